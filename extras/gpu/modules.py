"""IntLinears whose products a GPU's kernels compute. Shape letters: kernels/int_linear.py."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from kernels.int_linear import IntLinear, recast, swap, unpack

FEW = 16  # rows of x, at most, that int8_rows.py multiplies
MANY = 256  # rows of x: for a layer of the 8b, an H100 makes int4 floats in 4 ms; PyTorch's kernel: 0.26 for 16 rows


class Int8CudaLinear(IntLinear):
    """An IntLinear of int8. Compiled, few rows are multiplied by the kernels of int8_rows.py.

    PyTorch's own kernel (torch 2.13) computes each output in one thread, byte by byte. Without the compiler, launching
    int8_rows.py's takes four times as long as multiplying floats.
    """

    def forward(self, x):
        scales = self.scales[:, 0]
        if torch.compiler.is_compiling() and x.numel() <= FEW * self.in_features:
            from extras.gpu import int8_rows  # late: PyTorch for CPUs has no Triton

            y = int8_rows.multiply(x, self.weight, scales)
        else:  # in this order, because the compiler replaces F.linear(...) * scales by PyTorch's kernel
            y = scales * F.linear(x, self.weight.to(x.dtype))
        return y if self.bias is None else y + self.bias


class Int4CudaLinear(nn.Module):
    """An IntLinear of int4 in the layout of PyTorch's kernel, for which 128 divides K and 8 divides N.

    The kernel reads all weights for each 16 rows. For MANY rows they become floats first: `permutation` undoes the
    layout within a tile of 8 x 128. It is found by packing the numbers 0 to 1023, as three digits in base 16.
    """

    @torch.no_grad()
    def __init__(self, linear):
        super().__init__()
        self.out_features, self.in_features, self.bias = linear.out_features, linear.in_features, linear.bias
        self.group_size = self.in_features // linear.scales.shape[1]
        # the kernel computes W = (q - 8) scale + middle
        pairs = torch.stack((linear.scales, linear.zeros + 8 * linear.scales), dim=-1)  # (N, G, 2)
        self.scales = nn.Parameter(pairs.transpose(0, 1).contiguous(), requires_grad=False)
        self.weight = nn.Parameter(pack(linear.weight), requires_grad=False)  # (N / 8, K / 128, 32, 4) int32
        n = torch.arange(8 * 128, device=linear.weight.device).view(8, 128)
        digits = (torch.cat((n, n >> 4, n >> 8)) & 15).byte()  # three tiles
        low, middle, high = unpack_tiles(pack(digits[:, ::2] | digits[:, 1::2] << 4)).long()
        self.permutation = (low | middle << 4 | high << 8).flatten().argsort()  # (1024,)

    def dequantized(self):
        """Return W (N, K)."""
        q = unpack_tiles(self.weight)[..., self.permutation]  # (N / 8, K / 128, 1024)
        q = q.unflatten(-1, (8, 128)).transpose(1, 2)  # (N / 8, 8, K / 128, 128)
        scale, middle = self.scales.transpose(0, 1).split(1, dim=-1)  # (N, G, 1)
        q = q.reshape(self.out_features, -1, self.group_size).to(scale.dtype)
        return torch.addcmul(middle, q.sub_(8), scale).flatten(1)

    def forward(self, x):
        if x.numel() >= MANY * self.in_features:
            return F.linear(x, self.dequantized(), self.bias)
        y = torch._weight_int4pack_mm(x.reshape(-1, self.in_features), self.weight, self.group_size, self.scales)
        y = y.view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


def pack(weight):
    """Return int4 (N, K / 2) in the layout of PyTorch's kernel, which takes the even column in the upper half."""
    return torch._convert_weight_to_int4pack(weight << 4 | weight >> 4, 8)


def unpack_tiles(packed):
    """Return the elements of each tile, in the layout's order, as bytes (N / 8, K / 128, 1024)."""
    return unpack(packed.flatten(2).view(torch.uint8))


def use_kernels(model):
    """Replace the IntLinears of a model in bfloat16, where there is a kernel for the shape."""

    def make(name, linear):
        if type(linear) is not IntLinear or linear.scales.dtype != torch.bfloat16 or not linear.out_features:
            return None
        if linear.zeros is None:
            return recast(linear, Int8CudaLinear)
        N, K = linear.out_features, linear.in_features
        return Int4CudaLinear(linear) if K % 128 == N % 8 == 0 and K // linear.scales.shape[1] >= 32 else None

    swap(model, make)
