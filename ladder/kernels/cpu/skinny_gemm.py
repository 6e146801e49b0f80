"""Skinny GEMMs, matrix products with few rows of x, on a CPU: the operators of skinny_gemm.cpp and their integers.

Decoding reads each weight once for a few rows, which libraries made for large matrices do not do fast.
"""

import functools
import math
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ladder.errors import InputError
from ladder.kernels import compilers
from ladder.kernels.cpp import load_operators
from ladder.kernels.huge_pages import empty_in_huge_pages
from ladder.kernels.quant_linear import Layout, add_bias, pack_pairs, unpack

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


BLOCK = 32  # columns of a block of 8 bits in groups


class Form(NamedTuple):
    """In which of several forms 8 bits in groups are packed: in as few bits as a matrix's numbers need."""

    bits: int  # of a number: 4, 5, 6 or 8
    group_size: int  # of the checkpoint's groups
    has_zeros: bool  # whether any zero is not 0; else none is stored
    is_signed: bool  # whether a number is less than 0; what is stored is 2^(bits - 1) more than it, or it itself

    @property
    def groups(self):
        """How many groups of scales a block has; larger groups are stored as several."""
        return max(1, BLOCK // self.group_size)

    @property
    def code(self):
        """What the operators of skinny_gemm.cpp take as `bits`."""
        return self.bits | self.has_zeros << 4 | self.is_signed << 5 | self.groups << 8

    @property
    def header_bytes(self):
        """Bytes of the scales and zeros of a block, which begins with them."""
        return 32 * self.groups * (1 + self.has_zeros)

    @property
    def block_bytes(self):
        return self.header_bytes + BLOCK * 16 * self.bits // 8


def form_of(weight, scales, zeros):
    """Return the Form of 8 bits in groups, or None for other integers."""
    if weight.dtype != torch.int8 or zeros is None:
        return None
    lowest, highest = (bound.item() for bound in weight.aminmax()) if weight.numel() else (0, 0)
    is_signed = lowest < 0
    needed = max((~lowest).bit_length(), highest.bit_length()) + 1 if is_signed else highest.bit_length()
    bits = next(bits for bits in (4, 5, 6, 8) if needed <= bits)
    return Form(bits, weight.shape[-1] // scales.shape[-1], bool(zeros.any()), is_signed)


def packed_shape(weight, scales, zeros, form=None):
    """Return the shape of pack()'s result: (P, G, 1 + V, 64), and for the matrices of experts (E, P, G, 1 + V, 64).

    With a Form: (P, blocks, V, 32).
    """
    if form:
        *E, N, K = weight.shape
        return *E, -(-N // 16), -(-K // BLOCK), form.block_bytes // 32, 32
    *E, N, columns = weight.shape
    G = scales.shape[-1]
    return *E, -(-N // 16), G, 1 + (-(-columns // 8) * 2 if zeros is None else columns // G // 4), 64


@torch.no_grad()
def pack(weight, scales, zeros, out=None, form=None):
    """Return integers of quant_linear.py in skinny_gemm.cpp's layout: (P, G, 1 + V, 64) bytes, the last panel padded.

    A panel is 16 rows. It stores each group of columns as one vector of the rows' scales and zeros, followed by V
    vectors with four bytes from every row. With int8 these are the next four columns, q + 128, and the columns are
    padded to a multiple of 8. With int4 they are the next eight columns, the later four in the upper halves. The bytes
    are uint8 if the scales are bfloat16, and int8 if they are float16.
    out: the bytes to write to; None: new ones. form: that of 8 bits in groups, whose layout skinny_gemm.h describes.
    """
    if weight.dim() == 3:
        out = out.view(packed_shape(weight, scales, zeros, form))
        for e, expert_out in enumerate(out):
            pack(weight[e], scales[e], None if zeros is None else zeros[e], expert_out, form)
        return out.view(BYTES[scales.dtype])
    if form:
        return _pack_groups(weight, scales, zeros, out, form)
    N, columns = weight.shape
    shape = packed_shape(weight, scales, zeros)
    packed = empty_in_huge_pages(shape, torch.uint8) if out is None else out.view(torch.uint8).view(shape)
    integers, pairs = _views(packed, scales.dtype)
    for i in range(0, len(packed), PANELS_AT_ONCE):
        q = weight[16 * i : 16 * (i + PANELS_AT_ONCE)]
        q = F.pad(q, (0, -columns % 8 if zeros is None else 0, 0, -len(q) % 16))
        if zeros is None:
            q = q.view(torch.uint8) ^ 128
        else:
            low, high = unpack(q).unflatten(-1, (-1, 2, 4)).unbind(-2)
            q = low | high << 4
        integers[i : i + PANELS_AT_ONCE] = q.view(-1, *integers.shape[1:])
    scales_and_zeros = torch.stack((scales, torch.zeros_like(scales) if zeros is None else zeros))  # (2, N, G)
    pairs.copy_(F.pad(scales_and_zeros, (0, 0, 0, -N % 16)).view(pairs.shape))
    return packed.view(BYTES[scales.dtype])


def _views(packed, dtype):
    """Return views of packed integers, through which they are written and read: (P, 16, G, V, 4) bytes of the rows, and
    scales and zeros (2, P, 16, G)."""
    by_row = packed.view(torch.uint8).unflatten(-1, (16, 4))[:, :, 1:]  # (P, G, V, 16, 4)
    pairs = packed.view(dtype)[:, :, 0].unflatten(-1, (2, 16))  # (P, G, 2, 16)
    return by_row.permute(0, 3, 1, 2, 4), pairs.permute(2, 0, 3, 1)


def _pack_groups(weight, scales, zeros, out, form):
    N, K = weight.shape
    shape = packed_shape(weight, scales, zeros, form)
    packed = empty_in_huge_pages(shape, torch.uint8) if out is None else out.view(torch.uint8).view(shape)
    P, blocks = shape[:2]
    data, header = _views_of_groups(packed, scales.dtype, form)
    for i in range(0, P, PANELS_AT_ONCE):
        q = weight[16 * i : 16 * (i + PANELS_AT_ONCE)].view(torch.uint8)
        q = F.pad(q, (0, BLOCK * blocks - K, 0, -len(q) % 16)) + (form.is_signed << form.bits - 1)
        q = q.view(-1, 16, blocks, 8, 4).permute(0, 2, 3, 1, 4).flatten(3)  # (p, blocks, 8, 64): four columns of rows
        if form.bits < 8:
            high = q >> 4
            q = q & 15
            q = q[:, :, ::2] | q[:, :, 1::2] << 4
            if form.bits > 4:
                n = form.bits - 4
                pieces = high.unflatten(2, (-1, 8 // n)).unbind(3)  # each (p, blocks, n, 64)
                q = torch.cat((q, sum(piece << n * k for k, piece in enumerate(pieces))), dim=2)
        data[i : i + PANELS_AT_ONCE] = q.flatten(2)
    vectors = torch.stack((scales, zeros)[: len(header)]).repeat_interleave(max(1, form.group_size // BLOCK), -1)
    padding = blocks * form.groups - vectors.shape[-1]
    header.copy_(F.pad(vectors, (0, padding, 0, -N % 16)).view(header.shape))
    return packed.view(BYTES[scales.dtype])


def _views_of_groups(packed, dtype, form):
    """Return views as _views does: (P, blocks, bytes) of integers; scales, perhaps zeros (1 or 2, P, 16, blocks, g)."""
    by_block = packed.view(torch.uint8).flatten(2)
    header = by_block[..., : form.header_bytes].view(dtype).unflatten(2, (1 + form.has_zeros, form.groups, 16))
    return by_block[..., form.header_bytes :], header.permute(2, 0, 4, 1, 3)


@torch.no_grad()
def unpacked(linear):
    """Return (weight, scales, zeros or None) of a packed QuantLinear as the checkpoint stores them: undo pack()."""
    packed = linear.packed
    N = linear.out_features
    K = linear.in_features
    form = linear.layout.form
    dtype = next(dtype for dtype, stored in BYTES.items() if stored == packed.dtype)

    def undo(matrix):
        return _unpack_groups(matrix, dtype, N, K, form) if form else _unpacked(matrix, dtype, N, K, linear.bits)

    if packed.dim() == 5:  # of experts
        parts = zip(*map(undo, packed), strict=True)
        return tuple(None if part[0] is None else torch.stack(part) for part in parts)
    return undo(packed)


def _unpack_groups(packed, dtype, N, K, form):
    """Undo _pack_groups."""
    P = len(packed)
    data, header = _views_of_groups(packed, dtype, form)
    q = data.unflatten(2, (-1, 64))
    if form.bits < 8:
        low = q[:, :, :4]
        high = q[:, :, 4:]
        q = torch.stack((low & 15, low >> 4), dim=3).flatten(2, 3)  # (P, blocks, 8, 64)
        if form.bits > 4:
            n = form.bits - 4
            pieces = [high >> n * k & (1 << n) - 1 for k in range(8 // n)]
            q = q | torch.stack(pieces, dim=3).flatten(2, 3) << 4
    q = (q - (form.is_signed << form.bits - 1)).unflatten(3, (16, 4)).permute(0, 3, 1, 2, 4).reshape(16 * P, -1)
    step = max(1, form.group_size // BLOCK)
    G = K // form.group_size
    vectors = header.reshape(len(header), 16 * P, -1)[:, :N, ::step]
    scales, *zeros = vectors[..., :G].contiguous()
    return q[:N, :K].contiguous().view(torch.int8), scales, zeros[0] if zeros else torch.zeros_like(scales)


def _unpacked(packed, dtype, N, K, bits):
    integers, pairs = _views(packed, dtype)
    scales, zeros = pairs.flatten(1, 2)[:, :N].contiguous()
    q = integers.flatten(2).flatten(0, 1)[:N]
    if bits == 8:
        return (q[:, :K] ^ 128).view(torch.int8), scales, None
    q = q.unflatten(-1, (-1, 4))
    q = torch.stack((q & 15, q >> 4), dim=-2).flatten(1)  # (N, K)
    return pack_pairs(q), scales, zeros


def multiply(x, linear):
    """Multiply up to SKINNY_INT_ROWS rows by the integers, more by floats that are made of them piece by piece."""
    if x.dtype != torch.bfloat16 or x.device.type != "cpu":
        return None
    few = x.numel() <= SKINNY_INT_ROWS * x.shape[-1]
    operator = torch.ops.ladder.skinny_gemm_int if few else torch.ops.ladder.many_rows_int
    packed = linear._parameters["packed"]
    bits = linear.layout.code or linear.bits
    return add_bias(operator(x, packed, linear.out_features, linear.in_features, bits), linear)


LAYOUT = Layout("skinny_gemm.cpp", multiply, unpacked)


@functools.cache
def layout_of(form):
    """Return the Layout of a Form, always the same one, or of other integers, for which it is None."""
    return LAYOUT._replace(form=form, code=form.code) if form else LAYOUT


def bits_of(linear):
    """Return what skinny_gemm.cpp takes as the `bits` of a QuantLinear that is packed for it, or None for others."""
    layout = linear.layout
    return None if layout is None or layout.multiply is not multiply else layout.code or linear.bits


def pack_all(linears):
    """Pack QuantLinears that are not yet packed. Those of experts are multiplied by experts.py."""

    def fits(linear):  # skinny_gemm.cpp is made for these group sizes
        stored = linear.weight.dtype in (torch.int8, torch.uint8)  # and not floats that somebody put there
        if linear.zeros is None:
            return stored
        return stored and linear.in_features // linear.scales.shape[-1] in (8, 16, 32, 64, 128)

    linears = [linear for linear in linears if linear.layout is None and fits(linear)]
    forms = [form_of(m.weight, m.scales, m.zeros) for m in linears]
    sizes = [math.prod(packed_shape(m.weight, m.scales, m.zeros, f)) for m, f in zip(linears, forms, strict=True)]
    # One allocation for all: else the end of each matrix, which does not fill a huge page, would lie in small pages.
    memory = empty_in_huge_pages((sum(sizes),), torch.uint8).split(sizes)
    for linear, form, out in zip(linears, forms, memory, strict=True):
        packed = pack(linear.weight, linear.scales, linear.zeros, out, form)
        linear.pack(layout_of(form), packed=packed)  # frees the integers before the next are packed
