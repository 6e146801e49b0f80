"""Speculative decoding: a draft proposes the next K tokens of each row, and one pass of the model verifies them all.

What is accepted is what the model would have said: its own tokens if greedy, else samples of its very distribution
(arXiv 2211.17192). A pass costs one set of all-reduces, however many of its tokens are accepted.

A draft is a smaller model, the model's own weights in another wiring, or the text itself.

Shape letters: B batch, K proposals of a row in a pass, V vocabulary.
"""

import copy
import os.path
import re
import sys
from collections import Counter
from typing import NamedTuple

import torch
import torch.nn.functional as F

import checkpoint
import launch
from measure.timing import between, mark
from model import WIRINGS, Config, InputError
from tokenizer import load_tokenizer

COUNTS = 0, 1, 3, 7  # that Auto chooses from: passes of 1, 2, 4 and 8 tokens, as few_rows.cpp takes rows
USUAL = 3  # without --speculate
NGRAM = 3, 2  # tokens that Ngrams looks for, the longer first

# ---------------------------------------------------------------------------------------------------------------------
# Verification


def accept(sample, logits, proposed, q):
    """What a pass yields: ids (B, K + 1), and how many (B,) of each row's proposals stand; one more of its ids counts.

    sample: a Sampler of generate.py. logits (B, K + 1, V): the model's, after the last token and after each proposal.
    proposed (B, K): drawn from q (B, K, V), or certain where that is None. An id is -1 where its logits are not finite.

    A proposal d stands with probability min(1, p(d) / q(d)), if those before it do. The first that does not is replaced
    by a draw from max(0, p - q), and behind the last one comes a draw from p: so each id is distributed as p.
    """
    p, good = sample.probabilities(logits)
    (B, K), d, rows = proposed.shape, proposed[..., None], torch.arange(len(p), device=p.device)
    q = F.one_hot(proposed, p.shape[-1]) if q is None else q
    stands = sample.uniform(B, K) * q.gather(-1, d)[..., 0] < p[:, :K].gather(-1, d)[..., 0]
    count = stands.long().cumprod(-1).sum(-1)  # (B,)
    rest = (p - F.pad(q, (0, 0, 0, 1)))[rows, count].clamp_(min=0)  # behind the last proposal q is zero
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p[rows, count])  # p was q, but for rounding
    ids = torch.cat((proposed, proposed[:, :1]), 1)
    ids[rows, count] = sample.draw(rest)
    return ids.where(good, -1), count


@torch.inference_mode()
def decode_pass(runner, texts, sample, proposed=None):
    """([new ids of each row], [how many of them are proposals that stand] or None) behind the texts.

    runner: a Runner of generate.py, in whose cache all tokens of the texts but the last are. proposed: (ids (B, K), q)
    as accept takes them, or None for a plain step.
    """
    last = torch.tensor([text[-1:] for text in texts], device=runner.device)
    positions = torch.tensor([len(text) - 1 for text in texts], device=runner.device)
    longest = max(map(len, texts))
    if proposed is None:
        return sample(runner.decode(last, positions, longest)[:, 0])[:, None].tolist(), None
    ids, q = proposed
    logits = runner.decode(torch.cat((last, ids), 1), positions, longest + ids.shape[1])
    ids, stand = (found.tolist() for found in accept(sample, logits, ids, q))
    return [row[: n + 1] for row, n in zip(ids, stand, strict=True)], stand


def try_pass(runner, texts, sample, draft=None, count=0):
    """A pass with so many proposals, be there any or not: to warm up, and to time it."""
    proposed = None
    if count:
        none = torch.zeros(len(texts), count, dtype=torch.long, device=runner.device), None
        proposed = draft.propose(count, texts, [False] * len(texts), sample) or none
    decode_pass(runner, texts, sample, proposed)


# ---------------------------------------------------------------------------------------------------------------------
# Drafts


