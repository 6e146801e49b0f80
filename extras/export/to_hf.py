"""Write a checkpoint as a Hugging Face folder, for transformers, TRL and PEFT.

python -m extras.export demo --out hf/demo
"""

import dataclasses
import json
import math
import shutil
from pathlib import Path

from formats import checkpoint
from formats.checkpoint import dtype_name
from formats.huggingface import hf_names
from formats.rope import ROPE_KEYS
from formats.tokenizer import SentencePieceTokenizer, load_tokenizer
from runtime import cli, writing
from runtime.errors import InputError

CODE = Path(__file__).with_name("exported")  # copied into a folder whose model transformers does not have
BLOCKS = {  # of the wirings that this code computes
    "standard": "standard", "ladder": "standard", "parallel": "parallel", "parallel-ladder": "parallel",
    "pair": "pair", "pair-ladder": "pair",
}  # fmt: skip
MODEL_TYPES = {"Qwen2Moe": "qwen2_moe", "Qwen3Moe": "qwen3_moe"}
MIXTRAL = {  # its names for Qwen's
    ".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".down_proj.": ".w2.", ".up_proj.": ".w3.",
}  # fmt: skip
OWN_FAMILY = {
    "model_type": "ladder_residual", "architectures": ["LadderForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_ladder.LadderConfig",
        "AutoModel": "modeling_ladder.LadderModel",
        "AutoModelForCausalLM": "modeling_ladder.LadderForCausalLM",
    },
}  # fmt: skip
FIELDS = {  # of Config, that are written here
    "n_layers", "n_heads", "n_kv_heads", "head_dim", "dim", "intermediate_size", "vocab_size", "max_seq_len",
    "norm_eps", "rope_theta", "rope_scaling", "tie_embeddings", "qkv_bias", "wo_bias", "mlp_bias", "qk_norm",
    "nope_layers", "sliding_window", "window_layers", "bos_id", "eos_ids", "wiring", "n_experts", "experts_per_token",
    "expert_size", "renormalize_experts", "shared_expert_size", "shared_expert_gate", "dense_layers",
}  # fmt: skip


def family_of(config):
    """Return the keys that name transformers' family with a standard model's biases, norms and windows, or None."""
    qkv, wo, mlp, nope = config.qkv_bias, config.wo_bias, config.mlp_bias, config.nope_layers
    name, keys = "Llama", {"attention_bias": qkv, "mlp_bias": mlp}
    if config.n_experts:
        return mixture_of(config)
    if qkv and not (wo or mlp or nope or config.qk_norm):
        name, keys = "Qwen2", {}
    elif qkv != wo or config.qk_norm and (mlp or nope):
        return None
    elif config.qk_norm:
        name, keys = "Qwen3", {"attention_bias": qkv}
    elif nope:
        name, keys = "SmolLM3", {**keys, "pad_token_id": None}
    if config.window_layers:
        types = ["sliding_attention" if i in config.window_layers else "full_attention" for i in range(config.n_layers)]
        if name == "Llama" and (qkv or mlp):
            return None
        if name == "Llama":
            name, keys = "Ministral" if "full_attention" in types else "Mistral", {}
        keys["sliding_window"] = config.sliding_window
        if name != "Mistral":
            keys |= {"use_sliding_window": True, "layer_types": types}
    return {"model_type": name.lower(), "architectures": [f"{name}ForCausalLM"], **keys}


def mixture_of(config):
    """Return the keys that name transformers' family of a standard mixture of experts."""
    c, per_token = config, {"num_experts_per_tok": config.experts_per_token}
    qwen = {
        **per_token, "num_experts": c.n_experts, "moe_intermediate_size": c.expert_size, "decoder_sparse_step": 1,
        "norm_topk_prob": c.renormalize_experts, "mlp_only_layers": list(c.dense_layers),
    }  # fmt: skip
    plain = not (c.wo_bias or c.nope_layers or c.window_layers)
    if plain and c.shared_expert_gate and c.qkv_bias and not c.qk_norm:
        name, keys = "Qwen2Moe", {**qwen, "shared_expert_intermediate_size": c.shared_expert_size}
    elif plain and not c.shared_expert_size and c.qk_norm and not c.qkv_bias:
        name, keys = "Qwen3Moe", qwen
    elif (
        plain and c.renormalize_experts and c.expert_size == c.intermediate_size
        and not (c.shared_expert_size or c.dense_layers or c.qkv_bias or c.qk_norm)
    ):  # fmt: skip
        name, keys = "Mixtral", {**per_token, "num_local_experts": c.n_experts}
    else:
        raise InputError(
            "this mixture of experts has no Hugging Face form here, only Mixtral's, Qwen2's and Qwen3's have"
        )
    return {"model_type": MODEL_TYPES.get(name, name.lower()), "architectures": [f"{name}ForCausalLM"], **keys}


