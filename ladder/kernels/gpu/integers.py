"""The kernels of QuantLinear on a GPU. Shape letters: ladder/kernels/quant_linear.py."""

import torch
import torch.nn.functional as F

from ladder.kernels.quant_linear import (
    PLAIN_FORWARD,
    PLAIN_STORED,
    Layout,
    add_bias,
    matrix_by_rows,
    pack_pairs,
    to_fp8,
    unpack,
)
from ladder.kernels.registry import Kernel

TRITON_INT8_ROWS = 16  # up to so many rows of x are multiplied by int8_rows.py
# From so many rows of x on, int4 is turned into floats: for a layer of the 8b that takes an H100 4 ms, while PyTorch's
# kernel takes 0.26 ms for each 16 rows.
INT4_FLOAT_ROWS = 256
FP8_CAPABILITY = 8, 9  # of the GPUs that multiply e4m3: Ada, Hopper, Blackwell
FP8_MULTIPLE = 16  # of N and K, as PyTorch's kernel wants it


def fits(x):
    return x.is_cuda and x.dtype == torch.bfloat16


def multiply_int8(linear, x):
    """Multiply by the kernels of int8_rows.py if there are few rows and the model is compiled, else by floats.

    PyTorch's own kernel (torch 2.13) computes each output in one thread, byte by byte. Without the compiler, launching
    those of int8_rows.py takes four times as long as multiplying floats.
    """
    stored = matrix_by_rows(linear, torch.int8)
    if stored is None or not fits(x):
        return None
    weight = stored[0]
    scales = stored[1][:, 0]
    if torch.compiler.is_compiling() and x.numel() <= TRITON_INT8_ROWS * linear.in_features:
        from ladder.kernels.gpu import int8_rows  # late: PyTorch for CPUs has no Triton

        y = int8_rows.multiply(x, weight, scales)
    else:  # in this order, because the compiler replaces F.linear(...) * scales by PyTorch's kernel
        y = scales * F.linear(x, weight.to(x.dtype))
    return add_bias(y, linear)


def multiply_fp8(linear, x):
    """Multiply e4m3 by e4m3 with PyTorch's kernel: each row of x (..., K) has a scale, and each row of W.

    No GPU has run it yet.
    """
    stored = matrix_by_rows(linear, torch.float8_e4m3fn)
    N = linear.out_features
    K = linear.in_features
    if stored is None or not fits(x) or N % FP8_MULTIPLE or K % FP8_MULTIPLE:
        return None
    if torch.cuda.get_device_capability() < FP8_CAPABILITY:
        return None
    weight, row_scales = stored
    q, scales = to_fp8(x.reshape(-1, K))
    y = torch._scaled_mm(q, weight.T, scales, row_scales.float().T.contiguous(), out_dtype=x.dtype)
    return add_bias(y.view(*x.shape[:-1], -1), linear)


KERNELS = [
    Kernel(PLAIN_FORWARD, multiply_int8, "integers of 8 bits are read as such", (PLAIN_STORED,)),
    Kernel(PLAIN_FORWARD, multiply_fp8, "fp8 is multiplied as such", (PLAIN_STORED,)),
]


# ---- int4, in the layout of PyTorch's kernel -------------------------------------------------------------------------


@torch.no_grad()
def pack_int4(linears):
    """Pack the QuantLinears whose shape fits: packed (N / 8, K / 128, 32, 4) int32, packed_scales (G, N, 2).

    PyTorch's kernel takes scales in bfloat16 only, so float16 ones lose three bits here.

    packed_order undoes the layout within a tile of 8 x 128. To find it, the numbers 0 to 1023 are packed as three
    digits in base 16.
    """
    for linear in linears:
        N = linear.out_features
        K = linear.in_features
        if linear.layout or linear.weight.dtype != torch.uint8:
            continue
        fits = N > 0 and K % 128 == N % 8 == 0 and K // linear.scales.shape[-1] >= 32
        if not fits or linear.weight.dim() == 3:  # experts have kernels of their own
            continue
        scales = linear.scales.float()
        zeros = linear.zeros.float()
        pairs = torch.stack((scales, zeros + 8 * scales), dim=-1).bfloat16()  # W = (q - 8) scale + middle
        n = torch.arange(8 * 128, device=linear.weight.device).view(8, 128)
        digits = (torch.cat((n, n >> 4, n >> 8)) & 15).byte()  # three tiles
        low, middle, high = unpack_tiles(pack(pack_pairs(digits))).long()
        order = (low | middle << 4 | high << 8).flatten().argsort()  # (1024,)
        packed = pack(linear.weight)
        linear.pack(LAYOUT, packed=packed, packed_scales=pairs.transpose(0, 1).contiguous(), packed_order=order)


def multiply_int4(x, linear):
    """Multiply by PyTorch's kernel, which reads all weights for each 16 rows; INT4_FLOAT_ROWS or more by floats."""
    if x.dtype != torch.bfloat16:
        return None
    K = linear.in_features
    scales = linear._parameters["packed_scales"]
    if x.numel() >= INT4_FLOAT_ROWS * K:
        return F.linear(x, unpacked(linear), linear.bias)
    y = torch._weight_int4pack_mm(x.reshape(-1, K), linear._parameters["packed"], K // len(scales), scales)
    return add_bias(y.view(*x.shape[:-1], -1), linear)


def integers_of(linear):
    """Return the integers (N, K) of a packed QuantLinear, as bytes."""
    q = unpack_tiles(linear.packed)[..., linear.packed_order]  # (N / 8, K / 128, 1024)
    return q.unflatten(-1, (8, 128)).transpose(1, 2).reshape(linear.out_features, -1)  # (N / 8, 8, K / 128, 128)


def unpacked(linear):
    """Return W (N, K) of a packed QuantLinear in bfloat16."""
    scale, middle = linear.packed_scales.transpose(0, 1).split(1, dim=-1)  # (N, G, 1)
    q = integers_of(linear).view(*scale.shape[:2], -1).to(scale.dtype)
    return torch.addcmul(middle, q.sub_(8), scale).flatten(1)


@torch.no_grad()
def unpacked_integers(linear):
    """Return (weight, scales, zeros) of a packed QuantLinear in the checkpoint's order; the scales in float32."""
    q = integers_of(linear)
    scales, middle = linear.packed_scales.transpose(0, 1).float().unbind(-1)  # (N, G)
    return pack_pairs(q), scales.contiguous(), middle - 8 * scales


LAYOUT = Layout("PyTorch's int4 kernel", multiply_int4, unpacked_integers)


def pack(weight):
    """Return int4 (N, K / 2) in the layout of PyTorch's kernel, which wants the even column in the upper half."""
    return torch._convert_weight_to_int4pack(weight << 4 | weight >> 4, 8)


def unpack_tiles(packed):
    """Return the elements of each tile, in the layout's order, as bytes (N / 8, K / 128, 1024)."""
    return unpack(packed.flatten(2).view(torch.uint8))
