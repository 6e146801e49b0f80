"""Speculative decoding: a draft proposes the next few tokens of each row, and one pass of the model verifies them all.

That pass costs one set of all-reduces, however many of the proposals stand; sampling.py says which do. A draft is a
smaller model, the model's own weights in another wiring, or the text itself.

Shape letters: B batch, V vocabulary.
"""

import argparse
import copy
import os.path
import sys
from collections import Counter
from typing import NamedTuple

import torch

from formats import checkpoint
from formats.tokenizer import load_tokenizer
from measure.timing import between, mark
from model import Config, InputError, rewired
from runtime import cli

COUNTS = 0, 1, 2, 3, 7  # that Auto chooses from; each is a graph to compile
USUAL = 3  # without --speculate
NGRAM = 3, 2  # tokens that Ngrams looks for, the longer first

# ---------------------------------------------------------------------------------------------------------------------
# Drafts


class Draft:
    """What proposes tokens, and what came of them in this generation.

    control: Fixed or Auto. runner: a Runner of generate.py, of the model that proposes, or None. drafted: proposals of
    a row. accepted: {number of them that stood: how often}, in each pass and row with any. seconds: of proposing.
    """

    def __init__(self, control, runner=None):
        self.control, self.runner = control, runner

    def begin(self, tokens, lengths, chunk, known=0):
        """A generation begins; the arguments are Runner.prefill's."""
        self.drafted, self.accepted, self.seconds = 0, Counter(), 0.0

    def propose(self, count, texts, done, sample):
        """(ids (B, count), what they were drawn from (B, count, V) or None; [whether a row has any]), or None.

        texts: the tokens of each row so far. done: which rows need no more. sample: a Sampler.
        """
        raise NotImplementedError

    @torch.inference_mode()
    def step(self, runner, texts, done, sample):
        """[new ids of each row] of one pass of the model, with proposals where there are any."""
        count, start = self.control.choose(), mark(runner.device)
        found = self.propose(count, texts, done, sample) if count else None
        end = mark(runner.device)
        new, stand = runner.step(texts, sample, found and found[:2])
        self.seconds += between(start, end)  # the device is beyond both
        if found:
            tried = [n for n, d, has in zip(stand, done, found[2], strict=True) if has and not d]
            self.control.note(count, tried)
            self.drafted += count
            self.accepted.update(tried)
        return new


class Ngrams(Draft):
    """Prompt lookup: what followed the last few tokens when they stood in the text before."""

    def begin(self, tokens, lengths, chunk, known=0):
        super().begin(tokens, lengths, chunk, known)
        self.index = [{} for _ in lengths]  # of each row: where the text went on behind some tokens, the last time
        self.indexed = [0] * len(lengths)

    def propose(self, count, texts, done, sample):
        found = [None if done[row] else self._lookup(row, text, count) for row, text in enumerate(texts)]
        if not any(found):
            return None
        ids = torch.tensor([row or [0] * count for row in found], device=sample.device)
        return ids, None, [row is not None for row in found]

    def _lookup(self, row, text, count):
        index = self.index[row]
        for end in range(self.indexed[row], len(text)):
            index.update({tuple(text[end - n : end]): end for n in NGRAM if n <= end})
        self.indexed[row] = len(text)
        for n in NGRAM:
            if start := index.get(tuple(text[-n:])):
                return (text[start:] * count)[:count]  # where it ends too early, once more
        return None


class ModelDraft(Draft):
    """A model that proposes one token after another."""

    def propose(self, count, texts, done, sample):
        positions = torch.tensor([len(text) - 1 for text in texts], device=sample.device)
        logits, longest, ids, q = self.read(texts, sample.device), max(map(len, texts)), [], []
        for i in range(count):
            if i:
                logits = self.runner.decode(ids[-1][:, None], positions + i, longest + i)
            token, p = sample.propose(logits[:, -1])
            ids.append(token)
            q.append(p)
        return torch.stack(ids, 1), None if q[0] is None else torch.stack(q, 1), [True] * len(texts)

    def read(self, texts, device):
        """Logits (B, S, V) whose last ones come after the texts."""
        raise NotImplementedError


