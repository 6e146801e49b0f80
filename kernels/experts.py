"""The product of tokens with the matrices of their experts, as an operator that the compiler does not look into."""

import torch


def runs(expert):
    """Return [(expert, start, stop)] of the experts (n,), in ascending order: those that have rows, and which."""
    ids, counts = expert.unique_consecutive(return_counts=True)
    stops = counts.cumsum(0).tolist()
    return list(zip(ids.tolist(), [0, *stops], stops, strict=False))


torch.library.define("ladder::expert_linear", "(Tensor x, Tensor weight, Tensor expert) -> Tensor")
torch.library.register_fake("ladder::expert_linear", lambda x, weight, _: x.new_empty(len(x), weight.shape[1]))


@torch.library.impl("ladder::expert_linear", "default")
def _expert_linear(x, weight, expert):
    """Return (n, N): each row of x (n, K) times the matrix of its expert (n,), in ascending order, weight (E, N, K)."""
    y = x.new_empty(len(x), weight.shape[1])
    for e, start, stop in runs(expert):
        torch.mm(x[start:stop], weight[e].T, out=y[start:stop])
    return y


torch.library.define(
    "ladder::expert_linear_int", "(Tensor x, Tensor weight, Tensor scales, Tensor? zeros, Tensor expert) -> Tensor"
)
torch.library.register_fake("ladder::expert_linear_int", lambda x, weight, *_: x.new_empty(len(x), weight.shape[1]))


@torch.library.impl("ladder::expert_linear_int", "default")
def _expert_linear_int(x, weight, scales, zeros, expert):
    """Do the same with integers as int_linear.py stores them, of which one expert's become floats at a time."""
    from kernels.int_linear import dequantize

    y = x.new_empty(len(x), weight.shape[1])
    for e, start, stop in runs(expert):
        matrix = dequantize(weight[e], scales[e], None if zeros is None else zeros[e])
        torch.mm(x[start:stop], matrix.T, out=y[start:stop])
    return y
