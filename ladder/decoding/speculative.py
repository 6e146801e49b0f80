"""Speculative decoding: a draft proposes the next tokens of each row, and one pass of the model verifies them all.

Shape letters: B batch, P proposals of a row, V vocabulary, v this rank's part of it.
"""

from collections import Counter, defaultdict

import torch
import torch.nn.functional as F

import generate
from ladder.decoding import fast_sampling, top_k_top_p
from ladder.decoding.batch import SINGLE_DEVICE, Sampler, last_tokens, pad
from ladder.kernels import registry
from model import dummy_slot


class Draft:
    """Proposes the next tokens of each row. A subclass has propose(sequences, done, sampler); see step().

    propose returns the proposed ids (B, P), the distributions (B, P, V) that they were drawn from or None if they were
    not drawn, and for each row whether it has proposals. P is one of `counts`.

    count: how many tokens are proposed at a time. runner: the Runner of the model that proposes, or None.
    drafted: how many tokens were proposed for each row since begin(). accepted: a Counter {n: how often n proposals of
    a row were accepted}; in each pass it counts the rows that had proposals.
    """

    def __init__(self, count, runner=None):
        self.count = count
        self.runner = runner
        self.counts = (count,) if runner else (0, count)  # n-grams may propose nothing

    def begin(self, cached_tokens=0):
        """Prepare for a generation of which cached_tokens of each row are in the model's cache."""
        self.drafted = 0
        self.accepted = Counter()

    @torch.inference_mode()
    def step(self, runner, sequences, done, sampler):
        """Run one pass of the model over proposals; return [the new ids of each row].

        sequences: the tokens of each row so far. done: which rows have ended. sampler: a Sampler.
        """
        ids, q, has_proposals = self.propose(sequences, done, sampler)
        if self.runner:
            ids = of_rank_0(ids, runner.model.comm)
        new = verify(runner, sequences, ids, q, sampler)
        self.drafted += ids.shape[1]
        rows = zip(new, done, has_proposals, strict=True)
        self.accepted.update(len(row) - 1 for row, ended, proposed in rows if proposed and not ended)
        return new

    @torch.inference_mode()
    def warm_up(self, runner, sequences):
        """Run a pass with each of the possible numbers of proposals, so that it is compiled."""
        sampler = Sampler(0, device=runner.device)
        for count in self.counts:
            ids = torch.zeros(len(sequences), count, dtype=torch.long, device=runner.device)
            self.propose(sequences, [False] * len(sequences), sampler)
            verify(runner, sequences, ids, None, sampler)


class Ngrams(Draft):
    """Prompt lookup: proposes the tokens that followed the last occurrence of the row's last two or three tokens."""

    def begin(self, cached_tokens=0):
        super().begin()
        self.index = defaultdict(dict)  # {row: {n-gram: the index after its last occurrence}}
        self.indexed = Counter()  # {row: how many of its tokens are in the index}

    def propose(self, sequences, done, sampler):
        rows = [None if done[row] else self._lookup(row, ids) for row, ids in enumerate(sequences)]
        filler = [0] * self.count if any(rows) else []
        ids = torch.tensor([row or filler for row in rows], dtype=torch.long, device=sampler.device)
        return ids, None, [row is not None for row in rows]

    def _lookup(self, row, ids, lengths=(3, 2)):  # lengths of n-grams, tried in this order
        index = self.index[row]
        for end in range(self.indexed[row], len(ids)):
            index.update({tuple(ids[end - n : end]): end for n in lengths if n <= end})
        self.indexed[row] = len(ids)
        for n in lengths:
            if start := index.get(tuple(ids[-n:])):
                return (ids[start:] * self.count)[: self.count]  # repeated if the sequence ends too early
        return None


class SmallModel(Draft):
    """Proposes one token after another by a smaller model, which each rank has whole, with a cache of its own.

    Only the proposals of rank 0 count. cached: tokens of each row in its cache, which the next turn of a chat can use.
    vocab_size: of the model that it helps, whose table may be padded otherwise.
    """

    cached = 0

    def __init__(self, count, runner, vocab_size):
        super().__init__(count, runner)
        self.vocab_size = vocab_size
        self.last_id = runner.model.config.vocab_size - 1

    def begin(self, cached_tokens=0):
        super().begin()
        self.cached = min(cached_tokens, self.cached)
        self.begins = True

    def propose(self, sequences, done, sampler):
        positions = torch.tensor([len(ids) - 1 for ids in sequences], device=sampler.device)
        logits = self.read(sequences, sampler.device)
        longest = max(map(len, sequences))
        ids = []
        q = []
        for i in range(self.count):
            if i:
                logits = self.runner.decode(ids[-1][:, None], positions + i, longest + i)
            logits = logits[:, -1]
            comm = self.runner.model.comm
            if self.last_id >= self.vocab_size:  # the other model's table has no rows for this padding
                logits = comm.gather_logits(logits)[:, : self.vocab_size]
                comm = SINGLE_DEVICE
            token, p = draw(sampler, logits, comm)
            ids.append(token)
            q.append(p if p is None else F.pad(p, (0, self.vocab_size - p.shape[-1])))
        return torch.stack(ids, 1), None if q[0] is None else torch.stack(q, 1), [True] * len(sequences)

    def read(self, sequences, device):
        """Return logits (B, S, V), of which the last position is for the token after each sequence.

        The last two tokens of each row are read: if the last proposal was accepted, it is not in the cache yet.
        """
        if self.begins:  # not in begin(), since a request may end before anything is proposed
            tokens, lengths = pad([ids[:-1] for ids in sequences], device)
            self.runner.prefill(tokens.clamp(max=self.last_id), lengths, self.cached)
        self.begins = False
        self.cached = min(map(len, sequences))
        tokens = torch.tensor([ids[-2:] for ids in sequences], device=device).clamp(max=self.last_id)
        positions = torch.tensor([len(ids) - 2 for ids in sequences], device=device)
        return self.runner.decode(tokens, positions, max(map(len, sequences)))


