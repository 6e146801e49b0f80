"""Reads Hugging Face's configs and names of tensors."""

import math
import re
import reprlib
from collections import Counter

import torch

from formats import checkpoint
from formats.checkpoint import MOST_LAYERS, read_json
from formats.families import FAMILIES, IGNORED, NESTED, ONLY, SHAPE
from formats.fields import wiring_name
from kernels.rope_scaling import ROPE_KEYS
from runtime.errors import InputError, load_extra

PARTS = {  # of our tensors' names: Hugging Face's; wqkv is made of three
    "tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head", "attention": "self_attn",
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "wo": "o_proj", "feed_forward": "mlp",
    "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj", "router": "gate", "shared_gate": "shared_expert_gate",
    "attention_sum_norm": "post_self_attn_layernorm", "ffn_sum_norm": "post_mlp_layernorm",  # GLM's
}  # fmt: skip
ROPE_TYPES = "full_attention", "sliding_attention"
TWO_BASES = "gemma3_text", "olmo3"  # in which layers with a window turn otherwise
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # Hugging Face's names: ours
ORIGINAL = "original_max_position_embeddings"
ROPE = {key for keys in ROPE_KEYS.values() for key in keys} | {  # keys of rope_scaling and rope_parameters
    "rope_type", "type", "rope_theta", "mscale", "mscale_all_dim", "max_position_embeddings",
}  # fmt: skip


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


def unpaired(weight, head_dim, rotary_dim=None):
    """Return the rows of q or k for rotary embeddings that turn (i, i + R/2) instead of neighbours (2i, 2i + 1)."""
    first, rest = weight.unflatten(0, (-1, head_dim)).tensor_split((rotary_dim or head_dim,), dim=1)
    return torch.cat((first.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2), rest), dim=1).flatten(0, 1)


def wiring_from_hf(ladder_layers, parallel_blocks, n_layers):
    """Return the wiring in which those layers (the last n, or a list) are ladders."""
    if not ladder_layers:
        return "parallel" if parallel_blocks else "standard"
    name = "parallel-ladder" if parallel_blocks else "ladder"
    return name if ladder_layers in (n_layers, list(range(n_layers))) else wiring_name(name, ladder_layers)


def text_values(values):
    """Return the values of the language model that a config.json describes beside towers for pictures, or `values`."""
    outer, text = values.get("model_type"), values.get("text_config")
    if not isinstance(outer, str) or outer not in NESTED:
        return values
    if not isinstance(text, dict):
        raise InputError(f"model_type is {outer}, but text_config is {text!r}, no config of a language model")
    shared = {"bos_token_id", "eos_token_id", "tie_word_embeddings", "quantization_config"} & values.keys()
    return {"model_type": NESTED[outer], **text, **{key: values[key] for key in shared}}


def read_hf(values):
    """Return the values of a config.json with the defaults of its family, without keys that only other families have.

    Raises InputError for families, and features of them, that model.py does not compute, and for unknown keys.
    """
    values = text_values(values)
    family, _ = values.get("model_type"), values.pop("laneformer", None)
    if "n_layers" in values and family is None:
        raise InputError("this is a checkpoint of this project already (python -m extras.export converts it back)")
    if "laneformer" in str(family).lower():  # Kog's, whose lanes are an extra
        family, values = "ministral", load_extra("lanes", f"model_type {family}").laneformer_as_ministral(values)
    if not isinstance(family, str) or family not in FAMILIES:
        raise InputError(f"model_type {family!r} is not supported; {', '.join(FAMILIES)} and laneformer are")
    if values["num_hidden_layers"] > MOST_LAYERS:
        raise InputError(f"num_hidden_layers is {values['num_hidden_layers']} but must be at most {MOST_LAYERS}")
    if family == "llamaLadder" and "ladder_layers" not in values:
        raise InputError("model_type is llamaLadder, but ladder_layers does not say which layers")
    known = FAMILIES[family].keys
    # before transformers 5, and since
    rope = values.get("rope_scaling") or values.get("rope_parameters") or known.get("rope_parameters", {})
    near = {}  # of layers with a window, where the others have another
    if isinstance(rope, dict) and {*ROPE_TYPES} & rope.keys():
        rope, near = (rope.get(name) or {} for name in ROPE_TYPES)
    for key, only in ONLY.items():
        for value in values.get(key), rope.get(key):
            if key not in known and value not in (only, None):
                raise InputError(f"{key} {value!r} is not supported, only {only!r} is")
    foreign = {key for other in FAMILIES.values() for key in other.keys} - known.keys() - SHAPE
    own = {key: value for key, value in values.items() if key not in foreign or "laneformer" in values}
    names, rope_names = known.keys() | SHAPE | IGNORED | ONLY.keys() | {"laneformer"}, known.keys() | ROPE | ONLY.keys()
    for given, allowed in (own, names), (rope, rope_names), (near, rope_names):
        for key, value in given.items():
            if key not in allowed and value is not None:
                words = "drop it from config.json if what the model computes does not depend on it"
                raise InputError(f"{reprlib.repr(key)[1:-1]} {reprlib.repr(value)} is unknown: {words}")
    return {**known, **own, "model_type": family, "rope_scaling": rope, "near_rope": near}


