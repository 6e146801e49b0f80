"""Reads Hugging Face folders: config.json becomes our Config, and their tensors get our names."""

import dataclasses
import math
import os
import pkgutil
import re
from collections import Counter

import torch

from ladder.architectures import all_architectures
from ladder.checkpoints import checkpoint
from ladder.checkpoints.checkpoint import read_json, read_json_if_there
from ladder.checkpoints.compare import TOKENIZER_FILES
from ladder.errors import FieldError, InputError, as_json, first_line
from ladder.layers.attention_inputs import unpaired
from ladder.layers.rope_scaling import ORIGINAL_CONTEXT, ROPE_KEYS
from ladder.sources.config_values import HF_KEYS, check_values
from ladder.sources.families import FAMILIES, HARMLESS, NESTED, ONLY_VALUES, REMEDIES, REQUIRED, find_family
from ladder.sources.matrices import Renamed, Tensors, are_equal, multiply
from ladder.sources.quantized_formats import dequantizing
from ladder.sources.source import Source
from ladder.wiring_text import wiring_name

HF_NAMES = {  # {a part of our tensors' names: Hugging Face's}; wqkv is made of three tensors
    "tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head", "attention": "self_attn",
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "wo": "o_proj", "feed_forward": "mlp",
    "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj",
}  # fmt: skip
ROPE_TYPES = "full_attention", "sliding_attention"
ROPE_PLACES = "rope_parameters", "rope_scaling"  # which transformers 5 writes, and what model cards tell to add
SINGLE_ROPE_KEYS = "rope_theta", "partial_rotary_factor"  # that may also stand outside these places
INTERVALS = {  # {an interval of layers: the list that makes it superfluous}
    "sliding_window_pattern": "layer_types", "full_attention_interval": "layer_types",
    "no_rope_layer_interval": "no_rope_layers",
}  # fmt: skip
HF_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # {Hugging Face's name: ours}
ALL_ROPE_KEYS = {key for keys in ROPE_KEYS.values() for key in keys} | {  # of rope_scaling and rope_parameters
    "rope_type", "type", "rope_theta", "mscale", "mscale_all_dim", "truncate",
}  # fmt: skip


def hf_names(name, config):
    """Return the names of the Hugging Face tensors that make up ours: one, or three (q, k, v) for wqkv."""
    names = dict(HF_NAMES)
    for each in config.architecture:
        names |= each.hf_names
    layer, module, tensor = re.fullmatch(r"(layers\.\d+\.)?(.+)\.(\w+)", name).groups()
    prefix = f"model.{layer}" if layer else ""
    module = ".".join(names.get(part, part) for part in module.split("."))
    modules = [module.replace("wqkv", f"{letter}_proj") for letter in "qkv"] if module.endswith("wqkv") else [module]
    return [f"{prefix}{module}.{tensor}" for module in modules]


def group(q, k, v, config):
    """Join weights or biases of q, k and v to wqkv: for each KV head the rows of its queries, its key, its value."""
    return torch.cat([t.unflatten(0, (config.n_kv_heads, -1)) for t in (q, k, v)], dim=1).flatten(0, 1)


def wiring_from_hf(hf):
    """Return the text of the wiring: the one that is named, that of the family's own keys, or that of ladder_layers.

    ladder_layers are the last n layers, or a list of layers, that are ladders.
    """
    if hf.get("wiring"):
        return hf["wiring"]
    family = hf["family"]
    if family.wiring and (own := pkgutil.resolve_name(family.wiring)(hf)):
        return own
    parallel_blocks = hf.get("parallel_blocks") or hf.get("use_parallel_residual")
    base = family.values.get("wiring") or ("parallel" if parallel_blocks else "standard")
    ladder_layers = hf.get("ladder_layers")
    n_layers = hf["num_hidden_layers"]
    if not ladder_layers:
        return base
    name = "ladder" if base == "standard" else f"{base}-ladder"
    return name if ladder_layers in (n_layers, list(range(n_layers))) else wiring_name(name, ladder_layers)


def text_values(values):
    """Return the values of the language model in a config.json that also describes towers for pictures.

    Without such towers these are the values themselves. Raises InputError.
    """
    outer = values.get("model_type")
    text = values.get("text_config")
    if not isinstance(outer, str) or outer not in NESTED:
        return values
    if not isinstance(text, dict):
        raise InputError(f"model_type is {outer}, but text_config is {as_json(text)}, no config of a language model")
    for key in (*ROPE_PLACES, *SINGLE_ROPE_KEYS):
        if values.get(key) is not None and values[key] != text.get(key):
            raise InputError(f"{key} stands beside text_config, where it is not read: move it into text_config")
    shared = {"bos_token_id", "eos_token_id", "tie_word_embeddings", "quantization_config"} & values.keys()
    return {"model_type": NESTED[outer], **text, **{key: values[key] for key in shared}}