# ---- Verification ----------------------------------------------------------------------------------------------------


def verify(runner, sequences, ids, q, sampler):
    """Run one pass of the model over each row's last token and its proposals; return [the new ids of each row].

    ids, q: as `proposed` and q of accept(); ids may be (B, 0). All but the last new id of a row were proposed.
    """
    tokens, positions, longest = last_tokens(sequences, runner.device)
    comm = runner.model.comm
    logits = runner.decode(torch.cat((tokens, ids), 1), positions, longest + ids.shape[1])
    if not ids.shape[1]:
        return generate.sample(logits[:, 0], comm, sampler)[:, None].tolist()
    ids, accepted = accept(sampler, logits, ids, q, comm)
    accepted = accepted.clamp(max=dummy_slot(runner.cache) - 1 - positions)  # beyond the cache the logits mean nothing
    if sampler.temperature:
        ids, accepted = of_rank_0(torch.cat((ids, accepted[:, None]), 1), comm).tensor_split([-1], 1)
    return [row[: n + 1] for row, n in zip(ids.tolist(), accepted.flatten().tolist(), strict=True)]


def of_rank_0(ids, comm):
    """Return rank 0's ids on all ranks. Those of other ranks may differ, since unlike devices round differently."""
    return comm.all_gather(ids)[0]


def has_distribution(sampler):
    """Return whether ids are drawn from what probabilities() returns.

    They are not if they are chosen greedily, or by a generate.sample that somebody has changed: only its ids are known.
    """
    if sampler.greedy:
        return False
    if fast_sampling.is_edited():
        registry.say_once("generate.sample was changed: a draft's tokens are accepted where it chooses the same")
        return False
    return True


def probabilities(sampler, logits, comm):
    """Return (the distributions (B, V) float32 that a Sampler draws from, whether a row's logits are all finite (B,)).

    sampler: with a temperature above 0. logits: this rank's (B, v).
    """
    if not fast_sampling.gathers_as_known(comm):
        logits = comm.gather_logits(logits)
        comm = SINGLE_DEVICE
    if sampler.filters:
        received = comm.all_gather(top_k_top_p.local_candidates(sampler, logits, comm))
        ids, weights, finite = top_k_top_p.candidates(sampler, logits, comm, received)
        weights = (weights / weights.sum(-1, keepdim=True)).nan_to_num().float()
        V = comm.local_logits(logits)[2]
        p = torch.zeros(len(ids), V, device=ids.device).scatter_add_(-1, ids.clamp(max=V - 1), weights)  # padding has 0
    else:
        logits = comm.gather_logits(logits).float()
        finite = logits.amax(-1).isfinite() & logits.amin(-1).isfinite()
        p = (logits / sampler.temperature).softmax(-1)
    return p.where(finite[:, None], 1 / p.shape[-1]), finite


def draw(sampler, logits, comm):
    """Draw from a draft's logits (B, v); return (ids (B,), their distributions (B, V) or None: has_distribution)."""
    if not has_distribution(sampler):
        return generate.sample(logits, comm, sampler).clamp(min=0), None
    p, _ = probabilities(sampler, logits, comm)
    return torch.multinomial(p, 1, generator=sampler.generator)[:, 0], p


def accept(sampler, logits, proposed, q, comm):
    """Return (ids (B, P + 1), how many proposals of each row are accepted (B,)).

    A row continues with its accepted proposals and one more of its ids. An id is -1 if the logits are not finite.
    logits (B, P + 1, v): the model's, after the last token and after each proposal. proposed (B, P): drawn from
    q (B, P, V); q is None if they were not drawn.

    Greedy, and with a generate.sample that somebody has changed, a proposal is accepted if it and all proposals before
    it are what generate.sample chooses. Otherwise, with the model's distribution p, a proposal d is accepted with
    probability min(1, p(d) / q(d)). The first rejected one is replaced by a draw from max(0, p - q); if all are
    accepted, a draw from p follows. So each id is distributed as p (arXiv 2211.17192).
    """
    if not has_distribution(sampler):
        ids = generate.sample(logits.flatten(0, 1), comm, sampler).unflatten(0, logits.shape[:2])
        return ids, (ids[:, :-1] == proposed).long().cumprod(-1).sum(-1)
    p, finite = (x.unflatten(0, logits.shape[:2]) for x in probabilities(sampler, logits.flatten(0, 1), comm))
    q = F.one_hot(proposed, p.shape[-1]) if q is None else q
    p_d, q_d = (x.gather(-1, proposed[..., None])[..., 0] for x in (p[:, :-1], q))
    uniform = torch.rand(q_d.shape, device=p.device, generator=sampler.generator)
    accepted = (uniform * q_d < p_d).long().cumprod(-1).sum(-1)  # (B,)
    here = torch.arange(len(p), device=p.device), accepted  # the place of each row's last id
    rest = (p[here] - F.pad(q, (0, 0, 0, 1))[here]).clamp_(min=0)
    rest = rest.where(rest.sum(-1, keepdim=True) > 0, p[here])  # if p equals q, rounding may leave nothing
    ids = F.pad(proposed, (0, 1))
    ids[here] = torch.multinomial(rest, 1, generator=sampler.generator)[:, 0]
    return ids.where(finite, -1), accepted
