"""Whether the fields of a Config suit one another; ladder/checkpoints/checkpoint.py checks their types."""

from ladder.errors import FieldError, InputError
from ladder.kernels import quant_linear
from ladder.layers import rope_scaling
from ladder.layers.norms import ACTIVATIONS, NORMS

GROUPS_OF_8_BITS = 16, 32, 64, 128  # columns


def check(c):
    """Raise InputError if the fields of a Config do not suit one another."""
    if c.n_heads % c.n_kv_heads:
        raise FieldError("{n_heads} is not a multiple of {n_kv_heads}", c)
    if c.head_dim % 2:
        raise FieldError("{head_dim} is odd: rotary embeddings turn pairs", c)
    if (c.rotary_dim or 0) % 2 or (c.rotary_dim or 0) > c.head_dim:
        raise FieldError("{rotary_dim} is odd, or more than {head_dim}", c)
    if c.rope_scaling is not None and (error := rope_scaling.error(c)):
        raise InputError(error)
    for field, known in ("norm", NORMS), ("activation", ACTIVATIONS):
        if getattr(c, field) not in known:
            raise InputError(f"{field} {getattr(c, field)!r} is unknown; known: {', '.join(known)}")
    for each in c.architecture:
        each.check(c)
    check_quantization(c)
    c.named_wiring.check(c)


def quantizable(c):
    """Return {kind of a matrix that may be quantized, such as w2: {how many columns it has}}."""
    columns = dict.fromkeys(("tok_embeddings", "wqkv", "w1", "w3", "output"), {c.dim})
    columns |= {"wo": {c.n_heads * c.head_dim}, "w2": {c.intermediate_size}}
    for each in c.architecture:
        columns = each.columns(c, columns)
    return columns


def check_quantization(c):
    if c.quant not in (None, "int8", "int4", "fp8"):
        raise InputError(f"unknown quantization {c.quant!r}; known: int8, int4, fp8")
    if c.group_size is not None and c.quant == "fp8":
        raise InputError("a group size is for int4 and int8")
    sizes = {"int4": (32, 64, 128), "int8": (None, *GROUPS_OF_8_BITS)}.get(c.quant, (None,))
    if c.group_size not in sizes:
        raise InputError(f"group size {c.group_size} is none of {', '.join(str(size) for size in sizes if size)}")
    columns = quantizable(c)
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
