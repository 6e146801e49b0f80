"""Modules of a model whose decode step few_rows.cpp computes. Shape letters: model.py."""

import sys

import torch
import torch.nn.functional as F

from extras.cpu import few_rows
from kernels.int_linear import recast, swap
from model import Attention, FeedForward
from runtime import cxx, launch
from runtime.compiling import FEW_POSITIONS


class DecodeAttention(Attention):
    """An Attention whose decode step few_rows.cpp computes, on a CPU."""

    def attend(self, q, k, v, mask, positions):
        if q.shape[3] > FEW_POSITIONS:
            return super().attend(q, k, v, mask, positions)
        q, k, v = q.transpose(2, 3), k.contiguous(), v.contiguous()  # without a cache, views into wqkv's output
        y = torch.ops.ladder.decode_attention(q, k, v, positions, self.window or k.shape[2])  # (B, K, S, G, H)
        return y.transpose(2, 3).flatten(2, 3)


class FewRowsFeedForward(FeedForward):
    """A FeedForward of FewRowsIntLinears: for few rows one call, so that no time passes between its three products."""

    def forward(self, x):
        if x.numel() > few_rows.FEW_INT * x.shape[-1]:
            return super().forward(x)
        weights = self.w1.weight, self.w3.weight, self.w2.weight
        return torch.ops.ladder.feed_forward_int(x, *weights, self.w1.out_features, self.w1.in_features, self.w1.bits)


def use_kernels(model):
    """Replace modules of a model in bfloat16, if few_rows.cpp knows this processor; else rank 0 prints that.

    Raises InputError when it cannot be compiled.
    """
    if model.dtype != torch.bfloat16:
        return
    if cxx.instruction_set() == "plain":
        if launch.rank_and_size()[0] == 0:
            print("few_rows.cpp knows no such processor or system: PyTorch's kernels, slower", file=sys.stderr)
        return
    few_rows.build()
    few_rows.replace_matrices(model)

    def make(name, module):
        if type(module) is Attention and module.head_dim % 64 == 0 and not module.score_cap:
            return recast(module, DecodeAttention)
        if type(module) is FeedForward and module.w1.bias is None and module.activation is F.silu:
            integers = all(type(linear) is few_rows.FewRowsIntLinear for linear in module.children())
            return recast(module, FewRowsFeedForward) if integers else None
        if name == "experts":
            from extras.cpu.experts import FewRowsExperts  # which needs extras/experts

            return recast(module, FewRowsExperts)
        return None

    swap(model, make)