def rope_of(values, default):
    """Return (key, rope, near): a config.json's rope settings, their key, and those of layers with a window if others.

    If two places have settings, these are joined. Raises InputError if they contradict one another.
    """
    given = {key: values[key] for key in ROPE_PLACES if values.get(key)}
    key = [ROPE_PLACES[0], *given][-1]
    rope = {}
    near = {}
    for place, settings in given.items():
        check_values(settings, ROPE_TYPES, f"{place}.")
    if any(settings.keys() & {*ROPE_TYPES} for settings in given.values()):
        if len(given) > 1 and given["rope_parameters"] != given["rope_scaling"]:
            raise InputError("rope_parameters and rope_scaling differ: keep the one that holds, for each kind of layer")
        rope, near = (given[key].get(name) or {} for name in ROPE_TYPES)
    else:
        for settings in given.values():
            kinds = ("rope_type", "type") if len(given) > 1 else ()  # "default" in one place is no scaling of its own
            settings = {name: value for name, value in settings.items() if name not in kinds or value != "default"}
            if differ := sorted(name for name in settings if rope.get(name, settings[name]) != settings[name]):
                raise InputError(f"rope_parameters and rope_scaling have another {differ[0]!r}: keep what holds")
            rope = rope | settings
    kinds = sorted({rope[name] for name in ("rope_type", "type") if rope.get(name) not in (None, "su")})
    if len(kinds) > 1:
        raise InputError(f"{key} has both rope_type and type, which differ: {' and '.join(map(repr, kinds))}; keep one")
    for name in SINGLE_ROPE_KEYS:
        if rope.get(name) and values.get(name) and rope[name] != values[name]:
            where = " and ".join(given)
            raise InputError(
                f"{name} is {as_json(values[name])}, but {as_json(rope[name])} in {where}: keep the one that holds"
            )
    return key, rope if given else default or {}, near


def read_hf(values):
    """Return the values of a config.json that transformers reads, completed by the defaults of its family.

    "ignored" lists the other keys, which change nothing in transformers, and "family" is the Family. Raises InputError
    for a family, or a feature of one, that model.py does not compute.
    """
    outer = values
    values = text_values(outer)
    has_towers = values is not outer
    family = family_of(values)
    if family.translate:
        values = pkgutil.resolve_name(family.translate)(values)
    missing = [key for key in REQUIRED if values.get(key, family.keys.get(key)) is None]
    missing += [key for key in family.needs if key not in values]
    if missing:
        raise InputError(f"{missing[0]} is missing")
    rope_key, rope, near = rope_of(values, family.keys.get("rope_parameters"))
    names = {*family.keys, *REQUIRED}
    rope_names = names | ALL_ROPE_KEYS
    own, ignored = read_keys(values, names, family)
    rope, ignored_rope = read_keys(rope, rope_names, family, f"{rope_key}.")
    near, ignored_near = read_keys(near, rope_names, family, f"{rope_key}.")
    ignored |= ignored_rope | ignored_near
    if ignored and family.strict:
        key, value = ignored.popitem()
        words = "drop it from config.json if what the model computes does not depend on it"
        raise InputError(f"{key} {as_json(value)} is unknown: {words}")
    for key, instead in INTERVALS.items():
        if key in family.keys and own.get(key, family.keys[key]) is None and not own.get(instead):
            raise InputError(f"{key} is null but must be a whole number above 0, unless there are {instead}")
    return {
        **family.keys, **own, "family": family, "rope_scaling": rope, "near_rope": near, "ignored": [*ignored],
        "has_towers": has_towers,
    }  # fmt: skip


def family_of(values):
    """Return the Family of a config.json's values. Raises InputError if there is none."""
    name = find_family(values)
    if "n_layers" in values and name is None:
        raise InputError("this is a checkpoint of this project already, which needs no conversion")
    check_values(values, {"num_hidden_layers", "rope_scaling", "rope_parameters"})
    if not isinstance(name, str) or name not in FAMILIES:
        raise InputError(f"model_type {as_json(name)} is not supported; {', '.join(FAMILIES)} are")
    return FAMILIES[name]