def names_in_hf(name, config):
    """Return the Hugging Face names of the tensors that ours becomes, in order: of experts, one for each."""
    names = hf_names(name)
    if config.n_experts and family_of(config)["model_type"] == "mixtral":
        for qwen, mixtral in MIXTRAL.items():
            names = [name.replace(qwen, mixtral) for name in names]
    if ".experts." in name:
        names = [names[0].replace(".experts.", f".experts.{e}.") for e in range(config.n_experts)]
    return names


def family_to_hf(config):
    """Return the keys of a config.json that name the model: one of transformers' own, or the one in exported/.

    The latter has a model_type of its own, so that transformers refuses to load the folder without its code.
    """
    name, family = config.parsed.name, family_of(config)
    if name not in BLOCKS:
        raise InputError(f"wiring {config.wiring} has no Hugging Face form: only {', '.join(BLOCKS)} have one")
    if family and name == "standard":
        return family
    if config.n_experts:
        raise InputError(f"a mixture of experts in wiring {config.wiring} has no Hugging Face form, only standard ones")
    if config.window_layers:
        forms = "a standard model with the biases and norms of Mistral, Qwen2, Qwen3 or SmolLM3"
        raise InputError(f"sliding_window {config.sliding_window} has no Hugging Face form here: only {forms} has one")
    return {
        **OWN_FAMILY, "wiring": config.wiring, "block": BLOCKS[name], "stale": config.named_wiring.stale,
        "wired_layers": [i for i, wiring in enumerate(config.wirings) if wiring is config.named_wiring],
        "attention_bias": config.qkv_bias, "attention_out_bias": config.wo_bias, "mlp_bias": config.mlp_bias,
        "qk_norm": config.qk_norm, "attention_dropout": 0.0, "pad_token_id": None,
    }  # fmt: skip


