"""Reads Hugging Face's configs and names of tensors."""

import math
import re

import torch

from formats import checkpoint
from formats.checkpoint import MOST_LAYERS, read_json
from formats.experts import ExpertWeights
from formats.rope import ROPE_KEYS
from formats.wiring_text import wiring_name
from linear_attention import LinearWeights, values_from_hf
from runtime.errors import InputError, load_extra

PARTS = {  # of our tensors' names: Hugging Face's; wqkv is made of three
    "tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head", "attention": "self_attn",
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "wo": "o_proj", "feed_forward": "mlp",
    "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj", "router": "gate", "shared_gate": "shared_expert_gate",
}  # fmt: skip
COMMON = {
    "num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
QWEN = {**COMMON, "bos_token_id": None, "eos_token_id": None, "use_sliding_window": False, "sliding_window": 4096}
WINDOW_LAYERS = {"max_window_layers": 28, "layer_types": None}
BIASES = {"attention_bias": False, "mlp_bias": False}
QWEN_EXPERTS = {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": None}
LINEAR = {  # Qwen's with linear attention
    **COMMON, "bos_token_id": None, "eos_token_id": None, "attention_bias": False, "head_dim": 256,
    "partial_rotary_factor": 0.25, "layer_types": None, "full_attention_interval": 4, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
GRANITE = {"embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0}
# model_type: {key: transformers 5.23's default}, for the keys that the family has. Every config.json has
# the model's shape, except for the keys that the first Llamas lack.
FAMILIES = {
    "llama": {**COMMON, **BIASES},
    "llamaLadder": {**COMMON, **BIASES},
    "ladder_residual": {  # extras/export/exported: a child of seed_oss
        **COMMON, **BIASES, "attention_out_bias": False, "bos_token_id": 0, "no_rope_layers": None, "qk_norm": False,
        "parallel_blocks": False, "wiring": None,
    },
    "mistral": {**COMMON, "sliding_window": 4096},
    "ministral": {**COMMON, "sliding_window": 4096, "layer_types": None},
    "qwen2": {**QWEN, **WINDOW_LAYERS},
    "qwen3": {**QWEN, **WINDOW_LAYERS, "attention_bias": False},
    "phi3": {**COMMON, "rms_norm_eps": 1e-5, "sliding_window": None, "eos_token_id": 32000},
    "granite": {**COMMON, **BIASES, **GRANITE},
    "mixtral": {
        **COMMON, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "granitemoe": {**COMMON, **GRANITE, "attention_bias": False, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {
        **QWEN, **WINDOW_LAYERS, **QWEN_EXPERTS, "num_experts": 60, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "qkv_bias": True,
    },
    "qwen3_moe": {
        **QWEN, **QWEN_EXPERTS, "attention_bias": False, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "qwen3_next": {
        **LINEAR, **QWEN_EXPERTS, "norm_topk_prob": True, "num_experts": 512, "num_experts_per_tok": 10,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    },
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": {
        **LINEAR, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "smollm3": {
        **COMMON, **BIASES, "tie_word_embeddings": True, "rope_theta": 2000000.0, "no_rope_layers": None,
        "no_rope_layer_interval": 4, "use_sliding_window": False, "sliding_window": None, "layer_types": None,
        "bos_token_id": 128000, "eos_token_id": 128001,
    },
    "seed_oss": {**COMMON, **BIASES, "attention_bias": True, "attention_out_bias": False, "bos_token_id": 0},
}  # fmt: skip
ORIGINAL = "original_max_position_embeddings"


def hf_names(name):
    """Return the names of the Hugging Face tensors that make up ours: one, or three (q, k, v) for wqkv."""
    layer, module, tensor = re.fullmatch(r"(layers\.\d+\.)?(.+)\.(\w+)", name).groups()
    prefix = f"model.{layer}" if layer else ""
    module = ".".join(PARTS.get(part, part) for part in module.split("."))
    modules = [module.replace("wqkv", f"{letter}_proj") for letter in "qkv"] if module.endswith("wqkv") else [module]
    return [f"{prefix}{module}.{tensor}" for module in modules]


def group(q, k, v, config):
    """Return weights or biases of q, k and v as wqkv, which has for each KV head its queries, its key and its value."""
    return torch.cat([t.unflatten(0, (config.n_kv_heads, -1)) for t in (q, k, v)], dim=1).flatten(0, 1)


def unpaired(weight, head_dim):
    """Return the rows of q or k for rotary embeddings that turn (i, i + H/2) instead of neighbours (2i, 2i + 1)."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def wiring_from_hf(ladder_layers, parallel_blocks, n_layers):
    """Return the wiring in which those layers (the last n, or a list) are ladders."""
    if not ladder_layers:
        return "parallel" if parallel_blocks else "standard"
    name = "parallel-ladder" if parallel_blocks else "ladder"
    return name if ladder_layers in (n_layers, list(range(n_layers))) else wiring_name(name, ladder_layers)


def read_hf(values):
    """Return the values of a config.json with the defaults of its family, without keys that only other families have.

    Raises InputError for families, and features of them, that model.py does not compute.
    """
    family, _ = values.get("model_type"), values.pop("laneformer", None)
    if "n_layers" in values and family is None:
        raise InputError("this is a checkpoint of this project already (python -m extras.export converts it back)")
    if values["num_hidden_layers"] > MOST_LAYERS:
        raise InputError(f"num_hidden_layers is {values['num_hidden_layers']} but must be at most {MOST_LAYERS}")
    if "laneformer" in str(family).lower():  # Kog's, whose lanes are an extra
        family, values = "ministral", load_extra("lanes", f"model_type {family}").laneformer_as_ministral(values)
    if not isinstance(family, str) or family not in FAMILIES:
        raise InputError(f"model_type {family!r} is not supported; {', '.join(FAMILIES)} and laneformer are")
    if family == "llamaLadder" and "ladder_layers" not in values:
        raise InputError("model_type is llamaLadder, but ladder_layers does not say which layers")
    known = FAMILIES[family]
    if family == "qwen3_moe" and "num_local_experts" in values:  # transformers 5 renames num_experts to this
        values["num_experts"] = values.pop("num_local_experts")
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}  # before transformers 5, and since
    supported = {"hidden_act": "silu", "partial_rotary_factor": 1.0, "truncate": True, "mscale": None}
    supported |= dict.fromkeys({"attention_bias", "attention_out_bias", "mlp_bias"} - known.keys(), False)
    supported |= dict.fromkeys({"num_experts", "num_local_experts", "n_routed_experts"} - known.keys(), 0)
    for key, only in supported.items():
        for value in (values.get(key), rope.get(key) if isinstance(rope, dict) else None):
            if value not in (only, None):
                raise InputError(f"{key} {value!r} is not supported, only {only!r} is")
    foreign = {key for other in FAMILIES.values() for key in other} - known.keys()
    own = {k: v for k, v in values.items() if k not in foreign}
    return {**known, **own, "model_type": family, "rope_scaling": rope}


def eos_ids(path, values, hf):
    """Return the ids that end a text: those of config.json, `values`, and of a generation_config.json beside it."""
    generation = path.with_name("generation_config.json")
    others = read_json(generation).get("eos_token_id") if generation.is_file() else None
    own = hf["eos_token_id"] if others is None or "eos_token_id" in values else None
    result = [i for ids in (own, others) for i in (ids if isinstance(ids, list) else [ids])]
    return tuple(dict.fromkeys(i for i in result if i is not None))


def config_from_hf(path):
    """Return the Config that a Hugging Face config.json (and the generation_config.json beside it) describes."""
    values = read_json(path)
    try:
        hf = read_hf(values)
        ours = our_values(hf) | {"eos_ids": eos_ids(path, values, hf)}
    except (InputError, AttributeError, ArithmeticError, KeyError, TypeError) as e:  # an absent key, text as a number
        raise InputError(f"{path}: {e if isinstance(e, InputError) else repr(e)}") from None
    return checkpoint.make_config(ours, path)


def our_values(hf):
    """Return the values of Config, except eos_ids, from the result of read_hf."""
    n_layers, n_heads, dim = hf["num_hidden_layers"], hf["num_attention_heads"], hf["hidden_size"]
    family, rope = hf["model_type"], hf["rope_scaling"]
    attention_bias, windowed = hf.get("attention_bias", False), window_layers_from_hf(hf)
    return {
        "n_layers": n_layers, "n_heads": n_heads, "dim": dim, "max_seq_len": hf["max_position_embeddings"],
        "n_kv_heads": hf["num_key_value_heads"] or n_heads,
        "intermediate_size": hf["moe_intermediate_size" if family == "qwen3_5_moe_text" else "intermediate_size"],
        "head_dim": hf["head_dim"] or dim // n_heads,
        "vocab_size": hf["vocab_size"], "norm_eps": hf["rms_norm_eps"],
        "rope_theta": rope.get("rope_theta", hf["rope_theta"]), "rope_scaling": rope_scaling_from_hf(hf),
        "tie_embeddings": hf["tie_word_embeddings"],
        "qkv_bias": family == "qwen2" or hf.get("qkv_bias", attention_bias),
        "wo_bias": hf.get("attention_out_bias", attention_bias), "mlp_bias": hf.get("mlp_bias", False),
        "qk_norm": family in ("qwen3", "qwen3_moe") or hf.get("qk_norm", False), **experts_from_hf(hf),
        "nope_layers": nope_layers_from_hf(hf), "bos_id": hf["bos_token_id"],
        "sliding_window": hf["sliding_window"] if windowed else None, "window_layers": windowed,
        "wiring": hf.get("wiring") or wiring_from_hf(hf.get("ladder_layers"), hf.get("parallel_blocks"), n_layers),
        **hf.get("laneformer", {}), **values_from_hf(hf),
    }  # fmt: skip


def experts_from_hf(hf):
    """Return the values of Config about experts from the result of read_hf; none for a dense model."""
    n_experts = hf.get("num_experts", hf.get("num_local_experts"))
    if not n_experts:
        return {}
    layers, step, dense = range(hf["num_hidden_layers"]), hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers")
    return {
        "n_experts": n_experts, "experts_per_token": hf["num_experts_per_tok"],
        "expert_size": hf.get("moe_intermediate_size", hf["intermediate_size"]),
        "renormalize_experts": hf.get("norm_topk_prob", True),
        "shared_expert_size": hf.get("shared_expert_intermediate_size"),
        "shared_expert_gate": "shared_expert_intermediate_size" in hf,
        "dense_layers": tuple(i for i in layers if i in (dense or ()) or (i + 1) % step),
    }  # fmt: skip


def rope_scaling_from_hf(hf):
    """Return Config.rope_scaling from the result of read_hf. Absent keys of YaRN get transformers' values."""
    rope, context = hf["rope_scaling"], hf["max_position_embeddings"]
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    supported = ["default", *([] if hf["model_type"] == "phi3" else ROPE_KEYS)]  # Phi-3 takes every other for longrope
    if rope_type not in supported:
        raise InputError(f"rope type {rope_type!r} is not supported, only {', '.join(supported)} are")
    if rope_type == "default":
        return None
    original = hf.get(ORIGINAL, rope.get(ORIGINAL, context))
    scaling = {**rope, ORIGINAL: original}
    if rope_type == "yarn":
        factor = rope.get("factor") or context / original
        scaling |= {
            "factor": factor, "beta_fast": rope.get("beta_fast") or 32.0, "beta_slow": rope.get("beta_slow") or 1.0,
            "attention_factor": rope.get("attention_factor") or 0.1 * math.log(max(factor, 1)) + 1,
        }  # fmt: skip
    return {key: scaling[key] for key in ROPE_KEYS[rope_type]}


def nope_layers_from_hf(hf):
    """Return the layers without rotary embeddings: those with a 0 in SmolLM3's list, or every interval-th layer."""
    n_layers = hf["num_hidden_layers"]
    interval = hf.get("no_rope_layer_interval", n_layers + 1)
    has_rope = hf.get("no_rope_layers") or [i % interval for i in range(1, n_layers + 1)]
    if len(has_rope) < n_layers:
        raise InputError(f"no_rope_layers has {len(has_rope)} entries for {n_layers} layers")
    return tuple(i for i in range(n_layers) if not has_rope[i])


def window_layers_from_hf(hf):
    """Return the layers with a sliding window: those that layer_types names, or else the family's own."""
    n_layers, window, types = hf["num_hidden_layers"], hf.get("sliding_window"), hf.get("layer_types")
    if window is None or window >= hf["max_position_embeddings"] or not hf.get("use_sliding_window", True):
        return ()
    first = hf.get("max_window_layers", 0)
    if types is None and hf["model_type"] == "qwen2_moe":
        return tuple(range(0, min(first, n_layers), 2))
    if types is None:
        return nope_layers_from_hf(hf) if hf["model_type"] == "smollm3" else tuple(range(first, n_layers))
    if len(types) != n_layers or not {*types} <= {"full_attention", "sliding_attention"}:
        raise InputError(f"layer_types must name full_attention or sliding_attention for each of {n_layers} layers")
    return tuple(i for i in range(n_layers) if types[i] == "sliding_attention")


class LlamaWeights:
    """The tensors of a Hugging Face folder under Llama's names: names() and read(name), like their source.

    Phi-3's fused projections are split. Granite's multipliers are folded into the weights: residual_multiplier into wo
    and w2, attention_multiplier into the queries, embedding_multiplier into the embedding table, logits_scaling into
    the last norm. If the table is also the output head, the last norm divides by embedding_multiplier.
    """

    def __init__(self, source, path, config):
        hf, H = read_hf(read_json(path)), config.head_dim
        source = ExpertWeights(source) if config.n_experts else source
        source = LinearWeights(source, config) if config.linear_layers else source
        if "laneformer" in hf:
            source = load_extra("lanes", "a Laneformer").LaneformerWeights(source, H)
        self.factors = {}
        if "residual_multiplier" in hf:
            embedding, residual = hf["embedding_multiplier"], hf["residual_multiplier"]
            head = embedding if config.tie_embeddings else 1.0
            self.factors = {
                "embed_tokens": embedding, "o_proj": residual, "down_proj": residual, "lm_head": head,
                "norm": 1 / (head * hf["logits_scaling"]),
                "q_proj": hf["attention_multiplier"] * H**0.5,  # the scores are over H**0.5
            }  # fmt: skip
        fused = {  # the proportions of their rows
            "qkv_proj": {"q_proj": config.n_heads, "k_proj": config.n_kv_heads, "v_proj": config.n_kv_heads},
            "gate_up_proj": {"gate_proj": 1, "up_proj": 1},
        }
        self.source, self.places = source, {}  # name: (the source's name, proportions of its chunks, which chunk)
        for name in source.names():
            module = f".{name}".split(".")[-2]
            chunks = fused.get(module, {module: 1})
            for i, chunk in enumerate(chunks):
                place = name.replace(module, chunk)
                if place in self.places:
                    raise InputError(f"the source has both {self.places[place][0]} and {name}: drop one")
                self.places[place] = name, [*chunks.values()], i

    def names(self):
        return list(self.places)

    def read(self, name):
        source_name, chunks, i = self.places[name]
        tensor = self.source.read(source_name)
        if len(chunks) > 1:
            unit = tensor.shape[-2] // sum(chunks)
            tensor = tensor.split([unit * chunk for chunk in chunks], dim=-2)[i]
        factor = self.factors.get(name.rsplit(".", 2)[-2], 1.0)
        return tensor if factor == 1.0 else tensor.float() * factor
