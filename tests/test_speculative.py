"""Speculative decoding: the same tokens as without a draft if greedy, else the same distribution; drafts, flags, chats."""

import copy
import dataclasses
import itertools
import math
import os
from collections import Counter

import pytest
import torch
from helpers import (
    BASE,
    RANKS,
    WIRED,
    StateWeights,
    random_model,
    run_ranks,
    wired_id,
)  # fmt: skip
from test_generate import greedy_tokens

import generate
import speculative
import tp

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [7], [7, 8, 20]]
OTHER = dataclasses.replace(BASE, n_layers=2, n_heads=4, head_dim=6, dim=20, intermediate_size=30, wiring="ladder")
GREEDY = generate.Sampler(0)


def mild(config):
    """A random model whose sublayers add so little to the stream that other wirings of it often say the same."""
    net = random_model(config)
    with torch.no_grad():
        for block in net.layers:
            block.attention.wo.weight.mul_(0.2)
            block.feed_forward.w2.weight.mul_(0.2)
    return net


def noisy(net, noise):
    """A copy with other weights, which says the same the more often, the less the noise is."""
    net, generator = copy.deepcopy(net), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(noise * weight.std() * torch.randn(weight.shape, generator=generator))
    return net


class Scripted:
    """The numbers of proposals to ask for, over and over."""

    seconds = {}

    def __init__(self, *counts):
        self.counts, self.next = counts, itertools.cycle(counts)

    def choose(self):
        return next(self.next)

    def note(self, count, accepted):
        pass


def auto():
    """As it is after a warm-up."""
    control = speculative.Auto()
    control.seconds = {0: 1.0, 1: 1.1, 2: 1.25, 4: 1.5, 8: 2.2}
    return control


def generated(net, draft=None, control=None, prompts=PROMPTS, new=14, sample=GREEDY, eos_ids=(), compile=False):
    """(Generation, what drafted) of a fresh cache of just the length that is needed."""
    length = max(map(len, prompts)) + new
    runner, draft = generate.make_runners(net, draft, control, len(prompts), length, compile)
    return generate.generate(runner, prompts, new, sample, eos_ids, draft=draft), draft


def until(row, ends):
    """The row up to the first of the ends."""
    return list(itertools.takewhile(lambda i: i not in ends, row))


# ---------------------------------------------------------------------------------------------------------------------
# Greedy: the tokens of decoding without a draft

REWIRED = [
    {"wiring": "hybrid", "ladder_layers": (1,)}, {"wiring": "desync", "desync_period": 2}, {"wiring": "spd"},
    {"wiring": "upper-bound"}, {"wiring": "parallel-ladder"},
]  # fmt: skip


def rewirings(net):
    """{name: the model in another wiring} of those above that its norms suffice for."""
    config, found = net.config, {}
    for changes in REWIRED:
        other = dataclasses.replace(config, **{"ladder_layers": None, **changes})
        norms = [set(c.wiring_of(i).norms) for c in (other, config) for i in range(config.n_layers)]
        if other.function != config.function and all(map(set.issubset, norms, norms[config.n_layers :])):
            found[wired_id(changes)] = speculative.rewire(net, other)
    return found


def sharded(whole, world):
    net = tp.load_shard(whole.config, StateWeights(whole.state_dict()), torch.float32, "cpu", world.rank, world.tp_size)
    net.comm = tp.TensorParallel(whole.config, world.tp_size, world.group)
    return net


def kind(n, count):
    return "none" if n == 0 else "all" if n == count else "some"


def twins(world, changes, controls):
    """{name of a draft: how many of its proposals stood, in words}, after its tokens were those of decoding without it.

    controls: numbers of proposals, or "auto". Generations end in turns where rows have their own ends, and after some
    number of tokens.
    """
    whole = mild(dataclasses.replace(BASE, **changes))
    net = whole if world is None else sharded(whole, world)
    plain = generated(net)[0].rows
    ends = plain[0][3], plain[2][9]
    drafts = {"near": noisy(whole, 0.05), "ngram": "ngram", "other": random_model(OTHER), **rewirings(net)}
    kinds, ways = {}, itertools.cycle([((), 14), (ends, 14), (ends, 9), ((), 2), ((), 1)])
    for name, draft in drafts.items():
        kinds[name] = set()
        for number, (eos_ids, new) in zip(controls, ways, strict=False):
            control = auto() if number == "auto" else speculative.Fixed(number)
            done, used = generated(net, draft, control, new=new, eos_ids=eos_ids)
            assert done.rows == [until(row[:new], eos_ids) for row in plain], (name, number, eos_ids, new)
            assert done.steps == max(min(len(row) + 1, new) for row in done.rows)
            assert done.passes <= done.steps - 1
            if number != "auto":
                assert name == "ngram" or used.drafted == number * done.passes
                kinds[name] |= {kind(n, number) for n in used.accepted}
    sampled, _ = generated(net, drafts["near"], speculative.Fixed(2), sample=generate.Sampler(1.0, seed=3))
    return kinds, sampled.rows


