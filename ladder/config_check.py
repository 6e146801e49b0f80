"""Whether the fields of a Config suit one another; ladder/checkpoints/checkpoint.py checks their types."""

from ladder.errors import InputError
from ladder.kernels import quant_linear
from ladder.layers import rope_scaling
from ladder.layers.norms import ACTIVATIONS, NORMS

GROUPS_OF_8_BITS = 16, 32, 64, 128  # columns
EXPERT_FIELDS = (
    "experts_per_token", "expert_size", "shared_expert_size", "shared_expert_gate", "dense_layers", "expert_groups",
    "chosen_groups", "expert_scale",
)  # fmt: skip


def check(c):
    """Raise InputError if the fields of a Config do not suit one another."""
    if c.n_heads % c.n_kv_heads:
        raise InputError(f"n_heads {c.n_heads} is not a multiple of n_kv_heads {c.n_kv_heads}")
    if c.head_dim % 2:
        raise InputError(f"head_dim {c.head_dim} is odd: rotary embeddings turn pairs")
    if (c.rotary_dim or 0) % 2 or (c.rotary_dim or 0) > c.head_dim:
        raise InputError(f"rotary_dim {c.rotary_dim} is odd, or more than head_dim {c.head_dim}")
    if c.rope_scaling is not None and (error := rope_scaling.error(c)):
        raise InputError(error)
    if c.llama4_beta and "original_max_position_embeddings" not in (c.rope_scaling or {}):
        raise InputError("llama4_beta needs a rope_scaling with original_max_position_embeddings")
    check_norms(c)
    if c.attention_sinks and (c.latent_attention or c.score_cap):
        raise InputError(f"attention_sinks are not for {'score_cap' if c.score_cap else 'latent_attention'}")
    if c.activation not in ACTIVATIONS and not c.n_experts:  # else see mixture.check
        raise InputError(f"activation {c.activation!r} is unknown; known: {', '.join(ACTIVATIONS)}")
    if c.window_layers and (c.sliding_window or 0) < 1:
        raise InputError("window_layers needs a sliding_window of 1 or more tokens")
    for name in "window_layers", "nope_layers", "dense_layers", "linear_layers":
        if not {*getattr(c, name)} <= {*range(c.n_layers)}:
            raise InputError(f"{name} takes layers from 0 to {c.n_layers - 1}, not {getattr(c, name)}")
    if c.linear_layers or c.linear_attention:
        from ladder.layers import linear_attention

        linear_attention.check(c)
    if c.latent_attention:
        from ladder.layers import latent_attention

        latent_attention.check(c)
    if c.n_experts:
        from ladder.layers import mixture

        mixture.check(c)
    elif given := [n for n in EXPERT_FIELDS if getattr(c, n)] + [f"wiring {c.wiring}"] * c.parsed.name.startswith(
        "farskip"
    ):
        raise InputError(f"{given[0]} is for a mixture of experts, which has n_experts")
    if c.router != "softmax" and not c.n_experts:
        raise InputError(f"router {c.router!r} is for a mixture of experts, which has n_experts")
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
    name = "post_norms" if c.post_norms and adds_partials else name
    if name and c.wiring != "upper-bound":
        raise InputError(f"wiring {c.wiring} is not for models with {name}: it adds partials before they are summed")


def check_quantization(c):
    if c.quant not in (None, "int8", "int4", "fp8"):
        raise InputError(f"unknown quantization {c.quant!r}; known: int8, int4, fp8")
    if c.group_size is not None and c.quant == "fp8":
        raise InputError("a group size is for int4 and int8")
    sizes = {"int4": (32, 64, 128), "int8": (None, *GROUPS_OF_8_BITS)}.get(c.quant, (None,))
    if c.group_size not in sizes:
        raise InputError(f"group size {c.group_size} is none of {', '.join(str(size) for size in sizes if size)}")
    columns = dict.fromkeys(("tok_embeddings", "wqkv", "w1", "w3", "output"), {c.dim})
    columns |= {"wo": {c.n_heads * c.head_dim}, "w2": {*c.mlps.values(), c.shared_expert_size} - {None}}
    if c.latent_attention:
        from ladder.layers import latent_attention

        columns.pop("wqkv")
        columns |= latent_attention.columns(c)
    if c.linear_layers:
        columns |= {"wqkvz": {c.dim}, "wout": {c.linear_attention["value_heads"] * c.linear_attention["value_dim"]}}
    if c.int8 and c.quant not in ("int4", "int8"):
        raise InputError("int8 names matrices of a model whose quant is int4 or int8")
    for entry in c.int8:  # see quant_linear.eight_bits
        size = entry.partition(":")[2]
        if ":" in entry and size not in map(str, GROUPS_OF_8_BITS):
            raise InputError(f"int8 lists {entry!r}, but groups have {', '.join(map(str, GROUPS_OF_8_BITS))} columns")
    listed = quant_linear.eight_bits(c)
    if both := {*listed} & {*c.not_quantized}:
        raise InputError(f"{both.pop()} is in int8 and in not_quantized, too")
    for name in (*c.not_quantized, *(path.rpartition(".")[2] for path in listed)):
        if name not in columns:
            what = f"keep {name!r} from being quantized" if name in c.not_quantized else f"give {name!r} 8 bits"
            raise InputError(f"cannot {what}; known: {', '.join(columns)}")
        if name == "output" and c.tie_embeddings:
            raise InputError("the output head of this model is its embedding table: keep tok_embeddings instead")
    if c.tie_embeddings:
        del columns["output"]
    for path, size in listed.items():
        if uneven := [n for n in columns.get(path.rpartition(".")[2], ()) if size and n % size]:
            raise InputError(f"int8 lists {path}:{size}, but its columns are {uneven[0]}, no multiple of {size}")
    columns = {name: counts for name, counts in columns.items() if name not in (*c.not_quantized, *listed)}
    quantized = [(name, n) for name, counts in columns.items() for n in sorted(counts)]
    if odd := [(name, n) for name, n in quantized if c.group_size and n % c.group_size]:
        smaller = [f"use {size}, or " for size in (64, 32) if not any(n % size for _, n in odd)][:1]
        instead = "".join(smaller) + "keep " + ",".join(dict.fromkeys(name for name, _ in odd))
        matrices = ", ".join(f"{name} ({n})" for name, n in odd)
        raise InputError(f"group size {c.group_size} does not divide the columns of {matrices}: {instead}")
