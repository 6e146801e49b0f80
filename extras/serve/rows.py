"""Continuous batching over a static cache. A request has a row until it ends; the rows that decode do so in one pass.

A prompt is prefilled in chunks, one between two decode steps, so that a long prompt does not stop other streams.

All ranks make the same calls. Shape letters: model.py.
"""

import copy
import itertools
import os
from typing import NamedTuple

import torch

from extras.serve.sample_rows import sample_rows
from ladder.decoding.batch import Sampler, last_tokens
from ladder.progress import progress
from model import has_slots

SHORT_CHUNK = 128  # tokens of a chunk of a prefill while other rows wait, or if all its logits are needed


class Token(NamedTuple):
    """A token and, where its request asks for them, its logprob and {id: logprob} of the likeliest in its place."""

    id: int  # -1 where the logits were not finite
    logprob: float | None = None
    top: dict | None = None


def scored(ids, logits, n):
    """Return the Tokens of ids, each with the n likeliest in its place. logits: (len(ids) or one more, V)."""
    logprobs = logits[: len(ids)].float().log_softmax(-1)
    chosen = logprobs.gather(-1, torch.tensor(ids, device=logits.device).clamp(min=0)[:, None])[:, 0].tolist()
    values, order = (x.tolist() for x in logprobs.topk(n))
    return [Token(i, p, dict(zip(*top, strict=True))) for i, p, *top in zip(ids, chosen, order, values, strict=True)]


class Row:
    """A place for a request. All but the last token of `ids` are cached, even after the request has ended.

    request: None, or a dict of ids, max_tokens, min_tokens (before which the answer does not end), ignore_eos and
    stop_token_ids, sampling (the arguments of a Sampler), repetition_penalty, logprobs (for how many of the likeliest
    tokens in each place, or None) and echo (whether also for the prompt). During a prefill, `ids` is only as much of
    the prompt as the cache holds, and one more.

    slot: its index in the cache, which changes, so that the rows that decode have the first slots.
    """

    def __init__(self, slot, has_states):
        self.ids = [0]
        self.request = None
        self.used = 0  # the pass in which a request last began or ended
        self.slot = slot
        self.has_states = has_states  # of linear attention, which cannot go back in a sequence

    def cached(self, ids):
        """Return how many of a prompt's first tokens are cached; 0 with linear attention."""
        return 0 if self.has_states else len(os.path.commonprefix([self.ids[:-1], ids[:-1]]))

    prefilling = property(lambda self: self.request and len(self.ids) <= len(self.request["ids"]))
    n_new = property(lambda self: len(self.ids) - len(self.request["ids"]))