class Draft:
    """What proposes tokens, and what came of them in this generation.

    control: Fixed or Auto. runner: a Runner of generate.py, of the model that proposes, or None. drafted: proposals of
    a row. accepted: {number of them that stood: how often}, in each pass with any and each row that was not done.
    seconds: of proposing.
    """

    def __init__(self, control, runner=None):
        self.control, self.runner = control, runner

    def prefill(self, tokens, lengths, chunk, known=0):
        """A generation begins; the arguments are Runner.prefill's."""
        self.drafted, self.accepted, self.seconds = 0, Counter(), 0.0

    def propose(self, count, texts, done, sample):
        """(ids (B, count), what they were drawn from (B, count, V) or None), or None without any.

        texts: the tokens of each row so far. done: which rows need no more.
        """
        raise NotImplementedError

    @torch.inference_mode()
    def step(self, runner, texts, done, sample):
        """[new ids of each row] of one pass of the model, with proposals where there are any."""
        count, start = self.control.choose(), mark(runner.device)
        proposed = self.propose(count, texts, done, sample) if count else None
        end = mark(runner.device)
        new, stand = decode_pass(runner, texts, sample, proposed)
        self.seconds += between(start, end)  # the device is beyond both
        if proposed is not None:
            live = [n for n, d in zip(stand, done, strict=True) if not d]
            self.control.note(count, live)
            self.drafted += count
            self.accepted.update(live)
        return new


class Ngrams(Draft):
    """Prompt lookup: what followed the last few tokens when they stood in the text before."""

    def prefill(self, tokens, lengths, chunk, known=0):
        super().prefill(tokens, lengths, chunk, known)
        self.index = [{} for _ in lengths]  # of each row: where the text went on behind some tokens, the last time
        self.indexed = [0] * len(lengths)

    def propose(self, count, texts, done, sample):
        found = [None if done[row] else self._lookup(row, text, count) for row, text in enumerate(texts)]
        if not any(found):
            return None
        found = [ids or text[-1:] * count for ids, text in zip(found, texts, strict=True)]
        return torch.tensor(found, device=sample.device), None

    def _lookup(self, row, text, count):
        index = self.index[row]
        for end in range(self.indexed[row], len(text)):
            index.update({tuple(text[end - n : end]): end for n in NGRAM if n <= end})
        self.indexed[row] = len(text)
        for n in NGRAM:
            if start := index.get(tuple(text[-n:])):
                return (text[start:] * count)[:count]  # where it ends too early, once more
        return None


class Rewired(Draft):
    """The model's own weights in another wiring.

    Of the model's own cache, too: all that it reads is verified, but for its own last proposals, which the verification
    overwrites.
    """

    def propose(self, count, texts, done, sample):
        positions = torch.tensor([len(text) - 1 for text in texts], device=sample.device)
        logits = self.first(texts, positions, sample)
        proposed, q = [], []
        for i in range(count):
            if i:
                longest = max(map(len, texts)) + i
                logits = self.runner.decode(proposed[-1], positions + i, longest)
            q.append(sample.probabilities(logits[:, -1])[0])
            proposed.append(sample.draw(q[-1])[:, None])
        return torch.cat(proposed, 1), torch.stack(q, 1)

    def first(self, texts, positions, sample):
        """Logits (B, 1, V) after the texts."""
        last = torch.tensor([text[-1:] for text in texts], device=sample.device)
        return self.runner.decode(last, positions, max(map(len, texts)))


class SmallModel(Rewired):
    """A smaller model, whole on each rank, with a cache of its own."""

    def prefill(self, tokens, lengths, chunk, known=0):
        super().prefill(tokens, lengths, chunk, known)
        held = min([known, *getattr(self, "held", [])])
        self.runner.prefill(tokens, lengths, chunk, held)
        self.held, self.proposed = lengths.tolist(), [[] for _ in lengths]  # tokens that are in the cache; the last

    def propose(self, count, texts, done, sample):
        for row, (text, mine) in enumerate(zip(texts, self.proposed, strict=True)):  # of these some stand
            self.held[row] += len(os.path.commonprefix([mine, text[self.held[row] :]]))
        proposed, q = super().propose(count, texts, done, sample)
        self.proposed = proposed[:, : count - 1].tolist()  # the last one was only drawn
        return proposed, q

    def first(self, texts, positions, sample):
        """Two tokens at a time, because as many are new where all proposals were accepted: so one graph does."""
        while True:
            starts = [min(held, len(text) - 2) for held, text in zip(self.held, texts, strict=True)]
            pairs = torch.tensor([text[i : i + 2] for i, text in zip(starts, texts, strict=True)], device=sample.device)
            logits = self.runner.decode(pairs, torch.tensor(starts, device=sample.device), max(starts) + 2)
            self.held = [i + 2 for i in starts]
            if all(held == len(text) for held, text in zip(self.held, texts, strict=True)):
                return logits


# ---------------------------------------------------------------------------------------------------------------------
# The number of proposals


