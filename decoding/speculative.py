"""Speculative decoding: a draft proposes the next few tokens of each row, and one pass of the model verifies them all.

That pass costs one set of all-reduces, however many of the proposals accept() takes. A draft is a smaller model,
the model's own weights in another wiring, or the text itself.

Shape letters: B batch, P proposals of a row, V vocabulary, v this rank's part of it.
"""

import copy
import os.path
import sys
from collections import Counter
from typing import NamedTuple

import torch
import torch.nn.functional as F

from decoding.sampling import Plain, Sampler, all_finite, last_tokens
from formats import checkpoint
from formats.tokenizer import check_vocabulary
from formats.wiring_text import wiring_name
from model import WIRINGS, Config, parse_wiring, rewired
from runtime import report
from runtime.errors import InputError
from runtime.timing import between, mark, timed

COUNTS = 0, 1, 2, 3, 7  # numbers of proposals for Auto; each is a graph to compile
USUAL = 3  # proposals of a --draft without @
NGRAM = 3, 2  # tokens that Ngrams looks for, the longer first

# ---- Drafts ----------------------------------------------------------------------------------------------------------


class Draft(Plain):
    """The source of proposals, and how many of them were accepted in this generation.

    control: Fixed or Auto. runner: a Runner of generate.py, of the model that proposes, or None. drafted: the
    proposals made for a row. accepted: {number accepted: how often}, per pass and row with any. seconds: of proposing.
    """

    def __init__(self, control, runner=None):
        self.control, self.runner = control, runner
        self.counts = tuple({0: None} | dict.fromkeys(control.counts))  # 0: where there is nothing to propose

    def begin(self, tokens, lengths, chunk, known=0):
        self.drafted, self.accepted, self.seconds = 0, Counter(), 0.0

    def propose(self, count, texts, done, sample):
        """Return (ids (B, count), their distributions (B, count, V) or None, [whether a row has any]), or None.

        The other arguments are those of step().
        """
        raise NotImplementedError

    @torch.inference_mode()
    def step(self, runner, texts, done, sample):
        count, start = self.control.choose(), mark(runner.device)
        proposed = self.propose(count, texts, done, sample) if count else None
        end = mark(runner.device)
        if proposed is None:  # a plain pass
            none = torch.empty(len(texts), 0, dtype=torch.long, device=runner.device)
            new, _ = verify(runner, texts, none, None, sample)
        else:
            ids, q, has = proposed
            new, accepted = verify(runner, texts, ids, q, sample)
            tried = [n for n, d, h in zip(accepted, done, has, strict=True) if h and not d]
            self.control.note(count, tried)
            self.drafted += count
            self.accepted.update(tried)
        self.seconds += between(start, end)  # the device has passed both marks
        return new

    @torch.inference_mode()
    def warm_up(self, runner, texts, count, sample=None):
        sample, zeros = sample or Sampler(0, device=runner.device), torch.zeros(len(texts), count, dtype=torch.long)
        found = self.propose(count, texts, [False] * len(texts), sample) if count else None
        ids, q, _ = found or (zeros.to(runner.device), None, None)
        verify(runner, texts, ids, q, sample)

    @torch.inference_mode()
    def time_passes(self, runner, prompts, world, sample):
        """Measure for Auto what a pass with each number of proposals takes, on the slowest rank."""
        like = Sampler(sample.temperature, sample.top_k, sample.top_p, device=runner.device)
        texts = [[0] * (max(map(len, prompts)) + 1) for _ in prompts]
        seconds = {
            count: min(timed(runner.device, lambda n=count: self.warm_up(runner, texts, n, like)) for _ in range(3))
            for count in self.counts
        }
        found = world.gather(seconds)
        self.control.seconds = {count: max(each[count] for each in found) for count in seconds}