@pytest.mark.parametrize("changes", WIRED, ids=wired_id)
def test_greedy_tokens_do_not_know_of_a_draft(changes):
    kinds, _ = twins(None, changes, (4, 1, "auto", 2, 5, 3))
    assert kinds["near"] == {"none", "some", "all"} and kinds["other"] and set().union(*kinds.values()) == kinds["near"]


FAST = {(2, "spd"), (2, "parallel"), (3, "standard"), (3, "desync-2"), (4, "ladder")}
ON_RANKS = [
    pytest.param(n, changes, marks=() if (n, wired_id(changes)) in FAST else pytest.mark.slow, id=f"{n}-{wired_id(changes)}")
    for n in range(2, RANKS + 1) for changes in WIRED
]  # fmt: skip


@pytest.mark.parametrize("ranks, changes", ON_RANKS)
def test_nor_on_any_number_of_ranks(ranks, changes):
    """Ranks accept alike, also where they sample."""
    found = run_ranks(ranks, twins, changes, (3, "auto"))
    assert found == found[:1] * ranks and {"some", "all"} & found[0][0]["near"]


def naive_tally(draft, net, count, new):
    """How many of `count` proposals stand in each pass, a row and a pass at a time, everything computed anew."""
    tally = Counter()
    for prompt in PROMPTS:
        plain, have = greedy_tokens(net, prompt, new + count), 1
        while have < new:
            proposed = greedy_tokens(draft, prompt + plain[:have], count)
            n = len(os.path.commonprefix([proposed, plain[have : have + count]]))
            tally[n] += 1
            have += n + 1
    return tally


@pytest.mark.parametrize("count", [1, 3, 5])
def test_what_a_small_model_proposes_is_what_it_would_say(count):
    """Its cache holds what it should, however many of its proposals stood in each row before."""
    net = mild(BASE)
    for draft in (noisy(net, 0.05), noisy(net, 0.2), random_model(OTHER)):
        _, used = generated(net, draft, speculative.Fixed(count), new=20)
        assert used.accepted == naive_tally(draft, net, count, 20)


@pytest.mark.parametrize("counts", [(3, 0, 0, 0, 0), (0, 0, 0, 2), (1, 5, 0, 2), (0, 1)])
@pytest.mark.parametrize("changes", [None, {"wiring": "spd"}, {"wiring": "desync", "desync_period": 4}], ids=str)
def test_a_draft_that_says_the_same_is_always_right(counts, changes):
    """Also after passes without proposals, which a small model then has to catch up on."""
    net = mild(BASE)
    same = copy.deepcopy(net) if changes is None else speculative.rewire(net, dataclasses.replace(BASE, **changes))
    control, noted = Scripted(*counts), []
    control.note = lambda count, accepted: noted.append((count, set(accepted)))
    done, used = generated(net, same, control, new=30)
    assert done.rows == generated(net, new=30)[0].rows
    assert noted and all(accepted == {count} for count, accepted in noted)
    assert used.drafted == sum(count for count, _ in noted) and sum(used.accepted.values()) >= len(noted)


@pytest.mark.parametrize("prompt", [[7], [7, 8, 20]])
def test_a_small_model_catches_up_by_pairs(prompt):
    """After a pass of three that all stood, the first two of which it has seen, and four plain ones: six tokens."""
    net, widths = mild(BASE), []
    runner, draft = generate.make_runners(net, copy.deepcopy(net), Scripted(3, 0, 0, 0, 0), 1, len(prompt) + 15)
    decode = draft.runner.decode
    draft.runner.decode = lambda tokens, *args: widths.append(tokens.shape[1]) or decode(tokens, *args)
    generate.generate(runner, [prompt], 15, GREEDY, draft=draft)
    assert widths == [2, 1, 1, 2, 2, 2, 1, 1] and draft.accepted == {3: 2}