def read_keys(given, names, family, prefix=""):
    """Return ({key: value} of the given values that are read, {key: value} of those that change nothing).

    names: the keys that may be read. prefix: of the keys, for messages. Raises InputError for a value that is not
    supported.
    """
    only = ONLY_VALUES | family.only
    harmless = HARMLESS | only.keys() | {"model_type", "rope_scaling", "rope_parameters"}
    ignored = {}
    check_values(given, names, prefix)
    for key, value in given.items():
        if key in REMEDIES and value:
            raise InputError(f"{key} is not supported; {REMEDIES[key]}")
        is_read = key in family.keys and key not in family.only
        if not is_read and value not in (only.get(key, value), None):
            raise InputError(f"{key} {as_json(value)} is not supported, only {as_json(only[key])} is")
        if key not in names | harmless and value is not None:
            ignored[prefix + repr(key)[1:-1]] = value
    return {key: value for key, value in given.items() if key in names and key not in family.only}, ignored


def eos_ids(values, hf, generated):
    """Return the ids that end a text: those of config.json, `values`, and of generation_config.json, `generated`."""
    check_values(generated, {"eos_token_id"}, "generation_config.json: ")
    others = generated.get("eos_token_id")
    # a family's default yields to generation_config.json
    own = hf["eos_token_id"] if others is None or "eos_token_id" in values else None
    result = [i for ids in (own, others) for i in (ids if isinstance(ids, list) else [ids])]
    return tuple(dict.fromkeys(i for i in result if i not in (None, -1)))  # -1: no token


def config_from_hf(path):
    """Return the Config that a Hugging Face config.json, and the generation_config.json beside it, describes."""
    return read_config(read_json(path), path, read_generation(path))[1]


def read_generation(path):
    """Return the values of the generation_config.json beside a config.json, {} if there is none."""
    return read_json_if_there(path.with_name("generation_config.json"))


def read_config(values, where, generated):
    """Return (the result of read_hf, the Config) of a config.json and a generation_config.json. where: for messages."""
    try:
        hf = read_hf(values)
        ours = our_values(hf) | {"eos_ids": eos_ids(text_values(values), hf, generated)}
        return hf, checkpoint.make_config(ours)
    except FieldError as e:
        names = getattr(e.owner, "hf_keys", HF_KEYS)  # a Config has none of its own
        own = {name: key for name, key in names.items() if name not in hf}  # qwen2_moe itself has a qkv_bias
        raise InputError(f"{where}: {e.with_names(own)}") from None
    except (InputError, AttributeError, ArithmeticError, KeyError, TypeError, ValueError) as e:
        what = "" if isinstance(e, InputError) else "values do not fit one another: "
        raise InputError(f"{where}: {what}{first_line(e)}") from None


def context_from_hf(hf, scaling):
    """Return the context in tokens: with yarn or linear scaling, at least `factor` times the original context.

    Such a scaling is often added without a larger max_position_embeddings, except in families of a scaled_context.
    """
    context = hf["max_position_embeddings"]
    if not scaling or hf["family"].scaled_context or scaling.keys() & {"low_freq_factor", "long_factor"}:
        return context
    original = hf[ORIGINAL_CONTEXT] or hf["rope_scaling"].get(ORIGINAL_CONTEXT) or context
    return max(context, int(scaling["factor"] * original))


def our_values(hf):
    """Return the fields of Config, except eos_ids, from the result of read_hf."""
    n_layers = hf["num_hidden_layers"]
    n_heads = hf["num_attention_heads"]
    dim = hf["hidden_size"]
    family = hf["family"]
    attention_bias = hf.get("attention_bias", False)
    head_dim = hf["head_dim"] or dim // n_heads
    rotary = rotary_from_hf(hf, head_dim)
    context = context_from_hf(hf, rotary["rope_scaling"])
    hf = hf | {"context": context, "scaling": rotary["rope_scaling"]}
    values = {**family.values, "wiring": wiring_from_hf(hf)}
    architecture = {}
    for name, kind in all_architectures().items():
        of_family = values.pop(name, None)  # settings that the family has in any case
        settings, fields = kind.from_hf(hf) or (of_family, {})
        if settings is not None:
            architecture[name] = settings | (of_family or {})
            values |= fields
    return {
        "n_layers": n_layers, "n_heads": n_heads, "dim": dim, "max_seq_len": context,
        "n_kv_heads": hf["num_key_value_heads"] or n_heads, "intermediate_size": hf["intermediate_size"],
        "head_dim": head_dim, "vocab_size": hf["vocab_size"],
        "norm_eps": next(hf[key] for key in ("layer_norm_eps", "norm_eps", "rms_norm_eps") if key in hf),
        **rotary, "tie_embeddings": hf["tie_word_embeddings"],
        "qkv_bias": hf.get("qkv_bias", hf.get("use_qkv_bias", attention_bias)),
        "wo_bias": hf.get("attention_out_bias", attention_bias), "mlp_bias": hf.get("mlp_bias", False),
        "activation": activation_from_hf(hf),
        "embedding_scale": dim**0.5 if family.wide_embeddings else None,
        "logit_cap": hf.get("final_logit_softcapping"),
        "bos_id": None if hf["bos_token_id"] == -1 else hf["bos_token_id"],
        **values, "architecture": architecture,
    }  # fmt: skip