def verify(runner, texts, ids, q, sample):
    """Run one pass over proposals; returns [the new ids of each row], [how many of its proposals are accepted].

    ids, q: as accept takes them; without any id the pass is a plain one.
    """
    (tokens, positions, longest), comm = last_tokens(texts, runner.device), runner.model.comm
    logits = runner.decode(torch.cat((tokens, ids), 1), positions, longest + ids.shape[1])
    if not ids.shape[1]:
        return sample(logits[:, 0], comm)[:, None].tolist(), [0] * len(texts)
    ids, accepted = (found.tolist() for found in accept(sample, logits, ids, q, comm))
    return [row[: n + 1] for row, n in zip(ids, accepted, strict=True)], accepted


class Ngrams(Draft):
    """Prompt lookup: what followed the last few tokens where they occurred in the text before."""

    def begin(self, tokens, lengths, chunk, known=0):
        super().begin(tokens, lengths, chunk, known)
        self.index = [{} for _ in lengths]  # of each row: where the text went on after some tokens, the last time
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
            token, p = propose(sample, logits[:, -1], self.runner.model.comm)
            ids.append(token)
            q.append(p)
        return torch.stack(ids, 1), None if q[0] is None else torch.stack(q, 1), [True] * len(texts)

    def read(self, texts, device):
        """Return logits (B, S, v) the last of which come after the texts."""
        raise NotImplementedError


class Rewired(ModelDraft):
    """The model's own weights in another wiring, on the model's own cache.

    The keys and values that it finds there are the model's, not those that its own wiring would have made, except for
    those of its last proposals, which the verification overwrites.
    """

    def read(self, texts, device):
        return self.runner.decode(*last_tokens(texts, device))


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
        for row, text in enumerate(texts):  # some of the last ones were accepted
            self.held[row] += len(os.path.commonprefix([self.last[row], text[self.held[row] :]]))
        found = super().propose(count, texts, done, sample)
        self.last = found[0][:, : count - 1].tolist()  # nobody read the very last one
        return found

    def read(self, texts, device):
        """Read two tokens at a time, because two are new where all proposals were accepted: so one graph does."""
        while True:
            starts = [min(held, len(text) - 2) for held, text in zip(self.held, texts, strict=True)]
            pairs = [text[i : i + 2] for i, text in zip(starts, texts, strict=True)]
            tokens, positions = (torch.tensor(numbers, device=device) for numbers in (pairs, starts))
            logits = self.runner.decode(tokens, positions, max(starts) + 2)
            self.held = [i + 2 for i in starts]
            if all(held == len(text) for held, text in zip(self.held, texts, strict=True)):
                return logits


# ---- Which proposals are accepted ------------------------------------------------------------------------------------


def probabilities(sample, logits):
    """Return a Sampler's distribution above temperature 0, (..., V) float32, and whether the logits (..., V) are
    finite, (...)."""
    top = logits.amax(-1)
    good = all_finite(logits, top)
    logits = ((logits - top[..., None]).float() / sample.temperature).masked_fill_(~good[..., None], 0)
    if sample.top_k is not None and sample.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(sample.top_k).values[..., -1:], -torch.inf)
    if sample.top_p < 1:
        ordered, order = logits.softmax(-1).sort(descending=True, stable=True)  # as likely.py
        beyond = ordered.cumsum(-1) - ordered >= sample.top_p  # the mass before this token suffices already
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)
    return logits.softmax(-1), good


def draw(sample, p):
    """Draw token ids (B,), each with its probability in p (B, V), whose rows need not add up to 1."""
    return torch.multinomial(p, 1, generator=sample.generator)[:, 0]


def propose(sample, logits, comm):
    """Draw token ids (B,) by a draft's logits (B, v); return them and their distribution (B, V), None if greedy."""
    if sample.temperature == 0:
        return sample(logits, comm).clamp(min=0), None
    p, _ = probabilities(sample, comm.gather_logits(logits))
    return draw(sample, p), p


