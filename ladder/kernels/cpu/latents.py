"""The functions of skinny_gemm.cpp that stand in for those of architectures/latent.py, where its letters are."""

import torch

from ladder.kernels.cpu import skinny_gemm
from ladder.kernels.cpu.stand_ins import FEW_POSITIONS, LINEAR, NORM, is_bf16, is_changed, matrix_of
from ladder.kernels.registry import Kernel
from ladder.layers.norms import RMSNorm


def latent_attention(self, q, kv, metadata, cache):
    """Compute LatentAttention.attend of a few new positions in one call."""
    L, X, R, Y = self.sizes
    if cache is None or metadata.mask is None or not is_bf16(q):
        return None
    if not fits_latents(self, q.shape[1]) or q.shape[0] * q.shape[1] > skinny_gemm.SKINNY_ROWS:
        return None
    if q.shape[1] > self.most_absorbed:
        return None
    weight = matrix_of(self, "wkv_b")
    norm = self._modules["kv_a_norm"]
    if (
        weight is None
        or weight[2] is not None
        or type(norm) is not RMSNorm
        or is_changed(norm)
        or metadata.rope[0].dtype is not torch.float32
    ):
        return None
    scale = self.scale * (self.query_scale or 1.0)
    arguments = norm._parameters["weight"], norm.eps, weight[0], X, Y, *metadata.rope, metadata.rows
    return torch.ops.ladder.latent_attention(q, kv, *arguments, metadata.positions, cache[0], metadata.mask, scale)


def fits_latents(self, positions):
    L, _, R, _ = self.sizes
    return L % 64 == 0 and (L + R) % 32 == 0 and positions <= FEW_POSITIONS


def attend_to_latents(self, q, cached, metadata):
    """Attend to latents from a few positions; with to_latents and to_values, in compiled code too."""
    if not fits_latents(self, q.shape[2]) or not is_bf16(q):
        return None
    L, X, R, _ = self.sizes
    queries, rotated = q.split([X, R], -1)
    q = torch.cat((self.to_latents(queries), rotated), -1).transpose(1, 2)[:, None]  # (B, 1, S, N, L + R)
    y = torch.ops.ladder.decode_attention(q, cached, cached[..., :L], metadata.mask, self.scale)
    return self.to_values(y[:, 0].transpose(1, 2))


def to_latents(self, q):
    """Multiply a few rows by the heads' keys."""
    return multiply_heads(self, q, slice(None, q.shape[1] * q.shape[3]), torch.ops.ladder.skinny_gemm_heads_mT)


def to_values(self, y):
    """Multiply a few rows by the heads' values."""
    return multiply_heads(self, y, slice(-y.shape[1] * self.sizes[3], None), torch.ops.ladder.skinny_gemm_heads)


def multiply_heads(self, x, rows, operator):
    """Return x (B, N, S, in) times the heads' matrices in these rows of wkv_b: (B, N, S, out)."""
    if x.shape[0] * x.shape[2] > skinny_gemm.SKINNY_ROWS or not is_bf16(x):
        return None
    weight = self.wkv_b.weight[rows].unflatten(0, (x.shape[1], -1))
    y = operator(x.transpose(0, 1).flatten(1, 2), weight)
    return y.unflatten(1, (x.shape[0], -1)).transpose(0, 1)


PLAIN = "ladder.architectures.latent.LatentAttention"
KERNELS = [
    Kernel(f"{PLAIN}.attend", latent_attention, "few positions are one call", (LINEAR, NORM), compiles=False),
    Kernel(f"{PLAIN}.attend_to_latents", attend_to_latents, "few positions are about twice as fast"),
    Kernel(f"{PLAIN}.to_latents", to_latents, "few rows are about twice as fast"),
    Kernel(f"{PLAIN}.to_values", to_values, "few rows are about twice as fast"),
]