class Rewired(ModelDraft):
    """The model's own weights in another wiring.

    Of the model's own cache, too. The keys and values that it finds there are the model's, not those that its own
    wiring would have made, but for those of its last proposals, which the verification overwrites.
    """

    def read(self, texts, device):
        return self.runner.read(texts)


class SmallModel(ModelDraft):
    """A smaller model, whole on each rank, with a cache of its own."""

    held = ()  # of each row: tokens that are in the cache; a chat's next generation begins with these

    def begin(self, tokens, lengths, chunk, known=0):
        super().begin(tokens, lengths, chunk, known)
        self.prompts = tokens, lengths, chunk, min([known, *self.held])
        self.held = [self.prompts[-1]] * len(lengths)
        self.last = [[] for _ in lengths]  # the proposals that are in the cache

    def propose(self, count, texts, done, sample):
        if self.prompts:  # only now: a request may end before anything is proposed
            self.runner.prefill(*self.prompts)
            self.held, self.prompts = self.prompts[1].tolist(), None
        for row, text in enumerate(texts):  # some of the last ones stood
            self.held[row] += len(os.path.commonprefix([self.last[row], text[self.held[row] :]]))
        found = super().propose(count, texts, done, sample)
        self.last = found[0][:, : count - 1].tolist()  # nobody read the very last one
        return found

    def read(self, texts, device):
        """Two tokens at a time, because as many are new where all proposals stood: so one graph does."""
        while True:
            starts = [min(held, len(text) - 2) for held, text in zip(self.held, texts, strict=True)]
            pairs = [text[i : i + 2] for i, text in zip(starts, texts, strict=True)]
            tokens, positions = (torch.tensor(numbers, device=device) for numbers in (pairs, starts))
            logits = self.runner.decode(tokens, positions, max(starts) + 2)
            self.held = [i + 2 for i in starts]
            if all(held == len(text) for held, text in zip(self.held, texts, strict=True)):
                return logits


# ---------------------------------------------------------------------------------------------------------------------
# The number of proposals


def expected(rate, count):
    """The mean number of ids that a pass yields in a row, if each of so many proposals stands with probability `rate`
    where those before it do."""
    return sum(rate**i for i in range(count + 1))


class Fixed:
    """As many proposals in each pass."""

    def __init__(self, count):
        self.counts = (count,)

    def choose(self):
        return self.counts[0]

    def note(self, count, stood):
        pass


class Auto:
    """As many as yield most ids a second, by what stood lately, and by what passes take.

    What it saw fades with each pass, until it hopes again: the text may have changed. seconds: {count: those of a
    pass}, as warm_up of generate.py measures them, alike on all ranks.
    """

    counts, seconds = COUNTS, None
    HOPE = 0.9  # the rate that it begins with, as if it had seen one proposal
    MEMORY = 0.98  # of what it saw, what is left a pass later

    def __init__(self):
        self.stood = self.tried = 0.0

    def choose(self):
        self.stood, self.tried = self.MEMORY * self.stood, self.MEMORY * self.tried
        rate = (self.stood + self.HOPE) / (self.tried + 1)
        return max(self.seconds, key=lambda count: expected(rate, count) / self.seconds[count])

    def note(self, count, stood):
        """stood: of `count` proposals, in each row. Those behind the first that did not stand were not tried."""
        if stood:
            self.stood += sum(stood) / len(stood)
            self.tried += sum(min(n + 1, count) for n in stood) / len(stood)


def control_of(count):
    """Of a number, or of "auto"."""
    return Auto() if count == "auto" else Fixed(count)


# ---------------------------------------------------------------------------------------------------------------------
# The flags


def add_flags(parser):
    g = parser.add_argument_group("speculation", "several tokens for one set of all-reduces: docs/speculation.md")
    g.add_argument(
        "--draft",
        metavar="DIR|ngram|wiring:NAME",
        help="what proposes tokens: a smaller checkpoint, the text so far, or these weights in another wiring, e.g. "
        "wiring:spd, wiring:ladder:8, wiring:desync:4",
    )
    usual = f"tokens at a time (default: {USUAL})"
    g.add_argument("--speculate", type=number_of_proposals, metavar="K|auto", help=usual)


