"""Sampling among the likeliest tokens (top_k, top_p) without gathering all logits.

Shape letters: B batch, v this rank's part of the vocabulary, n candidates.
"""

import torch

MIN_CANDIDATES = 64  # the logits that each rank sends, or top_k + 1 where that is more


def candidates(sample, logits, comm):
    """Return what a Sampler with top_k or top_p draws from, given this rank's logits (B, v).

    That is (ids (B, n), weights (B, n) float64, finite (B,)): the likeliest tokens first, with weight 0 where top_k and
    top_p drop them, and whether all logits of a row are finite. Each rank sends its largest logits. Where these may not
    be all that is kept, all logits are gathered; also on a GPU, which would have to be waited for to know.
    """
    numbers, first, _ = comm.local_logits(logits.float())
    top = numbers.amax(-1)
    weights = ((numbers - top[..., None]) / sample.temperature).exp_()
    mass = top.double() / sample.temperature + weights.sum(-1).log()  # log of the sum of exp(logit / temperature)
    mass = mass.where(top.isfinite() & numbers.amin(-1).isfinite(), torch.nan)
    n = min(max(MIN_CANDIDATES, (sample.top_k or 0) + 1), numbers.shape[-1])
    values, ids = numbers.topk(n)
    sent = torch.stack((values, ids + first), -1).double()
    received = comm.all_gather(torch.cat((sent, mass[:, None, None].expand(-1, 1, 2)), 1))  # (tp, B, n + 1, 2)
    mass, least = received[:, :, n, 0].logsumexp(0), received[:, :, n - 1, 0].amax(0)[:, None]
    values, ids = received[:, :, :n].transpose(0, 1).flatten(1, 2).unbind(-1)
    ids, order = ids.sort()
    values, order = values.gather(-1, order).sort(descending=True, stable=True)  # of equal logits the first id's
    ids, weights = ids.gather(-1, order), kept(sample, values, mass)
    if logits.is_cuda or (n < numbers.shape[-1] and ((weights > 0) & (values <= least)).any()):
        values, ids = comm.gather_logits(logits).sort(descending=True, stable=True)
        weights = kept(sample, values.double(), mass)
    return ids.long(), weights, mass.isfinite()


def kept(sample, values, mass):
    """Return the weights of the largest logits (B, n), in descending order: 0 where top_k and top_p drop them."""
    weights = ((values - values[:, :1]) / sample.temperature).exp()
    total = (mass - values[:, 0] / sample.temperature).exp()[:, None]
    if sample.top_k is not None and sample.top_k < values.shape[-1]:
        weights = weights.masked_fill(values < values[:, sample.top_k - 1 : sample.top_k], 0)
        total = weights.sum(-1, keepdim=True)
    return weights.masked_fill(weights.cumsum(-1) - weights >= sample.top_p * total, 0)


def draw(sample, logits, comm):
    """Return token ids (B,) drawn from the candidates, -1 where the logits are not all finite."""
    ids, weights, finite = candidates(sample, logits, comm)
    sums = weights.cumsum(-1)
    drawn = torch.rand(len(ids), 1, device=ids.device, generator=sample.generator) * sums[:, -1:]
    return ids.gather(-1, (sums <= drawn).sum(-1, keepdim=True))[:, 0].where(finite, -1)
