"""Continuous batching over a static cache: a request takes a row until it ends, and all rows decode in one pass.

A prompt is prefilled in passes, one between two decode steps, so that a long one does not stop the others' streams.

Every rank makes the same calls. Shape letters: model.py.
"""

import copy
import itertools
import os
from typing import NamedTuple

import torch

from ladder.decoding.batch import Sampler, last_tokens
from ladder.progress import progress

SHORT_PASS = 128  # tokens of a pass of a prefill while others wait for their next token, or if each gets its logits


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
    likeliest in each place, or None) and echo (whether also in the prompt). During its prefill `ids` is shorter.
    """

    def __init__(self, runner, row):
        self.ids, self.request, self.used = [0], None, 0  # used: in which pass a request last began or ended
        self.runner = copy.copy(runner)  # of this row alone
        self.runner.cache = [(k[row : row + 1], v[row : row + 1]) for k, v in runner.cache]

    def cached(self, ids):
        """Return how many tokens of a prompt, from its beginning, are cached; none in a model with linear attention."""
        whole = self.runner.model.config.linear_layers  # a state cannot go back to where the prompts part
        return 0 if whole else len(os.path.commonprefix([self.ids[:-1], ids[:-1]]))

    prefilling = property(lambda self: self.request and len(self.ids) <= len(self.request["ids"]))


class Rows(list):
    """The Rows of a Runner's cache."""

    def __init__(self, runner, eos_ids):
        super().__init__(Row(runner, row) for row in range(len(runner.cache[0][0])))
        self.runner, self.eos_ids, self.greedy, self.passes = runner, eos_ids, Sampler(0), 0

    busy = property(lambda self: [row for row in self if row.request])

    def start(self, number, request):
        """Begin a request in a row that is free."""
        row, ids = self[number], request["ids"]
        row.scores = request["echo"] and request["logprobs"] is not None
        row.cached_tokens, row.prompt_tokens = (0, [Token(ids[0])]) if row.scores else (row.cached(ids), [])
        row.ids, row.request, row.used = ids[: row.cached_tokens + 1], request, self.passes
        row.sampler = Sampler(*request["sampling"], self.runner.device)

    def step(self):
        """Run a pass of the prompt that came first, if any is not in the cache yet, and a decode step of other rows.

        Returns [(number of a row, Token, None or why its request ends: stop, length or error, with its first Token
        those of the prompt if its request asks for them, else [], and how many tokens were cached)].
        """
        self.passes += 1
        prefilling, decoding = [row for row in self if row.prefilling], [row for row in self.busy if not row.prefilling]
        taken = self.prefill(min(prefilling, key=lambda row: row.used), decoding) if prefilling else []
        return taken + self.decode(decoding) if decoding else taken

    def prefill(self, row, decoding):
        """Run a pass of a row's prompt; returns as step."""
        ids, start, runner = row.request["ids"], len(row.ids) - 1, self.runner
        progress.at("prefill from token", start)
        end = min(start + (SHORT_PASS if decoding or row.scores else runner.chunk_tokens), len(ids))
        tokens, positions = torch.tensor([ids[start:end]]), torch.arange(start, end)[None]
        later = (positions.to(runner.device), row.runner.cache, end) if start else (None, row.runner.cache, None)
        select = None if row.scores else torch.tensor([end - start - 1], device=runner.device)
        splits = runner.choose_splits(1, end - start)
        logits = runner.model(tokens.to(runner.device), *later, select, splits)[0]
        if row.scores:
            full = runner.model.comm.gather_logits(logits)
            row.prompt_tokens += scored(ids[start + 1 : end + 1], full, row.request["logprobs"])
        row.ids = ids[: end + 1]
        return self.take([row], logits[-1:], [row]) if end == len(ids) else []

    def decode(self, decoding):
        """Run a decode step; returns as step.

        On a CPU a row alone decodes as a batch of one. A row that does not decode reads its last token again, which
        changes only the states of linear attention: a prompt's are put back.
        """
        progress.at("decode step", self.passes)
        alone = len(decoding) == 1 and self.runner.device.type == "cpu"
        rows, runner = (decoding, decoding[0].runner) if alone else (self, self.runner)
        config, caches = runner.model.config, [row.runner.cache for row in rows if row.prefilling]
        linear = [i for i in range(len(runner.cache)) if i % config.n_layers in config.linear_layers]  # of each lane
        states = [(state, state.clone()) for cache in caches for i in linear for state in cache[i]]
        logits = runner.decode(*last_tokens([row.ids for row in rows], runner.device))[:, 0]
        for state, before in states:
            state.copy_(before)
        return self.take(rows, logits, decoding)

    def take(self, rows, logits, chosen):
        """Sample a token for the chosen of these rows from logits (len(rows), v); returns as step."""
        comm, taken = self.runner.model.comm, []
        ids = self.greedy(logits, comm).tolist() if any(not row.sampler.temperature for row in chosen) else None
        full = comm.gather_logits(logits) if any(row.request["logprobs"] is not None for row in chosen) else None
        for i, row in enumerate(rows):
            if row not in chosen:
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
            taken.append((self.index(row), token, finish, row.prompt_tokens, row.cached_tokens))
            row.prompt_tokens, row.cached_tokens = [], 0
        return taken
