"""Continuous batching over a static cache. A request has a row until it ends, and all rows decode in one pass.

A prompt is prefilled in chunks, one between two decode steps, so that a long prompt does not stop other streams.

All ranks make the same calls. Shape letters: model.py.
"""

import copy
import itertools
import os
from typing import NamedTuple

import torch

from ladder.decoding.batch import Sampler, last_tokens
from ladder.progress import progress

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
    """A row of the cache. All but the last token of `ids` are cached, even after its request has ended.

    request: None, or a dict of ids, max_tokens, sampling (the arguments of a Sampler), logprobs (for how many of the
    likeliest tokens in each place, or None) and echo (whether also for the prompt). During a prefill, `ids` is only as
    much of the prompt as the cache holds, and one more.
    """

    def __init__(self, runner, row):
        self.ids, self.request, self.used = [0], None, 0  # used: the pass in which a request last began or ended
        self.runner = copy.copy(runner)  # of this row alone
        self.runner.cache = [(k[row : row + 1], v[row : row + 1]) for k, v in runner.cache]

    def cached(self, ids):
        """Return how many of a prompt's first tokens are cached; 0 with linear attention."""
        has_states = self.runner.model.config.linear_layers  # they cannot go back to where the prompts differ
        return 0 if has_states else len(os.path.commonprefix([self.ids[:-1], ids[:-1]]))

    prefilling = property(lambda self: self.request and len(self.ids) <= len(self.request["ids"]))


class Rows(list):
    """The Rows of a Runner's cache."""

    def __init__(self, runner, eos_ids):
        super().__init__(Row(runner, row) for row in range(len(runner.cache[0][0])))
        self.runner, self.eos_ids, self.greedy, self.passes = runner, eos_ids, Sampler(0), 0

    busy = property(lambda self: [row for row in self if row.request])

    def start(self, number, request):
        """Begin a request in a free row."""
        row, ids = self[number], request["ids"]
        row.scores = request["echo"] and request["logprobs"] is not None
        row.cached_tokens, row.prompt_tokens = (0, [Token(ids[0])]) if row.scores else (row.cached(ids), [])
        row.ids, row.request, row.used = ids[: row.cached_tokens + 1], request, self.passes
        row.sampler = Sampler(*request["sampling"], self.runner.device)

    def step(self):
        """Run a chunk of the oldest prompt that is not all in the cache, if any, and a decode step of the other rows.

        Returns a list of (number of a row, its new Token, why its request ends: "stop", "length", "error" or None, the
        Tokens of its prompt, how many tokens were cached). With any Token but the first, and if the request does not
        ask for them, the Tokens of the prompt are []; the number is 0 after the first Token.
        """
        self.passes += 1
        prefilling, decoding = [row for row in self if row.prefilling], [row for row in self.busy if not row.prefilling]
        taken = self.prefill(min(prefilling, key=lambda row: row.used), decoding) if prefilling else []
        return taken + self.decode(decoding) if decoding else taken

    def prefill(self, row, decoding):
        """Run a chunk of a row's prompt; returns a list as step does."""
        ids, start, runner = row.request["ids"], len(row.ids) - 1, self.runner
        progress.at("prefill from token", start)
        end = min(start + (SHORT_CHUNK if decoding or row.scores else runner.chunk_tokens), len(ids))
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
        """Run a decode step; returns a list as step does.

        On a CPU, a single row decodes as a batch of one. Rows that do not decode read their last token again. This
        changes only the states of linear attention, which are restored for a row in its prefill.
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
        """Sample a token for the chosen rows from the logits (len(rows), v) of `rows`; returns a list as step does."""
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
                    tensor.zero_()  # even masked, a NaN would reach the next request
            if finish:
                row.request, row.used = None, self.passes
            taken.append((self.index(row), token, finish, row.prompt_tokens, row.cached_tokens))
            row.prompt_tokens, row.cached_tokens = [], 0
        return taken
