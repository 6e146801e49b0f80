"""What few_rows.cpp computes of a model's decode step on a CPU. Shape letters: model.py."""

import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

from extras.cpu import few_rows
from kernels.int_linear import swap, use_kernels
from model import Attention, FeedForward, attend
from runtime import cxx, launch
from runtime.compiling import FEW_POSITIONS


def decode_attend(q, k, v, mask, positions, window, score_cap):
    """Compute what model.attend does, without a score_cap."""
    if q.shape[3] > FEW_POSITIONS:
        return attend(q, k, v, mask, positions, window, score_cap)
    q, k, v = q.transpose(2, 3), k.contiguous(), v.contiguous()  # without a cache, views into wqkv's output
    y = torch.ops.ladder.decode_attention(q, k, v, positions, window or k.shape[2])  # (B, K, S, G, H)
    return y.transpose(2, 3).flatten(2, 3)


def multiply_experts(x, chosen, w1, w3, w2):
    """Compute what extras.experts.Experts do; few_rows.cpp reads the weights of those that are chosen, once.

    w1, w3, w2: in bfloat16, or packed QuantLinears.
    """
    weights, bits = [w.weight for w in (w1, w3, w2)], [getattr(w, "bits", 16) for w in (w1, w3, w2)]
    if bits == [16] * 3 and chosen.numel() > few_rows.FEW * len(w1.weight):
        return torch.ops.ladder.experts(x, chosen, *([weight] for weight in weights))
    return torch.ops.ladder.few_rows_experts(x, chosen, *weights, w2.in_features, x.shape[1], bits)


class FewRowsFeedForward(nn.Module):
    """The packed QuantLinears of a FeedForward: few rows take one call, so no time passes between the products."""

    def __init__(self, feed_forward):
        super().__init__()
        self.w1, self.w3, self.w2 = feed_forward.w1, feed_forward.w3, feed_forward.w2

    def forward(self, x):
        if x.numel() > few_rows.FEW_INT * x.shape[-1]:
            return self.w2(F.silu(self.w1(x)) * self.w3(x))
        weights = self.w1.weight, self.w3.weight, self.w2.weight
        return torch.ops.ladder.feed_forward_int(x, *weights, self.w1.out_features, self.w1.in_features, self.w1.bits)


def use_few_rows(model):
    """Let a model in bfloat16 use few_rows.cpp, if that knows this processor; else rank 0 prints that it does not.

    Raises InputError when it cannot be compiled.
    """
    if model.dtype != torch.bfloat16:
        return
    if cxx.instruction_set() == "plain":
        if launch.rank_and_size()[0] == 0:
            print("few_rows.cpp knows no such processor or system: PyTorch's kernels, slower", file=sys.stderr)
        return
    few_rows.build()
    use_kernels(model, "few_rows")

    def make(name, module):
        if type(module) is nn.Linear:
            return few_rows.FewRowsLinear(module)
        if type(module) is FeedForward and module.w1.bias is None and module.activation is F.silu:
            packed = all(getattr(linear, "kernel", None) is few_rows.multiply for linear in module.children())
            return FewRowsFeedForward(module) if packed else None
        return None

    swap(model, make)
    for name, module in model.named_modules():
        if type(module) is Attention and module.head_dim % 64 == 0 and not module.score_cap:
            module.attend = decode_attend
        elif name.endswith(".experts"):
            module.kernel = multiply_experts
