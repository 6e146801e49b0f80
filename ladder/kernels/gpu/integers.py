"""The kernels of QuantLinear on a GPU. Shape letters: ladder/kernels/quant_linear.py."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from ladder.kernels.quant_linear import add_bias, unpack

TRITON_INT8_ROWS = 16  # up to so many rows of x are multiplied by int8_rows.py
# From so many rows of x on, int4 is turned into floats: for a layer of the 8b that takes an H100 4 ms, while PyTorch's
# kernel takes 0.26 ms for each 16 rows.
INT4_FLOAT_ROWS = 256


def multiply_int8(x, linear):
    """Multiply by the kernels of int8_rows.py if there are few rows and the model is compiled, else by floats.

    PyTorch's own kernel (torch 2.13) computes each output in one thread, byte by byte. Without the compiler, launching
    those of int8_rows.py takes four times as long as multiplying floats.
    """
    scales = linear.scales[:, 0]
    if torch.compiler.is_compiling() and x.numel() <= TRITON_INT8_ROWS * linear.in_features:
        from ladder.kernels.gpu import int8_rows  # late: PyTorch for CPUs has no Triton

        y = int8_rows.multiply(x, linear.weight, scales)
    else:  # in this order, because the compiler replaces F.linear(...) * scales by PyTorch's kernel
        y = scales * F.linear(x, linear.weight.to(x.dtype))
    return add_bias(y, linear)


def use_int8(linears):
    for linear in linears:
        if linear.out_features:
            linear.kernel = multiply_int8


# ---- int4, in the layout of PyTorch's kernel -------------------------------------------------------------------------


@torch.no_grad()
def use_int4(linears):
    """Pack the QuantLinears whose shape fits: weight (N / 8, K / 128, 32, 4) int32, scales (G, N, 2).

    PyTorch's kernel takes scales in bfloat16 only, so float16 ones lose three bits here.

    `permutation` undoes the layout within a tile of 8 x 128. To find it, the numbers 0 to 1023 are packed as three
    digits in base 16.
    """
    for linear in linears:
        N, K = linear.out_features, linear.in_features
        fits = N > 0 and K % 128 == N % 8 == 0 and K // linear.scales.shape[-1] >= 32
        if not fits or linear.weight.dim() == 3:  # experts have kernels of their own
            continue
        scales, zeros = linear.scales.float(), linear.zeros.float()
        pairs = torch.stack((scales, zeros + 8 * scales), dim=-1).bfloat16()  # W = (q - 8) scale + middle
        n = torch.arange(8 * 128, device=linear.weight.device).view(8, 128)
        digits = (torch.cat((n, n >> 4, n >> 8)) & 15).byte()  # three tiles
        low, middle, high = unpack_tiles(pack(digits[:, ::2] | digits[:, 1::2] << 4)).long()
        linear.permutation = (low | middle << 4 | high << 8).flatten().argsort()  # (1024,)
        linear.weight = nn.Parameter(pack(linear.weight), requires_grad=False)
        linear.scales = nn.Parameter(pairs.transpose(0, 1).contiguous(), requires_grad=False)
        linear.zeros, linear.kernel = None, multiply_int4


def multiply_int4(x, linear):
    """Multiply by PyTorch's kernel, which reads all weights for each 16 rows; INT4_FLOAT_ROWS or more by floats."""
    K = linear.in_features
    if x.numel() >= INT4_FLOAT_ROWS * K:
        return F.linear(x, unpacked(linear), linear.bias)
    y = torch._weight_int4pack_mm(x.reshape(-1, K), linear.weight, K // len(linear.scales), linear.scales)
    return add_bias(y.view(*x.shape[:-1], -1), linear)


def unpacked(linear):
    """Return W (N, K) of a packed QuantLinear."""
    q = unpack_tiles(linear.weight)[..., linear.permutation]  # (N / 8, K / 128, 1024)
    q = q.unflatten(-1, (8, 128)).transpose(1, 2)  # (N / 8, 8, K / 128, 128)
    scale, middle = linear.scales.transpose(0, 1).split(1, dim=-1)  # (N, G, 1)
    q = q.reshape(*scale.shape[:2], -1).to(scale.dtype)
    return torch.addcmul(middle, q.sub_(8), scale).flatten(1)


def pack(weight):
    """Return int4 (N, K / 2) in the layout of PyTorch's kernel, which wants the even column in the upper half."""
    return torch._convert_weight_to_int4pack(weight << 4 | weight >> 4, 8)


def unpack_tiles(packed):
    """Return the elements of each tile, in the layout's order, as bytes (N / 8, K / 128, 1024)."""
    return unpack(packed.flatten(2).view(torch.uint8))
