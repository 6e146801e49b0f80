"""What --compile takes besides torch.compile: a C++ compiler, and modules with kernels of their own.

Shape letters: model.py.
"""

import contextlib

import torch
from torch.nn.attention.flex_attention import flex_attention

from kernels import cxx, few_rows
from kernels.few_rows import FEW_INT, FewRowsIntLinear
from kernels.swap import recast, swap
from model import Attention, FeedForward
from runtime.errors import InputError

FEW_POSITIONS = 16  # of a row: with more (a prefill), PyTorch's attention is faster


@contextlib.contextmanager
def _one_line():
    try:
        yield
    except cxx.CompilerError as e:
        raise InputError(str(e)) from None


def prepare():
    """Check and set up what torch.compile needs on a CPU. Raises InputError without a C++ compiler."""
    with _one_line():
        cxx.prepare_compile()


class DecodeAttention(Attention):
    """An Attention whose decode step few_rows.cpp computes, on a CPU."""

    def attend(self, q, k, v, metadata):
        if q.shape[3] > FEW_POSITIONS:
            return super().attend(q, k, v, metadata)
        window = metadata.window or k.shape[2]
        q, v = q.transpose(2, 3), v.contiguous()  # without a cache, v is a view into wqkv's output
        y = torch.ops.ladder.decode_attention(q, k, v, metadata.positions, window)  # (B, K, S, G, H)
        return y.transpose(2, 3).flatten(2, 3)


class SplitAttention(Attention):
    """An Attention that, compiled for a GPU, splits the keys of a head between multiprocessors in a decode step.

    PyTorch's own kernels that take a mask give one head to one multiprocessor: for a row of the 8b, 8 of an H200's 132
    would work.
    """

    def attend(self, q, k, v, metadata):
        S, T, positions, window = q.shape[3], metadata.mask.shape[-1], metadata.positions, metadata.window
        if S > FEW_POSITIONS or not torch.compiler.is_compiling():
            return super().attend(q, k, v, metadata)

        def visible(score, row, head, query, key):
            position = positions[row, query % S]
            near = key <= position if window is None else (key <= position) & (key > position - window)
            return torch.where(near, score, -torch.inf)

        return flex_attention(q.flatten(2, 3), k[:, :, :T], v[:, :, :T], visible)


class FewRowsFeedForward(FeedForward):
    """A FeedForward of FewRowsIntLinears: for few rows one call, so that no time passes between its three products."""

    def forward(self, x):
        if x.numel() > FEW_INT * x.shape[-1]:
            return super().forward(x)
        weights = self.w1.weight, self.w3.weight, self.w2.weight
        return torch.ops.ladder.feed_forward_int(x, *weights, self.w1.out_features, self.w1.in_features, self.w1.bits)


def use_fast_modules(model):
    """Replace modules by those with kernels for a decode step: on a CPU in bfloat16, and on a GPU.

    Raises InputError when few_rows.cpp cannot be compiled.
    """
    on_gpu = model.device.type == "cuda"
    if not on_gpu and model.dtype != torch.bfloat16:
        return
    if not on_gpu:
        with _one_line():
            few_rows.build()
        few_rows.replace_matrices(model)

    def make(name, module):
        if type(module) is Attention and module.head_dim % (16 if on_gpu else 64) == 0:
            return recast(module, SplitAttention if on_gpu else DecodeAttention)
        if type(module) is FeedForward and not on_gpu and module.w1.bias is None:
            integers = all(type(linear) is FewRowsIntLinear for linear in module.children())
            return recast(module, FewRowsFeedForward) if integers else None

    swap(model, make)
