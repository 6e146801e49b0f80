"""Skinny GEMMs, matrix products with few rows of x, on a CPU: the operators of skinny_gemm.cpp and their integers.

Decoding reads each weight once for a few rows, which libraries made for large matrices do not do fast.
"""

import math
from pathlib import Path

import torch
import torch.nn.functional as F

from ladder.errors import InputError
from ladder.kernels import compilers
from ladder.kernels.cpp import load_operators
from ladder.kernels.huge_pages import empty_in_huge_pages
from ladder.kernels.quant_linear import Layout, add_bias, unpack

# Up to so many rows of x skinny_gemm.cpp is faster (benchmarks/decode.md): than oneDNN and, for integers, than floats
# made of them. Where oneDNN has no bfloat16, it always is.
_ARM_BF16 = compilers.ON_ARM and "bf16" in compilers.features()
HAS_ONEDNN_BF16 = torch.backends.cpu.get_cpu_capability() == "AVX512" or _ARM_BF16
SKINNY_ROWS = 2**30 if not HAS_ONEDNN_BF16 else 7 if torch.cpu._is_amx_tile_supported() else 24
SKINNY_INT_ROWS = 96 if HAS_ONEDNN_BF16 else 2**30
BYTES = {torch.bfloat16: torch.uint8, torch.float16: torch.int8}  # {scales: packed integers}
PANELS_AT_ONCE = 64  # panels of 16 rows that are packed at a time, so that temporaries take a few MB


def build():
    """Load the operators of skinny_gemm.cpp, compiled if need be. Raises InputError if they cannot be compiled."""
    if hasattr(torch.ops.ladder, "skinny_gemm"):
        return
    if compilers.instruction_set() == "plain":
        raise InputError("skinny_gemm.cpp knows no such processor or system")
    avx2_only = compilers.instruction_set() == "avx2" and "avx512bw" in compilers.features()  # -march=native uses both
    options = "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", *["-march=haswell"] * avx2_only
    load_operators(Path(__file__).with_name("skinny_gemm.cpp"), "skinny_gemm.cpp", *options)
    torch.library.register_fake("ladder::skinny_gemm", lambda x, weight: x.new_empty(*x.shape[:-1], weight.shape[0]))
    for name in ("ladder::skinny_gemm_int", "ladder::many_rows_int"):
        torch.library.register_fake(name, lambda x, weight, N, *_: x.new_empty(*x.shape[:-1], N))
    torch.library.register_fake(
        "ladder::skinny_gemm_experts", lambda x, chosen, *_: x.new_empty(*chosen.shape, x.shape[1])
    )
    torch.library.register_fake("ladder::skinny_gemm_heads", lambda x, w: x.new_empty(*x.shape[:-1], w.shape[1]))
    torch.library.register_fake("ladder::skinny_gemm_heads_mT", lambda x, w: x.new_empty(*x.shape[:-1], w.shape[2]))
    torch.library.register_fake("ladder::feed_forward", lambda x, *_: x.new_empty(x.shape))
    torch.library.register_fake("ladder::decode_attention", lambda q, k, v, *_: q.new_empty(*q.shape[:-1], v.shape[-1]))


# ---- The Layout of quant_linear.QuantLinear --------------------------------------------------------------------------


