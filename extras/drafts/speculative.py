"""Speculative decoding: a draft proposes the next tokens of each row, and one pass of the model verifies them all.

That pass costs one set of all-reduces, however many proposals accept() takes. A draft is a smaller model or the text
itself, or, in rewired.py, the model's own weights in another wiring.

Shape letters: B batch, P proposals of a row, V vocabulary, v this rank's part of it.
"""

import os.path
from collections import Counter
from typing import NamedTuple

import torch
import torch.nn.functional as F

from decoding import likely
from decoding.sampling import Sampler, last_tokens
from formats import checkpoint
from formats.compare import check_vocabulary, digest
from model import Config
from runtime import benchmarking
from runtime.errors import InputError

DEFAULT = 3  # proposals of a --draft without @K
NGRAM = 3, 2  # lengths that Ngrams looks up, in this order


class Draft:
    """A source of proposals.

    control: Fixed, or rewired.Auto. runner: the Runner (generate.py) of the model that proposes, or None.
    counts: the numbers of proposals that a pass may have. drafted: the proposals for a row so far in this generation.
    accepted: a Counter of how many proposals of a row a pass accepted, over the passes and rows that had proposals.
    """

    def __init__(self, control, runner=None):
        self.control, self.runner = control, runner
        self.counts = tuple({0: None} | dict.fromkeys(control.counts))  # 0: where there is nothing to propose

    def begin(self, tokens, lengths, pass_tokens, cached_tokens=0):
        """Prepare for a generation. The arguments are those of Runner.prefill."""
        self.drafted, self.accepted = 0, Counter()

    def propose(self, count, texts, done, sample):
        """Return None or (ids (B, count), their distributions (B, count, V) or None, [whether a row has any]).

        The other arguments are those of step().
        """
        raise NotImplementedError

    @torch.inference_mode()
    def step(self, runner, texts, done, sample):
        """Run one pass of the model; returns [the new ids of each row].

        texts: the tokens of each row so far. done: which rows have ended. sample: a Sampler.
        """
        count = self.control.choose()
        proposals = self.propose(count, texts, done, sample) if count else None
        ids, q, has = proposals or (torch.empty(len(texts), 0, dtype=torch.long, device=runner.device), None, None)
        new, accepted = verify(runner, texts, ids, q, sample)
        if proposals:
            tried = [n for n, ended, proposed in zip(accepted, done, has, strict=True) if proposed and not ended]
            self.control.note(count, tried)
            self.drafted += count
            self.accepted.update(tried)
        return new

    @torch.inference_mode()
    def warm_up(self, runner, texts, count, sample=None):
        """Run a pass that verifies `count` proposals, as step() would."""
        sample, zeros = sample or Sampler(0, device=runner.device), torch.zeros(len(texts), count, dtype=torch.long)
        proposals = self.propose(count, texts, [False] * len(texts), sample) if count else None
        ids, q, _ = proposals or (zeros.to(runner.device), None, None)
        verify(runner, texts, ids, q, sample)


class Fixed:
    """The same number of proposals in each pass."""

    def __init__(self, count):
        self.counts = (count,)

    def choose(self):
        """Return the number of proposals of the next pass."""
        return self.counts[0]

    def note(self, count, accepted):
        """Learn how many of `count` proposals each row accepted."""


class Ngrams(Draft):
    """Prompt lookup: proposes what followed the last few tokens where they last occurred in the text."""

    def begin(self, tokens, lengths, pass_tokens, cached_tokens=0):
        super().begin(tokens, lengths, pass_tokens, cached_tokens)
        self.index = [{} for _ in lengths]  # of each row: {n-gram: where it last ended}
        self.indexed = [0] * len(lengths)

    def propose(self, count, texts, done, sample):
        rows = [None if done[row] else self._lookup(row, text, count) for row, text in enumerate(texts)]
        if not any(rows):
            return None
        ids = torch.tensor([row or [0] * count for row in rows], device=sample.device)
        return ids, None, [row is not None for row in rows]

    def _lookup(self, row, text, count):
        index = self.index[row]
        for end in range(self.indexed[row], len(text)):
            index.update({tuple(text[end - n : end]): end for n in NGRAM if n <= end})
        self.indexed[row] = len(text)
        for n in NGRAM:
            if start := index.get(tuple(text[-n:])):
                return (text[start:] * count)[:count]  # repeated where the text ends too early
        return None


