"""What the fields of a Config may be, beyond the types that formats/checkpoint.py checks, and the text of a wiring."""

import functools
import re
from typing import NamedTuple

import torch.nn as nn
import torch.nn.functional as F

from runtime.errors import InputError, load_extra


class OffsetNorm(nn.RMSNorm):
    """An RMSNorm times 1 + weight, which is not rounded to the weight's dtype (Gemma's)."""

    def forward(self, x):
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).type_as(x)


NORMS = {"rms": nn.RMSNorm, "rms+1": OffsetNorm, "layer": nn.LayerNorm}
ACTIVATIONS = {"silu": F.silu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh")}
EXPERTS = "experts_per_token", "expert_size", "shared_expert_size", "shared_expert_gate", "dense_layers"


def check(c):
    """Raise InputError if the fields of a Config do not suit one another."""
    if c.n_heads % c.n_kv_heads:
        raise InputError(f"n_heads {c.n_heads} is not a multiple of n_kv_heads {c.n_kv_heads}")
    if c.head_dim % 2:
        raise InputError(f"head_dim {c.head_dim} is odd: rotary embeddings turn pairs")
    if (c.rotary_dim or 0) % 2 or (c.rotary_dim or 0) > c.head_dim:
        raise InputError(f"rotary_dim {c.rotary_dim} is odd, or more than head_dim {c.head_dim}")
    if c.rope_scaling is not None:
        from kernels import rope_scaling

        if error := rope_scaling.error(c):
            raise InputError(error)
    if c.llama4_beta and "original_max_position_embeddings" not in (c.rope_scaling or {}):
        raise InputError("llama4_beta needs a rope_scaling with original_max_position_embeddings")
    check_norms(c)
    if c.activation not in ACTIVATIONS:
        raise InputError(f"activation {c.activation!r} is unknown; known: {', '.join(ACTIVATIONS)}")
    if c.window_layers and (c.sliding_window or 0) < 1:
        raise InputError("window_layers needs a sliding_window of 1 or more tokens")
    for name in "window_layers", "nope_layers", "dense_layers", "linear_layers":
        if not {*getattr(c, name)} <= {*range(c.n_layers)}:
            raise InputError(f"{name} takes layers from 0 to {c.n_layers - 1}, not {getattr(c, name)}")
    if c.linear_layers or c.linear_attention:
        load_extra("linear_attention", "linear_layers").check(c)
    if c.n_experts:
        load_extra("experts", "n_experts").check(c)
    elif given := [name for name in EXPERTS if getattr(c, name)] + ["wiring farskip"] * (c.parsed.name == "farskip"):
        raise InputError(f"{given[0]} is for a mixture of experts, which has n_experts")
    check_quantization(c)
    if c.named_wiring.model:
        c.named_wiring.model.check(c)


def check_norms(c):
    if c.norm not in NORMS:
        raise InputError(f"norm {c.norm!r} is unknown; known: {', '.join(NORMS)}")
    if c.whole_qk_norm and not (c.qk_norm and c.norm == "rms"):
        raise InputError("whole_qk_norm needs qk_norm and a norm 'rms'")
    wiring = c.named_wiring
    adds_partials = wiring.depends_on_lanes or wiring.blocks > 1 or len(wiring.norms) < 2
    name = "whole_qk_norm" if c.whole_qk_norm and wiring.depends_on_lanes else ""
    name = "sum_norms" if c.sum_norms and adds_partials else name
    if name and c.wiring != "upper-bound":
        raise InputError(f"wiring {c.wiring} is not for models with {name}: it adds partials before they are summed")


def check_quantization(c):
    if c.quant not in (None, "int8", "int4"):
        raise InputError(f"unknown quantization {c.quant!r}; known: int8, int4")
    if c.group_size is not None and c.quant != "int4":
        raise InputError("a group size is for int4")
    if c.quant == "int4" and c.group_size not in (32, 64, 128):
        raise InputError(f"group size {c.group_size} is none of 32, 64, 128")
    columns = dict.fromkeys(("tok_embeddings", "wqkv", "w1", "w3", "output"), {c.dim})
    columns |= {"wo": {c.n_heads * c.head_dim}, "w2": {*c.mlps.values(), c.shared_expert_size} - {None}}
    if c.linear_layers:
        columns |= {"wqkvz": {c.dim}, "wout": {c.linear_attention["value_heads"] * c.linear_attention["value_dim"]}}
    for name in c.kept:
        if name not in columns:
            raise InputError(f"cannot keep {name!r} from being quantized; known: {', '.join(columns)}")
        if name == "output" and c.tie_embeddings:
            raise InputError("the output head of this model is its embedding table: keep tok_embeddings instead")
    if c.tie_embeddings:
        del columns["output"]
    quantized = [(name, n) for name, counts in columns.items() if name not in c.kept for n in sorted(counts)]
    if odd := [(name, n) for name, n in quantized if c.group_size and n % c.group_size]:
        smaller = [f"use {size}, or " for size in (64, 32) if not any(n % size for _, n in odd)][:1]
        instead = "".join(smaller) + "keep " + ",".join(dict.fromkeys(name for name, _ in odd))
        matrices = ", ".join(f"{name} ({n})" for name, n in odd)
        raise InputError(f"group size {c.group_size} does not divide the columns of {matrices}: {instead}")


# ---- The text that names a wiring, such as ladder:16 or delayed-4/8 --------------------------------------------------


class Parsed(NamedTuple):
    """A wiring's text, NAME[-STALE][:PARAMETER][/LANES]."""

    name: str
    parameter: int | tuple | None = None
    stale: int | None = None
    lanes: int | None = None


def parse_wiring(text, wirings, in_extras):
    """Return the Parsed of a text such as ladder, ladder:16, ladder:0,1, ladder:4-7, delayed-2/8 or desync:4.

    NAME:N wires the last N layers, NAME:I,J,... those layers, counted from 0 (one alone is "3,"), and NAME:I-J layers I
    to J; the others are standard. desync:N keeps every N-th all-reduce. NAME-K reads the stream K sublayers stale. /L
    names the number of lanes, by default that of the ranks. wirings, in_extras: model.WIRINGS and WIRINGS_IN_EXTRAS.
    Raises InputError.
    """
    for name, extra in in_extras.items():
        if text.startswith(name):
            load_extra(extra, f"wiring {text}")  # adds it to wirings
    match = re.fullmatch(r"([\w-]*[A-Za-z_])(?:-(\d{1,4}))?(?::([\d,-]+))?(?:/(\d{1,4}))?", text, re.ASCII)
    name, stale, parameter, lanes = match.groups() if match else (re.split("[:/]", text)[0], *3 * [None])
    if name not in wirings:
        raise InputError(f"unknown wiring {name!r}; known: {', '.join(wirings | in_extras)}")
    wiring, layers = wirings[name], r"\d{1,9}(,\d{1,9})*,?|\d{1,9}-\d{1,9}"
    form = {None: "", "period": "[1-9][0-9]{0,8}", "layers": layers}[wiring.n_means]
    fits = match and (parameter is None or re.fullmatch(form, parameter))
    wrong_stale = stale and (int(stale) == 0 or not wiring.stale)
    wrong_lanes = lanes and (int(lanes) == 0 or not wiring.depends_on_lanes)
    if text in wirings and not match:
        raise InputError(f"{text!r} is no name for a wiring: names end in a letter")
    if not fits or wrong_stale or wrong_lanes:
        forms = {None: [], "period": [":N"], "layers": [":N", ":I,J,...", ":I-J"]}[wiring.n_means]
        forms = ["", *forms, *["-K"] * bool(wiring.stale), *["/LANES"] * wiring.depends_on_lanes]
        known = ", ".join(name + form for form in forms)
        raise InputError(f"no such wiring: {text!r}; write {' or '.join(known.rsplit(', ', 1))}")
    if parameter and "-" in parameter:
        first, last = map(int, parameter.split("-"))
        parameter = tuple(range(first, min(last, first + 10**4) + 1))
    elif parameter and "," in parameter:
        parameter = tuple(map(int, parameter.removesuffix(",").split(",")))
    elif parameter:
        parameter = int(parameter)
    return Parsed(name, parameter, stale and int(stale), lanes and int(lanes))


def wiring_name(name, parameter=None, stale=None, lanes=None):
    """Return a wiring's text: the inverse of parse_wiring."""
    if isinstance(parameter, tuple | list):
        parameter = ",".join(map(str, parameter)) + "," * (len(parameter) == 1)
    pairs = ("-", stale), (":", parameter), ("/", lanes)
    return name + "".join(f"{sign}{value}" for sign, value in pairs if value is not None)


def choose_layers(parsed, wiring, n):
    """Return the layers, of n, that a Parsed wires so. wiring: its model.Wiring. Raises InputError."""
    parameter, text = parsed.parameter, wiring_name(*parsed)
    chosen = parameter if isinstance(parameter, tuple) else range(n % wiring.blocks, n)
    if isinstance(parameter, int) and wiring.n_means == "layers":
        chosen = range(max(-1, n - parameter), n)  # -1: too many, refused below
    if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(n)):
        fit = f"NAME:N takes 1 to {n}, NAME:I,J and NAME:I-J distinct layers from 0 to {n - 1}"
        raise InputError(f"wiring {text} does not fit {n} layers: {fit}")
    if wiring.stale > 2 * n:
        raise InputError(f"wiring {text} is {wiring.stale} sublayers late: {n} layers take up to {2 * n}")
    blocks, firsts = wiring.blocks, sorted(chosen)[:: wiring.blocks]
    if sorted(chosen) != [i + j for i in firsts for j in range(blocks)]:
        raise InputError(f"wiring {text}: its layers are wired in groups of {blocks} neighbours, e.g. 0-{blocks - 1}")
    return chosen
