"""The norms and activations that a Config names."""

import functools

import torch.nn as nn
import torch.nn.functional as F

from ladder.kernels.registry import plain


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    @plain
    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class OffsetNorm(nn.RMSNorm):
    """Gemma's RMSNorm, which multiplies by 1 + weight in float32, before it rounds to the dtype of x."""

    def forward(self, x):
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).type_as(x)


NORMS = {"rms": RMSNorm, "rms+1": OffsetNorm, "layer": nn.LayerNorm}
ACTIVATIONS = {"silu": F.silu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh")}