def accept(sample, logits, proposed, q, comm):
    """Return what a pass yields: ids (B, P + 1), -1 where the logits are not finite, and how many (B,) of each row's
    proposals are accepted. So many of its ids count, and one more.

    logits (B, P + 1, v): the model's, after the last token and after each proposal. proposed (B, P): drawn from q
    (B, P, V), or certain where that is None.

    Greedy: a proposal is accepted if it is the model's own, and those before it are. Else a proposal d is accepted with
    probability min(1, p(d) / q(d)). The first one that is not is replaced by a draw from max(0, p - q), and after the
    last comes a draw from p: so each id is distributed as p (arXiv 2211.17192).
    """
    if sample.temperature == 0:
        ids = sample(logits, comm)
        return ids, (ids[:, :-1] == proposed).long().cumprod(-1).sum(-1)
    p, good = probabilities(sample, comm.gather_logits(logits))
    (B, P), d, rows = proposed.shape, proposed[..., None], torch.arange(len(p), device=p.device)
    offered = 1.0 if q is None else q.gather(-1, d)[..., 0]
    drawn = torch.rand(B, P, device=p.device, generator=sample.generator)
    accepted = (drawn * offered < p[:, :P].gather(-1, d)[..., 0]).long().cumprod(-1).sum(-1)  # (B,)
    rest, first, whole = p[rows, accepted], accepted.clamp(max=P - 1), (accepted == P)[:, None]
    certain = q is None
    left = rest.scatter(-1, proposed[rows, first][:, None], 0.0) if certain else (rest - q[rows, first]).clamp_(min=0)
    none_left = left.sum(-1, keepdim=True) == 0  # p was q, but for rounding
    ids = F.pad(proposed, (0, 1))
    ids[rows, accepted] = draw(sample, torch.where(whole | none_left, rest, left))
    return ids.where(good, -1), accepted


# ---- The number of proposals -----------------------------------------------------------------------------------------


def expected(rate, count):
    """Return the mean number of ids that a pass yields in a row, if each of `count` proposals is accepted with
    probability `rate` where those before it are."""
    return sum(rate**i for i in range(count + 1))


class Fixed:
    """The same number of proposals in each pass."""

    def __init__(self, count):
        self.counts = (count,)

    def choose(self):
        return self.counts[0]

    def note(self, count, accepted):
        pass


class Auto:
    """The number of proposals that yields most ids a second, by the rate accepted lately and what passes take.

    What it saw fades with each pass, until it hopes again: the text may have changed. seconds: {count: those of a
    pass}, as Draft.time_passes measures them, alike on all ranks.
    """

    counts, seconds = COUNTS, dict.fromkeys(COUNTS, 1.0)
    HOPE = 0.9  # the rate that it begins with, as if it had seen one proposal
    MEMORY = 0.98  # of what it saw, the share that is left a pass later

    def __init__(self):
        self.accepted = self.tried = 0.0

    def choose(self):
        self.accepted, self.tried = self.MEMORY * self.accepted, self.MEMORY * self.tried
        rate = (self.accepted + self.HOPE) / (self.tried + 1)
        return max(self.seconds, key=lambda count: expected(rate, count) / self.seconds[count])

    def note(self, count, accepted):
        """Take in how many of `count` proposals each row accepted; those after a refused one were not tried."""
        if accepted:
            self.accepted += sum(accepted) / len(accepted)
            self.tried += sum(min(n + 1, count) for n in accepted) / len(accepted)


# ---- What --draft names ----------------------------------------------------------------------------------------------


class Source(NamedTuple):
    """What --draft names. count: proposals of a pass, or "auto". config: None for n-grams. folder: None for the model's
    own weights."""

    name: str
    count: int | str = USUAL
    config: Config | None = None
    folder: str | None = None

    @property
    def most(self):
        """Return the most proposals of a pass."""
        return max(COUNTS) if self.count == "auto" else self.count

    def contents(self):
        """Return what must be alike on all ranks, as {name: digest}: each runs a whole draft, to the same bits."""
        found = {"--draft": f"{self.name}@{self.count}"}
        if self.folder:
            found["contents of --draft"] = checkpoint.digest(self.folder)
            found["hardware"] = f"{report.processor()}, {torch.get_num_threads()} threads"
        return found