def eos_ids(path, values, hf):
    """Return the ids that end a text: those of config.json, `values`, and of a generation_config.json beside it."""
    generation = path.with_name("generation_config.json")
    others = read_json(generation).get("eos_token_id") if generation.is_file() else None
    own = hf["eos_token_id"] if others is None or "eos_token_id" in values else None  # not a family's default
    result = [i for ids in (own, others) for i in (ids if isinstance(ids, list) else [ids])]
    return tuple(dict.fromkeys(i for i in result if i is not None))


def config_from_hf(path):
    """Return the Config that a Hugging Face config.json (and the generation_config.json beside it) describes."""
    values = read_json(path)
    try:
        hf = read_hf(values)
        ours = our_values(hf) | {"eos_ids": eos_ids(path, text_values(values), hf)}
    except (InputError, AttributeError, ArithmeticError, KeyError, TypeError, ValueError) as e:  # absent, text, NaN
        raise InputError(f"{path}: {e if isinstance(e, InputError) else repr(e)}") from None
    return checkpoint.make_config(ours, path)


def our_values(hf):
    """Return the values of Config, except eos_ids, from the result of read_hf."""
    n_layers, n_heads, dim = hf["num_hidden_layers"], hf["num_attention_heads"], hf["hidden_size"]
    family, attention_bias, windowed = hf["model_type"], hf.get("attention_bias", False), window_layers_from_hf(hf)
    head_dim = hf["head_dim"] or dim // n_heads
    rotary, scalar = rotary_from_hf(hf, head_dim), hf.get("query_pre_attn_scalar") or head_dim
    parallel = hf.get("parallel_blocks") or hf.get("use_parallel_residual")
    has_linear = "linear_num_key_heads" in hf
    linear = load_extra("linear_attention", f"model_type {family}").values_from_hf(hf) if has_linear else {}
    n_experts = hf.get("num_experts") or hf.get("num_local_experts")  # which transformers 5 writes
    experts = load_extra("experts", f"model_type {family}").values_from_hf(hf, n_experts) if n_experts else {}
    return {
        "n_layers": n_layers, "n_heads": n_heads, "dim": dim, "max_seq_len": hf["max_position_embeddings"],
        "n_kv_heads": hf["num_key_value_heads"] or n_heads, "intermediate_size": hf["intermediate_size"],
        "head_dim": head_dim, "vocab_size": hf["vocab_size"], "norm_eps": hf.get("layer_norm_eps", hf["rms_norm_eps"]),
        **rotary, "tie_embeddings": hf["tie_word_embeddings"],
        "qkv_bias": hf.get("qkv_bias", hf.get("use_qkv_bias", attention_bias)),
        "wo_bias": hf.get("attention_out_bias", attention_bias), "mlp_bias": hf.get("mlp_bias", False),
        "qk_norm": hf.get("qk_norm", False), "activation": activation_from_hf(hf),
        "embedding_scale": dim**0.5 if family.startswith("gemma") else None,
        "query_scale": (head_dim / scalar) ** 0.5 if scalar != head_dim else None,
        "score_cap": hf.get("attn_logit_softcapping"), "logit_cap": hf.get("final_logit_softcapping"),
        "nope_layers": nope_layers_from_hf(hf), "bos_id": hf["bos_token_id"],
        "sliding_window": hf["sliding_window"] if windowed else None, "window_layers": windowed,
        "wiring": hf.get("wiring") or wiring_from_hf(hf.get("ladder_layers"), parallel, n_layers),
        **FAMILIES[family].values, **hf.get("laneformer", {}), **linear, **experts,
    }  # fmt: skip


def activation_from_hf(hf):
    """Return Config.activation from the result of read_hf."""
    given = hf.get("hidden_activation") or hf.get("hidden_act") or "silu"
    name = "gelu_pytorch_tanh" if (hf["model_type"], given) == ("gemma", "gelu") else given  # as transformers takes it
    if name not in ACTIVATIONS:
        raise InputError(f"hidden_act {name!r} is not supported, only {', '.join(ACTIVATIONS)} are")
    return ACTIVATIONS[name]


