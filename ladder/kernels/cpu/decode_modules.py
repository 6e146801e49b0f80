"""The parts of a model that skinny_gemm.cpp computes on a CPU. Shape letters: model.py."""

import functools
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

from ladder.errors import InputError
from ladder.kernels.cpu import skinny_gemm
from ladder.kernels.quant_kernels import use_kernels
from ladder.kernels.quant_linear import swap
from ladder.ranks.world import rank_and_size
from model import Attention, FeedForward, attend, rotate_into_cache

FEW_POSITIONS = 16  # of a row in a pass; with more, as in a prefill, PyTorch's attention is faster


def decode_attend(q, k, v, mask, positions, window, score_cap):
    """Compute what model.attend does, for up to FEW_POSITIONS positions and no score_cap by skinny_gemm.cpp."""
    if q.shape[3] > FEW_POSITIONS:
        return attend(q, k, v, mask, positions, window, score_cap)
    q, k, v = q.transpose(2, 3), k.contiguous(), v.contiguous()  # without a cache they are views of wqkv's output
    y = torch.ops.ladder.decode_attention(q, k, v, positions, window or k.shape[2])  # (B, K, S, G, H)
    return y.transpose(2, 3).flatten(2, 3)


def fused_rotate(q, k, v, rope, metadata, cache):
    """Compute what model.rotate_into_cache does in one operator, unless the compiler makes one."""
    if rope is None or rope[0].dtype != torch.float32 or torch.compiler.is_compiling():
        return rotate_into_cache(q, k, v, rope, metadata, cache)
    (B, K, _, S, H), positions = k.shape, metadata.positions
    if cache is None:
        cache, positions = k.new_empty(2, B, K, S, H), torch.arange(S).expand(B, -1)
    keys, values = cache
    q = torch.ops.ladder.rotate_into_cache(q, k.squeeze(2), v.squeeze(2), *rope, positions, keys, values)
    return q, keys[:, :, :S], values[:, :, :S]  # read only where a pass begins at position 0


class SkinnyNorm(nn.RMSNorm):
    """An RMSNorm in one operator, unless the compiler makes one."""

    def __init__(self, norm):
        super().__init__(norm.normalized_shape, norm.eps, device="meta")
        self.weight = norm.weight

    def forward(self, x):
        if torch.compiler.is_compiling():
            return super().forward(x)
        return torch.ops.ladder.rms_norm(x, self.weight, self.eps)


def multiply_experts(x, chosen, w1, w3, w2):
    """Compute what layers/experts.py does. skinny_gemm.cpp reads the weights of each chosen expert once.

    w1, w3, w2: ExpertMatrices in bfloat16, or packed QuantLinears.
    """
    weights, bits = [w.weight for w in (w1, w3, w2)], [getattr(w, "bits", 16) for w in (w1, w3, w2)]
    if bits == [16] * 3 and chosen.numel() > skinny_gemm.SKINNY_ROWS * len(w1.weight):
        return torch.ops.ladder.experts(x, chosen, *([weight] for weight in weights))
    return torch.ops.ladder.skinny_gemm_experts(x, chosen, *weights, w2.in_features, x.shape[1], bits)


class SkinnyFeedForward(nn.Module):
    """A FeedForward of packed QuantLinears of the same bits.

    Few rows take one call, so that no time is lost between its products.
    """

    def __init__(self, feed_forward):
        super().__init__()
        self.w1, self.w3, self.w2 = feed_forward.w1, feed_forward.w3, feed_forward.w2

    def forward(self, x):
        if x.numel() > skinny_gemm.SKINNY_INT_ROWS * x.shape[-1]:
            return self.w2(F.silu(self.w1(x)) * self.w3(x))
        weights = self.w1.weight, self.w3.weight, self.w2.weight
        return torch.ops.ladder.feed_forward_int(x, *weights, self.w1.out_features, self.w1.in_features, self.w1.bits)


@functools.cache
def is_built():
    """Return whether there is skinny_gemm.cpp, which is compiled once on a machine; else rank 0 prints why not."""
    try:
        skinny_gemm.build()
        return True
    except InputError as e:
        if rank_and_size()[0] == 0:
            print(f"{e}: PyTorch's kernels, slower", file=sys.stderr)
        return False


def use_skinny_gemm(model):
    """Let a model in bfloat16 use skinny_gemm.cpp, or PyTorch's kernels where that cannot be built.

    The matrices of a quantized model are packed, which frees the integers as the checkpoint stores them.
    """
    if model.dtype != torch.bfloat16:
        return
    if not is_built():
        use_kernels(model, "cpu")
        if not skinny_gemm.HAS_ONEDNN_BF16:
            swap(model, lambda _, m: skinny_gemm.Float32Linear(m) if type(m) is nn.Linear else None)
        return
    use_kernels(model, "skinny_gemm")

    def make(name, module):
        if type(module) is nn.Linear:
            return skinny_gemm.SkinnyLinear(module)
        if type(module) is nn.RMSNorm:
            return SkinnyNorm(module)
        if type(module) is FeedForward and module.w1.bias is None and module.activation is F.silu:
            forms = {(getattr(linear, "kernel", None), getattr(linear, "bits", 16)) for linear in module.children()}
            same = len(forms) == 1 and forms.pop()[0] is skinny_gemm.multiply
            return SkinnyFeedForward(module) if same else None
        return None

    swap(model, make)
    for name, module in model.named_modules():
        if type(module) is Attention and module.head_dim % 64 == 0 and not module.score_cap:
            module.attend, module.rotate_into_cache = decode_attend, fused_rotate
        elif name.endswith(".experts"):
            module.kernel = multiply_experts