def config_to_hf(config, dtype):
    """Return a Hugging Face config.json as a dict. Raises InputError for a Config that has no such form."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in FIELDS and value != field.default:
            raise InputError(f"{field.name} {value!r} has no Hugging Face form here, only {field.default!r} has one")
    hf = {
        **family_to_hf(config), "hidden_act": "silu",
        "num_hidden_layers": config.n_layers, "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads, "head_dim": config.head_dim, "hidden_size": config.dim,
        "intermediate_size": config.intermediate_size, "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len, "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta, "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id, "eos_token_id": list(config.eos_ids) or None,
        "torch_dtype": dtype_name(dtype),
    }  # fmt: skip
    if config.nope_layers:
        hf["no_rope_layers"] = [int(i not in config.nope_layers) for i in range(config.n_layers)]
    if config.rope_scaling:
        [rope_type] = [name for name, keys in ROPE_KEYS.items() if set(keys) == config.rope_scaling.keys()]
        hf["rope_scaling"] = {"rope_type": rope_type, **config.rope_scaling}
    return hf


def ungroup(wqkv, config):
    """Return (q, k, v): the inverse of group."""
    queries = config.n_heads // config.n_kv_heads * config.head_dim
    chunks = wqkv.unflatten(0, (config.n_kv_heads, -1)).split([queries, config.head_dim, config.head_dim], dim=1)
    return [t.flatten(0, 1) for t in chunks]


def convert_to_hf(source, config, folder, dtype, shard_bytes):
    """Write a Hugging Face folder from our checkpoint's weights, one shard in memory at a time."""
    hf = config_to_hf(config, dtype)
    ours, sizes = {}, {}  # by Hugging Face's name: (our name, index among q, k and v or experts), bytes
    for name, shape in checkpoint.shapes(config).items():
        names = names_in_hf(name, config)
        parts = [config.n_heads, config.n_kv_heads, config.n_kv_heads] if ".wqkv." in name else [1] * len(names)
        for i, hf_name in enumerate(names):
            ours[hf_name] = name, i
            sizes[hf_name] = math.prod(shape) * parts[i] // sum(parts) * dtype.itemsize

    def read(hf_name):
        name, i = ours[hf_name]
        tensor = source.read(name).to(dtype)
        return ungroup(tensor, config)[i] if ".wqkv." in name else tensor[i] if ".experts." in name else tensor

    writing.write_weights(folder, sizes, read, shard_bytes)
    (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
    if "auto_map" in hf:
        for path in CODE.glob("*.py"):
            shutil.copyfile(path, folder / path.name)


def write_tokenizer_json(folder, sentencepiece):
    """Write a SentencePiece BPE model as tokenizer.json, because transformers would read its spaces in another way."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors

    pieces = [sentencepiece.id_to_piece(i) for i in range(sentencepiece.vocab_size())]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    merges = []  # a pair for each way to put a piece together, those of the highest scores first
    for i, piece in enumerate(pieces):
        if not (sentencepiece.is_control(i) or sentencepiece.is_unknown(i) or sentencepiece.is_byte(i)):
            pairs = [(piece[:k], piece[k:]) for k in range(1, len(piece))]
            pairs = [(a, b) for a, b in pairs if a in vocabulary and b in vocabulary]
            merges += [(-sentencepiece.get_score(i), vocabulary[a], vocabulary[b], (a, b)) for a, b in pairs]
    merges = [pair for *_, pair in sorted(merges)]
    model = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token=pieces[0]))
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    if sentencepiece.normalize("a  b") == "▁a▁b":  # it removes extra spaces
        steps = [normalizers.Replace(Regex(r"\A +|[ ▁]+\z"), ""), normalizers.Replace(Regex(" +"), " "), *steps]
    model.normalizer = normalizers.Sequence(steps)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model.decoder = decoders.Sequence(steps)
    bos, eos = sentencepiece.bos_id(), sentencepiece.eos_id()
    model.add_special_tokens([AddedToken(pieces[i], normalized=False) for i in (bos, eos)])
    model.post_processor = processors.TemplateProcessing(f"{pieces[bos]} $A", None, [(pieces[bos], bos)])
    model.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": pieces[bos], "eos_token": pieces[eos]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def convert_tokenizer(folder, tokenizer):
    """Make transformers read a SentencePiece model that has no settings beside it as this project does."""
    path = folder / "tokenizer_config.json"
    if not isinstance(tokenizer, SentencePieceTokenizer) or len(tokenizer.special) != 2 or path.exists():
        return
    model = tokenizer.model
    sample = "ﬁ①é x"
    plain = model.unk_id() == 0 and model.normalize(sample) == f"▁{sample}".replace(" ", "▁")
    if plain and model.is_byte(3):
        return write_tokenizer_json(folder, model)
    print("transformers may read some texts as other tokens: this tokenizer normalizes them in a way of its own")
    bos, eos = tokenizer.special
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": bos, "eos_token": eos, "add_bos_token": True}
    path.write_text(json.dumps(settings, indent=2) + "\n")


def main(argv=None):
    p = cli.Parser(__doc__)
    p.add_argument("checkpoint", metavar="CHECKPOINT", help="a folder of ours, e.g. demo")
    cli.add_output_flags(p, "hf/demo")
    cli.add_wiring_flags(p)
    args = p.parse_args(argv)
    own, weights = checkpoint.read_original(args.checkpoint), checkpoint.Weights(args.checkpoint)
    config = cli.with_wiring(own, args)
    cli.warn_of_wiring(own, config, (1,))
    dtype = checkpoint.chosen_dtype(args.dtype, args.checkpoint, weights)
    tokenizer = load_tokenizer(args.checkpoint, config.vocab_size)
    with writing.new_folder(args.out) as out:
        writing.copy_tokenizer(args.checkpoint, out)
        convert_tokenizer(out, tokenizer)
        convert_to_hf(weights, config, out, dtype, int(args.shard_gb * 1e9))
    print(f"wrote {args.out}: {config.n_layers} layers, wiring {config.wiring}, {dtype_name(dtype)}")