def number_of_proposals(text):
    """An argparse type."""
    try:
        return text if text == "auto" else cli.count(text)
    except argparse.ArgumentTypeError as e:
        raise argparse.ArgumentTypeError(f"{e}, nor auto") from None


def check_flags(args):
    """Raise InputError where flags do not go together; sets --speculate."""
    if args.draft is None and args.speculate is not None:
        raise InputError(f"--speculate {args.speculate} needs a --draft: DIR, ngram or wiring:NAME")
    wrong = [name for name in ("simulate_tp", "exposed", "profile") if args.draft is not None and getattr(args, name)]
    if wrong:
        raise InputError(f"--{wrong[0].replace('_', '-')} is of plain decode steps: it does not go with --draft")
    args.speculate = args.speculate or USUAL


class Source(NamedTuple):
    """What --draft names. config: None for n-grams. folder: None for the model's own weights."""

    name: str
    config: Config | None = None
    folder: str | None = None


def read(args, config, tokenizer, tp_size):
    """The Source of --draft for a model of this config, or None without the flag. Raises InputError."""
    text = args.draft
    if text is None:
        return None
    if args.speculate != "auto" and args.speculate >= config.max_seq_len:
        raise InputError(f"--speculate {args.speculate} goes beyond the context of {config.max_seq_len}")
    if text == "ngram":
        return Source(text)
    kind, colon, wiring = text.partition(":")
    if kind == "wiring" and colon:
        draft = _rewired(config, wiring)
        if tp_size == 1 and all(c.wiring == "standard" or c.kind.runs_standard for c in (config, draft)):
            print(f"on one rank {draft.wiring} is {config.wiring} itself: this draft only takes time", file=sys.stderr)
        return Source(text, draft)
    if not os.path.isdir(text):
        raise InputError(f"--draft {text!r} is no folder, nor is it ngram or wiring:NAME")
    draft = checkpoint.read_config(text)
    same = args.checkpoint and draft == checkpoint.read_config(args.checkpoint)  # else no need to read the weights
    if same and checkpoint.digest(text) == checkpoint.digest(args.checkpoint):
        raise InputError(f"--draft {text} is the checkpoint itself: give a smaller one, or wiring:NAME")
    check_vocabulary(draft, config, f"--draft {text}")
    theirs = load_tokenizer(text, draft.vocab_size)
    for i in range(0, draft.vocab_size, 1 + draft.vocab_size // 1000) if theirs and tokenizer else ():
        if theirs.decode([i]) != tokenizer.decode([i]):
            words = f"token {i} is {theirs.decode([i])!r}, and the model's {tokenizer.decode([i])!r}"
            raise InputError(f"--draft {text} has another vocabulary: {words}")
    return Source(checkpoint.name(text), draft, text)


def check_vocabulary(draft, config, name):
    """Raise InputError where two Configs have vocabularies of different sizes. name: what the draft is called."""
    if draft.vocab_size != config.vocab_size:
        sizes = f"{draft.vocab_size:,} tokens, and the model's {config.vocab_size:,}"
        raise InputError(f"{name} has another vocabulary, of {sizes}: give one of the same, or ngram")


def _rewired(config, text):
    """The config in the wiring that --draft wiring:TEXT names."""
    flag = f"--draft wiring:{text}"
    try:
        draft = rewired(config, text)
    except InputError as e:
        raise InputError(f"{flag}: {e}") from None
    pairs = zip(draft.wirings, config.wirings, strict=True)
    missing = {norm for drafts, own in pairs for norm in drafts.norms if norm not in own.norms}
    if missing:
        raise InputError(f"{flag} needs {min(missing)}, which {config.wiring} has not")
    if draft.function == config.function:
        raise InputError(f"{flag} is the wiring that the model runs in: name another")
    return draft


def rewire(model, config):
    """The model of the same weights in the wiring of another config."""
    model = copy.copy(model)
    model.config = config
    return model
