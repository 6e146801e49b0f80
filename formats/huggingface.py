"""Hugging Face's names and configs, as ours."""

import math

import torch

from extras.lanes import laneformer_folder as laneformer
from formats import checkpoint
from formats.checkpoint import read_json
from formats.wiring_text import wiring_name
from runtime.errors import InputError

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

COMMON = {
    "num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NO_ENDS = {"bos_token_id": None, "eos_token_id": None}
WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "layer_types": None}
BIASES = {"attention_bias": False, "mlp_bias": False}
# model_type: what transformers 5.23 takes for keys that are absent; a family has the settings named here. The shape
# stands in every config.json, but for what the first Llamas do without: a wrong one would not fit the weights.
FAMILIES = {
    "llama": {**COMMON, **BIASES},
    "llamaLadder": {**COMMON, **BIASES},
    "ladder_residual": {  # of formats/exported: a child of seed_oss
        **COMMON, **BIASES, "attention_out_bias": False, "bos_token_id": 0, "no_rope_layers": None, "qk_norm": False,
        "parallel_blocks": False, "wiring": None,
    },
    "mistral": {**COMMON, "sliding_window": 4096},
    "ministral": {**COMMON, "sliding_window": 4096, "layer_types": None},
    "qwen2": {**COMMON, **NO_ENDS, **WINDOW, "max_window_layers": 28},
    "qwen3": {**COMMON, **NO_ENDS, **WINDOW, "max_window_layers": 28, "attention_bias": False},
    "phi3": {**COMMON, "rms_norm_eps": 1e-5, "sliding_window": None, "eos_token_id": 32000},
    "granite": {
        **COMMON, **BIASES, "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    },
    "smollm3": {
        **COMMON, **BIASES, "tie_word_embeddings": True, "rope_theta": 2000000.0, "no_rope_layers": None,
        "no_rope_layer_interval": 4, **WINDOW, "sliding_window": None, "bos_token_id": 128000, "eos_token_id": 128001,
    },
    "seed_oss": {**COMMON, **BIASES, "attention_bias": True, "attention_out_bias": False, "bos_token_id": 0},
    **laneformer.FAMILIES,
}  # fmt: skip
ORIGINAL = "original_max_position_embeddings"
ROPE_KINDS = {  # the keys of Config.rope_scaling
    "default": [],
    "linear": ["factor"],
    "llama3": ["factor", "low_freq_factor", "high_freq_factor", ORIGINAL],
    "yarn": ["factor", "beta_fast", "beta_slow", "attention_factor", ORIGINAL],
}


def hf_names(name):
    """Return the Hugging Face tensors that our tensor is made of: one, or those of q, k and v for wqkv."""
    if name in NAMES:
        return [NAMES[name]]
    _, layer, rest = name.split(".", 2)
    prefix = f"model.layers.{layer}."
    if rest.startswith("attention.wqkv."):
        return [f"{prefix}self_attn.{letter}_proj.{rest.rpartition('.')[2]}" for letter in "qkv"]
    return [prefix + LAYER_NAMES[rest]]


def group(q, k, v, config):
    """Return weights or biases of q, k and v as wqkv: KV head by KV head its queries, its key, its value."""
    return torch.cat([t.unflatten(0, (config.n_kv_heads, -1)) for t in (q, k, v)], dim=1).flatten(0, 1)


def ungroup(wqkv, config):
    """Return (q, k, v): the inverse of group."""
    queries = config.n_heads // config.n_kv_heads * config.head_dim
    parts = wqkv.unflatten(0, (config.n_kv_heads, -1)).split([queries, config.head_dim, config.head_dim], dim=1)
    return [t.flatten(0, 1) for t in parts]


def wiring_from_hf(ladder_layers, parallel_blocks, n_layers):
    """Return the wiring in which those layers (the last n, or a list) are ladders."""
    if not ladder_layers:
        return "parallel" if parallel_blocks else "standard"
    name = "parallel-ladder" if parallel_blocks else "ladder"
    return name if ladder_layers in (n_layers, list(range(n_layers))) else wiring_name(name, ladder_layers)


def read_hf(path):
    """Return a config.json as transformers takes it: with keys that are absent, without those of other families.

    Raises InputError for families, and features of them, that model.py does not compute.
    """
    values = read_json(path)
    family = values.get("model_type")
    if "n_layers" in values and family is None:
        raise InputError(f"{path.parent} is a checkpoint of this project already (--to-hf DIR converts it back)")
    if not isinstance(family, str) or family not in FAMILIES:
        raise InputError(f"{path}: model_type {family!r} is not supported; {', '.join(FAMILIES)} are")
    if family == "llamaLadder" and "ladder_layers" not in values:
        raise InputError(f"{path}: model_type is llamaLadder, but ladder_layers does not say which layers")
    known = FAMILIES[family]
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}  # before transformers 5, and since
    supported = {"hidden_act": "silu", "partial_rotary_factor": 1.0, "truncate": True, "mscale": None}
    supported |= dict.fromkeys({"attention_bias", "attention_out_bias", "mlp_bias"} - known.keys(), False)
    for key, value in supported.items():
        for found in (values.get(key), rope.get(key) if isinstance(rope, dict) else None):
            if found not in (value, None):
                raise InputError(f"{path}: {key} {found!r} is not supported, only {value!r} is")
    others = [] if family in laneformer.FAMILIES else FAMILIES.values()  # those refuse what they do not know
    foreign = {key for other in others for key in other} - known.keys()
    return {**known, **{k: v for k, v in values.items() if k not in foreign}, "rope_scaling": rope}


