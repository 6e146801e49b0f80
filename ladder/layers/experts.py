"""The MLPs of experts. An operator that the compiler does not look into computes the experts that tokens choose.

Shape letters: T tokens, k experts of each, E experts, D dim, I neurons of an expert.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from ladder.kernels.quant_linear import dequantize

FEW_TOKENS = 128  # up to so many, a GPU multiplies all tokens by all experts as fast as it reads the experts

torch.library.define("ladder::experts", "(Tensor x, Tensor chosen, Tensor[] w1, Tensor[] w3, Tensor[] w2) -> Tensor")
torch.library.register_fake("ladder::experts", lambda x, chosen, *_: x.new_empty(*chosen.shape, x.shape[1]))


def floats(matrices, dtype, index=slice(None)):
    """Return the matrices of the experts at `index`, by default of all, as floats of the dtype.

    matrices: [weight] of all experts, or [integers, scales, zeros] as quant_linear.py defines them.
    """
    chosen = [tensor[index] for tensor in matrices]
    return chosen[0] if len(chosen) == 1 else dequantize(*chosen, dtype=dtype)


def experts(x, chosen, w1, w3, w2):
    """Return w2 (silu(w1 x) * w3 x) as (T, k, D): for each token of x (T, D), of each of its chosen experts (T, k).

    w1, w3 (E, I, D) and w2 (E, D, I) are lists as floats() takes them. The weights of each expert are read once.
    """
    y = x.new_empty(*chosen.shape, x.shape[1])
    for e in chosen.unique().tolist():
        token, slot = (chosen == e).nonzero(as_tuple=True)
        rows = x[token]
        hidden = F.silu(rows @ floats(w1, x.dtype, e).T) * (rows @ floats(w3, x.dtype, e).T)
        y[token, slot] = hidden @ floats(w2, x.dtype, e).T
    return y


def experts_on_a_gpu(x, chosen, w1, w3, w2):
    """Compute what experts() does, by grouped_mm.

    Except for bfloat16 on Hopper and B200, grouped_mm waits for the device (torch 2.13), which a CUDA graph cannot.
    """
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return every(x, chosen, w1, w3, w2)
    expert, order = chosen.flatten().sort(stable=True)  # an expert's rows become neighbours
    stops = torch.searchsorted(expert, torch.arange(len(w1[0]), device=x.device), right=True).int()  # where each's end

    def multiply(rows, matrices):
        return F.grouped_mm(rows, floats(matrices, x.dtype).transpose(1, 2), offs=stops)

    rows = x[order // chosen.shape[1]]
    y = multiply(F.silu(multiply(rows, w1)) * multiply(rows, w3), w2)
    return y[order.argsort()].view(*chosen.shape, -1)


def gathered(x, chosen, w1, w3, w2):
    """Compute what experts() does. Compiled, each product is a kernel that reads the chosen weights in place."""

    def multiply(matrices, x):  # (T, k or 1, in_features) -> (T, k, out_features)
        return (floats(matrices, x.dtype, chosen) * x[..., None, :]).sum(-1)

    x = x[:, None]  # (T, 1, D)
    return multiply(w2, F.silu(multiply(w1, x)) * multiply(w3, x))


def every(x, chosen, w1, w3, w2):
    """Compute what experts() does, but let every expert compute every token, which hides behind reading the experts."""

    def multiply(matrices, x):  # (T, in_features) or (E, T, in_features) -> (E, T, out_features)
        return x @ floats(matrices, x.dtype).transpose(1, 2)

    y = multiply(w2, F.silu(multiply(w1, x)) * multiply(w3, x))
    return y[chosen, torch.arange(len(x), device=x.device)[:, None]]


torch.library.impl("ladder::experts", "default", experts)
torch.library.impl("ladder::experts", "CUDA", experts_on_a_gpu)


# ---- The module and its kernels (x, chosen, w1, w3, w2) -> y, where w1, w3 and w2 are modules ------------------------


def multiply(x, chosen, w1, w3, w2):
    """Compute what experts() does, on any device, in the way that suits it."""
    compute = torch.ops.ladder.experts
    in_graph = torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())
    if x.is_cuda and in_graph and len(x) <= FEW_TOKENS:
        # an H100 gathers E experts in the time in which it reads all E once, and 2 E of integers, which become floats
        break_even = len(w1.weight) * (1 if w1.weight.is_floating_point() else 2)
        compute = gathered if chosen.numel() < break_even else every
    return compute(x, chosen, *(list(w.parameters()) for w in (w1, w3, w2)))


def multiply_with_gradient(x, chosen, w1, w3, w2):
    """Compute what experts() does, with a gradient, which the operator lacks. Experts that are not chosen get zeros."""
    return experts(x, chosen, *([w.weight.unbind()] for w in (w1, w3, w2)))


def make_differentiable(model, compiles):
    """Give the Experts of a model a kernel with a gradient. compiles: whether the model is compiled."""
    # the compiler cannot trace it, since which experts compute depends on data
    kernel = torch.compiler.disable(multiply_with_gradient) if compiles else multiply_with_gradient
    for module in model.modules():
        if type(module) is Experts:
            module.kernel = kernel


class ExpertMatrices(nn.Module):
    """A matrix for each of E experts, as one weight (E, out_features, in_features)."""

    def __init__(self, in_features, out_features, n_experts):
        super().__init__()
        self.out_features, self.in_features = out_features, in_features
        self.weight = nn.Parameter(torch.empty(n_experts, out_features, in_features))


class Experts(nn.Module):
    """The MLPs of E experts."""

    def __init__(self, dim, neurons, n_experts):
        super().__init__()
        self.w1 = ExpertMatrices(dim, neurons, n_experts)
        self.w3 = ExpertMatrices(dim, neurons, n_experts)
        self.w2 = ExpertMatrices(neurons, dim, n_experts)
        self.kernel = multiply  # skinny_gemm.cpp and training choose another one

    def forward(self, x, chosen):
        """Return the outputs (T, k, D) of the experts `chosen` (T, k) by the tokens x (T, D)."""
        return self.kernel(x, chosen, self.w1, self.w3, self.w2)
