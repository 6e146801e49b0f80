"""Sampling with top_k, top_p and min_p, without gathering all logits of all ranks.

Shape letters: B batch, v this rank's part of the vocabulary, n candidates. The settings of a Sampler are numbers, or
tensors (B, 1) with those of each row.
"""

import copy

import torch
import torch.nn.functional as F

MIN_CANDIDATES = 64  # each rank sends so many logits, or top_k + 1 if that is more


def begin(sample, logits, comm):
    """Return (what this rank sends, a function from what all ranks sent to token ids (B,)): see fast_sampling.begin."""

    def choose(received):
        ids, weights, finite = candidates(sample, logits, comm, received)
        cumulative = weights.cumsum(-1)
        drawn = sample.random(torch.Tensor.uniform_, len(ids), 1) * cumulative[:, -1:]
        return ids.gather(-1, (cumulative <= drawn).sum(-1, keepdim=True))[:, 0].where(finite, -1)

    return local_candidates(sample, logits, comm), choose


def local_candidates(sample, logits, comm):
    """Return (B, n + 1, 2) float64: (logit, id) of this rank's n largest logits, and a pair about all of them.

    The pair is the log of their sum of exp(logit / temperature), NaN if some are not finite, and the most that a logit
    may be that is not among the n. logits (B, v): this rank's.
    """
    local, first_id, _ = comm.local_logits(logits.float())
    top = local.amax(-1)
    n = min(max(MIN_CANDIDATES, sample.n_candidates), local.shape[-1])
    weights = ((local - top[..., None]) / sample.temperature).exp_()
    log_total = (top[:, None].double() / sample.temperature)[:, 0] + weights.sum(-1).log()
    log_total = log_total.where(top.isfinite() & local.amin(-1).isfinite(), torch.nan)
    values, ids = local.topk(n)
    bound = values[:, -1].double() if n < local.shape[-1] else torch.full_like(log_total, -torch.inf)
    sent = torch.stack((values, ids + first_id), -1).double()
    return torch.cat((sent, torch.stack((log_total, bound), -1)[:, None]), 1)


def candidates(sample, logits, comm, received):
    """Return (ids (B, n), weights (B, n) float64, finite (B,)), from which a Sampler with filters draws.

    The likeliest tokens come first. The weight of a token that the filters exclude is 0. finite: whether all logits of
    a row are finite. received (tp, B, n + 1, 2): the local_candidates of all ranks.

    If the filters may include more tokens, all logits of these rows are gathered. On a GPU they always are, since the
    host would have to wait in order to know.
    """
    log_total = received[:, :, -1, 0].logsumexp(0)
    bound = received[:, :, -1, 1].amax(0)[:, None]
    values, ids = received[:, :, :-1].transpose(0, 1).flatten(1, 2).unbind(-1)
    ids, order = ids.sort()
    values, order = values.gather(-1, order).sort(descending=True, stable=True)  # of equal logits the first id's
    ids = ids.gather(-1, order)
    weights = filtered_weights(sample, values, log_total, bound)
    short = ((weights > 0) & (values <= bound)).any(-1)
    if logits.is_cuda or short.any():
        rows = slice(None) if logits.is_cuda else short
        values, all_ids = comm.gather_logits(logits[rows]).sort(descending=True, stable=True)
        ids, weights = (F.pad(x, (0, values.shape[-1] - x.shape[-1])) for x in (ids, weights))
        ids[rows], weights[rows] = (
            all_ids.double(),
            filtered_weights(of_rows(sample, rows), values.double(), log_total[rows]),
        )
    return ids.long(), weights, log_total.isfinite()


def of_rows(sample, rows):
    """Return a Sampler with the settings of some rows."""
    result = copy.copy(sample)
    vars(result).update({name: x[rows] for name, x in vars(sample).items() if isinstance(x, torch.Tensor)})
    return result


def filtered_weights(sample, values, log_total, bound=-torch.inf):
    """Return the weights (B, n) of the largest logits (B, n), in descending order; 0 if a filter excludes one.

    log_total (B,): log of the sum of exp(logit / temperature) over the whole vocabulary. bound (B, 1): the most that
    other logits may be. Where top_k or min_p may include some of these, top_p excludes none.
    """
    top = values[:, :1]
    n = values.shape[-1]
    top_k = torch.as_tensor(sample.top_k, device=values.device)
    min_p = torch.as_tensor(sample.min_p, dtype=values.dtype, device=values.device)
    least = values.gather(-1, top_k.clamp(max=n).expand(len(values), 1) - 1)  # that top_k and min_p include
    least = torch.maximum(least, top + sample.temperature * min_p.log())
    weights = ((values - top) / sample.temperature).exp().masked_fill(values < least, 0)
    included = weights.sum(-1, keepdim=True).masked_fill(bound >= least, torch.inf)
    total = (log_total[:, None] - top / sample.temperature).exp().where((top_k >= n) & (min_p == 0), included)
    return weights.masked_fill(weights.cumsum(-1) - weights >= sample.top_p * total, 0)