def eos_ids(path, hf):
    """Return the ids that end a text: those of config.json and of a generation_config.json beside it."""
    generation = path.with_name("generation_config.json")
    others = read_json(generation).get("eos_token_id") if generation.is_file() else None
    own = hf["eos_token_id"] if others is None or "eos_token_id" in read_json(path) else None
    found = [i for ids in (own, others) for i in (ids if isinstance(ids, list) else [ids])]
    return tuple(dict.fromkeys(i for i in found if i is not None))


def config_from_hf(path):
    """Return the Config that a Hugging Face config.json (and the generation_config.json beside it) describes."""
    hf = read_hf(path)
    try:
        values = our_values(hf) | {"eos_ids": eos_ids(path, hf)}
    except (InputError, AttributeError, ArithmeticError, KeyError, TypeError) as e:  # an absent key, text as a number
        raise InputError(f"{path}: {e if isinstance(e, InputError) else repr(e)}") from None
    return checkpoint.make_config(values, path)


def our_values(hf):
    """Return the values of Config, but for eos_ids, that settings as of read_hf mean."""
    n_layers, n_heads, dim = hf["num_hidden_layers"], hf["num_attention_heads"], hf["hidden_size"]
    if n_layers > checkpoint.MOST_LAYERS:
        raise InputError(f"num_hidden_layers is {n_layers} but must be at most {checkpoint.MOST_LAYERS}")
    if hf["model_type"] in laneformer.FAMILIES:
        hf = laneformer.as_llama(hf)
    family, rope = hf["model_type"], hf["rope_scaling"]
    attention_bias, windowed = hf.get("attention_bias", False), window_layers_from_hf(hf)
    return {
        "n_layers": n_layers, "n_heads": n_heads, "dim": dim, "max_seq_len": hf["max_position_embeddings"],
        "n_kv_heads": hf["num_key_value_heads"] or n_heads, "intermediate_size": hf["intermediate_size"],
        "head_dim": hf["head_dim"] or dim // n_heads,
        "vocab_size": hf["vocab_size"], "norm_eps": hf["rms_norm_eps"],
        "rope_theta": rope.get("rope_theta", hf["rope_theta"]), "rope_scaling": rope_scaling_from_hf(hf),
        "tie_embeddings": hf["tie_word_embeddings"],
        "qkv_bias": family == "qwen2" or attention_bias,
        "wo_bias": hf.get("attention_out_bias", attention_bias), "mlp_bias": hf.get("mlp_bias", False),
        "qk_norm": family == "qwen3" or hf.get("qk_norm", False),
        "nope_layers": nope_layers_from_hf(hf), "bos_id": hf["bos_token_id"],
        "sliding_window": hf["sliding_window"] if windowed else None, "window_layers": windowed,
        "wiring": hf.get("wiring") or wiring_from_hf(hf.get("ladder_layers"), hf.get("parallel_blocks"), n_layers),
        **hf.get("laneformer", {}),
    }  # fmt: skip


def rope_scaling_from_hf(hf):
    """Return the Config.rope_scaling of settings as of read_hf. Absent keys of YaRN are computed as by transformers."""
    rope, context = hf["rope_scaling"], hf["max_position_embeddings"]
    kind = rope.get("rope_type", rope.get("type", "default"))
    kinds = ["default"] if hf["model_type"] == "phi3" else list(ROPE_KINDS)  # Phi-3 takes every other for longrope
    if kind not in kinds:
        raise InputError(f"rope type {kind!r} is not supported, only {', '.join(kinds)} are")
    if kind == "default":
        return None
    original = hf.get(ORIGINAL, rope.get(ORIGINAL, context))
    scaling = {**rope, ORIGINAL: original}
    if kind == "yarn":
        factor = rope.get("factor") or context / original
        scaling |= {
            "factor": factor, "beta_fast": rope.get("beta_fast") or 32.0, "beta_slow": rope.get("beta_slow") or 1.0,
            "attention_factor": rope.get("attention_factor") or 0.1 * math.log(max(factor, 1)) + 1,
        }  # fmt: skip
    return {key: scaling[key] for key in ROPE_KINDS[kind]}