def expected(rate, count):
    """The mean number of ids that a pass yields, of so many proposals that stand with probability `rate` each."""
    return sum(rate**i for i in range(count + 1))


class Fixed:
    """As many proposals in each pass. seconds: see Auto."""

    def __init__(self, count):
        self.counts, self.seconds = (count,), {}

    def choose(self):
        return self.counts[0]

    def note(self, count, accepted):
        pass


class Auto:
    """As many as yield most ids a second, by what was accepted lately, and by what passes take.

    Where that is none, it asks for one every now and then: the text may have changed.
    """

    counts = COUNTS
    MEMORY, PROBE = 0.95, 32  # of a pass, what is left at the next one; passes

    def __init__(self):
        self.seconds = {}  # {count: seconds of a pass}, which Runner.warm_up measures
        self.accepted, self.tried, self.idle = 1.0, 1.5, 0

    def choose(self):
        if not self.seconds:
            return 1
        rate = self.accepted / self.tried
        best = max(self.seconds, key=lambda count: expected(rate, count) / self.seconds[count])
        self.idle = 0 if best else self.idle + 1
        return best or int(self.idle % self.PROBE == 0)

    def note(self, count, accepted):
        """accepted: of each live row, of `count` proposals. Those behind the first that was not have not been tried."""
        self.accepted = self.MEMORY * self.accepted + sum(accepted)
        self.tried = self.MEMORY * self.tried + sum(min(n + 1, count) for n in accepted)


def control(count):
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
        "wiring:spd, wiring:hybrid:8, wiring:hybrid:3,5,7, wiring:desync:4",
    )
    usual = f"tokens at a time (default: {USUAL})"
    g.add_argument("--speculate", type=number_of_proposals, metavar="K|auto", help=usual)


def number_of_proposals(text):
    """An argparse type."""
    return text if text == "auto" else launch.count(text)


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
        if tp_size == 1 and all(c.wiring == "standard" or WIRINGS[c.wiring].standard_alone for c in (config, draft)):
            print(f"on one rank {draft.wiring} is {config.wiring} itself: this draft only takes time", file=sys.stderr)
        return Source(text, draft)
    draft = checkpoint.read_config(text)
    if args.checkpoint and checkpoint.digest(text) == checkpoint.digest(args.checkpoint):
        raise InputError(f"--draft {text} is the checkpoint itself: give a smaller one, or wiring:NAME")
    if draft.vocab_size != config.vocab_size:
        sizes = f"{draft.vocab_size:,} tokens, and the model's {config.vocab_size:,}"
        raise InputError(f"--draft {text} has another vocabulary, of {sizes}: give one of the same, or ngram")
    theirs = load_tokenizer(text, draft.vocab_size)
    for i in range(0, draft.vocab_size, 1 + draft.vocab_size // 1000) if theirs and tokenizer else ():
        if theirs.decode([i]) != tokenizer.decode([i]):
            words = f"token {i} is {theirs.decode([i])!r}, and the model's {tokenizer.decode([i])!r}"
            raise InputError(f"--draft {text} has another vocabulary: {words}")
    return Source(checkpoint.name(text), draft, text)


def _rewired(config, text):
    """The config in the wiring that --draft wiring:TEXT names."""
    name, _, parameter = text.partition(":")
    flag = f"--draft wiring:{text}"
    known = WIRINGS.get(name)
    if known is None:
        raise InputError(f"{flag} is of no known wiring; known: {', '.join(WIRINGS)}")
    if known.parameter is None and parameter:
        raise InputError(f"{flag}: {name} takes no number" + f", but hybrid:{parameter} does" * (name == "ladder"))
    listed = known.parameter == "ladder_layers" and re.fullmatch("[0-9]{1,9}(,[0-9]{1,9})*,?", parameter)
    if (parameter or not (known.optional or known.parameter is None)) and not (
        listed or re.fullmatch("[1-9][0-9]{0,8}", parameter)
    ):
        raise InputError(f"{flag} takes its {known.parameter} as a number: wiring:{name}:2")
    try:
        draft = launch.rewired(config, name, **({known.parameter: launch.read_layers(parameter)} if parameter else {}))
    except InputError as e:
        raise InputError(f"{flag}: {e}") from None
    missing = {
        norm for i in range(config.n_layers) for norm in set(draft.wiring_of(i).norms) - set(config.wiring_of(i).norms)
    }
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
