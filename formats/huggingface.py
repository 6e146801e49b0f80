"""Hugging Face's names and configs, as ours."""

import math
import os

import torch

from formats import checkpoint
from formats.checkpoint import read_json
from model import (
    LINEAR,
    LLAMA3,
    YARN,
    InputError,
    attention_plus_mlp,
    attention_then_mlp,
    wiring_name,
)

NAMES = {  # ours: Hugging Face's; wqkv is made of three
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "attention.wo.bias": "self_attn.o_proj.bias",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w1.bias": "mlp.gate_proj.bias",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "feed_forward.w3.bias": "mlp.up_proj.bias",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w2.bias": "mlp.down_proj.bias",
}

PARALLEL_BLOCKS = {attention_then_mlp: False, attention_plus_mlp: True}  # by the split of a wiring

COMMON = {
    "num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NO_ENDS = {"bos_token_id": None, "eos_token_id": None}
WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "layer_types": None}
BIASES = {"attention_bias": False, "mlp_bias": False}
FAMILIES = {  # model_type: what transformers 5.23 takes for a key that is absent; a family has the settings named here
    "llama": {**COMMON, "max_position_embeddings": 2048, **BIASES},
    "llamaLadder": {**COMMON, "max_position_embeddings": 2048, **BIASES},
    "ladder_residual": {  # of formats/exported: a child of seed_oss
        **COMMON, "max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128, **BIASES,
        "attention_out_bias": False, "bos_token_id": 0, "no_rope_layers": None, "qk_norm": False,
        "parallel_blocks": False,
    },
    "mistral": {**COMMON, "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "ministral": {
        **COMMON, "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096,
        "layer_types": None,
    },
    "qwen2": {**COMMON, **NO_ENDS, "max_position_embeddings": 32768, "num_key_value_heads": 32, **WINDOW},
    "qwen3": {
        **COMMON, **NO_ENDS, "max_position_embeddings": 32768, "num_key_value_heads": 32, **WINDOW, "head_dim": 128,
        "attention_bias": False,
    },
    "phi3": {
        **COMMON, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "sliding_window": None, "eos_token_id": 32000,
    },
    "granite": {
        **COMMON, "max_position_embeddings": 2048, **BIASES, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
        "residual_multiplier": 1.0, "attention_multiplier": 1.0,
    },
    "smollm3": {
        **COMMON, "max_position_embeddings": 32768, "num_key_value_heads": 4, **BIASES, "tie_word_embeddings": True,
        "rope_theta": 2000000.0, "no_rope_layers": None, "no_rope_layer_interval": 4, **WINDOW, "sliding_window": None,
        "bos_token_id": 128000, "eos_token_id": 128001,
    },
    "seed_oss": {
        **COMMON, "max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128, **BIASES,
        "attention_bias": True, "attention_out_bias": False, "bos_token_id": 0,
    },
}  # fmt: skip
SIZES = {  # ours of Hugging Face's, as far as checkpoint.AT_MOST knows how large they may be
    "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads", "num_key_value_heads": "n_kv_heads",
    "hidden_size": "dim", "max_position_embeddings": "max_seq_len",
}  # fmt: skip
ROPE_KINDS = {"default": None, "linear": LINEAR, "llama3": LLAMA3, "yarn": YARN}


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
    """The wiring whose ladder layers are those (the last n, or a list), or None where there is none."""
    every = ladder_layers in (n_layers, list(range(n_layers)))
    if parallel_blocks:
        return "parallel-ladder" if every else None if ladder_layers else "parallel"
    return "ladder" if every else wiring_name("ladder", ladder_layers) if ladder_layers else "standard"


class HuggingFaceConfig:
    """A config.json: what transformers takes for its settings, absent ones included. path: of the file.

    Raises InputError for a model_type that is none of FAMILIES.
    """

    def __init__(self, path):
        self.path, values = path, read_json(path)
        self.family = values.get("model_type")
        if "n_layers" in values and self.family is None:
            raise InputError(f"{path.parent} is a checkpoint of this project already (--to-hf DIR converts it back)")
        if not isinstance(self.family, str) or self.family not in FAMILIES:
            raise InputError(f"{path}: model_type {self.family!r} is not supported; {', '.join(FAMILIES)} are")
        self.values = {**FAMILIES[self.family], **values}
        generation = path.with_name("generation_config.json")
        others = read_json(generation).get("eos_token_id") if os.path.lexists(generation) else None
        if others is not None and "eos_token_id" not in values:
            self.values["eos_token_id"] = None
        self.eos = []
        for ids in (self.values["eos_token_id"], others):
            self.eos += [i for i in (ids if isinstance(ids, list) else [ids]) if i is not None and i not in self.eos]

    def get(self, key, kind, *default, among=None):
        """The value of a key (of another dict, if given), or the default where it is null; numbers must be positive."""
        value = (self.values if among is None else among).get(key)
        if value is None and default:
            return default[0]
        if type(value) not in ((int, float) if kind is float else (kind,)) or (kind in (int, float) and not value > 0):
            wanted = {int: "a positive integer", float: "a positive number", bool: "true or false", list: "a list"}
            raise InputError(f"{self.path}: {key} is {value!r} but must be {wanted.get(kind, 'an object')}")
        checkpoint.check_size(SIZES.get(key, key), value, self.path, key)
        return value

    def setting(self, key, kind, absent):
        """The value of a key, and `absent` where it is null or in a family that does not have it."""
        return self.get(key, kind, absent) if key in FAMILIES[self.family] else absent


