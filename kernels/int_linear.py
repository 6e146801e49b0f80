"""Linears and an embedding whose weights are integers of 8 or 4 bits.

W[n, k] = scales[n, g] q[n, k] + zeros[n, g], where q are the integers and g is the group of column k.

int8: q from -127 to 127, one group per row, no zeros.
int4: q from 0 to 15, two in a byte, the even column in the lower half.

Shape letters: N rows and K columns of W, G groups in a row.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

PIECE = 2**19  # elements of W that become floats at a time, so that they are multiplied while they are in the cache
FEW = 16  # rows of x, at most, that PyTorch's int8 kernel multiplies


def dequantize(weight, scales, zeros=None):
    """Return W (N, K) in the dtype of the scales."""
    if zeros is None:
        return weight.to(scales.dtype) * scales
    q = unpack(weight).unflatten(-1, (scales.shape[-1], -1)).to(scales.dtype)  # (N, G, K / G)
    return torch.addcmul(zeros[..., None], q, scales[..., None]).flatten(-2)


def unpack(weight):
    """Return int4 (N, K / 2) as bytes (N, K)."""
    return torch.stack((weight & 15, weight >> 4), dim=-1).flatten(-2)


class Integers(nn.Module):
    """A matrix (N, K) stored as integers: weight (N, K) int8 or (N, K / 2) uint8, scales and zeros (N, G).

    Those of experts have a dimension E in front.
    """

    def __init__(self, shape, quant, group_size):
        super().__init__()
        *rows, K = shape
        four_bits = quant == "int4"
        shape, dtype = ((*rows, K // 2), torch.uint8) if four_bits else (shape, torch.int8)
        groups = torch.empty(*rows, K // group_size if four_bits else 1, dtype=torch.bfloat16)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
        self.scales = nn.Parameter(groups, requires_grad=False)
        self.zeros = nn.Parameter(groups.clone(), requires_grad=False) if four_bits else None

    out_features = property(lambda self: self.weight.shape[-2])
    in_features = property(lambda self: self.weight.shape[-1] * (1 if self.zeros is None else 2))

    def rows(self, index):
        """Return rows of the matrix, as floats."""
        zeros = None if self.zeros is None else self.zeros[index]
        return dequantize(self.weight[index], self.scales[index], zeros)


class IntLinear(Integers):
    """x (..., K) -> x W^T + bias (..., N)."""

    def __init__(self, shape, quant, group_size, bias):
        super().__init__(shape, quant, group_size)
        self.bias = nn.Parameter(torch.empty(shape[0]), requires_grad=False) if bias else None

    def forward(self, x):
        N, K = max(1, self.out_features), self.in_features  # a rank may have no rows of the output head
        # compiled, it is one loop anyway; on a GPU each piece would be two more launches
        step = N if torch.compiler.is_compiling() or x.is_cuda else max(1, PIECE // K)
        y = torch.cat([F.linear(x, self.rows(slice(i, i + step))) for i in range(0, N, step)], dim=-1)
        return y if self.bias is None else y + self.bias


class Int8Linear(IntLinear):
    """An IntLinear on a CPU that multiplies few rows with PyTorch's int8 kernel.

    K must be a multiple of 16: otherwise the kernel (torch 2.13) reads out of bounds.
    """

    def forward(self, x):
        K = self.in_features
        if x.numel() > FEW * K:
            return super().forward(x)
        y = torch._weight_int8pack_mm(x.reshape(-1, K), self.weight, self.scales[:, 0])
        y = y.view(*x.shape[:-1], -1).type_as(x)
        return y if self.bias is None else y + self.bias


class IntEmbedding(Integers):
    """Token ids (...) -> their rows (..., K) of W."""

    def forward(self, tokens):
        return self.rows(tokens)


# ---- Replacing the matrices of a model -------------------------------------------------------------------------------


def swap(model, make):
    """Replace every submodule by make(name, submodule), where name is its last one. None leaves it as it is."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if (new := make(name, module)) is not None:
                setattr(parent, name, new)


def recast(module, subclass):
    """Make a module one of a subclass that differs only in its methods; returns the module."""
    module.__class__ = subclass
    return module


