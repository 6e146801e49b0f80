"""What the values of a Config may be, beyond the types that formats/checkpoint.py checks."""

import functools

import torch.nn.functional as F

from kernels.norms import NORMS
from runtime.errors import InputError, load_extra

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
    scaling, pairs = c.rope_scaling or {}, (c.rotary_dim or c.head_dim) // 2
    for name in "short_factor", "long_factor":
        if not isinstance(scaling.get(name, []), list) or len(scaling.get(name, [0] * pairs)) != pairs:
            raise InputError(f"{name} has {len(scaling[name])} numbers, not {pairs}, one for each pair of dimensions")
    if c.llama4_beta and "original_max_position_embeddings" not in scaling:
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
    elif given := [name for name in EXPERTS if getattr(c, name)]:
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
    for name, counts in columns.items():
        if c.group_size and name not in c.kept and (odd := [count for count in counts if count % c.group_size]):
            raise InputError(f"group size {c.group_size} does not divide the {odd[0]} columns of {name}: keep {name}")