def rotary_from_hf(hf, head_dim):
    """Return the values of Config about rotary embeddings from the result of read_hf."""
    rope, near, theta = hf["rope_scaling"], hf["near_rope"], hf["rope_theta"]
    part = rope.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    rotary_dim, scaling = int(head_dim * part), rope_scaling_from_hf(hf)
    theta, near_theta = rope.get("rope_theta", theta), near.get("rope_theta", hf.get("rope_local_base_freq") or theta)
    two = hf["model_type"] in TWO_BASES and (scaling or theta != near_theta)
    if near.get("rope_type", "default") != "default":
        raise InputError(f"rope_type {near['rope_type']!r} of sliding_attention is not supported, only 'default' is")
    return {
        "rope_theta": theta, "rope_scaling": scaling, "rotary_dim": rotary_dim if rotary_dim != head_dim else None,
        "window_rope_theta": near_theta if two else None, "llama4_beta": rope.get("llama_4_scaling_beta"),
    }  # fmt: skip


def rope_scaling_from_hf(hf):
    """Return Config.rope_scaling from the result of read_hf. Absent keys get transformers' values."""
    rope, context = hf["rope_scaling"], hf["max_position_embeddings"]
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = "longrope" if "short_factor" in rope else kind  # Phi-3 had other names for it
    if kind == "default":
        return None
    if kind not in ROPE_KEYS:
        raise InputError(f"rope type {kind!r} is not supported, only default, {', '.join(ROPE_KEYS)} are")
    original = hf.get(ORIGINAL) or rope.get(ORIGINAL) or context
    factor, scaling = rope.get("factor") or context / original, {}
    if kind == "yarn":
        mscales = rope.get("mscale"), rope.get("mscale_all_dim")
        over, under = (0.1 * m * math.log(max(factor, 1)) + 1 for m in (mscales if all(mscales) else (1.0, 0.0)))
        scaling = {"factor": factor, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": over / under}
    elif kind == "longrope":
        scaling["attention_factor"] = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    scaling |= {key: value for key, value in rope.items() if value} | {ORIGINAL: original}
    if missing := [key for key in ROPE_KEYS[kind] if key not in scaling]:
        raise InputError(f"rope type {kind!r} needs {missing[0]}")
    return {key: scaling[key] for key in ROPE_KEYS[kind]}


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
    if window is None or not hf.get("use_sliding_window", True):
        return ()
    if window >= hf["max_position_embeddings"] and hf["model_type"] not in TWO_BASES:
        return ()
    if types is None and hf["model_type"] in ("qwen2_moe", "smollm3"):  # transformers has others for each
        raise InputError("a sliding_window needs layer_types in this family")
    if types is None:
        first, step = hf.get("max_window_layers", 0), hf.get("sliding_window_pattern", n_layers + 1)
        return tuple(i for i in range(first, n_layers) if (i + 1) % step)
    if len(types) != n_layers or not {*types} <= {"full_attention", "sliding_attention"}:
        raise InputError(f"layer_types must name full_attention or sliding_attention for each of {n_layers} layers")
    return tuple(i for i in range(n_layers) if types[i] == "sliding_attention")


class LlamaWeights:
    """The tensors of a Hugging Face folder under Llama's names: names() and read(name), like their source.

    Phi-3's fused projections are split. Granite's multipliers are folded into the weights: residual_multiplier into wo
    and w2, attention_multiplier into the queries, embedding_multiplier into the embedding table, logits_scaling into
    the last norm. If the table is also the output head, the last norm divides by embedding_multiplier. GLM's rotary
    embeddings turn neighbours: see unpaired. Of a model with several towers only the language model's tensors are here.

    skipped: {tower: how many tensors of it are not}.
    """

    def __init__(self, source, path, config):
        values = read_json(path)
        hf, H, nested = read_hf(values), config.head_dim, values["model_type"] in NESTED
        self.rotary = (H, config.rotary_dim) if hf["model_type"] in ("glm", "glm4") else None
        norms, self.skipped = FAMILIES[hf["model_type"]].norms, Counter()
        if config.n_experts:
            source = load_extra("experts", "n_experts").ExpertWeights(source)
        if config.linear_layers:
            source = load_extra("linear_attention", "linear_layers").LinearWeights(source, config)
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
            if name.startswith("mtp.") or nested and not re.match(r"(model\.)?language_model\.|lm_head\.", name):
                self.skipped[name.removeprefix("model.").partition(".")[0]] += 1
                continue
            text = re.sub(r"^((model|language_model)\.)*", "", name)  # older folders have another order
            text = text if text.startswith("lm_head.") else f"model.{text}"
            module = f".{text}".split(".")[-2]
            chunks = fused.get(module, {norms.get(module, module): 1})
            for i, chunk in enumerate(chunks):
                place = text.replace(module, chunk)
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
        if self.rotary and re.search(r"\.[qk]_proj\.", name):
            tensor = unpaired(tensor, *self.rotary)
        factor = self.factors.get(name.rsplit(".", 2)[-2], 1.0)
        return tensor if factor == 1.0 or tensor.dtype == torch.uint8 else tensor.float() * factor