def read_draft(text, config, folder, tp_size):
    """Return the Source of --draft for a model of this config. folder: the model's, or None. Raises InputError."""
    name, at, count = text.rpartition("@")
    if not at or not (count == "auto" or count.isdecimal()):
        name, count = text, str(USUAL)
    count = count if count == "auto" else int(count)
    if count != "auto" and not 1 <= count < config.max_seq_len:
        raise InputError(f"--draft {text}: @{count} must be from 1 to the context of {config.max_seq_len}, or @auto")
    if name == "ngram":
        return Source(name, count)
    if name.startswith("wiring:"):
        draft = _rewired(config, name, tp_size)
        alike = all(c.wiring == "standard" or c.standard_in_one_lane for c in (config, draft))
        if alike and (config.lanes or tp_size) == 1:
            print(f"on one rank {draft.wiring} is {config.wiring} itself: this draft only takes time", file=sys.stderr)
        return Source(name, count, draft)
    if not os.path.isdir(name):
        raise InputError(f"--draft {text!r} is no folder, nor is it ngram or wiring:NAME")
    draft = checkpoint.read_config(name)
    if folder and os.path.samefile(name, folder):
        raise InputError(f"--draft {name} is the checkpoint itself: give a smaller one, or wiring:NAME")
    check_vocabulary(config, folder, draft, name, f"--draft {name}")
    return Source(checkpoint.name(name), count, draft, name)


def _rewired(config, name, tp_size):
    """Return the config in the wiring that --draft names, in the lanes of the weights, which it shares."""
    try:
        named, held = parse_wiring(name.removeprefix("wiring:")), config.lanes or tp_size
        if named.lanes is None and WIRINGS[named.name].laned:
            named = named._replace(lanes=config.lanes)
        draft = rewired(config, wiring_name(*named))
    except InputError as e:
        raise InputError(f"--draft {name}: {e}") from None
    if (draft.lanes or held) != held:
        lanes = f"the weights in {draft.lanes} lanes, that is on so many ranks"
        raise InputError(f"--draft {name} needs {lanes}; here they are in {held}")
    pairs = zip(draft.wirings, config.wirings, strict=True)
    missing = {norm for drafts, own in pairs for norm in drafts.norms if norm not in own.norms}
    if missing:
        raise InputError(f"--draft {name} needs {min(missing)}, which {config.wiring} has not")
    if draft.function == config.function:
        raise InputError(f"--draft {name} is the wiring that the model runs in: name another")
    return draft


def rewire(model, config):
    """Return the model of the same weights in the wiring of another config."""
    model = copy.copy(model)
    model.config = config
    return model


def build(source, runner, new_runner, load):
    """Return the Draft of a Source for the model of a runner.

    new_runner(model, cache=None): a Runner with that cache, or one of its own. load(config, folder): a whole model.
    """
    control = Auto() if source.count == "auto" else Fixed(source.count)
    if source.config is None:
        return Ngrams(control)
    if source.folder is None:
        return Rewired(control, new_runner(rewire(runner.model, source.config), runner.cache))
    return SmallModel(control, new_runner(load(source.config, source.folder)))


def of_model(draft, count, runner, new_runner):
    """Return the Draft of complete(): draft is "ngram" or a model; the other arguments are those of build()."""
    if draft == "ngram":
        return Ngrams(Fixed(count))
    check_vocabulary(runner.model.config, None, draft.config, None, "draft")
    return SmallModel(Fixed(count), new_runner(draft))


# ---- The report ------------------------------------------------------------------------------------------------------


def mean_accepted(counts):
    """Return the mean number of accepted proposals, of "accepted" in a result, or None if there were none."""
    return sum(n * count for n, count in enumerate(counts)) / sum(counts) if sum(counts) else None


def line_of(r):
    """Return what a draft did, in a line for people."""
    line, total = f"draft {r['draft']}@{r['speculate']}: {r['passes']} passes", sum(r["accepted"])
    if total:
        shares = ", ".join(f"{n}: {100 * count / total:.0f} %" for n, count in enumerate(r["accepted"]))
        mean = mean_accepted(r["accepted"])
        line += f", {total} times with proposals for a row, {mean:.2f} of them accepted on average ({shares})"
    return f"{line}; drafting {r['draft_s']:.2f} s, the rest {r['decode_s'] - r['draft_s']:.2f} s"