def config_from_hf(path):
    """The Config that a Hugging Face config.json (and the generation_config.json beside it) describes.

    Raises InputError for architectures, and settings of them, that model.py does not compute.
    """
    hf = HuggingFaceConfig(path)
    get, setting, known = hf.get, hf.setting, FAMILIES[hf.family]
    rope = get("rope_scaling", dict, None) or get("rope_parameters", dict, {})  # before transformers 5, and since
    supported = {"hidden_act": "silu", "partial_rotary_factor": 1.0}
    supported |= dict.fromkeys({"attention_bias", "attention_out_bias", "mlp_bias"} - known.keys(), False)
    for key, value in supported.items():
        for found in (hf.values.get(key), rope.get(key)):
            if found not in (value, None):
                raise InputError(f"{path}: {key} {found!r} is not supported, only {value!r} is")

    n_heads, dim, context = (get(key, int) for key in ("num_attention_heads", "hidden_size", "max_position_embeddings"))
    scaling = rope_scaling_from_hf(hf, rope, context)
    window = setting("sliding_window", int, None) if get("use_sliding_window", bool, True) else None
    if "sliding_attention" not in setting("layer_types", list, ["sliding_attention"]):
        window = None
    if window is not None and window < context:
        print(f"sliding window attention is full attention up to {window} tokens: the context is cut to that")
        context = window

    ladder = hf.values.get("ladder_layers")
    n_layers = get("num_hidden_layers", int)
    if hf.family == "llamaLadder" and "ladder_layers" not in hf.values:
        raise InputError(f"{path}: model_type is llamaLadder, but ladder_layers does not say which layers")
    wiring = wiring_from_hf(ladder, setting("parallel_blocks", bool, False), n_layers)
    if wiring is None:
        raise InputError(f"{path}: ladder_layers {ladder!r} with parallel_blocks is no wiring that this project has")
    attention_bias = setting("attention_bias", bool, False)
    values = {
        "n_layers": n_layers, "n_heads": n_heads, "dim": dim, "max_seq_len": context,
        "n_kv_heads": get("num_key_value_heads", int, n_heads), "intermediate_size": get("intermediate_size", int),
        "head_dim": get("head_dim", int, dim // n_heads),
        "vocab_size": get("vocab_size", int), "norm_eps": get("rms_norm_eps", float),
        "rope_theta": rope.get("rope_theta", hf.values["rope_theta"]), "rope_scaling": scaling,
        "tie_embeddings": get("tie_word_embeddings", bool),
        "qkv_bias": hf.family == "qwen2" or attention_bias,
        "wo_bias": setting("attention_out_bias", bool, attention_bias), "mlp_bias": setting("mlp_bias", bool, False),
        "qk_norm": hf.family == "qwen3" or setting("qk_norm", bool, False),
        "nope_layers": nope_layers_from_hf(hf, n_layers),
        "bos_id": hf.values["bos_token_id"], "eos_ids": hf.eos,
        "wiring": wiring,
    }  # fmt: skip
    return checkpoint.make_config(values, path)


def rope_scaling_from_hf(hf, rope, context):
    """Config.rope_scaling of what a config.json says of its rotary embeddings (the dict rope), or None.

    context: max_position_embeddings. What YaRN leaves out is computed as transformers 5.23 does.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    kinds = ["default"] if hf.family == "phi3" else list(ROPE_KINDS)  # Phi-3 takes every other for longrope
    if kind not in kinds:
        raise InputError(f"{hf.path}: rope type {kind!r} is not supported, only {', '.join(kinds)} are")
    if kind == "default":
        return None
    original = rope.get("original_max_position_embeddings", context)
    scaling = {**rope, "original_max_position_embeddings": hf.values.get("original_max_position_embeddings", original)}
    if kind == "yarn":
        if rope.get("truncate") is False:
            raise InputError(f"{hf.path}: YaRN with truncate false is not supported")
        original = hf.get("original_max_position_embeddings", int, among=scaling)
        factor = hf.get("factor", float, context / original, among=rope)
        mscale, mscale_all_dim = (hf.get(key, float, 0, among=rope) for key in ("mscale", "mscale_all_dim"))
        above, below = (mscale, mscale_all_dim) if mscale and mscale_all_dim else (1, 0)
        log = 0.1 * math.log(max(factor, 1))
        scaling |= {
            "factor": factor, "beta_fast": rope.get("beta_fast") or 32.0, "beta_slow": rope.get("beta_slow") or 1.0,
            "attention_factor": hf.get("attention_factor", float, (above * log + 1) / (below * log + 1), among=rope),
        }  # fmt: skip
    return {key: scaling.get(key) for key in ROPE_KINDS[kind].__args__}


def nope_layers_from_hf(hf, n_layers):
    """The layers without rotary embeddings: SmolLM3 marks them with a 0 in a list, or has one in so many."""
    interval = hf.setting("no_rope_layer_interval", int, n_layers + 1)
    turned = hf.setting("no_rope_layers", list, [i % interval for i in range(1, n_layers + 1)])
    if len(turned) < n_layers:
        raise InputError(f"{hf.path}: no_rope_layers has {len(turned)} entries for {n_layers} layers")
    return tuple(i for i in range(n_layers) if not turned[i])


def no_rope_layers(config):
    """The inverse: a 0 for each such layer and 1 for the others, or None where there is none."""
    return [int(i not in config.nope_layers) for i in range(config.n_layers)] if config.nope_layers else None


def family_of(config):
    """The keys of a config.json that name the family of transformers with a standard model's biases and norms, or None.

    The inverse of config_from_hf for what is not a number: its shape and its rotary embeddings are the same in all.
    """
    qkv, wo, mlp, turned = config.qkv_bias, config.wo_bias, config.mlp_bias, not config.nope_layers
    if config.qk_norm:
        fits, family, name, keys = qkv == wo and not mlp and turned, "qwen3", "Qwen3", {"attention_bias": qkv}
    elif not turned:
        keys = {
            "attention_bias": qkv, "mlp_bias": mlp, "no_rope_layers": no_rope_layers(config), "pad_token_id": None,
        }  # fmt: skip
        fits, family, name = qkv == wo, "smollm3", "SmolLM3"
    elif qkv == wo:
        fits, family, name, keys = True, "llama", "Llama", {"attention_bias": qkv, "mlp_bias": mlp}
    elif qkv and not mlp:
        fits, family, name, keys = True, "qwen2", "Qwen2", {}
    else:
        keys = {"attention_bias": qkv, "attention_out_bias": wo, "mlp_bias": mlp, "pad_token_id": None}
        fits, family, name = True, "seed_oss", "SeedOss"
    return {"model_type": family, "architectures": [f"{name}ForCausalLM"], **keys} if fits else None


def rope_kind(scaling):
    """transformers' name of a Config.rope_scaling."""
    return next(kind for kind, keys in ROPE_KINDS.items() if keys and set(keys.__args__) == scaling.keys())


class LlamaWeights:
    """The tensors of a Hugging Face folder under Llama's names: names() and read(name), as of their source.

    Phi-3's fused projections are taken apart. Granite's multipliers go into the weights: that of the residual stream
    into those that write to it, that of the scores into the queries, that of the embeddings into their table, and that
    of the logits into the last norm, which also makes up for a table that is the output head too.
    """

    def __init__(self, source, path, config):
        hf, H = HuggingFaceConfig(path), config.head_dim
        residual, embedding, logits = (
            hf.setting(key, float, 1.0) for key in ("residual_multiplier", "embedding_multiplier", "logits_scaling")
        )
        scores = hf.setting("attention_multiplier", float, None)
        queries = 1.0 if scores is None else scores * H**0.5  # the scores are divided by that
        head = embedding if config.tie_embeddings else 1.0
        self.factors = {
            "embed_tokens": embedding, "q_proj": queries, "o_proj": residual, "down_proj": residual,
            "norm": 1 / (head * logits), "lm_head": head,
        }  # fmt: skip
        fused = {
            "qkv_proj": {f"{n}_proj": (config.n_heads if n == "q" else config.n_kv_heads) * H for n in "qkv"},
            "gate_up_proj": dict.fromkeys(("gate_proj", "up_proj"), config.intermediate_size),
        }
        self.source, self.parts = source, {}  # name: (the source's, rows of each of its parts or None, which part)
        for name in source.names():
            path, module, kind = [""] * (2 - name.count(".")) + name.rsplit(".", 2)
            parts = fused.get(module, {}) if hf.family == "phi3" else {}
            self.parts |= {f"{path}.{part}.{kind}": (name, list(parts.values()), i) for i, part in enumerate(parts)}
            if not parts:
                self.parts[name] = name, None, 0

    def names(self):
        return list(self.parts)

    def read(self, name):
        fused, rows, i = self.parts[name]
        tensor = self.source.read(fused)
        if rows is not None:
            if len(tensor) != sum(rows):
                raise InputError(f"{fused} has {len(tensor)} rows, but the config says {sum(rows)}")
            tensor = tensor.split(rows)[i]
        factor = self.factors.get(name.rsplit(".", 2)[-2], 1.0)
        return tensor if factor == 1.0 else tensor.float() * factor