class ModelDraft(Draft):
    """A model that proposes one token after another."""

    def propose(self, count, texts, done, sample):
        positions = torch.tensor([len(text) - 1 for text in texts], device=sample.device)
        logits, longest, ids, q = self.read(texts, sample.device), max(map(len, texts)), [], []
        for i in range(count):
            if i:
                logits = self.runner.decode(ids[-1][:, None], positions + i, longest + i)
            token, p = propose(sample, logits[:, -1], self.runner.model.comm)
            ids.append(token)
            q.append(p)
        return torch.stack(ids, 1), None if q[0] is None else torch.stack(q, 1), [True] * len(texts)

    def read(self, texts, device):
        """Return logits (B, S, v) whose last position follows the texts."""
        raise NotImplementedError


class SmallModel(ModelDraft):
    """A smaller model, whole on each rank, with its own cache."""

    cached = ()  # of each row: tokens in the cache; they remain for the next turn of a chat

    def begin(self, tokens, lengths, pass_tokens, cached_tokens=0):
        super().begin(tokens, lengths, pass_tokens, cached_tokens)
        self.prompts = tokens, lengths, pass_tokens, min([cached_tokens, *self.cached])
        self.cached = [self.prompts[-1]] * len(lengths)
        self.last = [[] for _ in lengths]  # the proposals that are in the cache

    def propose(self, count, texts, done, sample):
        if self.prompts:  # not in begin(): a request may end before anything is proposed
            self.runner.prefill(*self.prompts)
            self.cached, self.prompts = self.prompts[1].tolist(), None
        for row, text in enumerate(texts):  # proposals that were accepted stay in the cache
            self.cached[row] += len(os.path.commonprefix([self.last[row], text[self.cached[row] :]]))
        proposals = super().propose(count, texts, done, sample)
        self.last = proposals[0][:, : count - 1].tolist()  # the very last one was not read
        return proposals

    def read(self, texts, device):
        """Read two tokens at a time: so many are new where all proposals were accepted, and one graph is enough."""
        while True:
            starts = [min(n, len(text) - 2) for n, text in zip(self.cached, texts, strict=True)]
            pairs = [text[i : i + 2] for i, text in zip(starts, texts, strict=True)]
            tokens, positions = (torch.tensor(numbers, device=device) for numbers in (pairs, starts))
            logits = self.runner.decode(tokens, positions, max(starts) + 2)
            self.cached = [i + 2 for i in starts]
            if all(n == len(text) for n, text in zip(self.cached, texts, strict=True)):
                return logits


# ---- Verification ----------------------------------------------------------------------------------------------------


def verify(runner, texts, ids, q, sample):
    """Run one pass over proposals (or none); returns [new ids of each row], [how many of its proposals are accepted].

    ids, q: as for accept().
    """
    (tokens, positions, longest), comm = last_tokens(texts, runner.device), runner.model.comm
    logits = runner.decode(torch.cat((tokens, ids), 1), positions, longest + ids.shape[1])
    if not ids.shape[1]:
        return sample(logits[:, 0], comm)[:, None].tolist(), [0] * len(texts)
    ids, accepted = (result.tolist() for result in accept(sample, logits, ids, q, comm))
    return [row[: n + 1] for row, n in zip(ids, accepted, strict=True)], accepted


def probabilities(sample, logits, comm):
    """Return the distributions (B, V) float32 that a Sampler above temperature 0 draws from, given this rank's logits
    (B, v), and whether a row's logits are all finite (B,)."""
    if sample.filters:
        ids, weights, finite = likely.candidates(sample, logits, comm)
        weights = (weights / weights.sum(-1, keepdim=True)).nan_to_num().float()
        V = comm.local_logits(logits)[2]
        p = torch.zeros(len(ids), V, device=ids.device).scatter_add_(-1, ids.clamp(max=V - 1), weights)  # beyond: 0
    else:
        logits = comm.gather_logits(logits).float()
        finite = logits.amax(-1).isfinite() & logits.amin(-1).isfinite()
        p = (logits / sample.temperature).softmax(-1)
    return p.where(finite[:, None], 1 / p.shape[-1]), finite


def draw(sample, p):
    """Draw token ids (B,), each with its probability in p (B, V), whose rows need not add up to 1."""
    return torch.multinomial(p, 1, generator=sample.generator)[:, 0]


def propose(sample, logits, comm):
    """Draw token ids (B,) from a draft's logits (B, v); returns (ids, their distributions (B, V) or None if greedy)."""
    if sample.temperature == 0:
        return sample(logits, comm).clamp(min=0), None
    p, _ = probabilities(sample, logits, comm)
    return draw(sample, p), p