def activation_from_hf(hf):
    """Return Config.activation from the result of read_hf."""
    given = hf.get("hidden_activation") or hf.get("hidden_act") or "silu"
    name = hf["family"].activations.get(given, given)
    if name not in HF_ACTIVATIONS:
        raise InputError(f"hidden_act {name!r} is not supported, only {', '.join(HF_ACTIVATIONS)} are")
    return HF_ACTIVATIONS[name]


def rotary_from_hf(hf, head_dim):
    """Return the fields of Config about rotary embeddings, from the result of read_hf."""
    rope = hf["rope_scaling"]
    near = hf["near_rope"]
    theta = hf["rope_theta"]
    part = rope.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    rotary_dim = int(head_dim * part)
    scaling = rope_scaling_from_hf(hf)
    if (kind := near.get("rope_type", "default")) != "default":
        raise InputError(f"rope_type {as_json(kind)} of sliding_attention is not supported, only 'default' is")
    return {
        "rope_theta": rope.get("rope_theta", theta), "rope_scaling": scaling,
        "rotary_dim": rotary_dim if rotary_dim != head_dim else None,
    }  # fmt: skip


def rope_scaling_from_hf(hf):
    """Return Config.rope_scaling from the result of read_hf. Absent keys get the values that transformers takes."""
    rope = hf["rope_scaling"]
    context = hf["max_position_embeddings"]
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = "longrope" if "short_factor" in rope else kind  # Phi-3 had other names for it
    if kind == "default":
        return None
    if kind not in ROPE_KEYS:
        raise InputError(f"rope type {as_json(kind)} is not supported, only default, {', '.join(ROPE_KEYS)} are")
    original = hf.get(ORIGINAL_CONTEXT) or rope.get(ORIGINAL_CONTEXT) or context
    factor = rope.get("factor") or context / original
    scaling = {}
    if kind == "yarn":
        mscales = rope.get("mscale"), rope.get("mscale_all_dim")
        over, under = (0.1 * m * math.log(max(factor, 1)) + 1 for m in (mscales if all(mscales) else (1.0, 0.0)))
        scaling = {"factor": factor, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": over / under}
    elif kind == "longrope":
        scaling["attention_factor"] = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    scaling |= {key: value for key, value in rope.items() if value} | {ORIGINAL_CONTEXT: original}
    if missing := [key for key in ROPE_KEYS[kind] if key not in scaling]:
        raise InputError(f"rope type {kind!r} needs {missing[0]}")
    untruncated = {"truncate": False} if kind == "yarn" and rope.get("truncate") is False else {}
    return {key: scaling[key] for key in ROPE_KEYS[kind]} | untruncated


def open_folder(path, with_tokenizer=True):
    """Return the Source of a Hugging Face folder, or None for another path. Raises InputError."""
    if not path.is_dir():
        return None
    values = read_json(path / "config.json")
    where = path / "config.json"
    hf, config = read_config(values, where, read_generation(where))
    source = LlamaWeights(dequantizing(FolderTensors(path), values, path), hf, config)
    source.tokenizer_folder = path
    for file in filter(os.path.isfile, (path / name for name in TOKENIZER_FILES)):
        checkpoint.refuse_pointer(file)
    return source


class FolderTensors(checkpoint.Weights, Tensors):
    """The tensors of a folder as they are."""


def multipliers(hf, config):
    """Return {a module: what its weights are multiplied by}, from the result of read_hf: Granite's multipliers.

    residual_multiplier is folded into wo and w2, attention_multiplier into the queries, embedding_multiplier into the
    embedding table, logits_scaling into the last norm. If the table is also the output head, the last norm divides by
    embedding_multiplier.
    """
    if "residual_multiplier" not in hf:
        return {}
    embedding = hf["embedding_multiplier"]
    residual = hf["residual_multiplier"]
    head = embedding if config.tie_embeddings else 1.0
    return {
        "embed_tokens": embedding, "o_proj": residual, "down_proj": residual, "lm_head": head,
        "norm": 1 / (head * hf["logits_scaling"]),
        "q_proj": hf["attention_multiplier"] * config.head_dim**0.5,  # attention divides the scores by its root
    }  # fmt: skip


class TextTensors(Renamed):
    """The tensors of the language model of a source, with "model." or "lm_head." in front of all names.

    skipped: {a tower for pictures, or the like: how many tensors of it are left out}. Raises InputError.
    """

    def __init__(self, source, hf, config):
        places = {}
        self.skipped = Counter()
        for name in source.names():
            if tower := left_out(name, hf, config):
                self.skipped[tower] += 1
                continue
            text = re.sub(r"^((model|language_model)\.)*", "", name)  # older folders have them in another order
            add_place(places, text if text.startswith("lm_head.") else f"model.{text}", name)
        super().__init__(source, places)


def add_place(places, place, name, before=None):
    """Add a tensor of a source to the `places` of Renamed. Raises InputError where there is one already.

    before: the places that gave the source its names, for the message.
    """
    if place in places:
        both = [(before or {}).get(each, [each])[0] for each in (places[place][0], name)]
        raise InputError(f"the source has both {both[0]} and {both[1]}: drop one")
    places[place] = [name]


class LlamaWeights(Renamed, Source):
    """The tensors of a Hugging Face folder under Llama's names.

    Fused projections are split, and multipliers are folded into the weights. Rotary embeddings that turn neighbouring
    dimensions become those of pairs (see `unpaired`). Of a model with several towers, only the tensors of the language
    model are here.

    config: the given one; it is not tied if the folder's output head differs from the embedding table, as in
    transformers.
    """

    def __init__(self, source, hf, config):
        """hf: as read_hf returns it."""
        text = TextTensors(source, hf, config)
        source = text
        for each in config.architecture:
            source = each.hf_weights(source, config, hf)
        self.rotary = (config.head_dim, config.rotary_dim) if hf["family"].neighbours else None
        self.parts = {}  # {name of a part of a fused projection: (proportions of the parts' rows, index)}
        fused = {  # {a fused projection: {its parts: the proportions of their rows}}
            "qkv_proj": {"q_proj": config.n_heads, "k_proj": config.n_kv_heads, "v_proj": config.n_kv_heads},
            "gate_up_proj": {"gate_proj": 1, "up_proj": 1},
        }
        places = {}
        norms = hf["family"].norms
        for name in source.names():
            of_file = f".{name}".split(".")[-2]
            module = norms.get(of_file, of_file)
            for i, part in enumerate(fused.get(module, [module])):
                place = name.replace(of_file, part)
                add_place(places, place, name, text.places)
                if module in fused:
                    self.parts[place] = [*fused[module].values()], i
        super().__init__(source, places)
        table = "model.embed_tokens.weight"
        head = "lm_head.weight"
        is_tied = config.tie_embeddings
        if is_tied and {table, head} <= places.keys():
            is_tied = are_equal(*(source.read(*places[name]) for name in (table, head)))
        self.config = dataclasses.replace(config, tie_embeddings=is_tied)
        self.factors = multipliers(hf, self.config)
        self.notes = list(self.list_notes(hf, config, text.skipped))

    def list_notes(self, hf, config, skipped):
        if hf["ignored"]:
            yield f"ignored in config.json, since transformers does not read it: {', '.join(hf['ignored'])}"
        if self.config != config:
            words = "lm_head.weight is a tensor of its own: it is used, as in transformers"
            yield f"tie_word_embeddings is true, but {words}"
        own = hf["max_position_embeddings"]
        if config.max_seq_len > own:
            yield f"the context is {config.max_seq_len:,} tokens: scaling extends config.json's {own:,}"
        for tower, n in skipped.items():
            yield f"left out: {n} tensors of {tower}, since only text is computed here"

    def read(self, name):
        matrix = super().read(name)
        factor = self.factors.get(name.rsplit(".", 2)[-2], 1.0)
        return matrix if factor == 1.0 else multiply(matrix, factor)

    def join(self, name, tensor):
        if name in self.parts:
            proportions, i = self.parts[name]
            unit = tensor.shape[-2] // sum(proportions)
            tensor = tensor.split([unit * n for n in proportions], dim=-2)[i]
        return unpaired(tensor, *self.rotary) if self.rotary and re.search(r"\.[qk]_proj\.", name) else tensor


def left_out(name, hf, config):
    """Return the tower or the layers that a tensor belongs to, if they are no part of the language model, or None."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer and int(layer[1]) >= config.n_layers and "n_routed_experts" in hf:
        return "the layers that predict more tokens"
    is_text = re.match(r"(model\.)?language_model\.|lm_head\.", name)
    if name.startswith("mtp.") or hf["has_towers"] and not is_text:
        return name.removeprefix("model.").partition(".")[0]
    return None