def nope_layers_from_hf(hf):
    """Return the layers without rotary embeddings: SmolLM3 marks them with a 0 in a list, or has one in so many."""
    n_layers = hf["num_hidden_layers"]
    interval = hf.get("no_rope_layer_interval", n_layers + 1)
    turned = hf.get("no_rope_layers") or [i % interval for i in range(1, n_layers + 1)]
    if len(turned) < n_layers:
        raise InputError(f"no_rope_layers has {len(turned)} entries for {n_layers} layers")
    return tuple(i for i in range(n_layers) if not turned[i])


def window_layers_from_hf(hf):
    """Return the layers with a sliding window: those that layer_types names, else all that the family gives one."""
    n_layers, window, types = hf["num_hidden_layers"], hf.get("sliding_window"), hf.get("layer_types")
    if window is None or window >= hf["max_position_embeddings"] or not hf.get("use_sliding_window", True):
        return ()
    if types is None:
        first = hf.get("max_window_layers", 0)
        return nope_layers_from_hf(hf) if hf["model_type"] == "smollm3" else tuple(range(first, n_layers))
    if len(types) != n_layers or not {*types} <= {"full_attention", "sliding_attention"}:
        raise InputError(f"layer_types must name full_attention or sliding_attention for each of {n_layers} layers")
    return tuple(i for i in range(n_layers) if types[i] == "sliding_attention")


def no_rope_layers(config):
    """Return the inverse: a 0 for each such layer and 1 for the others, or None if there is no such layer."""
    return [int(i not in config.nope_layers) for i in range(config.n_layers)] if config.nope_layers else None


def family_of(config):
    """Return the keys of a config.json that name transformers' family with a standard model's biases and norms.

    The inverse of config_from_hf where it is not numbers, which all families share. None if there is no such family.
    """
    qkv, wo, mlp, nope = config.qkv_bias, config.wo_bias, config.mlp_bias, config.nope_layers
    name, keys = "Llama", {"attention_bias": qkv, "mlp_bias": mlp}
    if qkv and not (wo or mlp or nope or config.qk_norm):
        name, keys = "Qwen2", {}
    elif qkv != wo or config.qk_norm and (mlp or nope):
        return None
    elif config.qk_norm:
        name, keys = "Qwen3", {"attention_bias": qkv}
    elif nope:
        name, keys = "SmolLM3", {**keys, "no_rope_layers": no_rope_layers(config), "pad_token_id": None}
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


class LlamaWeights:
    """The tensors of a Hugging Face folder under Llama's names: names() and read(name), as of their source.

    Phi-3's fused projections are taken apart. Granite's multipliers go into the weights: that of the residual stream
    into those that write to it, that of the scores into the queries, that of the embeddings into their table, and that
    of the logits into the last norm, which also makes up for a table that is the output head too.
    """

    def __init__(self, source, path, config):
        hf, H = read_hf(path), config.head_dim
        if hf["model_type"] in laneformer.FAMILIES:
            source = laneformer.LaneformerWeights(source, H)
        query, key, hidden = config.n_heads * H, config.n_kv_heads * H, config.intermediate_size
        residual, embedding, logits = (
            hf.get(key, 1.0) for key in ("residual_multiplier", "embedding_multiplier", "logits_scaling")
        )
        queries = hf["attention_multiplier"] * H**0.5 if "attention_multiplier" in hf else 1.0  # the scores over H**0.5
        head = embedding if config.tie_embeddings else 1.0
        self.factors = {
            "embed_tokens": embedding, "q_proj": queries, "o_proj": residual, "down_proj": residual,
            "norm": 1 / (head * logits), "lm_head": head,
        }  # fmt: skip
        fused = {  # their rows
            "qkv_proj": {"q_proj": query, "k_proj": key, "v_proj": key},
            "gate_up_proj": {"gate_proj": hidden, "up_proj": hidden},
        }
        self.source, self.parts = source, {}  # name: (the source's, rows of each of its parts, which part)
        for name in source.names():
            module = f".{name}".split(".")[-2]
            parts = fused.get(module, {module: None})
            self.parts |= {name.replace(module, part): (name, [*parts.values()], i) for i, part in enumerate(parts)}

    def names(self):
        return list(self.parts)

    def read(self, name):
        fused, rows, i = self.parts[name]
        tensor = self.source.read(fused)
        if rows != [None]:
            tensor = tensor.split(rows)[i]
        factor = self.factors.get(name.rsplit(".", 2)[-2], 1.0)
        return tensor if factor == 1.0 else tensor.float() * factor
