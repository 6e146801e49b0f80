"""The functions of skinny_gemm.cpp that stand in for those of architectures/heads.py."""

import torch.nn as nn

from ladder.kernels.cpu.stand_ins import BF16, LINEAR, NORM, QUANT, attend, attention_step, is_changed, tell_change
from ladder.kernels.registry import Kernel
from ladder.layers.norms import RMSNorm


def attention(self, x, metadata, cache):
    """Compute the attention of a few new positions in one call, in layers that the operator knows."""
    own = self.shared(metadata)
    if self.gate or not self.rotates or self.score_cap or self.whole_norm or own.query_scale is not None:
        return None
    if self._parameters or self.__dict__["sinks"] is not None or len(self._modules) != 4:
        return None
    norms = norms_of_heads(self)
    if norms is None:
        return None
    if self.window:
        return attention_step(self, x, metadata, cache, own.window_rope, own.window_mask, norms)
    return attention_step(self, x, metadata, cache, metadata.rope, metadata.mask, norms)


def norms_of_heads(attention):
    """Return (weights of q_norm and k_norm, or none, their eps), or None if they are not RMSNorms of one eps."""
    q_norm = attention._modules["q_norm"]
    k_norm = attention._modules["k_norm"]
    if is_changed(q_norm) or is_changed(k_norm):
        tell_change(attention, "q_norm" if is_changed(q_norm) else "k_norm")
        return None
    if type(q_norm) is nn.Identity and type(k_norm) is nn.Identity:
        return (), 0.0
    if type(q_norm) is not RMSNorm or type(k_norm) is not RMSNorm or q_norm.eps != k_norm.eps:
        return None
    weights = q_norm._parameters["weight"], k_norm._parameters["weight"]
    return (weights, q_norm.eps) if weights[0].dtype is weights[1].dtype is BF16 else None


PLAIN = "ladder.architectures.heads"
KERNELS = [
    Kernel(f"{PLAIN}.attend_with_sinks", attend, "few positions are about twice as fast"),
    Kernel(
        f"{PLAIN}.HeadAttention.forward", attention, "few positions are one call", (LINEAR, NORM, *QUANT),
        compiles=False,
    ),
]  # fmt: skip
