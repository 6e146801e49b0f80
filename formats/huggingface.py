"""Hugging Face's names and configs, as ours."""

import torch

import checkpoint
from checkpoint import read_json
from model import ROPE_SCALING, WIRINGS, InputError, attention_plus_mlp, attention_then_mlp, residual_stream

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

PARALLEL_BLOCKS = {attention_then_mlp: False, attention_plus_mlp: True}  # by the split of a wiring


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


def wiring_from_hf(ladder_layers, parallel_blocks, n_layers):
    """The name of the wiring whose ladder layers are those (the last n, or a list), or None where there is none."""
    every = ladder_layers in (n_layers, list(range(n_layers)))
    parameter = "ladder_layers" if ladder_layers and not every else None
    for name, w in WIRINGS.items():
        described = w.stream is residual_stream and PARALLEL_BLOCKS.get(w.split) is parallel_blocks
        if described and (w.stale, w.parameter) == (bool(ladder_layers), parameter):
            return name


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
    if family not in ("llama", "llamaLadder", "ladder_residual", "mistral", "qwen2", "qwen3"):
        raise InputError(f"{path}: model_type {family!r} is not supported; llama, mistral, qwen2 and qwen3 are")
    unsupported = {"hidden_act": "silu", "mlp_bias": False, "attention_bias": False, "partial_rotary_factor": 1.0}
    if family == "ladder_residual":  # ours: see export.py
        del unsupported["attention_bias"]
        unsupported["attention_out_bias"] = False
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
    wiring = wiring_from_hf(ladder, get("parallel_blocks", bool, False), n_layers)
    if wiring is None:
        raise InputError(f"{path}: ladder_layers {ladder!r} with parallel_blocks is no wiring that this project has")
    values = {
        "n_layers": n_layers, "n_heads": n_heads, "dim": dim, "max_seq_len": context,
        "n_kv_heads": get("num_key_value_heads", int, n_heads), "intermediate_size": get("intermediate_size", int),
        "head_dim": get("head_dim", int, 128 if family == "qwen3" else dim // n_heads),
        "vocab_size": get("vocab_size", int), "norm_eps": hf.get("rms_norm_eps", 1e-6),
        "rope_theta": hf.get("rope_theta", rope.get("rope_theta", 10000.0)),
        "rope_scaling": {k: rope.get(k) for k in ROPE_SCALING.__args__} if kind == "llama3" else None,
        "tie_embeddings": get("tie_word_embeddings", bool, False),
        "qkv_bias": family == "qwen2" or get("attention_bias", bool, False),
        "qk_norm": family == "qwen3" or get("qk_norm", bool, False),
        "bos_id": hf.get("bos_token_id"), "eos_ids": eos,
        "wiring": wiring, "ladder_layers": ladder if WIRINGS[wiring].parameter else None,
    }  # fmt: skip
    return checkpoint.make_config(values, path)
