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
    elif given := [name for name in EXPERTS if getattr(c, name)]:
        raise InputError(f"{given[0]} is for a mixture of experts, which has n_experts")
    if (c.quant, c.group_size, c.kept) != (None, None, ()):
        from kernels import int_linear

        if error := int_linear.error(c):
            raise InputError(error)
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
