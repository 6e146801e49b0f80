"""The MLPs of experts. An operator that the compiler does not look into computes the experts that tokens choose.

Shape letters: T tokens, k experts of each, E experts, D dim, I neurons of an expert.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from ladder.kernels import quant_linear
from ladder.kernels.registry import Kernel, plain
from model import NeverCalled

FEW_TOKENS = 128  # up to so many, a GPU multiplies all tokens by all experts as fast as it reads the experts

torch.library.define(
    "ladder::experts", "(Tensor x, Tensor chosen, Tensor[] w1, Tensor[] w3, Tensor[] w2, Tensor[] biases) -> Tensor"
)
torch.library.register_fake("ladder::experts", lambda x, chosen, *_: x.new_empty(*chosen.shape, x.shape[1]))


def floats(matrices, dtype, index=slice(None)):
    """Return the matrices of the experts at `index`, by default of all, as floats of the dtype.

    matrices: [weight] of all experts, or [integers, scales, zeros] as quant_linear.py defines them.
    """
    chosen = [tensor[index] for tensor in matrices]
    return chosen[0] if len(chosen) == 1 else quant_linear.floats((*chosen, None)[:3], dtype=dtype)


def gated(gate, up, biases):
    """Return silu(gate) * up or, of experts with biases, gpt-oss's clamped SwiGLU."""
    if not biases:
        return F.silu(gate) * up
    gate = gate.clamp(max=7)
    up = up.clamp(-7, 7)
    return gate * (1.702 * gate).sigmoid() * (up + 1)


@plain
def experts(x, chosen, w1, w3, w2, biases=()):
    """Return w2 gated(w1 x, w3 x) as (T, k, D): for each token of x (T, D), of each of its chosen experts (T, k).

    w1, w3 (E, I, D) and w2 (E, D, I) are lists as floats() takes them. The weights of each expert are read once.
    biases: none, or those of w1 and w3 (E, I) and w2 (E, D).
    """
    y = x.new_empty(*chosen.shape, x.shape[1])
    for e in chosen.unique().tolist():
        token, slot = (chosen == e).nonzero(as_tuple=True)
        b1, b3, b2 = (bias[e] for bias in biases) if biases else (None, None, None)
        gate, up = (F.linear(x[token], floats(w, x.dtype, e), b) for w, b in ((w1, b1), (w3, b3)))
        y[token, slot] = F.linear(gated(gate, up, biases), floats(w2, x.dtype, e), b2)
    return y


def expert_mlps(multiply, x, matrices, biases, index):
    """Return what experts() does by multiply(x, matrix). index: of the biases that its results get."""
    w1, w3, w2 = [(w, biases[i][index] if biases else 0) for i, w in enumerate(matrices)]
    gate, up = (multiply(x, w) + bias for w, bias in (w1, w3))
    return multiply(gated(gate, up, biases), w2[0]) + w2[1]


