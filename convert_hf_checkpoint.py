"""Convert a Hugging Face folder or hub model, a GGUF or a llama2.c file into a checkpoint for generate.py.

python convert_hf_checkpoint.py meta-llama/Llama-3.2-1B --out checkpoints/1b
python convert_hf_checkpoint.py SmolLM2-135M-Instruct.Q4_1.gguf --out checkpoints/smollm2
python convert_hf_checkpoint.py stories260K.bin --tokenizer tok512.model --out checkpoints/stories260K
"""

import dataclasses
import functools
import math
import os
import re
import shutil
from collections import Counter
from pathlib import Path

import ladder.openmp  # noqa: F401 (before torch loads)

import torch

import tp
from ladder import outputs
from ladder.checkpoints import checkpoint, rounding, writing
from ladder.checkpoints.checkpoint import dtype_name, read_json
from ladder.checkpoints.compare import TOKENIZER_FILES
from ladder.command_line import flags
from ladder.errors import InputError, first_line
from ladder.kernels.quant_linear import dequantize, eight_bits, nearest
from ladder.ranks import launch
from ladder.ranks.ending import out_of_memory
from ladder.sources.huggingface import LlamaWeights, config_from_hf, group, hf_names
from ladder.sources.llama2c import Llama2cWeights
from ladder.sources.quantized_formats import FORM, QuantizedWeights, dequantizing
from ladder.text.tokenizer import load_tokenizer
from model import build

QUANTIZED = (  # what integers and fp8 are of
    "tok_embeddings", "wqkv", "wqkvz", "wq", "wq_a", "wq_b", "wkv_a", "wgate", "wo", "wout", "w1", "w3", "w2", "output",
)  # fmt: skip


def open_source(source, revision=None, with_tokenizer=True):
    """Return (weights, Config, folder of tokenizer files or None) of a folder, a hub id, a GGUF or a llama2.c file.

    It prints what is ignored or left out. Raises InputError.
    """
    path = Path(source)
    if os.path.isfile(path):
        if not os.path.getsize(path):
            raise InputError(f"{source} is empty: copy it again")
        with open(path, "rb") as file:
            is_gguf = file.read(4) == b"GGUF" or path.suffix == ".gguf"
        if is_gguf:
            from ladder.sources.gguf_file import open_gguf

            tensors = open_gguf(path, with_tokenizer)
            folder = Path(tensors.folder.name)
            try:
                return open_folder(folder, tensors)
            except InputError as e:  # names the file, not what was made of it
                raise InputError(str(e).replace(str(folder / "config.json"), source)) from None
    local = os.path.exists(path) or os.path.isdir(source.partition("/")[0]) or path.suffix in (".gguf", ".bin")
    if not local and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source):
        path = download(source, revision)
    if not os.path.isfile(path) and not os.path.isdir(path):
        raise InputError(f"{source}: no such file or folder, and no hub id such as meta-llama/Llama-3.2-1B")
    if not os.path.isfile(path / "config.json") and (hint := checkpoint.explain(path)):
        files = sorted(path.glob("*.gguf"))
        hint = f": give the file itself: {files[0]}" if "is in GGUF" in hint else hint
        raise InputError(f"{source} cannot be converted{hint}")
    if os.path.isfile(path):
        weights = Llama2cWeights(path)
        return weights, weights.config, None
    return open_folder(path)


def open_folder(path, tensors=None):
    """Return what open_source does, of a Hugging Face folder. tensors: to be read instead of those in the folder."""
    config = config_from_hf(path / "config.json")
    tensors = dequantizing(tensors or checkpoint.Weights(path), read_json(path / "config.json"), path)
    weights = LlamaWeights(tensors, path / "config.json", config)
    weights.quantized = tensors if isinstance(tensors, QuantizedWeights) else None
    for file in filter(os.path.isfile, (path / name for name in TOKENIZER_FILES)):
        checkpoint.refuse_pointer(file)
    if weights.ignored:
        print(f"ignored in config.json, since transformers does not read it: {', '.join(weights.ignored)}")
    if weights.config != config:
        print("tie_word_embeddings is true, but lm_head.weight is a tensor of its own: it is used, as in transformers")
    if config.max_seq_len > weights.own_context:
        print(f"the context is {config.max_seq_len:,} tokens: scaling extends config.json's {weights.own_context:,}")
    for tower, n in weights.skipped.items():
        print(f"left out: {n} tensors of {tower}, since only text is computed here")
    return weights, weights.config, path


