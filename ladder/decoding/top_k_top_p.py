"""Sampling with top_k and top_p, without gathering all logits of all ranks.

Shape letters: B batch, v this rank's part of the vocabulary, n candidates.
"""

import torch

MIN_CANDIDATES = 64  # each rank sends so many logits, or top_k + 1 if that is more


def gather_candidates(sample, logits, comm):
    """Return (ids (B, n), weights (B, n) float64, finite (B,)), from which a Sampler with top_k or top_p draws.

    The likeliest tokens come first. The weight of a token that top_k or top_p excludes is 0. finite: whether all logits
    of a row are finite. logits (B, v): this rank's.

    Each rank sends its largest logits. If top_k and top_p may include more than these, all logits are gathered. On a
    GPU they always are, since the host would have to wait in order to know.
    """
    local, first_id, _ = comm.local_logits(logits.float())
    top = local.amax(-1)
    weights = ((local - top[..., None]) / sample.temperature).exp_()
    log_total = top.double() / sample.temperature + weights.sum(-1).log()  # log of the sum of exp(logit / temperature)
    log_total = log_total.where(top.isfinite() & local.amin(-1).isfinite(), torch.nan)
    n = min(max(MIN_CANDIDATES, (sample.top_k or 0) + 1), local.shape[-1])
    values, ids = local.topk(n)
    sent = torch.stack((values, ids + first_id), -1).double()
    received = comm.all_gather(torch.cat((sent, log_total[:, None, None].expand(-1, 1, 2)), 1))  # (tp, B, n + 1, 2)
    log_total = received[:, :, n, 0].logsumexp(0)
    smallest_sent = received[:, :, n - 1, 0].amax(0)[:, None]  # the largest over the ranks
    values, ids = received[:, :, :n].transpose(0, 1).flatten(1, 2).unbind(-1)
    ids, order = ids.sort()
    values, order = values.gather(-1, order).sort(descending=True, stable=True)  # of equal logits the first id's
    ids, weights = ids.gather(-1, order), filtered_weights(sample, values, log_total)
    if logits.is_cuda or (n < local.shape[-1] and ((weights > 0) & (values <= smallest_sent)).any()):
        values, ids = comm.gather_logits(logits).sort(descending=True, stable=True)
        weights = filtered_weights(sample, values.double(), log_total)
    return ids.long(), weights, log_total.isfinite()


def filtered_weights(sample, values, log_total):
    """Return the weights (B, n) of the largest logits (B, n), in descending order; 0 if top_k or top_p excludes one.

    log_total (B,): log of the sum of exp(logit / temperature) over the whole vocabulary.
    """
    weights = ((values - values[:, :1]) / sample.temperature).exp()
    total = (log_total - values[:, 0] / sample.temperature).exp()[:, None]
    if sample.top_k is not None and sample.top_k < values.shape[-1]:
        weights = weights.masked_fill(values < values[:, sample.top_k - 1 : sample.top_k], 0)
        total = weights.sum(-1, keepdim=True)
    return weights.masked_fill(weights.cumsum(-1) - weights >= sample.top_p * total, 0)


def draw(sample, logits, comm):
    """Return token ids (B,) drawn from the candidates, -1 if a row's logits are not all finite."""
    ids, weights, finite = gather_candidates(sample, logits, comm)
    cumulative = weights.cumsum(-1)
    drawn = torch.rand(len(ids), 1, device=ids.device, generator=sample.generator) * cumulative[:, -1:]
    return ids.gather(-1, (cumulative <= drawn).sum(-1, keepdim=True))[:, 0].where(finite, -1)