def experts_on_a_gpu(x, chosen, w1, w3, w2, biases=()):
    """Compute what experts() does, by grouped_mm.

    Except for bfloat16 on Hopper and B200, grouped_mm waits for the device (torch 2.13), which a CUDA graph cannot.
    """
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return every(x, chosen, w1, w3, w2, biases)
    expert, order = chosen.flatten().sort(stable=True)  # an expert's rows become neighbours
    stops = torch.searchsorted(expert, torch.arange(len(w1[0]), device=x.device), right=True).int()  # where each's end

    def multiply(rows, matrices):
        return F.grouped_mm(rows, floats(matrices, x.dtype).transpose(1, 2), offs=stops)

    y = expert_mlps(multiply, x[order // chosen.shape[1]], (w1, w3, w2), biases, expert)
    return y[order.argsort()].view(*chosen.shape, -1)


def gathered(x, chosen, w1, w3, w2, biases=()):
    """Compute what experts() does. Compiled, each product is a kernel that reads the chosen weights in place."""

    def multiply(x, matrices):  # (T, k or 1, in_features) -> (T, k, out_features)
        return (floats(matrices, x.dtype, chosen) * x[..., None, :]).sum(-1)

    return expert_mlps(multiply, x[:, None], (w1, w3, w2), biases, chosen)


def every(x, chosen, w1, w3, w2, biases=()):
    """Compute what experts() does, but let every expert compute every token, which hides behind reading the experts."""

    def multiply(x, matrices):  # (T, in_features) or (E, T, in_features) -> (E, T, out_features)
        return x @ floats(matrices, x.dtype).transpose(1, 2)

    y = expert_mlps(multiply, x, (w1, w3, w2), biases, (slice(None), None))
    return y[chosen, torch.arange(len(x), device=x.device)[:, None]]


# looks `experts` up at each call, and so what somebody has put in its place
torch.library.impl("ladder::experts", "default", lambda *arguments: experts(*arguments))


# ---- The module ------------------------------------------------------------------------------------------------------


@plain
def multiply(x, chosen, w1, w3, w2):
    """Compute what experts() does by an operator, so that the compiler need not look into it. w1, w3, w2: modules."""
    return torch.ops.ladder.experts(x, chosen, *map(list_matrices, (w1, w3, w2)), list_biases(w1, w3, w2))


def multiply_in_graph(x, chosen, w1, w3, w2):
    """Compute what experts() does for few tokens on a GPU, by functions that the compiler or a CUDA graph may hold."""
    in_graph = x.is_cuda and (torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing())
    if not in_graph or len(x) > FEW_TOKENS:
        return None
    # an H100 gathers E experts in the time in which it reads all E once, and 2 E of integers, which become floats
    matrices = [list_matrices(w) for w in (w1, w3, w2)]
    break_even = len(matrices[0][0]) * (1 if len(matrices[0]) == 1 else 2)
    compute = gathered if chosen.numel() < break_even else every
    return compute(x, chosen, *matrices, list_biases(w1, w3, w2))


def list_matrices(module):
    """Return [weight] of ExpertMatrices, or [integers, scales, zeros] of a QuantLinear."""
    if isinstance(module, ExpertMatrices):
        return [module.weight]
    return [tensor for tensor in module.stored() if tensor is not None]


def list_biases(*modules):
    return [module.bias for module in modules if module.bias is not None]


def multiply_with_gradient(x, chosen, w1, w3, w2):
    """Compute what experts() does, with a gradient, which the operator lacks. Experts that are not chosen get zeros."""
    return experts(x, chosen, *([w.weight.unbind()] for w in (w1, w3, w2)), list_biases(w1, w3, w2))


def make_differentiable(model, compiles):
    """Give the Experts of a model a kernel with a gradient. compiles: whether the model is compiled."""
    # the compiler cannot trace it, since which experts compute depends on data
    kernel = torch.compiler.disable(multiply_with_gradient) if compiles else multiply_with_gradient
    for module in model.modules():
        if type(module) is Experts:
            module.compute = kernel


class ExpertMatrices(NeverCalled):
    """A matrix for each of E experts, as one weight (E, out_features, in_features); perhaps with a bias (E, out)."""

    def __init__(self, in_features, out_features, n_experts, bias=False):
        super().__init__()
        self.out_features = out_features
        self.in_features = in_features
        self.weight = nn.Parameter(torch.empty(n_experts, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(n_experts, out_features)) if bias else None


class Experts(nn.Module):
    """The MLPs of E experts."""

    def __init__(self, dim, neurons, n_experts, bias=False):
        super().__init__()
        self.w1 = ExpertMatrices(dim, neurons, n_experts, bias)
        self.w3 = ExpertMatrices(dim, neurons, n_experts, bias)
        self.w2 = ExpertMatrices(neurons, dim, n_experts, bias)
        self.compute = multiply  # or multiply_with_gradient, for training

    @plain
    def forward(self, x, chosen):
        """Return the outputs (T, k, D) of the experts `chosen` (T, k) by the tokens x (T, D)."""
        return self.compute(x, chosen, self.w1, self.w3, self.w2)


def if_on_a_gpu(x, *arguments):
    return experts_on_a_gpu(x, *arguments) if x.is_cuda else None


EXPERTS = "ladder.architectures.experts.experts"
GPU_KERNELS = [
    Kernel(EXPERTS, if_on_a_gpu, "all experts are one call"),
    Kernel("ladder.architectures.experts.multiply", multiply_in_graph, "few tokens fit a graph", (EXPERTS,)),
]