def replace_matrices(model, config):
    """Replace the linears and embeddings of a Transformer by integer ones, except those that the config keeps.

    What chooses experts, or how fast linear attention forgets, stays exact: it is small, and its errors are not.
    """

    def make(name, module):
        table = "tok_embeddings" if name == "output" and config.tie_embeddings else name
        weight = getattr(module, "weight", None)
        if weight is None or weight.dim() == 1 or table in (*config.kept, "router", "shared_gate", "wba"):
            return None
        settings = tuple(weight.shape), config.quant, config.group_size
        if type(module) is nn.Embedding:
            return IntEmbedding(*settings)
        return IntLinear(*settings, module.bias is not None) if weight.dim() == 2 else Integers(*settings)

    swap(model, make)


def use_kernels(model):
    """Let the int8 linears of a model in bfloat16 on a CPU use PyTorch's kernel."""

    def make(name, linear):
        fits = type(linear) is IntLinear and linear.zeros is None and linear.scales.dtype == torch.bfloat16
        return recast(linear, Int8Linear) if fits and linear.in_features % 16 == 0 < linear.out_features else None

    swap(model, make)


# ---- What a Config says of integers, and where ranks may cut them ----------------------------------------------------


def error(c):
    """Return what is wrong with the fields of a Config that quantize, or None."""
    if c.quant not in (None, "int8", "int4"):
        return f"unknown quantization {c.quant!r}; known: int8, int4"
    if c.group_size is not None and c.quant != "int4":
        return "a group size is for int4"
    if c.quant == "int4" and c.group_size not in (32, 64, 128):
        return f"group size {c.group_size} is none of 32, 64, 128"
    columns = dict.fromkeys(("tok_embeddings", "wqkv", "w1", "w3", "output"), {c.dim})
    columns |= {"wo": {c.n_heads * c.head_dim}, "w2": {*c.mlps.values(), c.shared_expert_size} - {None}}
    if c.linear_layers:
        columns |= {"wqkvz": {c.dim}, "wout": {c.linear_attention["value_heads"] * c.linear_attention["value_dim"]}}
    for name in c.kept:
        if name not in columns:
            return f"cannot keep {name!r} from being quantized; known: {', '.join(columns)}"
        if name == "output" and c.tie_embeddings:
            return "the output head of this model is its embedding table: keep tok_embeddings instead"
    if c.tie_embeddings:
        del columns["output"]
    quantized = [(name, n) for name, counts in columns.items() if name not in c.kept for n in sorted(counts)]
    if odd := [(name, n) for name, n in quantized if c.group_size and n % c.group_size]:
        smaller = [f"use {size}, or " for size in (64, 32) if not any(n % size for _, n in odd)][:1]
        instead = "".join(smaller) + "keep " + ",".join(dict.fromkeys(name for name, _ in odd))
        matrices = ", ".join(f"{name} ({n})" for name, n in odd)
        return f"group size {c.group_size} does not divide the columns of {matrices}: {instead}"
    return None


def column_unit(config, width, least_ranks):
    """Return how many of the `width` columns of an int4 w2 must stay on one rank.

    A group, or 128 columns, which PyTorch's int4 kernel on a GPU wants, if no share then exceeds its due by more than
    an eighth. least_ranks: how many ranks there would be if each had the smallest share. Where groups are too few they
    are halved, down to 8 columns, the least that few_rows.cpp takes. Lanes are cut at multiples of 8: at the neurons
    where they are cut without int4.
    """
    if config.fixed_lanes:
        return 8
    unit = config.group_size
    if width % 128 == 0 and width >= 8 * 128 * least_ranks and not config.named_wiring.depends_on_lanes:
        unit = 128
    while unit > 8 and width // unit < least_ranks:
        unit //= 2
    return unit


def regroup(numbers, start, stop, size):
    """Return int4 scales or zeros for columns start to stop, given those (..., G) of all groups that contain them.

    size: columns of such a group. If start or stop lies inside a group, all groups become smaller: the largest size
    that divides both. Example: groups of 64 cut at column 96 become groups of 32.
    """
    smaller = math.gcd(size, start, stop)
    first = start % size // smaller
    numbers = numbers.repeat_interleave(size // smaller, dim=-1)
    return numbers[..., first : first + (stop - start) // smaller].contiguous()
