"""Sampling rows that have settings and seeds of their own, with one exchange between the ranks.

Shape letters: B batch, v this rank's part of the vocabulary.
"""

import copy

import torch

import generate
from ladder.decoding import fast_sampling
from ladder.decoding.batch import SINGLE_DEVICE


def joined(samplers):
    """Return a Sampler for as many rows, all greedy, all with filters or all without; each is drawn as if alone."""
    if len(samplers) == 1:
        return samplers[0]

    def random(fill, n_rows, *shape):
        return torch.cat([sampler.random(fill, 1, *shape) for sampler in samplers])

    result = copy.copy(samplers[0])
    result.random = random
    result.n_candidates = max(sampler.n_candidates for sampler in samplers)
    dtypes = {"temperature": torch.float32, "top_k": torch.int64, "top_p": torch.float64, "min_p": torch.float64}
    for name, dtype in dtypes.items():
        column = [[getattr(sampler, name)] for sampler in samplers]
        setattr(result, name, torch.tensor(column, dtype=dtype, device=result.device))
    return result


def sample_rows(samplers, logits, comm=SINGLE_DEVICE):
    """Return token ids (B,) for local logits (B, v), each row's as generate.sample chooses it by a Sampler of its own.

    The kernel needs one gather for all rows; generate.sample as written, which takes one Sampler, one for each row.
    """
    if not fast_sampling.is_in_use() or not fast_sampling.gathers_as_known(comm):
        ids = [generate.sample(row[None], comm, sampler) for sampler, row in zip(samplers, logits, strict=True)]
        return torch.cat(ids)
    kinds = {}
    for row, sampler in enumerate(samplers):
        kinds.setdefault("greedy" if sampler.greedy else sampler.filters, []).append(row)
    parts = [logits[rows] for rows in kinds.values()] if len(kinds) > 1 else [logits]
    draws = [
        fast_sampling.begin(part, comm, joined([samplers[row] for row in rows]))
        for rows, part in zip(kinds.values(), parts, strict=True)
    ]
    sizes = [candidates.numel() for candidates, _ in draws]
    received = comm.all_gather(torch.cat([candidates.flatten() for candidates, _ in draws])).split(sizes, -1)
    ids = torch.empty(len(samplers), dtype=torch.long, device=logits.device)
    for rows, (candidates, choose), of_ranks in zip(kinds.values(), draws, received, strict=True):
        ids[rows] = choose(of_ranks.unflatten(-1, candidates.shape))
    return ids