@pytest.mark.parametrize("name", ["ngram", "near", "hybrid-(1,)", "upper-bound"])
def test_the_cache_is_that_of_plain_decoding(name):
    """Up to the last token of each row, whatever drafted in it: a chat goes on from there."""
    net, caches = mild(dataclasses.replace(BASE, wiring="ladder")), []
    drafts = {"ngram": "ngram", "near": noisy(net, 0.05), **rewirings(net)}
    for draft in (None, drafts[name]):
        runner, draft = generate.make_runners(net, draft, speculative.Fixed(3), 3, 30)
        rows = generate.generate(runner, PROMPTS, 20, GREEDY, draft=draft).rows
        caches.append(runner.cache)
    for before, after in zip(*caches, strict=True):
        for a, b in zip(before, after, strict=True):
            for i, (prompt, row) in enumerate(zip(PROMPTS, rows, strict=True)):
                held = len(prompt) + len(row) - 1
                assert torch.allclose(a[i, :, :held], b[i, :, :held], atol=1e-5)


def naive_lookup(text, count):
    """What followed the last three tokens, or else two, the last time before."""
    for n in (3, 2):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[-n:]:
                found = text[start + n :]
                return (found * count)[:count]
    return None


def test_ngrams_are_what_followed_the_last_time():
    generator, draft = torch.Generator().manual_seed(0), speculative.Ngrams(speculative.Fixed(4))
    texts, found = [[1], [1, 2], torch.randint(3, (30,), generator=generator).tolist()], Counter()
    draft.prefill(None, torch.tensor([1, 2, 30]), None)
    for _ in range(40):
        proposed, expected = draft.propose(4, texts, [False] * 3, GREEDY), [naive_lookup(text, 4) for text in texts]
        found[sum(ids is not None for ids in expected)] += 1
        if not any(expected):
            assert proposed is None
        else:
            plain = [ids or text[-1:] * 4 for ids, text in zip(expected, texts, strict=True)]
            assert proposed[0].tolist() == plain and proposed[1] is None
        for text in texts:
            text += torch.randint(3, (int(torch.randint(1, 4, (), generator=generator)),), generator=generator).tolist()
    assert {1, 3} <= found.keys()
    assert draft.propose(4, texts, [True] * 3, GREEDY) is None


def test_a_repeating_text_is_accepted_and_shown_as_it_comes():
    """Each row emits 10, 11, ... 10 + its period; whoever sees the tokens gets each once, and can end it."""
    periods, shown = (3, 4), [[], []]

    class Counting:
        """A runner of a model that counts."""

        device, passes = torch.device("cpu"), 0

        def prefill(self, tokens, lengths, chunk, known):
            return self.logits(tokens.gather(1, lengths[:, None] - 1))[:, 0]

        def decode(self, tokens, positions, longest):
            self.passes += 1
            return self.logits(tokens)

        def logits(self, tokens):
            later = [[10 + (i - 9) % n for i in row] for row, n in zip(tokens.tolist(), periods, strict=True)]
            return torch.nn.functional.one_hot(torch.tensor(later), 20).float()

    def see(fresh):
        for row, ids in zip(shown, fresh, strict=True):
            row += ids
        return len(shown[0]) >= 20

    runner, draft = Counting(), speculative.Ngrams(speculative.Fixed(4))
    prompts = [[10, 11, 12, 10, 11, 12], [10, 11]]
    done = generate.generate(runner, prompts, 40, GREEDY, (), see, draft=draft)
    assert done.rows == shown and shown[0][:5] == [10, 11, 12, 10, 11] and shown[1][:5] == [12, 13, 10, 11, 12]
    assert set(draft.accepted) == {0, 4} and done.passes == runner.passes < 10 and len(shown[0]) == 21


# ---------------------------------------------------------------------------------------------------------------------
# Sampling: the model's own distribution

SETTINGS = [(0.7, None, 1.0), (1.0, None, 1.0), (1.0, 3, 1.0), (0.7, None, 0.8), (1.3, 4, 0.7)]  # temperature, k, p