def packed_shape(weight, scales, zeros):
    """Return the shape of pack()'s result: (P, G, 1 + V, 64), and for the matrices of experts (E, P, G, 1 + V, 64)."""
    (*E, N, columns), G = weight.shape, scales.shape[-1]
    return *E, -(-N // 16), G, 1 + (-(-columns // 8) * 2 if zeros is None else columns // G // 4), 64


@torch.no_grad()
def pack(weight, scales, zeros, out=None):
    """Return integers of quant_linear.py in skinny_gemm.cpp's layout: (P, G, 1 + V, 64) bytes, the last panel padded.

    A panel is 16 rows. It stores each group of columns as one vector of the rows' scales and zeros, followed by V
    vectors with four bytes from every row. With int8 these are the next four columns, q + 128, and the columns are
    padded to a multiple of 8. With int4 they are the next eight columns, the later four in the upper halves. The bytes
    are uint8 if the scales are bfloat16, and int8 if they are float16.
    out: the bytes to write to; None: new ones.
    """
    if weight.dim() == 3:
        out = out.view(packed_shape(weight, scales, zeros))
        for e, expert_out in enumerate(out):
            pack(weight[e], scales[e], None if zeros is None else zeros[e], expert_out)
        return out.view(BYTES[scales.dtype])
    (N, columns), (P, G, vectors, _) = weight.shape, packed_shape(weight, scales, zeros)
    packed = empty_in_huge_pages((P, G, vectors, 64), torch.uint8) if out is None else out.view(P, G, vectors, 64)
    by_row = packed.unflatten(-1, (16, 4))
    for i in range(0, P, PANELS_AT_ONCE):
        q = weight[16 * i : 16 * (i + PANELS_AT_ONCE)]
        q = F.pad(q, (0, -columns % 8 if zeros is None else 0, 0, -len(q) % 16))
        if zeros is None:
            q = q.view(torch.uint8) ^ 128
        else:
            low, high = unpack(q).unflatten(-1, (-1, 2, 4)).unbind(-2)
            q = low | high << 4
        by_row[i : i + PANELS_AT_ONCE, :, 1:] = q.view(-1, 16, G, vectors - 1, 4).permute(0, 2, 3, 1, 4)
    pairs = torch.stack((scales, torch.zeros_like(scales) if zeros is None else zeros))  # (2, N, G)
    pairs = F.pad(pairs, (0, 0, 0, -N % 16)).unflatten(1, (P, 16)).permute(1, 3, 0, 2)  # (P, G, 2, 16)
    packed.view(scales.dtype)[:, :, 0] = pairs.flatten(2)
    return packed.view(BYTES[scales.dtype])


@torch.no_grad()
def unpacked(linear):
    """Return (weight, scales, zeros or None) of a packed QuantLinear as the checkpoint stores them: undo pack()."""
    packed, N, K = linear.packed, linear.out_features, linear.in_features
    if packed.dim() == 5:  # of experts
        parts = [_unpacked(matrix, N, K, linear.bits) for matrix in packed]
        return tuple(None if part[0] is None else torch.stack(part) for part in zip(*parts, strict=True))
    return _unpacked(packed, N, K, linear.bits)


def _unpacked(packed, N, K, bits):
    P, G, vectors, _ = packed.shape
    dtype = next(dtype for dtype, stored in BYTES.items() if stored == packed.dtype)
    pairs = packed.view(dtype)[:, :, 0].unflatten(-1, (2, 16))  # (P, G, 2, 16)
    scales, zeros = pairs.permute(2, 0, 3, 1).reshape(2, 16 * P, G)[:, :N]
    by_row = packed.view(torch.uint8).unflatten(-1, (16, 4))[:, :, 1:]  # (P, G, V, 16, 4)
    q = by_row.permute(0, 3, 1, 2, 4).reshape(16 * P, -1)[:N]
    if bits == 8:
        return (q[:, :K] ^ 128).view(torch.int8), scales.contiguous(), None
    q = q.unflatten(-1, (-1, 4))
    q = torch.stack((q & 15, q >> 4), dim=-2).flatten(1)  # (N, K)
    return q[:, ::2] | q[:, 1::2] << 4, scales.contiguous(), zeros.contiguous()


def multiply(x, linear):
    """Multiply up to SKINNY_INT_ROWS rows by the integers, more by floats that are made of them piece by piece."""
    if x.dtype != torch.bfloat16 or x.device.type != "cpu":
        return None
    few = x.numel() <= SKINNY_INT_ROWS * x.shape[-1]
    operator = torch.ops.ladder.skinny_gemm_int if few else torch.ops.ladder.many_rows_int
    packed = linear._parameters["packed"]
    return add_bias(operator(x, packed, linear.out_features, linear.in_features, linear.bits), linear)


LAYOUT = Layout("skinny_gemm.cpp", multiply, unpacked)


def pack_all(linears):
    """Pack QuantLinears that are not yet packed. Those of experts are multiplied by experts.py."""

    def fits(linear):  # skinny_gemm.cpp is made for these group sizes
        stored = linear.weight.dtype in (torch.int8, torch.uint8)  # and not floats that somebody put there
        return stored and (linear.bits == 8 or linear.in_features // linear.scales.shape[-1] in (8, 16, 32, 64, 128))

    linears = [linear for linear in linears if linear.layout is None and fits(linear)]
    sizes = [math.prod(packed_shape(m.weight, m.scales, m.zeros)) for m in linears]
    # One allocation for all: else the end of each matrix, which does not fill a huge page, would lie in small pages.
    memory = empty_in_huge_pages((sum(sizes),), torch.uint8).split(sizes)
    for linear, out in zip(linears, memory, strict=True):
        packed = pack(linear.weight, linear.scales, linear.zeros, out)
        linear.pack(LAYOUT, packed=packed)  # frees the integers before the next are packed
