"""Convert a Hugging Face folder or hub model, or a llama2.c file, into a checkpoint for generate.py; or back.

python convert_hf_checkpoint.py meta-llama/Llama-3.2-1B --out checkpoints/1b
python convert_hf_checkpoint.py stories260K.bin --tokenizer tok512.model --out checkpoints/stories260K
python convert_hf_checkpoint.py checkpoints/1b --to-hf hf/1b
"""

import json
import pickle
import re
import shutil
import zipfile
from pathlib import Path

import numpy as np
import torch

import checkpoint
import launch
from checkpoint import dtype_name, first_line, read_json
from model import ROPE_SCALING, WIRINGS, Config, InputError, attention_then_mlp, residual_stream
from tokenizer import SentencePieceTokenizer, load_tokenizer, read_tokenizer

# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face's names and config, and ours

NAMES = {  # ours: Hugging Face's; wqkv is made of three
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
}


def hf_names(name):
    """The Hugging Face tensors that our tensor is made of: one, or those of q, k and v for wqkv."""
    if name in NAMES:
        return [NAMES[name]]
    _, layer, rest = name.split(".", 2)
    prefix = f"model.layers.{layer}."
    if rest.startswith("attention.wqkv."):
        return [f"{prefix}self_attn.{letter}_proj.{rest.rpartition('.')[2]}" for letter in "qkv"]
    return [prefix + LAYER_NAMES[rest]]


def group(q, k, v, config):
    """Weights or biases of q, k and v, one below the other, as wqkv: KV head by KV head its queries, key and value."""
    return torch.cat([t.unflatten(0, (config.n_kv_heads, -1)) for t in (q, k, v)], dim=1).flatten(0, 1)


def ungroup(wqkv, config):
    """The inverse of group: (q, k, v)."""
    queries = config.n_heads // config.n_kv_heads * config.head_dim
    parts = wqkv.unflatten(0, (config.n_kv_heads, -1)).split([queries, config.head_dim, config.head_dim], dim=1)
    return [t.flatten(0, 1) for t in parts]