def download(repository, revision=None):
    """Download a hub model and return its folder. Raises InputError."""
    import huggingface_hub

    # the code in a folder (*.py) is left to those who verify; none of it is run here
    patterns = ["model*.safetensors", "*.json", "*.py", *TOKENIZER_FILES]
    try:
        return Path(huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except Exception as e:  # errors of huggingface_hub, of its HTTP library, of the operating system
        raise InputError(f"{repository} is not a local folder, and could not be downloaded: {first_line(e)}") from None


def keep_quantized(config, available, quant):
    """Return the config with those kinds of matrices, such as w2, quantized that the source has so in every layer.

    available: the source's names, quant: what they can stay, as QuantizedWeights has both. Where matrices have several
    forms, the config lists those with 8 bits, by their kind if all of it are alike.
    """
    named = (name.rpartition(".") for name in available)
    integers = {stem: tuple(map(int, form.groups())) for stem, _, part in named if (form := FORM.fullmatch(part))}
    kinds = {}  # {kind: {path of a matrix: (bits, columns of a group), or None if it is floats}}
    for name in writing.shapes(config):
        path, _, tensor = name.rpartition(".")
        kind = path.rpartition(".")[2]
        if tensor == "weight" and kind in QUANTIZED:
            stems = [name.removesuffix(".weight") for name in hf_names(name, config)]
            forms = [integers.get(stem) for stem in stems]
            form = None
            if quant == "fp8" and available.issuperset(f"{stem}.scales" for stem in stems):
                form = 8, None
            elif None not in forms:  # those of queries, keys and values become one
                form = max(bits for bits, _ in forms), math.gcd(*(columns for _, columns in forms))
            kinds.setdefault(kind, {})[path] = form
    floats = tuple(kind for kind, forms in kinds.items() if None in forms.values())
    kinds = {kind: forms for kind, forms in kinds.items() if kind not in floats}
    if not kinds:
        return config
    forms = [form for paths in kinds.values() for form in paths.values()]
    in_four = [columns for bits, columns in forms if bits == 4]
    if quant == "fp8":
        return dataclasses.replace(config, quant="fp8", not_quantized=floats)
    usual = (4, math.gcd(*in_four)) if in_four else Counter(forms).most_common(1)[0][0]
    listed = []
    for kind, paths in kinds.items():
        others = {path: form for path, form in paths.items() if form[0] == 8 and form != usual}
        if len(others) == len(paths) and len({*others.values()}) == 1:
            others = {kind: next(iter(others.values()))}
        listed += [f"{name}:{columns}" for name, (_, columns) in others.items()]
    return dataclasses.replace(
        config, quant=f"int{usual[0]}", group_size=usual[1], not_quantized=floats, int8=tuple(listed)
    )


def convert(source, config, folder, dtype, shard_bytes):
    """Write our config.json and safetensors from a source's tensors, with one file in memory at a time.

    Returns the kinds of matrices that are quantized in the source and became floats, and [(squares of what rounding
    changed, squares of all)] of the matrices that became e4m3 here. Raises InputError for tensors that are missing, of
    another shape than the config says, not finite, or not part of the model.
    """
    available = {name for name in source.names() if not FORM.fullmatch(name.rpartition(".")[2])}
    parameters = dict(build(config).named_parameters())
    shapes, dequantized, squares = {name: tuple(w.shape) for name, w in parameters.items()}, [], []
    scales = {name for name in shapes if name.endswith((".scales", ".zeros"))}
    dtypes = {n: w.dtype if n in scales or w.itemsize == 1 else dtype for n, w in parameters.items()}
    dtypes |= {name: torch.float32 for name in dtypes if config.stays_float32(name)}

    @functools.lru_cache(1)  # the scales and zeros of a matrix are read one after another
    def scales_dtype(stem):
        return nearest(*(source.read(n) for part in ("scales", "zeros") for n in sources[f"{stem}.{part}"]))

    def floats(name):
        tensor, stem = source.read(name), name.removesuffix(".weight")
        if f"{stem}.scales" not in available or tensor.itemsize > 1:
            return tensor
        zeros = source.read(f"{stem}.zeros") if f"{stem}.zeros" in available else None
        return dequantize(tensor, source.read(f"{stem}.scales"), zeros)

    sources, head = {name: hf_names(name, config) for name in shapes}, hf_names("output.weight", config)
    if config.tie_embeddings and not available.issuperset(sources["tok_embeddings.weight"]):
        sources["tok_embeddings.weight"] = head  # under whose name some folders have the tied tensor
    needed = {n for names in sources.values() for n in names}
    for name, names in sources.items():
        parts = {n.removesuffix("weight") + part for n in names for part in ("scales", "zeros")} & available - needed
        if parts:
            dequantized.append(name.split(".")[-2])
            needed |= parts
    if missing := sorted(needed - available):
        raise InputError(f"the source has no tensor {missing[0]}")
    heads = [f"lm_head.{part}" for part in ("weight", "scales", "zeros")]
    unused = ["rotary_emb.inv_freq", *(heads if config.tie_embeddings else [])]
    if "ffn_norm" not in config.named_wiring.norms:  # a parallel block has one norm, attention_norm
        unused += ["post_attention_layernorm.weight", "post_attention_layernorm.bias"]
    extra = sorted(name for name in available - needed if not name.endswith(tuple(unused)))
    extra = [name for name in extra if not name.endswith(".bias") or source.read(name).any()]  # AutoGPTQ adds zeros
    if extra:
        raise InputError(f"the source has a tensor {extra[0]} that is no part of such a model")

    def read(name):
        names, stem = ", ".join(sources[name]), name.rpartition(".")[0]
        try:
            tensors = [source.read(n) for n in sources[name]]
            if f"{stem}.scales" not in shapes or len({tensor.dtype for tensor in tensors}) > 1:
                tensors = [floats(n) for n in sources[name]]
            elif name in scales:  # of larger groups, which become several
                tensors = [tensor.repeat_interleave(shapes[name][-1] // tensor.shape[-1], -1) for tensor in tensors]
            tensor = group(*tensors, config) if len(tensors) == 3 else tensors[0]
            tensor = rounding.pack(tensor) if dtypes[name] == torch.uint8 else tensor
        except (IndexError, RuntimeError) as e:  # tensors that torch cannot split, stack or reshape
            if out_of_memory(e):
                raise
            raise InputError(f"{names}: {first_line(e)}; the config makes it {shapes[name]}") from None
        if tensor.shape != shapes[name]:
            raise InputError(f"{names}: shape {tuple(tensor.shape)} does not make the {shapes[name]} of the config")
        if dtypes[name] == torch.float8_e4m3fn and tensor.itemsize > 1:  # what the source has in blocks
            check_finite(names, tensor)  # since e4m3 has no infinity
            w, (tensor, row_scales) = tensor, rounding.to_e4m3(tensor, read(f"{stem}.scales"))
            error = dequantize(tensor, row_scales.float()) - w
            squares.append((error.square().sum().item(), w.square().sum().item()))
        is_of_groups = name in scales and f"{stem}.zeros" in scales
        tensor = tensor.to(scales_dtype(stem) if is_of_groups else dtypes[name])
        check_finite(names, tensor)
        return tensor

    sizes = {name: math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items()}
    writing.write_weights(folder, sizes, read, shard_bytes)
    writing.write_config(folder, config)
    return list(dict.fromkeys(dequantized)), squares


def check_finite(names, tensor):
    if not checkpoint.all_finite(tensor):
        raise InputError(f"{names}: NaN or infinite values in {dtype_name(tensor.dtype)}")


def check_lanes(config):
    """Raise InputError for a wiring that needs a number of lanes but names none, or that has too many for the shape."""
    if config.named_wiring.reads_partials and not config.named_wiring.fixed_shards:
        name = config.wiring
        raise InputError(f"--wiring {name} is another function in other numbers of lanes: name them, e.g. {name}/8")
    tp.shard_plan(config, 0, config.named_wiring.shards())


def main(argv=None):
    p = flags.Parser(__doc__)
    formats = "a Hugging Face folder, a hub id, a .gguf file, or a llama2.c .bin file"
    p.add_argument("source", metavar="SOURCE", help=formats)
    p.add_argument("--to-float", action="store_true", help="dequantize what could stay integers or fp8, to retrain it")
    p.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.model or tokenizer.json; default: SOURCE's")
    p.add_argument("--revision", help="of a hub model, e.g. main")
    flags.add_output_flags(p, "checkpoints/1b")
    flags.add_wiring_flags(p)
    args = p.parse_args(argv)
    outputs.check_absent_first(args.out)
    if args.tokenizer and not os.path.isfile(args.tokenizer):
        what = (
            "a folder: give a file in it, such as tokenizer.model" if os.path.isdir(args.tokenizer) else "no such file"
        )
        raise InputError(f"--tokenizer {args.tokenizer}: {what}")
    weights, own, folder = open_source(args.source, args.revision, with_tokenizer=not args.tokenizer)
    quantized = getattr(weights, "quantized", None)
    if quantized and quantized.quant and not args.to_float:
        own = keep_quantized(own, set(weights.names()), quantized.quant)
    config = flags.with_wiring(own, args)
    check_lanes(config)
    flags.warn_of_wiring(own, config, (1,))
    values = next((name for name in weights.names() if name.endswith((".v_proj.weight", ".kv_b_proj.weight"))), None)
    if values is None:
        raise InputError(f"{args.source} has no tensor v_proj.weight")
    is_quantized = quantized and (quantized.quant or quantized.floats)
    if is_quantized:
        dtype = checkpoint.DTYPES[args.dtype or "bfloat16"]
    else:  # read from the values, since LlamaWeights returns them in the source's own dtype
        dtype = checkpoint.chosen_dtype(args.dtype, weights, values)
    source = args.tokenizer or folder
    tokenizer = load_tokenizer(source, config.vocab_size) if source else None  # refuses a bad one before the work
    if tokenizer and tokenizer.left_out:
        print(f"left out: the tokens {', '.join(tokenizer.left_out)}, for which the embedding has no rows")
    if tokenizer:
        from ladder.text.rendering import turn_end  # late: it imports jinja2

        # several ids were chosen for this model's turns, of which one may have more messages than one
        named = tokenizer.end_tokens | (turn_end(tokenizer) if len(config.eos_ids) < 2 else {})
        if more := {name: i for name, i in named.items() if i not in config.eos_ids}:
            print(f"a text also ends at {', '.join(more)}, which the tokenizer has and config.json does not name")
            config = dataclasses.replace(config, eos_ids=(*config.eos_ids, *more.values()))
    with outputs.new_folder(args.out) as out:
        if args.tokenizer:
            name = "tokenizer.json" if args.tokenizer.endswith(".json") else "tokenizer.model"
            shutil.copyfile(args.tokenizer, out / name)
        elif folder is not None:
            writing.copy_tokenizer(folder, out)
        dequantized, squares = convert(weights, config, out, dtype, int(args.shard_gb * 1e9))
    if is_quantized and (dequantized or quantized.floats):
        names = [f"{count} of {name}" for name, count in quantized.floats.items()]
        print(f"dequantized to {dtype_name(dtype)}: {', '.join(names + [f'all of {name}' for name in dequantized])}")
    if squares:
        change = math.sqrt(sum(error for error, _ in squares) / (sum(size for _, size in squares) or 1))
        what = f"{len(squares)} matrices of e4m3 in blocks"
        print(f"{what} got a scale for each row, which changed them by {change:.1%} (root mean square)")
    form = f", {config.quant}" if config.quant else ""
    form += f" in groups of {config.group_size}" if config.group_size else ""
    others = dict.fromkeys(name.rpartition(".")[2] for name in eight_bits(config))
    form += f", other groups of 8 bits in {', '.join(others)}" if others else ""
    size = f"{config.n_layers} layers, wiring {config.wiring}, {dtype_name(dtype)}{form}"
    print(f"wrote {args.out}: {size}{'' if tokenizer else ', NO TOKENIZER (see --tokenizer)'}")


if __name__ == "__main__":
    launch.run(main)