class Rows(list):
    """The Rows of a Runner's cache.

    runners: {how many rows decode in a pass: a Runner of the first slots of the cache}: any number of rows, or where
    steps are compiled or captured only 1, 4, 16, ... and all.
    """

    def __init__(self, runner, eos_ids):
        n = len(runner.cache[0][0])
        has_states = not runner.model.config.rewindable
        super().__init__(Row(slot, has_states) for slot in range(n))
        self.runner = runner
        self.eos_ids = eos_ids
        self.n_passes = 0
        self.runners = {}
        self.caches = [self.part(slot, slot + 1) for slot in range(n)]  # of each slot
        fixed_shapes = runner.passes.compiles_decode or runner.passes.graphs
        for size in range(1, n + 1):
            if not fixed_shapes or size == n or size in (4**i for i in range(size)):
                self.runners[size] = copy.copy(runner)
                self.runners[size].cache = self.part(0, size)

    busy = property(lambda self: [row for row in self if row.request])

    def part(self, start, stop):
        """Return some slots of the cache."""
        return [tuple(tensor[start:stop] for tensor in layer) for layer in self.runner.cache]

    def start(self, number, request):
        """Begin a request in a free row."""
        row = self[number]
        ids = request["ids"]
        device = self.runner.device
        row.scores = request["echo"] and request["logprobs"] is not None
        row.cached_tokens, row.prompt_tokens = (0, [Token(ids[0])]) if row.scores else (row.cached(ids), [])
        row.ids = ids[: row.cached_tokens + 1]
        row.request = request
        row.used = self.n_passes
        row.sampler = Sampler(**request["sampling"], device=device)
        row.end_ids = {*request["stop_token_ids"], *(() if request["ignore_eos"] else self.eos_ids)}
        row.seen = None  # whether an id is in the prompt or in the answer, (V,)
        if request["repetition_penalty"] != 1:
            row.seen = torch.zeros(self.runner.model.config.vocab_size, dtype=torch.bool, device=device)
            row.seen[ids] = True

    def step(self):
        """Run a chunk of the oldest prompt that is not all in the cache, if any, and a decode step of the other rows.

        Returns a list of (number of a row, its new Token, why its request ends: "stop", "length", "error" or None, the
        Tokens of its prompt, how many tokens were cached). With any Token but the first, and if the request does not
        ask for them, the Tokens of the prompt are []; the number is 0 after the first Token.
        """
        self.n_passes += 1
        prefilling = [row for row in self if row.prefilling]
        decoding = [row for row in self.busy if not row.prefilling]
        chosen = []
        logits = []
        if prefilling:
            row = min(prefilling, key=lambda row: row.used)
            last = self.prefill(row, decoding)
            if last is not None:
                chosen = [row]
                logits = [last]
        if decoding:
            logits.append(self.decode(decoding))
        return self.take(chosen + decoding, torch.cat(logits)) if logits else []

    def prefill(self, row, decoding):
        """Run a chunk of a row's prompt; returns the logits (1, v) after the prompt, or None if more chunks follow."""
        ids = row.request["ids"]
        start = len(row.ids) - 1
        runner = self.runner
        cache = self.caches[row.slot]
        progress.at("prefill from token", start)
        end = min(start + (SHORT_CHUNK if decoding or row.scores else runner.chunk_tokens), len(ids))
        tokens = torch.tensor([ids[start:end]])
        positions = torch.arange(start, end)[None]
        later = (positions.to(runner.device), cache, end) if start else (None, cache, None)
        select = None if row.scores else torch.tensor([end - start - 1], device=runner.device)
        splits = runner.choose_splits(1, end - start)
        logits = runner.model(tokens.to(runner.device), *later, select, splits)[0]
        if row.scores:
            full = runner.model.comm.gather_logits(logits)
            row.prompt_tokens += scored(ids[start + 1 : end + 1], full, row.request["logprobs"])
        row.ids = ids[: end + 1]
        return logits[-1:] if end == len(ids) else None

    def decode(self, decoding):
        """Run a decode step of these rows; returns their logits (len(decoding), v).

        They get the first slots. If the pass has more, other rows read their last token again. This changes only the
        states of linear attention, which are restored for a row in its prefill.
        """
        progress.at("decode step", self.n_passes)
        size = min(size for size in self.runners if size >= len(decoding))
        others = [row for row in self if row.slot < size and row not in decoding]
        for row in [row for row in decoding if row.slot >= size]:
            self.swap(row, others.pop())
        rows = sorted(self, key=lambda row: row.slot)[:size]
        runner = self.runners[size]
        caches = [self.caches[row.slot] for row in rows if row.prefilling]
        layers = [layer for cache in caches for layer in cache if not has_slots(layer)]
        states = [(state, state.clone()) for layer in layers for state in layer]
        logits = runner.decode(*last_tokens([row.ids for row in rows], runner.device))[:, 0]
        for state, before in states:
            state.copy_(before)
        return logits[[row.slot for row in decoding]]

    def swap(self, row, other):
        """Let two rows exchange their slots, with what the cache has of them."""
        n = max(len(row.ids), len(other.ids))
        places = (self.caches[row.slot], self.caches[other.slot])
        for a, b in zip(*map(itertools.chain.from_iterable, places), strict=True):
            if a.dim() == 4:  # keys or values, of which only the first are in use; otherwise a state
                a = a[:, :, :n]
                b = b[:, :, :n]
            before = a.clone()
            a.copy_(b)
            b.copy_(before)
        row.slot, other.slot = other.slot, row.slot

    def take(self, rows, logits):
        """Sample a token for each of the rows from its logits (len(rows), v); returns a list as step does."""
        comm = self.runner.model.comm
        taken = []
        ids = sample_rows([row.sampler for row in rows], self.adjusted(rows, logits), comm).tolist()
        places = [i for i, row in enumerate(rows) if row.request["logprobs"] is not None]
        full = dict(zip(places, comm.gather_logits(logits[places]), strict=True)) if places else {}
        for i, row in enumerate(rows):
            token = Token(ids[i])
            if i in full:
                [token] = scored([token.id], full[i][None], row.request["logprobs"])
            row.ids.append(token.id)
            finish = "stop" if token.id in row.end_ids else "length" if row.n_new >= row.request["max_tokens"] else None
            if token.id < 0:
                finish = "error"
                row.ids = [0]
                for tensor in itertools.chain(*self.caches[row.slot]):
                    tensor.zero_()  # even masked, a NaN would reach the next request
            elif row.seen is not None:
                row.seen[token.id] = True
            if finish:
                row.request = None
                row.used = self.n_passes
            taken.append((self.index(row), token, finish, row.prompt_tokens, row.cached_tokens))
            row.prompt_tokens = []
            row.cached_tokens = 0
        return taken

    def adjusted(self, rows, logits):
        """Return the local logits (len(rows), v) from which tokens are drawn.

        repetition_penalty: of ids that the prompt or the answer has, positive logits are divided by it and negative
        ones are multiplied. Ids that would end an answer too early get the least logit.
        """
        first_id = self.runner.model.comm.local_logits(logits)[1]
        v = logits.shape[-1]
        penalized = [i for i, row in enumerate(rows) if row.seen is not None]
        early = [i for i, row in enumerate(rows) if row.n_new < row.request["min_tokens"]]
        if penalized or early:
            logits = logits.float().clone()
        if penalized:
            seen = torch.stack([rows[i].seen[first_id : first_id + v] for i in penalized])
            penalty = torch.tensor([[rows[i].request["repetition_penalty"]] for i in penalized], device=logits.device)
            some = logits[penalized]
            logits[penalized] = some.where(~seen, torch.where(some > 0, some / penalty, some * penalty))
        for i in early:
            ends = {*self.eos_ids, *rows[i].request["stop_token_ids"]}  # also those that are ignored
            logits[i, [end - first_id for end in ends if 0 <= end - first_id < v]] = torch.finfo(logits.dtype).min
        return logits