def naive(logits, temperature, top_k, top_p):
    """What is sampled from, in float64, a token at a time."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])[:top_k]
    weights = {i: math.exp((float(logits[i]) - float(logits[order[0]])) / temperature) for i in order}
    total, mass, kept = sum(weights.values()), 0.0, {}
    for i in order:
        if mass >= top_p:
            break
        kept[i] = weights[i]
        mass += weights[i] / total
    return [kept.get(i, 0.0) / sum(kept.values()) for i in range(len(logits))]


class ChiSquare:
    """Adds up how far counts are from what was expected; rare cells of a draw count as one."""

    def __init__(self):
        self.distance, self.freedom = 0.0, 0

    def add(self, counts, p):
        assert len(counts) == len(p) and not any(n for n, share in zip(counts, p, strict=True) if share == 0)
        total, rest, cells = sum(counts), [0, 0.0], []
        for n, share in zip(counts, p, strict=True):
            if share * total >= 8:
                cells.append((n, share * total))
            else:
                rest = [rest[0] + n, rest[1] + share * total]
        cells += [rest] if rest[1] >= 8 else []
        self.distance += sum((n - expected) ** 2 / expected for n, expected in cells)
        self.freedom += max(len(cells) - 1, 0)

    def p_value(self):
        half = torch.tensor([self.freedom, self.distance], dtype=torch.float64) / 2
        return torch.special.gammaincc(*half).item()


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "certain"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_accepted_or_replaced_each_id_is_distributed_as_the_model_says(settings, drawn):
    """Of 20,000 rows, each position given the token before it, where that stood."""
    B, V, generator = 20000, 6, torch.Generator().manual_seed(5)
    sample = generate.Sampler(*settings, seed=1)
    model, draft = (1.5 * torch.randn(3, V, V, generator=generator) for _ in range(2))  # (position, token before, V)
    before, proposed, q, logits = torch.zeros(B, dtype=torch.long), [], [], []
    for position in range(3):
        logits.append(model[position, before])
        if position < 2:
            q.append(sample.probabilities((model + draft)[position, before])[0])
            likely = torch.rand(B, generator=generator) < 0.7  # certain ones may be any
            most = torch.where(likely, model[position, before].argmax(-1), torch.arange(B) // 7**position % V)
            proposed.append(torch.multinomial(q[-1], 1, generator=generator)[:, 0] if drawn else most)
            before = proposed[-1]
    proposed, logits = torch.stack(proposed, 1), torch.stack(logits, 1)
    ids, count = speculative.accept(sample, logits, proposed, torch.stack(q, 1) if drawn else None)
    assert ids.shape == (B, 3) and min(torch.bincount(count, minlength=3)) > 500
    stood = torch.arange(2) < count[:, None]
    assert torch.equal(ids[:, :2][stood], proposed[stood])
    for position in range(3):  # the two proposals' and the one behind them
        chi = ChiSquare()
        for token in range(V):
            here = (count >= position) & ((proposed[:, position - 1] == token) if position else token == 0)
            counts = torch.bincount(ids[here, position], minlength=V).tolist()
            chi.add(counts, naive(model[position, token].double(), *settings))
        assert chi.freedom > 0 and chi.p_value() > 1e-4, position


@pytest.mark.parametrize("name, settings", [("ngram", (1.0, None, 1.0)), ("near", (0.7, 4, 1.0)),
                                            ("near", (1.3, None, 1.0)), ("hybrid-(1,)", (1.0, None, 0.8))])  # fmt: skip
def test_what_is_generated_with_a_draft_is_distributed_as_the_model_says(name, settings):
    """The first three tokens of 6000 rows of one prompt, together, against all texts that they may make."""
    B, V, prompt = 6000, 5, [1, 2, 3, 1, 2, 4, 1, 2, 0, 3, 1]
    net = mild(dataclasses.replace(BASE, n_layers=2, vocab_size=V, eos_ids=()))
    draft = {"ngram": "ngram", "near": noisy(net, 0.4), **rewirings(net)}[name]
    sample = generate.Sampler(*settings, seed=2)
    done, draft = generated(net, draft, speculative.Fixed(2), [prompt] * B, 3, sample)
    exact, shares = copy.deepcopy(net).double(), {(): 1.0}
    for _ in range(3):
        with torch.no_grad():
            logits = exact(torch.tensor([[*prompt, *text] for text in shares]))[:, -1]
        ways = [(text, share, naive(row, *settings)) for (text, share), row in zip(shares.items(), logits, strict=True)]
        shares = {(*text, i): share * p for text, share, row in ways for i, p in enumerate(row)}
    counts, chi = Counter(map(tuple, done.rows)), ChiSquare()
    chi.add([counts[text] for text in shares], list(shares.values()))
    assert min(draft.accepted[n] for n in range(3)) > 100 and chi.freedom > 10 and chi.p_value() > 1e-4