def config_from_hf(path):
    """The Config that a Hugging Face config.json (and the generation_config.json beside it) describes.

    Raises InputError for architectures, and settings of them, that model.py does not compute.
    """
    hf = read_json(path)

    def get(key, kind, *default):
        """hf[key], or the default where it is absent or null; numbers must be positive."""
        value = hf.get(key)
        if value is None and default:
            return default[0]
        if type(value) is not kind or (kind is int and value < 1):
            wanted = {int: "a positive integer", dict: "an object", bool: "true or false"}[kind]
            raise InputError(f"{path}: {key} is {value!r} but must be {wanted}")
        return value

    family = hf.get("model_type")
    if "n_layers" in hf and family is None:
        raise InputError(f"{path.parent} is a checkpoint of this project already (--to-hf DIR converts it back)")
    if family not in ("llama", "llamaLadder", "mistral", "qwen2", "qwen3"):
        raise InputError(f"{path}: model_type {family!r} is not supported; llama, mistral, qwen2 and qwen3 are")
    unsupported = {"hidden_act": "silu", "mlp_bias": False, "attention_bias": False, "partial_rotary_factor": 1.0}
    for key, supported in unsupported.items():
        if hf.get(key) not in (supported, None):
            raise InputError(f"{path}: {key} {hf[key]!r} is not supported, only {supported!r} is")

    n_heads, dim, context = (get(key, int) for key in ("num_attention_heads", "hidden_size", "max_position_embeddings"))
    rope = get("rope_parameters", dict, get("rope_scaling", dict, {}))  # transformers 5, or before
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise InputError(f"{path}: rope type {kind!r} is not supported, only default and llama3 are")
    window = get("sliding_window", int, None) if get("use_sliding_window", bool, family == "mistral") else None
    if window is not None and window < context:
        print(f"sliding window attention is full attention up to {window} tokens: the context is cut to that")
        context = window

    generation = path.with_name("generation_config.json")
    eos = []
    for ids in (hf.get("eos_token_id"), read_json(generation).get("eos_token_id") if generation.is_file() else None):
        eos += [i for i in (ids if isinstance(ids, list) else [ids]) if i is not None and i not in eos]
    ladder = hf.get("ladder_layers")
    n_layers = get("num_hidden_layers", int)
    if family == "llamaLadder" and "ladder_layers" not in hf:
        raise InputError(f"{path}: model_type is llamaLadder, but ladder_layers does not say which layers")
    if ladder in (None, 0, []):
        wiring = "standard"
    else:
        wiring = "ladder" if ladder in (n_layers, list(range(n_layers))) else "hybrid"
    values = {
        "n_layers": n_layers, "n_heads": n_heads, "dim": dim, "max_seq_len": context,
        "n_kv_heads": get("num_key_value_heads", int, n_heads), "intermediate_size": get("intermediate_size", int),
        "head_dim": get("head_dim", int, 128 if family == "qwen3" else dim // n_heads),
        "vocab_size": get("vocab_size", int), "norm_eps": hf.get("rms_norm_eps", 1e-6),
        "rope_theta": hf.get("rope_theta", rope.get("rope_theta", 10000.0)),
        "rope_scaling": {k: rope.get(k) for k in ROPE_SCALING.__args__} if kind == "llama3" else None,
        "tie_embeddings": get("tie_word_embeddings", bool, False), "qkv_bias": family == "qwen2",
        "qk_norm": family == "qwen3", "bos_id": hf.get("bos_token_id"), "eos_ids": eos,
        "wiring": wiring, "ladder_layers": ladder if wiring == "hybrid" else None,
    }  # fmt: skip
    return checkpoint.make_config(values, path)


def config_to_hf(config, dtype):
    """A Hugging Face config.json, as a dict; a ladder model's has ladder_layers in it."""
    wiring = WIRINGS[config.wiring]
    if (wiring.split, wiring.stream) != (attention_then_mlp, residual_stream):
        raise InputError(
            f"a model in wiring {config.wiring} has no Hugging Face form: give --wiring standard or --ladder"
        )
    family = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"
    hf = {
        "architectures": [f"{family.capitalize()}ForCausalLM"], "model_type": family, "hidden_act": "silu",
        "num_hidden_layers": config.n_layers, "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads, "head_dim": config.head_dim, "hidden_size": config.dim,
        "intermediate_size": config.intermediate_size, "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len, "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta, "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id, "eos_token_id": list(config.eos_ids) or None,
        "torch_dtype": dtype_name(dtype),
    }  # fmt: skip
    if config.rope_scaling:
        hf["rope_scaling"] = {"rope_type": "llama3", **config.rope_scaling}
    if config.stale_layers:
        hf["ladder_layers"] = list(config.stale_layers)
    return hf


# ---------------------------------------------------------------------------------------------------------------------
# Sources: names() and read(name), under Hugging Face's names; nothing is loaded before it is read


class PickledWeights:
    """pytorch_model.bin, one file or an index of shards, memory-mapped."""

    def __init__(self, folder):
        single, index = folder / "pytorch_model.bin", folder / "pytorch_model.bin.index.json"
        names = [single.name] if single.is_file() else sorted(set(checkpoint.read_weight_map(index).values()))
        self.tensors = {}
        for name in names:
            if not (folder / name).is_file():
                raise InputError(f"{folder / name} is missing, but {index.name} names it: download it again")
            mmap = zipfile.is_zipfile(folder / name)  # PyTorch wrote other files before 1.6: these are read whole
            try:
                self.tensors.update(torch.load(folder / name, map_location="cpu", mmap=mmap, weights_only=True))
            except (RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError) as e:
                raise InputError(f"{folder / name} is truncated or no PyTorch file: {first_line(e)}") from None

    def names(self):
        return list(self.tensors)

    def read(self, name):
        return self.tensors[name]


class Llama2cWeights:
    """A llama2.c legacy file: 7 int32 of config, then float32 tensors, each stacked over the layers, memory-mapped.

    Its rotary embeddings turn neighbours (2i, 2i + 1) where ours turn (i, i + H/2): read() reorders the rows of q, k.
    """

    def __init__(self, path):
        header = np.fromfile(path, np.int32, 7)
        if len(header) < 7:
            raise InputError(f"{path} is no llama2.c checkpoint: it is shorter than its header")
        D, hidden, L, N, K, V, context = (int(i) for i in header)
        if min(D, hidden, L, N, K, context) < 1 or V == 0 or D % N or N % K:
            raise InputError(f"{path} is no llama2.c checkpoint: its header reads {header.tolist()}")
        H = D // N
        self.config = Config(
            L, N, K, H, D, hidden, abs(V), context, tie_embeddings=V > 0, bos_id=1,
            eos_ids=(1, 2),  # its training texts are separated by BOS
        )  # fmt: skip
        layout = [
            ("model.embed_tokens.weight", (abs(V), D)),
            ("input_layernorm.weight", (L, D)),
            ("self_attn.q_proj.weight", (L, N * H, D)),
            ("self_attn.k_proj.weight", (L, K * H, D)),
            ("self_attn.v_proj.weight", (L, K * H, D)),
            ("self_attn.o_proj.weight", (L, D, N * H)),
            ("post_attention_layernorm.weight", (L, D)),
            ("mlp.gate_proj.weight", (L, hidden, D)),
            ("mlp.down_proj.weight", (L, D, hidden)),
            ("mlp.up_proj.weight", (L, hidden, D)),
            ("model.norm.weight", (D,)),
            ("rope cosines and sines", (2, context, H // 2)),  # recomputed, not read
        ] + [("lm_head.weight", (-V, D))] * (V < 0)
        expected = 28 + 4 * sum(int(np.prod(shape)) for _, shape in layout)
        if path.stat().st_size != expected:
            raise InputError(
                f"{path} is {path.stat().st_size} bytes, but its header asks for {expected}: copy it again"
            )
        data, self.tensors, at = np.memmap(path, np.float32, "r", offset=28), {}, 0
        for name, shape in layout:
            array = data[at : at + int(np.prod(shape))].reshape(shape)
            at += array.size
            if name.startswith(("model.", "lm_head.")):
                self.tensors[name] = array
            elif not name.startswith("rope"):
                self.tensors.update({f"model.layers.{i}.{name}": array[i] for i in range(L)})

    def names(self):
        return list(self.tensors)

    def read(self, name):
        tensor = torch.from_numpy(self.tensors[name].copy())
        if "q_proj" in name or "k_proj" in name:
            tensor = tensor.unflatten(0, (-1, self.config.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
        return tensor


def open_source(source, revision=None):
    """(weights, Config, folder of the tokenizer files or None) of a folder, a hub id or a llama2.c file."""
    path = Path(source)
    if path.is_file():
        weights = Llama2cWeights(path)
        return weights, weights.config, None
    if not path.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", source) and not source.startswith("."):
        path = download(source, revision)
    if not path.is_dir():
        raise InputError(f"{source} is no folder, no file and no hub id such as meta-llama/Llama-3.2-1B")
    if not (path / "config.json").is_file():
        raise InputError(f"{path} has no config.json: it is no Hugging Face folder, or only half downloaded")
    config = config_from_hf(path / "config.json")
    pickled = any(path.glob("pytorch_model.bin*")) and not any(path.glob("model.safetensors*"))
    return PickledWeights(path) if pickled else checkpoint.Weights(path), config, path


def download(repository, revision=None):
    """The local snapshot of a hub model: its safetensors, or its pytorch_model.bin where it has no others."""
    import huggingface_hub

    try:
        names = huggingface_hub.list_repo_files(repository, revision=revision)
        weights = (
            "model*.safetensors" if any(re.match(r"model.*\.safetensors$", n) for n in names) else "pytorch_model*.bin"
        )
        patterns = [weights, "*.json", *checkpoint.TOKENIZER_FILES]
        return Path(huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except Exception as e:  # its own errors, its HTTP library's, the operating system's
        raise InputError(f"{repository} is not a local folder, and could not be downloaded: {first_line(e)}") from None


# ---------------------------------------------------------------------------------------------------------------------
# Both directions


def convert(source, config, folder, dtype, shard_bytes):
    """Write our config.json and safetensors from a source's tensors, one shard in memory at a time."""
    available = set(source.names())
    if config.tie_embeddings and NAMES["tok_embeddings.weight"] not in available:
        aliases = {NAMES["tok_embeddings.weight"]: NAMES["output.weight"]}  # some folders hold the tied tensor so
    else:
        aliases = {}
    shapes = checkpoint.shapes(config)
    parts = {name: [aliases.get(n, n) for n in hf_names(name)] for name in shapes}
    needed = {n for names in parts.values() for n in names}
    missing = sorted(needed - available)
    if missing:
        raise InputError(f"the source has no tensor {missing[0]}")
    unneeded = {NAMES["output.weight"]} if config.tie_embeddings else set()
    unneeded |= {n for n in available if n.endswith("rotary_emb.inv_freq")}
    if "ffn_norm" not in WIRINGS[config.wiring].norms:
        unneeded |= {n for n in available if n.endswith(LAYER_NAMES["ffn_norm.weight"])}
    extra = sorted(available - needed - unneeded)
    if extra:
        raise InputError(f"the source has a tensor {extra[0]} that is no part of such a model")

    def read(name):
        tensors = [source.read(n) for n in parts[name]]
        try:
            tensor = group(*tensors, config) if len(tensors) == 3 else tensors[0]
        except RuntimeError:
            tensor = None
        if tensor is None or tensor.shape != shapes[name]:
            found = ", ".join(str(tuple(t.shape)) for t in tensors)
            raise InputError(f"{', '.join(parts[name])}: shape {found} does not make the {shapes[name]} of the config")
        return tensor.to(dtype)

    sizes = {name: int(np.prod(shape)) * dtype.itemsize for name, shape in shapes.items()}
    checkpoint.write_weights(folder, sizes, read, shard_bytes)
    checkpoint.write_config(folder, config)


def convert_to_hf(source, config, folder, dtype, shard_bytes):
    """Write a Hugging Face folder from our checkpoint, one shard in memory at a time."""
    ours = {}  # Hugging Face's name: (our name, which of its parts)
    for name in checkpoint.shapes(config):
        ours.update({n: (name, i) for i, n in enumerate(hf_names(name))})

    def read(hf_name):
        name, part = ours[hf_name]
        tensor = source.read(name).to(dtype)
        return ungroup(tensor, config)[part] if ".wqkv." in name else tensor

    def size(name, part):
        numel = int(np.prod(source.shape(name)))
        if ".wqkv." in name:
            rows = config.head_dim * (config.n_heads if part == 0 else config.n_kv_heads)
            numel = numel // source.shape(name)[0] * rows
        return numel * dtype.itemsize

    checkpoint.write_weights(folder, {n: size(*o) for n, o in ours.items()}, read, shard_bytes)
    (folder / "config.json").write_text(json.dumps(config_to_hf(config, dtype), indent=2) + "\n")


def name_tokenizer(folder, tokenizer):
    """Say that a SentencePiece model without further settings is a Llama one: transformers asks."""
    if (folder / "tokenizer_config.json").exists():
        return
    if isinstance(tokenizer, SentencePieceTokenizer) and len(tokenizer.special) == 2:
        bos, eos = tokenizer.special
        settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": bos, "eos_token": eos, "add_bos_token": True}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def parse(argv):
    p = launch.Parser(__doc__)
    p.add_argument("source", metavar="SOURCE", help="a Hugging Face folder, a hub id, or a llama2.c .bin file")
    p.add_argument("--out", metavar="DIR", help="the checkpoint folder to write, e.g. checkpoints/1b")
    p.add_argument(
        "--to-hf", metavar="DIR", help="the other way: SOURCE is our checkpoint, DIR the folder to write, e.g. hf/1b"
    )
    p.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="a tokenizer.model or tokenizer.json, where SOURCE holds none, e.g. tok512.model",
    )
    p.add_argument("--dtype", choices=checkpoint.DTYPES, help="without it the source's own")
    p.add_argument("--revision", help="of a hub model, e.g. main")
    size = launch.number(float, 0, above=True)
    p.add_argument(
        "--shard-gb",
        type=size,
        default=5.0,
        metavar="N",
        help="largest file to write, in GB, and about the memory that this takes, e.g. 2",
    )
    launch.add_wiring_flags(p)
    args = p.parse_args(argv)
    if bool(args.out) == bool(args.to_hf):
        raise InputError("give either --out DIR or --to-hf DIR")
    return args


def main(argv=None):
    args = parse(argv)
    if args.tokenizer and not Path(args.tokenizer).is_file():
        raise InputError(f"--tokenizer {args.tokenizer}: no such file")
    if args.to_hf:
        config, weights, folder = checkpoint.read_config(args.source), checkpoint.Weights(args.source), args.source
        some_tensor = "norm.weight"
        if config.quant is not None:
            raise InputError(f"{args.source} is quantized ({config.quant}): give the original")
    else:
        weights, config, folder = open_source(args.source, args.revision)
        some_tensor = NAMES["norm.weight"]
    config = launch.with_wiring(config, args)
    if some_tensor not in weights.names():
        raise InputError(f"{args.source} has no tensor {some_tensor}")
    dtype = checkpoint.DTYPES[args.dtype] if args.dtype else weights.read(some_tensor).dtype
    tokenizer = None  # one that does not fit is refused before the work
    if args.tokenizer:
        tokenizer = read_tokenizer(args.tokenizer, config.vocab_size)
    elif folder is not None:
        tokenizer = load_tokenizer(folder, config.vocab_size)
    with checkpoint.new_folder(args.to_hf or args.out) as out:
        if args.tokenizer:
            kind = "json" if args.tokenizer.endswith(".json") else "model"
            shutil.copyfile(args.tokenizer, out / f"tokenizer.{kind}")
        elif folder is not None:
            checkpoint.copy_tokenizer(folder, out)
        if args.to_hf:
            name_tokenizer(out, tokenizer)
        (convert_to_hf if args.to_hf else convert)(weights, config, out, dtype, int(args.shard_gb * 1e9))
    size = f"{config.n_layers} layers, wiring {config.wiring}, {dtype_name(dtype)}"
    print(f"wrote {args.to_hf or args.out}: {size}{'' if tokenizer else ', NO TOKENIZER (see --tokenizer)'}")


if __name__ == "__main__":
    launch.run(main)
