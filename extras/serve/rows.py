"""Continuous batching over a static cache: a request takes a row until it ends, and all rows decode in one pass.

Every rank makes the same calls. Shape letters: model.py.
"""

import copy
import os
from typing import NamedTuple

import torch

from decoding.sampling import Sampler, last_tokens, pad
from runtime import place
from runtime.report import PASS_TOKENS

SCORED_TOKENS = 256  # of a prompt whose logits, of the whole vocabulary, are gathered at a time


class Token(NamedTuple):
    """A token and, where its request asks for them, its logprob and {id: logprob} of the likeliest in its place."""

    id: int  # -1 where the logits were not finite
    logprob: float | None = None
    top: dict | None = None


def scored(ids, logits, n):
    """Return the Tokens of ids, with the n likeliest in their places; logits (len(ids), V)."""
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(-1, torch.tensor(ids, device=logits.device).clamp(min=0)[:, None])[:, 0].tolist()
    values, order = (x.tolist() for x in logprobs.topk(n))
    return [Token(i, p, dict(zip(*top, strict=True))) for i, p, *top in zip(ids, own, order, values, strict=True)]


class Row:
    """A row of the cache. All but the last token of `text` is cached, also when its request has ended.

    request: None, or a dict of ids, max_tokens, sampling (the arguments of a Sampler), logprobs (how many of the
    likeliest in each place, or None) and echo (whether also in the prompt).
    """

    def __init__(self, runner, row):
        self.text, self.request, self.used = [0], None, 0  # used: in which pass it was last
        self.runner = copy.copy(runner)  # of this row alone
        self.runner.cache = [(k[row : row + 1], v[row : row + 1]) for k, v in runner.cache]

    def cached(self, ids):
        """Return how many tokens of a prompt, from its beginning, are cached; none in a model with linear attention."""
        whole = self.runner.model.config.linear_layers  # a state cannot go back to where the prompts part
        return 0 if whole else len(os.path.commonprefix([self.text[:-1], ids[:-1]]))

    def clear(self):
        for tensor in (tensor for layer in self.runner.cache for tensor in layer):
            tensor.zero_()

    def prefill(self, request):
        """Take a request; returns (logits (1, v) after its prompt, the prompt's Tokens if asked for, else [])."""
        ids, runner, n, tokens = request["ids"], self.runner, request["logprobs"], []
        padded, cached = pad([ids], runner.device), self.cached(ids)
        self.text, self.request = list(ids), request
        self.sampler = Sampler(*request["sampling"], runner.device)
        if n is None or not request["echo"]:
            return runner.prefill(*padded, PASS_TOKENS, cached), []
        self.clear()  # with positions, states of linear attention go on
        for start in range(0, len(ids), SCORED_TOKENS):
            place.at("prefill from token", start)
            piece, following = padded[0][:, start : start + SCORED_TOKENS], ids[start + 1 : start + 1 + SCORED_TOKENS]
            positions = torch.arange(start, start + piece.shape[1], device=runner.device)[None]
            logits = runner.model(piece, positions, runner.cache, start + piece.shape[1])[0]
            tokens += scored(following, runner.model.comm.gather_logits(logits)[: len(following)], n)
        return logits[-1:], [Token(ids[0]), *tokens]


class Rows(list):
    """The Rows of a Runner's cache."""

    def __init__(self, runner, eos_ids):
        super().__init__(Row(runner, row) for row in range(len(runner.cache[0][0])))
        self.runner, self.eos_ids, self.greedy, self.passes = runner, eos_ids, Sampler(0), 0

    busy = property(lambda self: [row for row in self if row.request])

    def start(self, number, request):
        """Prefill a request into a row that is free; returns (as step, the prompt's Tokens, how many were cached)."""
        cached = self[number].cached(request["ids"])
        logits, tokens = self[number].prefill(request)
        return self.take([self[number]], logits), tokens, 0 if tokens else cached

    def step(self):
        """Run a pass; returns [(number of a row, Token, None or why its request ends: stop, length or error)].

        On a CPU a row alone decodes as a batch of one. A row without a request reads its last token again.
        """
        self.passes += 1
        place.at("decode step", self.passes)
        alone = len(self.busy) == 1 and self.runner.device.type == "cpu"
        rows, runner = (self.busy, self.busy[0].runner) if alone else (self, self.runner)
        return self.take(rows, runner.decode(*last_tokens([row.text for row in rows], runner.device))[:, 0])

    def take(self, rows, logits):
        """Sample from logits (len(rows), v)."""
        comm, taken = self.runner.model.comm, []
        ids = self.greedy(logits, comm).tolist() if any(not row.sampler.temperature for row in self.busy) else None
        full = comm.gather_logits(logits) if any(row.request["logprobs"] is not None for row in self.busy) else None
        for i, row in enumerate(rows):
            if not row.request:
                continue
            token = Token(int(row.sampler(logits[i : i + 1], comm)) if row.sampler.temperature else ids[i])
            if row.request["logprobs"] is not None:
                [token] = scored([token.id], full[i : i + 1], row.request["logprobs"])
            row.text.append(token.id)
            ended = len(row.text) - len(row.request["ids"]) >= row.request["max_tokens"]
            finish = "stop" if token.id in self.eos_ids else "length" if ended else None
            if token.id < 0:
                finish, row.text = "error", [0]
                row.clear()  # a NaN, masked or not, would reach the next request
            if finish:
                row.request, row.used = None, self.passes
            taken.append((self.index(row), token, finish))
        return taken
