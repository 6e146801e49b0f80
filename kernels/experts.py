"""The products of tokens with the matrices of their experts, as operators that the compiler does not look into.

The tokens of an expert stand together, so that its matrix is read once for all of them. Shape letters: n rows, a token
of an expert each; E experts; N rows and K columns of a matrix.
"""

import torch
import torch.nn.functional as F

from kernels.int_linear import dequantize

torch.library.define("ladder::expert_linear", "(Tensor x, Tensor weight, Tensor expert) -> Tensor")
torch.library.define(
    "ladder::expert_linear_int", "(Tensor x, Tensor weight, Tensor scales, Tensor? zeros, Tensor expert) -> Tensor"
)
for name in "ladder::expert_linear", "ladder::expert_linear_int":
    torch.library.register_fake(name, lambda x, weight, *_: x.new_empty(len(x), weight.shape[1]))


@torch.library.impl("ladder::expert_linear", "default")
def _multiply(x, weight, expert):
    """Return (n, N): rows of x (n, K) times the matrix of its expert (n,), in ascending order; weight (E, N, K)."""
    return _multiply_each(x, weight.shape[1], expert, lambda e: weight[e])


@torch.library.impl("ladder::expert_linear_int", "default")
def _multiply_int(x, weight, scales, zeros, expert):
    """Do the same with integers as int_linear.py stores them, of which one matrix at a time becomes floats."""
    return _multiply_each(
        x, weight.shape[1], expert, lambda e: dequantize(weight[e], scales[e], None if zeros is None else zeros[e])
    )


def _multiply_each(x, N, expert, matrix):
    y = x.new_empty(len(x), N)
    experts, counts = expert.unique_consecutive(return_counts=True)
    start = 0
    for e, count in zip(experts.tolist(), counts.tolist(), strict=True):
        torch.mm(x[start : start + count], matrix(e).T, out=y[start : start + count])
        start += count
    return y


@torch.library.impl("ladder::expert_linear", "CUDA")
def _multiply_on_a_gpu(x, weight, expert):
    """Do the same without waiting for the device."""
    if x.dtype != torch.bfloat16 or x.shape[1] % 8:  # which the library's kernel does not take
        return (weight[expert] * x[:, None]).sum(-1)
    stops = torch.searchsorted(expert, torch.arange(len(weight), device=x.device), right=True)
    return F.grouped_mm(x, weight.transpose(1, 2), offs=stops.int())


@torch.library.impl("ladder::expert_linear_int", "CUDA")
def _multiply_int_on_a_gpu(x, weight, scales, zeros, expert):
    return _multiply_on_a_gpu(x, dequantize(weight, scales, zeros), expert)
