"""Norms: by name, of each head or of all heads together, and of the sums that a loop adds."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class OffsetNorm(nn.RMSNorm):
    """An RMSNorm times 1 + weight, which is not rounded to the weight's dtype (Gemma's)."""

    def forward(self, x):
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).type_as(x)


NORMS = {"rms": nn.RMSNorm, "rms+1": OffsetNorm, "layer": nn.LayerNorm}


def norm_heads(q, k, q_norm, k_norm, comm=None):
    """Return queries (B, K, G, S, H) and keys (B, K, 1, S, H), normed head by head, or with `comm` all heads together.

    q_norm, k_norm: RMSNorms; those of all heads have a rank's part of the weights. comm: the collectives that sum the
    squares over the ranks, in one all-reduce.
    """
    if comm is None:
        return q_norm(q), k_norm(k)
    (queries,), (keys,) = q_norm.normalized_shape, k_norm.normalized_shape  # of all ranks
    share = q.shape[2] * keys / queries  # of ranks that share a KV head, each adds its share of the keys' squares
    squares = torch.stack([q.float().square().sum((1, 2, 4)), k.float().square().sum((1, 2, 4)) * share])
    sums = comm.wait(comm.start(squares))[:, :, None, None, :, None]  # (2, B, 1, 1, S, 1)

    def normed(x, norm, mean):
        weight = norm.weight.view(x.shape[1], x.shape[2], 1, x.shape[4])
        return (x.float() * (mean + norm.eps).rsqrt()).type_as(x) * weight

    return normed(q, q_norm, sums[0] / queries), normed(k, k_norm, sums[1] / keys)


class NormedSums:
    """The collectives of a loop whose sums are normed before they are added: settle returns x + norm(wait(pending)).

    norms: one for each sublayer, in the order of their starts.
    """

    def __init__(self, comm, norms):
        self.comm, self.norms, self.lanes = comm, iter(norms), comm.lanes

    def start(self, partial):
        return self.comm.start(partial), next(self.norms)

    def settle(self, x, pending, newer=()):
        started, norm = pending
        # not wait: settle also keeps the order
        return x + norm(self.comm.settle(torch.zeros_like(x), started, [later for later, _ in newer]))

    def pin(self, x, newer):
        return self.comm.pin(x, [later for later, _ in newer])