def accept(sample, logits, proposed, q, comm):
    """Return (ids (B, P + 1), how many proposals of each row are accepted (B,)).

    A row gets that many of its ids and one more. An id is -1 where the logits are not finite. logits (B, P + 1, v): the
    model's, after the last token and after each proposal. proposed (B, P): drawn from q (B, P, V), or certain where q
    is None.

    Greedy: a proposal is accepted if it and those before it are the model's own. Else a proposal d is accepted with
    probability min(1, p(d) / q(d)). The first refused one is replaced by a draw from max(0, p - q), and after the last
    one comes a draw from p: then each id is distributed as p (arXiv 2211.17192).
    """
    if sample.temperature == 0:
        ids = sample(logits, comm)
        return ids, (ids[:, :-1] == proposed).long().cumprod(-1).sum(-1)
    p, finite = (x.unflatten(0, logits.shape[:2]) for x in probabilities(sample, logits.flatten(0, 1), comm))
    (B, P), d, rows = proposed.shape, proposed[..., None], torch.arange(len(p), device=p.device)
    offered = 1.0 if q is None else q.gather(-1, d)[..., 0]
    drawn = torch.rand(B, P, device=p.device, generator=sample.generator)
    accepted = (drawn * offered < p[:, :P].gather(-1, d)[..., 0]).long().cumprod(-1).sum(-1)  # (B,)
    rest, first, all_accepted = p[rows, accepted], accepted.clamp(max=P - 1), (accepted == P)[:, None]
    offers = F.one_hot(proposed[rows, first], p.shape[-1]) if q is None else q[rows, first]
    left = (rest - offers).clamp_(min=0)
    none_left = left.sum(-1, keepdim=True) == 0  # p was q, except for rounding
    ids = F.pad(proposed, (0, 1))
    ids[rows, accepted] = draw(sample, torch.where(all_accepted | none_left, rest, left))
    return ids.where(finite, -1), accepted


# ---- What --draft names ----------------------------------------------------------------------------------------------


class Source(NamedTuple):
    """What --draft names.

    count: proposals of a pass, or "auto". config: of the model that proposes, None for n-grams. folder: its checkpoint,
    None for the model's own weights. max_count: the most proposals of a pass.
    """

    name: str
    count: int | str
    max_count: int
    config: Config | None = None
    folder: str | None = None

    def contents(self):
        """Return {name: digest} of what must be equal on all ranks, which each run a whole draft, to the same bits."""
        contents = {"--draft": f"{self.name}@{self.count}"}
        if self.folder:
            contents["contents of --draft"] = digest(self.folder)
            contents["hardware"] = f"{benchmarking.processor()}, {torch.get_num_threads()} threads"
        return contents


def read_draft(text, config, folder, tp_size):
    """Return the Source of --draft for a model of this config. folder: the model's, or None. Raises InputError."""
    name, at, count = text.rpartition("@")
    if not at or not (count == "auto" or count.isdecimal()):
        name, count = text, str(DEFAULT)
    from extras.drafts import rewired  # which imports this file

    count = max_count = count if count == "auto" else int(count)
    if count == "auto":
        max_count = max(rewired.Auto.counts)
    elif not 1 <= count < config.max_seq_len:
        raise InputError(f"--draft {text}: @{count} must be from 1 to the context of {config.max_seq_len}, or @auto")
    if name == "ngram":
        return Source(name, count, max_count)
    if name.startswith("wiring:"):
        return Source(name, count, max_count, rewired.wiring_of(config, name, tp_size))
    if not os.path.isdir(name):
        raise InputError(f"--draft {text!r} is no folder, nor is it ngram or wiring:NAME")
    draft = checkpoint.read_config(name)
    if folder and os.path.samefile(name, folder):
        raise InputError(f"--draft {name} is the checkpoint itself: give a smaller one, or wiring:NAME")
    check_vocabulary(config, folder, draft, name, f"--draft {name}")
    return Source(checkpoint.name(name), count, max_count, draft, name)


def build(source, runner, new_runner, load):
    """Return the Draft of a Source for the model of a runner.

    new_runner(model, cache=None): a Runner with that cache, or one of its own. load(config, folder): a whole model.
    """
    from extras.drafts import rewired

    control = rewired.Auto() if source.count == "auto" else Fixed(source.count)
    if source.config is None:
        return Ngrams(control)
    if source.folder is None:
        return rewired.rewired_draft(control, runner, new_runner, source.config)
    return SmallModel(control, new_runner(load(source.config, source.folder)))


def of_model(draft, count, runner, new_runner):
    """Return the Draft of complete(): draft is "ngram" or a model; the other arguments are those of build()."""
    if draft == "ngram":
        return Ngrams(Fixed(count))
    check_vocabulary(runner.model.config, None, draft.config, None, "draft")
    return SmallModel(Fixed(count), new_runner(draft))
