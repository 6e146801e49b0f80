"""Continuous batching over a static cache: a request takes a row until it ends, and all rows decode in one pass.

Every rank makes the same calls. Shape letters: model.py.
"""

import copy
import itertools
import os
from typing import NamedTuple

import torch

from ladder.decoding.batch import Sampler, last_tokens, pad
from ladder.progress import progress

SCORED_TOKENS = 256  # of a prompt whose logits, of the whole vocabulary, are gathered at a time


class Token(NamedTuple):
    """A token and, where its request asks for them, its logprob and {id: logprob} of the likeliest in its place."""

    id: int  # -1 where the logits were not finite
    logprob: float | None = None
    top: dict | None = None


def scored(ids, logits, n):
    """Return the Tokens of ids, with the n likeliest in their places; logits (len(ids) or one more, V)."""
    logprobs = logits[: len(ids)].float().log_softmax(-1)
    own = logprobs.gather(-1, torch.tensor(ids, device=logits.device).clamp(min=0)[:, None])[:, 0].tolist()
    values, order = (x.tolist() for x in logprobs.topk(n))
    return [Token(i, p, dict(zip(*top, strict=True))) for i, p, *top in zip(ids, own, order, values, strict=True)]


class Row:
    """A row of the cache. All but the last token of `ids` is cached, also when its request has ended.

    request: None, or a dict of ids, max_tokens, sampling (the arguments of a Sampler), logprobs (how many of the
    likeliest in each place, or None) and echo (whether also in the prompt).
    """

    def __init__(self, runner, row):
        self.ids, self.request, self.used = [0], None, 0  # used: in which pass it was last
        self.runner = copy.copy(runner)  # of this row alone
        self.runner.cache = [(k[row : row + 1], v[row : row + 1]) for k, v in runner.cache]

    def cached(self, ids):
        """Return how many tokens of a prompt, from its beginning, are cached; none in a model with linear attention."""
        whole = self.runner.model.config.linear_layers  # a state cannot go back to where the prompts part
        return 0 if whole else len(os.path.commonprefix([self.ids[:-1], ids[:-1]]))


class Rows(list):
    """The Rows of a Runner's cache."""

    def __init__(self, runner, eos_ids):
        super().__init__(Row(runner, row) for row in range(len(runner.cache[0][0])))
        self.runner, self.eos_ids, self.greedy, self.passes = runner, eos_ids, Sampler(0), 0

    busy = property(lambda self: [row for row in self if row.request])

    def start(self, number, request):
        """Prefill a request into a row that is free; returns (as step, the prompt's Tokens if it asks for them, else
        [], how many were cached)."""
        row, ids, n, scored_tokens = self[number], request["ids"], request["logprobs"], []
        padded, cached = pad([ids], self.runner.device), row.cached(ids)
        row.ids, row.request, row.sampler = list(ids), request, Sampler(*request["sampling"], self.runner.device)
        if n is None or not request["echo"]:
            return self.take([row], row.runner.prefill(*padded, cached)), [], cached
        for start in range(0, len(ids), SCORED_TOKENS):
            progress.at("prefill from token", start)
            end = min(start + SCORED_TOKENS, len(ids))
            positions = torch.arange(start, end, device=self.runner.device)[None] if start else None
            logits = self.runner.model(padded[0][:, start:end], positions, row.runner.cache, end)[0]
            scored_tokens += scored(ids[start + 1 : end + 1], self.runner.model.comm.gather_logits(logits), n)
        return self.take([row], logits[-1:]), [Token(ids[0]), *scored_tokens], 0

    def step(self):
        """Run a pass; returns [(number of a row, Token, None or why its request ends: stop, length or error)].

        On a CPU a row alone decodes as a batch of one. A row without a request reads its last token again.
        """
        self.passes += 1
        progress.at("decode step", self.passes)
        alone = len(self.busy) == 1 and self.runner.device.type == "cpu"
        rows, runner = (self.busy, self.busy[0].runner) if alone else (self, self.runner)
        return self.take(rows, runner.decode(*last_tokens([row.ids for row in rows], runner.device))[:, 0])

    def take(self, rows, logits):
        """Sample a token from logits (len(rows), v) for each row that has a request; returns as step."""
        comm, taken = self.runner.model.comm, []
        ids = self.greedy(logits, comm).tolist() if any(not row.sampler.temperature for row in self.busy) else None
        full = comm.gather_logits(logits) if any(row.request["logprobs"] is not None for row in self.busy) else None
        for i, row in enumerate(rows):
            if not row.request:
                continue
            token = Token(int(row.sampler(logits[i : i + 1], comm)) if row.sampler.temperature else ids[i])
            if row.request["logprobs"] is not None:
                [token] = scored([token.id], full[i : i + 1], row.request["logprobs"])
            row.ids.append(token.id)
            ended = len(row.ids) - len(row.request["ids"]) >= row.request["max_tokens"]
            finish = "stop" if token.id in self.eos_ids else "length" if ended else None
            if token.id < 0:
                finish, row.ids = "error", [0]
                for tensor in itertools.chain(*row.runner.cache):
                    tensor.zero_()  # a NaN, masked or not, would reach the next request
            if finish:
                row.request, row.used = None, self.passes
            taken.append((self.index(row), token, finish))
        return taken
