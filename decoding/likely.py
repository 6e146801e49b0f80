"""Sampling among the likeliest tokens, by top_k and top_p, without gathering the logits.

Shape letters: B batch, v this rank's part of the vocabulary.
"""

import torch

LIKELY = 64  # logits that a rank sends, or one more than top_k


def draw(sample, logits, numbers, first, mass, comm):
    """Draw ids (B,) among those that top_k and top_p of a Sampler keep, -1 where the mass is not finite.

    logits: (B, v); numbers: the same as float32, padded; mass (B,): the log of the sum of their weights. Each rank
    sends its largest logits. Where these may not be all that is kept, or the answer to this is on a GPU, which
    would have to be waited for, all logits are gathered.
    """
    n = min(max(LIKELY, (sample.top_k or 0) + 1), numbers.shape[-1])
    values, ids = numbers.topk(n)
    sent = torch.stack((values, ids + first), -1).double()
    parts = comm.all_gather(torch.cat((sent, mass[:, None, None].expand(-1, 1, 2)), 1))  # (tp, B, n + 1, 2)
    mass, least = parts[:, :, n, 0].logsumexp(0), parts[:, :, n - 1, 0].amax(0)[:, None]
    values, ids = parts[:, :, :n].transpose(0, 1).flatten(1, 2).unbind(-1)
    ids, order = ids.sort()
    values, order = values.gather(-1, order).sort(descending=True, stable=True)  # of equal ones the first id's
    ids, weights = ids.gather(-1, order), kept(sample, values, mass)
    if logits.is_cuda or (n < numbers.shape[-1] and ((weights > 0) & (values <= least)).any()):
        values, ids = comm.gather_logits(logits).sort(descending=True, stable=True)
        weights = kept(sample, values.double(), mass)
    reached = weights.cumsum(-1)
    drawn = torch.rand(len(ids), 1, device=ids.device, generator=sample.generator) * reached[:, -1:]
    return ids.gather(-1, (reached <= drawn).sum(-1, keepdim=True))[:, 0].long().where(mass.isfinite(), -1)


def kept(sample, values, mass):
    """Return weights of the largest logits (B, n), which descend: 0 where top_k and top_p leave them out."""
    weights = ((values - values[:, :1]) / sample.temperature).exp()
    whole = (mass - values[:, 0] / sample.temperature).exp()[:, None]
    if sample.top_k is not None and sample.top_k < values.shape[-1]:
        weights = weights.masked_fill(values < values[:, sample.top_k - 1 : sample.top_k], 0)
        whole = weights.sum(-1, keepdim=True)
    return weights.masked_fill(weights.cumsum(-1) - weights >= sample.top_p * whole, 0)
