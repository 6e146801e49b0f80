"""Speculative decoding: greedy tokens as without a draft, else their distribution; drafts, flags, chats."""

import contextlib
import copy
import dataclasses
import itertools
import json
import os
import shutil
from collections import Counter

import pytest
import torch
from helpers import BASE, RANKS, WIRED, StateWeights, naive, p_value, random_model, run_ranks, wired_id
from reference import Reference
from safetensors.torch import save_file
from test_generate import edit_config, greedy_tokens, run, run_json
from test_quantize import INT4, INT8, dequantized_state, quantized_state

import generate
import tp
from complete import complete, load
from decoding import speculative
from extras.drafts import Auto, Rewired, rewire
from extras.training.data import train_tokenizer
from formats import checkpoint
from model import SingleDevice
from runtime import compiling
from runtime.errors import InputError

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [7], [7, 8, 20]]
OTHER = dataclasses.replace(BASE, n_layers=2, n_heads=4, head_dim=6, dim=20, intermediate_size=30, wiring="ladder")
UNQUANTIZED = dataclasses.replace(INT8, quant=None)
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


class Scripted(speculative.Fixed):
    """The numbers of proposals to ask for, over and over."""

    def __init__(self, *counts):
        self.counts, self.next = counts, itertools.cycle(counts)

    def choose(self):
        return next(self.next)


def make_runners(net, draft, control, rows, length, compile=False):
    """(Runner, Draft or None) of a draft: None, "ngram", or a model, which may have the weights of the net."""

    def runner_of(net, cache=None):
        return generate.Runner(net, cache or generate.make_cache(net, rows, length), compile)

    if draft is None:
        return runner_of(net), None
    length += 1 + max(control.counts)
    runner = runner_of(net)
    if draft == "ngram":
        return runner, speculative.Ngrams(control)
    if draft.layers is net.layers:
        return runner, Rewired(control, runner_of(draft, runner.cache))
    return runner, speculative.SmallModel(control, runner_of(draft))


def generated(net, draft=None, control=None, prompts=PROMPTS, new=14, sample=GREEDY, eos_ids=(), compile=False):
    """(Generation, what drafted) of a fresh cache of just the length that is needed."""
    shown, slots = [], max(map(len, prompts)) + new
    runner, draft = make_runners(net, draft, control, len(prompts), slots, compile)
    done = generate.generate(runner, prompts, new, sample, eos_ids, shown.append, draft=draft)
    assert done.rows == [sum(ids, []) for ids in zip(*shown, strict=True)]
    return done, draft


# ---------------------------------------------------------------------------------------------------------------------
# Greedy: the tokens of decoding without a draft


def rewirings(net):
    """{name: the model in another wiring} of those that its norms suffice for."""
    found = {}
    for name in "ladder:1,", "desync:2", "spd", "upper-bound", "parallel-ladder":
        with contextlib.suppress(InputError):
            found[name] = rewire(net, speculative.read_draft(f"wiring:{name}", net.config, None, 2).config)
    return found


def drafts_of(net, noise=0.05):
    return {"ngram": "ngram", "near": noisy(net, noise), **rewirings(net)}


def twins(world, changes, controls):
    """{name of a draft: how many of its proposals were accepted, in words}, given the tokens of decoding without it.

    controls: numbers of proposals, or "auto". Generations end in turns where rows have their own ends, and after some
    number of tokens.
    """
    whole = mild(dataclasses.replace(BASE, **changes))
    net = whole
    if world is not None:
        state, ranks = StateWeights(whole.state_dict()), (world.rank, world.tp_size)
        net = tp.load_shard(whole.config, state, torch.float32, "cpu", *ranks)
        net.comm = tp.TensorParallel(whole.config, world.tp_size, world.group)
    plain = generated(net)[0].rows
    ends = plain[0][3], plain[2][9]
    drafts = {"near": noisy(whole, 0.05), "ngram": "ngram", "other": random_model(OTHER), **rewirings(net)}
    kinds, ways = {}, itertools.cycle([((), 14), (ends, 14), (ends, 9), ((), 2), ((), 1)])
    for name, draft in drafts.items():
        kinds[name] = set()
        for number, (eos_ids, new) in zip(controls, ways, strict=False):
            control = Auto() if number == "auto" else speculative.Fixed(number)
            control.seconds = dict(zip(Auto.counts, (1.0, 1.1, 1.25, 1.5, 2.2), strict=True))
            done, used = generated(net, draft, control, new=new, eos_ids=eos_ids)
            wanted = [[*itertools.takewhile(lambda i, ends=eos_ids: i not in ends, row[:new])] for row in plain]
            assert done.rows == wanted, (name, number, eos_ids, new)
            assert done.passes < done.steps == max(min(len(row) + 1, new) for row in done.rows)
            if number != "auto":
                assert name == "ngram" or used.drafted == number * done.passes
                kinds[name] |= {"none" if n == 0 else "all" if n == number else "some" for n in used.accepted}
    sampled, _ = generated(net, drafts["near"], speculative.Fixed(2), sample=generate.Sampler(1.0, seed=3))
    return kinds, sampled.rows


@pytest.mark.parametrize("changes", WIRED, ids=wired_id)
def test_greedy_tokens_do_not_know_of_a_draft(changes):
    every = changes["wiring"] in ("standard", "ladder", "parallel")
    kinds, _ = twins(None, changes, (4, 1, "auto", 2, 5, 3) if every else (3, "auto"))
    assert kinds["near"] == {"none", "some", "all"} if every else kinds["near"] > {"some"}


def test_a_draft_has_the_lanes_of_the_weights(capsys):
    laned = dataclasses.replace(BASE, wiring="spd/4")
    assert speculative.read_draft("wiring:delayed-2@2", laned, None, 1).config.wiring == "delayed-2/4"
    assert speculative.read_draft("wiring:standard", laned, None, 2).config.wiring == "standard"
    assert speculative.read_draft("wiring:spd/2", BASE, None, 2).config.lanes == 2
    assert capsys.readouterr().err == ""
    for config, ranks in (laned, 2), (BASE, 4):
        with pytest.raises(InputError, match="needs the weights in 2 lanes, .*; here they are in 4"):
            speculative.read_draft("wiring:desync/2", config, None, ranks)


FAST = (2, "spd"), (3, "standard"), (4, "ladder")
ON_RANKS = [
    pytest.param(n, changes, marks=[pytest.mark.slow] * ((n, wired_id(changes)) not in FAST))
    for n, changes in itertools.product(range(2, RANKS + 1), WIRED)
]


@pytest.mark.parametrize("ranks, changes", ON_RANKS, ids=str)
def test_nor_on_any_number_of_ranks(ranks, changes):
    """Ranks accept alike, also where they sample."""
    found = run_ranks(ranks, twins, changes, (3, "auto"))
    assert found == found[:1] * ranks and {"some", "all"} & found[0][0]["near"]


def naive_tally(draft, net, counts, new):
    """How many proposals are accepted in each pass, a row and a pass at a time, everything computed anew."""
    tally = Counter()
    for prompt in PROMPTS:
        plain, have, control = greedy_tokens(net, prompt, new + max(counts)), 1, Scripted(*counts)
        while have < new:
            if count := control.choose():
                proposed = greedy_tokens(draft, prompt + plain[:have], count)
                n = len(os.path.commonprefix([proposed, plain[have : have + count]]))
                tally[n] += 1
            have += n + 1 if count else 1
    return tally


@pytest.mark.parametrize("counts", [(1,), (3,), (4, 0, 0, 0), (5, 2, 0)])
def test_what_a_small_model_proposes_is_what_it_would_say(counts):
    """Its cache holds what it should, however many of its proposals were accepted in each row before."""
    net = mild(BASE)
    for draft in (noisy(net, 0.05), noisy(net, 0.2)):
        _, used = generated(net, draft, Scripted(*counts))
        assert used.accepted == naive_tally(draft, net, counts, 14)


@pytest.mark.parametrize("new", range(2, 10))
def test_a_small_model_goes_on_from_what_it_has_seen(new):
    """In a second turn its cache is as if it had read all: at the end of the first, it had not the last tokens."""
    net, draft, ids = mild(BASE), noisy(mild(BASE), 0.05), PROMPTS[0]
    runner, used = make_runners(net, draft, speculative.Fixed(3), 1, 30)
    ids = ids + generate.generate(runner, [ids], new, GREEDY, draft=used).rows[0]
    later = [*ids, 20, 21, 22]
    generate.generate(runner, [later], 2, GREEDY, draft=used, known=len(ids) - 1)
    cache = draft.new_cache(1, len(later))
    with torch.no_grad():
        draft(torch.tensor([later]), cache=cache)
    for have, expected in zip(itertools.chain(*used.runner.cache), itertools.chain(*cache), strict=True):
        assert torch.allclose(have[:, :, : len(later)], expected, atol=1e-5)


@pytest.mark.parametrize("counts", [(3, 0, 0, 0, 0), (0, 0, 0, 2), (1, 5, 0, 2), (0, 1)])
@pytest.mark.parametrize("changes", [None, {"wiring": "spd"}, {"wiring": "desync:4"}], ids=str)
def test_a_draft_that_says_the_same_is_always_right(counts, changes):
    """Also after passes without proposals, which a small model then has to catch up on."""
    net = mild(BASE)
    same = copy.deepcopy(net) if changes is None else rewire(net, dataclasses.replace(BASE, **changes))
    control, noted = Scripted(*counts), []
    control.note = lambda count, accepted: noted.append((count, set(accepted)))
    done, used = generated(net, same, control, new=30)
    assert done.rows == generated(net, new=30)[0].rows
    assert noted and all(accepted == {count} for count, accepted in noted)
    assert used.drafted == sum(count for count, _ in noted) and sum(used.accepted.values()) >= len(noted)


@pytest.mark.parametrize("name", [None, "ngram", "near", "ladder:1,"])
def test_a_row_goes_on_to_its_own_context(name):
    """A longer row does not take the room of a shorter one; what is proposed beyond the context is not shown."""
    net = mild(dataclasses.replace(BASE, max_seq_len=20))
    draft = drafts_of(net).get(name)
    prompts = [[5, 6, 7] * 6, [7], [7, 8, 20]]
    done, _ = generated(net, draft, speculative.Fixed(4), prompts, new=18)
    assert done.rows == [greedy_tokens(net, prompt, n) for prompt, n in zip(prompts, (2, 18, 17), strict=True)]


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
    draft.begin(None, torch.tensor([1, 2, 30]), None)
    for _ in range(40):
        expected = [naive_lookup(text, 4) for text in texts]
        ids, q, has = draft.propose(4, texts, [False] * 3, GREEDY) or (None, None, [False] * 3)
        assert has == [row is not None for row in expected] and q is None
        assert not any(has) or ids.tolist() == [row or [0] * 4 for row in expected]
        found[sum(has)] += 1
        for text in texts:
            text += torch.randint(3, (int(torch.randint(1, 4, (), generator=generator)),), generator=generator).tolist()
    assert {1, 3} <= found.keys() and draft.propose(4, texts, [True] * 3, GREEDY) is None


# ---------------------------------------------------------------------------------------------------------------------
# Sampling: the model's own distribution

SETTINGS = [(0.7, None, 1.0), (1.0, None, 1.0), (1.0, 3, 1.0), (0.7, None, 0.8), (1.3, 4, 0.7)]  # temperature, k, p


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "certain"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_accepted_or_replaced_each_id_is_distributed_as_the_model_says(settings, drawn):
    """Of 20,000 rows, each position given the token before it, where that was accepted."""
    B, V, generator = 20000, 6, torch.Generator().manual_seed(5)
    sample = generate.Sampler(*settings, seed=1)
    model, draft = (1.5 * torch.randn(3, V, V, generator=generator) for _ in range(2))  # (position, token before, V)
    before, proposed, q, logits = torch.zeros(B, dtype=torch.long), [], [], []
    for position in range(3):
        logits.append(model[position, before])
        if position < 2:
            q.append(speculative.probabilities(sample, (model + draft)[position, before], SingleDevice())[0])
            likely = torch.rand(B, generator=generator) < 0.7  # certain ones may be any
            most = torch.where(likely, model[position, before].argmax(-1), torch.arange(B) // 7**position % V)
            proposed.append(torch.multinomial(q[-1], 1, generator=generator)[:, 0] if drawn else most)
            before = proposed[-1]
    proposed, logits = torch.stack(proposed, 1), torch.stack(logits, 1)
    q = torch.stack(q, 1) if drawn else None
    ids, count = speculative.accept(sample, logits, proposed, q, SingleDevice())
    assert ids.shape == (B, 3) and min(torch.bincount(count, minlength=3)) > 500
    accepted = torch.arange(2) < count[:, None]
    assert torch.equal(ids[:, :2][accepted], proposed[accepted])
    for position in range(3):  # the two proposals' and the one after them
        draws = []
        for token in range(V):
            here = (count >= position) & ((proposed[:, position - 1] == token) if position else token == 0)
            counts = torch.bincount(ids[here, position], minlength=V).tolist()
            draws.append((counts, naive(model[position, token].double(), *settings)))
        assert p_value(draws) > 1e-4, position


@pytest.mark.parametrize("name, settings", [("ngram", (1.0, None, 1.0)), ("near", (0.7, 4, 1.0)),
                                            ("near", (1.3, None, 1.0)), ("ladder:1,", (1.0, None, 0.8))])  # fmt: skip
def test_what_is_generated_with_a_draft_is_distributed_as_the_model_says(name, settings):
    """The first three tokens of 2500 rows of one prompt, together, against all texts that they may make."""
    B, V, prompt = 2500, 5, [1, 2, 3, 1, 2, 4, 1, 2, 0, 3, 1]
    net = mild(dataclasses.replace(BASE, n_layers=2, vocab_size=V, eos_ids=()))
    draft = drafts_of(net, 0.4)[name]
    sample = generate.Sampler(*settings, seed=2)
    done, draft = generated(net, draft, speculative.Fixed(2), [prompt] * B, 3, sample)
    exact, shares = copy.deepcopy(net).double(), {(): 1.0}
    for _ in range(3):
        with torch.no_grad():
            logits = exact(torch.tensor([[*prompt, *text] for text in shares]))[:, -1]
        ways = [(text, share, naive(row, *settings)) for (text, share), row in zip(shares.items(), logits, strict=True)]
        shares = {(*text, i): share * p for text, share, row in ways for i, p in enumerate(row)}
    counts = Counter(map(tuple, done.rows))
    assert p_value([([counts[text] for text in shares], shares.values())], 10) > 1e-4
    assert min(draft.accepted[n] for n in range(3)) > 100


# ---------------------------------------------------------------------------------------------------------------------
# Compiled, quantized, and numbers that are not finite


@pytest.mark.slow
@pytest.mark.parametrize("name, number", [
    ("ngram", 2),  # one token and four of the model
    ("near", 3),  # and two of the draft, whose graph for one is the model's: they are of one shape
    ("ladder:1,", 3),  # and one of the draft
])  # fmt: skip
def test_compiled_there_is_one_graph_for_each_number_of_tokens(name, number):
    """Of a pass, whatever the lengths; and a warm-up compiles them all."""
    net = mild(dataclasses.replace(BASE, n_layers=2))
    draft = drafts_of(net)[name]
    expected = generated(net, new=30)[0].rows
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    stats = torch._dynamo.utils.counters["stats"]
    runner, draft = make_runners(net, draft, Scripted(3, 3, 0), 3, 38, True)
    generate.warm_up(runner, PROMPTS, 30, draft=draft)
    assert draft.counts == (0, 3) and stats["unique_graphs"] == number
    done = generate.generate(runner, PROMPTS, 30, GREEDY, draft=draft)
    assert done.rows == expected and sum(n * count for n, count in draft.accepted.items()) > 0
    later = generate.generate(runner, PROMPTS[::-1], 25, GREEDY, draft=draft).rows
    assert later == [row[:25] for row in expected[::-1]] and stats["unique_graphs"] == number


@pytest.mark.slow
@pytest.mark.parametrize("quant", [None, "int8", "int4"])
def test_compiled_in_bfloat16_each_token_is_about_the_likeliest(quant):
    """Rounding may choose among near equals; few_rows.cpp multiplies five rows of a pass and attends to them."""
    config = dataclasses.replace({"int8": INT8, "int4": INT4, None: BASE}[quant], head_dim=64)
    plain = dataclasses.replace(config, quant=None, group_size=None)
    state = quantized_state(config) if quant else mild(config).state_dict()
    net, same = (tp.load_shard(config, StateWeights(state), torch.bfloat16, "cpu") for _ in range(2))
    exact = dequantized_state(config, state) if quant else {name: w.bfloat16() for name, w in state.items()}
    torch._dynamo.reset()
    done, draft = generated(net, same, speculative.Fixed(4), new=20, compile=True)
    assert any(isinstance(m, compiling.DecodeAttention) for m in net.modules())
    assert draft.accepted[4] > 5
    for prompt, row in zip(PROMPTS, done.rows, strict=True):
        logits = Reference(plain, exact).logits(torch.tensor(prompt + row))
        for position, token in enumerate(row, len(prompt) - 1):
            assert logits[position, token] > logits[position].max() - 0.05 * abs(logits[position]).max()


@pytest.mark.parametrize("model", [INT8, INT4], ids=["int8", "int4"])
@pytest.mark.parametrize("quant", [None, INT8, INT4], ids=["float", "int8", "int4"])
def test_integers_may_draft_and_be_drafted_for(model, quant):
    states = [(c, StateWeights(quantized_state(c))) for c in (model, quant) if c]
    states += [] if quant else [(UNQUANTIZED, StateWeights(random_model(UNQUANTIZED).state_dict()))]
    made = [tp.load_shard(config, state, torch.float32, "cpu") for config, state in states]
    expected = generated(made[0])[0].rows
    done, draft = generated(*made, speculative.Fixed(3))
    assert done.rows == expected and draft.accepted.keys() >= ({3} if model is quant else {0})
    for other in ("ngram", *rewirings(made[0]).values()):
        assert generated(made[0], other, speculative.Fixed(3))[0].rows == expected


def spoiled(runner, row, step):
    """From a runner's decode step on, a row's logits are NaN after the second token of a pass, or the only one."""
    decode, steps = runner.decode, itertools.count(1)

    def wrong(tokens, *args):
        logits = decode(tokens, *args).clone()
        if next(steps) >= step:
            logits[row, min(1, tokens.shape[1] - 1)] = torch.nan
        return logits

    runner.decode = wrong


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_logits_that_are_not_finite_are_named_by_step_and_row(temperature):
    """They come in the third pass, of five tokens, after the second of them."""
    net, shown = mild(BASE), []
    runner, draft = make_runners(net, copy.deepcopy(net), speculative.Fixed(4), 3, 40)
    spoiled(runner, 1, 3)
    sample = generate.Sampler(temperature)
    with pytest.raises(InputError, match="row 1 in step 12 are NaN or infinite"):
        generate.generate(runner, PROMPTS, 30, sample, on_tokens=lambda f: shown.append([*map(len, f)]), draft=draft)
    assert shown == [[1] * 3, [5] * 3, [5] * 3]  # the draft is the model: all are accepted


@pytest.mark.parametrize("settings", [(0,), (0.8, 3, 0.9)], ids=str)
def test_a_draft_whose_logits_are_not_finite_does_no_harm(settings):
    net = mild(BASE)
    runner, draft = make_runners(net, noisy(net, 0.05), speculative.Fixed(3), 3, 27)
    spoiled(draft.runner, 1, 2)
    rows = generate.generate(runner, PROMPTS, 20, generate.Sampler(*settings), draft=draft).rows
    assert settings[0] or rows == generated(net, new=20)[0].rows
    assert [len(row) for row in rows] == [20] * 3 and all(0 <= i < BASE.vocab_size for i in sum(rows, []))


# ---------------------------------------------------------------------------------------------------------------------
# The number of proposals


def asked(control, passes, accepted):
    """What auto asks for in so many passes; accepted(pass, count): of the proposals, None where there are none."""
    found = []
    for i in range(passes):
        found.append(control.choose())
        if found[-1] and (n := accepted(i, found[-1])) is not None:
            control.note(found[-1], [n] * 2)
    return found


@pytest.mark.parametrize("seconds, accepted, chosen", [
    ((1.0, 1.0, 1.0, 1.0), lambda i, count: count, {7}),  # passes cost the same
    ((1.0, 2.0, 4.0, 8.0), lambda i, count: count, {0}),  # they cost what their tokens do
    ((1.0, 1.05, 3.0, 9.0), lambda i, count: min(count, 1), {1}),
    ((1.0, 1.3, 1.7, 4.0), lambda i, count: None if i % 5 else count, {3}),  # there are none in most passes
    ((1.0, 1.2, 1.5, 1.9), lambda i, count: min(count, (7, 1, 2)[i % 3]), {7}),  # those after a refused one say nothing
])  # fmt: skip
def test_auto_asks_for_what_pays(seconds, accepted, chosen):
    control = Auto()
    control.seconds = dict(zip((0, 1, 3, 7), seconds, strict=True))
    assert set(asked(control, 500, accepted)[50:]) == chosen


def test_auto_hopes_again():
    """In vain it asks seldom; and where the text has changed it finds out."""
    control = Auto()
    control.seconds = {0: 1.0, 1: 1.3, 3: 1.7, 7: 2.9}
    vain = asked(control, 1000, lambda i, count: 0)
    assert 0 < sum(count > 0 for count in vain[100:]) < 60
    assert asked(control, 300, lambda i, count: count)[-100:] == [7] * 100


# ---------------------------------------------------------------------------------------------------------------------
# Flags and reports


@pytest.fixture(scope="module")
def folders(tiny, tmp_path_factory):
    """Folders of drafts for tiny, by name."""
    root, config = tmp_path_factory.mktemp("drafts"), checkpoint.read_config(tiny)
    other, large = (dataclasses.replace(OTHER, vocab_size=size) for size in (300, 1024))
    made = {"near": (config, noisy(load(tiny)[0], 0.02).state_dict())}
    made |= {"other": (other, random_model(other).state_dict()), "larger": (large, random_model(large).state_dict())}
    integers = [dataclasses.replace(c, vocab_size=300) for c in (INT8, INT4)]
    made |= {c.quant: (c, quantized_state(c)) for c in integers}
    for name, (c, state) in made.items():
        (root / name).mkdir()
        checkpoint.write_config(root / name, c)
        save_file(state, root / name / "model.safetensors")
        if c.vocab_size == 300:
            shutil.copy(tiny / "tokenizer.model", root / name)
    shutil.copytree(root / "other", root / "other words")
    cats = ["A cat sat under the old tree and slept all day. "] * 60
    train_tokenizer(cats, 300, root / "other words" / "tokenizer.model")
    return root


DRAFTS = ["ngram", "near", "int4", "wiring:ladder:0,2", "wiring:spd", "wiring:desync:2"]
SLOW = ["other", "int8", "wiring:ladder", "wiring:ladder:1", "wiring:spd:2", "wiring:delayed", "wiring:upper-bound"]
DRAFTS += [pytest.param(draft, marks=pytest.mark.slow) for draft in SLOW]


def named(draft, folders):
    return folders / draft if (folders / draft).is_dir() else draft


FLAGS = ["--temperature", "0", "--max-new-tokens", "12", *["--prompt", "a", "--prompt", "Once", "--prompt", "The"]]


@pytest.fixture(scope="module")
def plain(tiny, tmp_path_factory):
    return run_json(tiny, *FLAGS, out=tmp_path_factory.mktemp("plain") / "out")[0]


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_flag_leaves_the_text_as_it_is(draft, tiny, plain, folders, tmp_path):
    flags = [*FLAGS, "--draft", f"{named(draft, folders)}@3"]
    result, _, said = run_json(tiny, *flags, out=tmp_path / "drafted")
    assert result["tokens"] == plain["tokens"] and result["texts"] == plain["texts"]
    assert (result["draft"], result["speculate"]) == (draft, 3) and 0 < result["draft_s"] < result["decode_s"]
    assert result["drafted"] <= 3 * result["passes"] and (draft == "ngram" or result["drafted"] == 3 * result["passes"])
    assert f"draft {draft}@3: {result['passes']} passes" in said
    if draft in ("near", "wiring:spd", "wiring:delayed", "wiring:upper-bound"):
        assert result["accepted"][3] and result["passes"] < plain["passes"]
        assert f"{speculative.mean_accepted(result['accepted']):.2f} of them accepted on average (0: " in said


def test_bytes_of_a_pass_are_the_models_and_those_of_each_proposal(tiny, folders, tmp_path):
    flags = ["--prompt-ids", "1,5,6", "--max-new-tokens", "7", "--ignore-eos", "--temperature", "0"]
    plain, *_ = run_json(tiny, *flags, out=tmp_path / "plain")
    draft, *_ = run_json(folders / "other", *flags, out=tmp_path / "draft")
    both, *_ = run_json(tiny, *flags, "--draft", f"{folders / 'other'}@3", out=tmp_path / "both")
    assert both["step_bytes"] == pytest.approx(plain["step_bytes"] + 3 * draft["step_bytes"], abs=5)


def test_the_line_for_people():
    found = {"draft": "ngram", "speculate": 2, "passes": 40, "accepted": [12, 6, 2], "draft_s": 0.25, "decode_s": 2}
    assert speculative.line_of(found) == (
        "draft ngram@2: 40 passes, 20 times with proposals for a row, 0.50 of them accepted on average "
        "(0: 60 %, 1: 30 %, 2: 10 %); drafting 0.25 s, the rest 1.75 s"
    )
    assert speculative.line_of(found | {"accepted": []}) == "draft ngram@2: 40 passes; drafting 0.25 s, the rest 1.75 s"


def test_auto_on_two_ranks(tiny, plain, folders, tmp_path):
    """It times the passes first, and all ranks go by the same times."""
    flags = [*FLAGS, "--draft", f"{folders / 'near'}@auto"]
    result, _, said = run_json(tiny, *flags, out=tmp_path / "drafted", ranks=2)
    assert result["tokens"] == plain["tokens"] and result["speculate"] == "auto" and result["compile_s"] == 0
    assert "draft near@auto: " in said


def test_complete_takes_a_draft(tiny, folders):
    (model, tokenizer), (near, _) = load(tiny), load(folders / "near")
    texts = ["Once upon a time", "The dog ran", "a"]
    plain = complete(model, tokenizer, texts, 9, temperature=0)
    for draft in ("ngram", near, model):
        assert complete(model, tokenizer, texts, 9, temperature=0, draft=draft, proposals=3) == plain


@pytest.mark.parametrize("draft, own, line", [
    ("larger", "", "has another vocabulary, of 1,024 tokens, and the model's 300"),
    ("other words", "", "other words has another vocabulary: token "),
    ("nowhere", "", "is no folder, nor is it ngram or wiring:NAME"),
    ("ngram@0", "", "@0 must be from 1 to the context"),
    ("wiring:ladder", "--ladder-layers=2,0,1", "ladder is the wiring that the model runs in: name another"),
    ("wiring:desync:2", "--wiring=desync", "desync:2 is the wiring that the model runs in"),
    ("wiring:parallel-ladder:2", "--wiring=parallel", "parallel-ladder:2 needs ffn_norm, which parallel has not"),
])  # fmt: skip
def test_a_draft_that_cannot_be_is_one_clear_line(draft, own, line, tiny, folders):
    flags = ["--checkpoint", str(tiny), "--prompt", "a", "--draft", str(named(draft, folders))]
    with pytest.raises(InputError) as error:
        generate.main(flags + own.split())
    assert line in str(error.value) and "\n" not in str(error.value)


# ---------------------------------------------------------------------------------------------------------------------
# A chat keeps its cache from turn to turn

LINES = ["Once upon a time", "The dog", "the park and the dog ran", "a"]
TEMPLATES = {  # which keep what was said as it is, or change it
    "text": None,
    "keeps": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]",
    "changes": "{% for m in messages %}[{{ m.role if loop.last else 'x' }}]{{ m.content }}{% endfor %}[a]",
}
CHATS = [
    pytest.param(*case, marks=[pytest.mark.slow] * ((case[1] == "text") != case[2] or case[1] == "keeps"))
    for case in itertools.product((None, "ngram", "near", "wiring:ladder:1"), TEMPLATES, (False, True))
]


@pytest.mark.parametrize("draft, template, interrupt", CHATS)
def test_a_chat_computes_only_what_is_new(draft, template, interrupt, tiny, folders, tmp_path, monkeypatch):
    """And answers as if it computed all."""
    shutil.copytree(tiny, tmp_path / "chat")
    edit_config(tmp_path / "chat", max_seq_len=400)
    if TEMPLATES[template]:
        (tmp_path / "chat" / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATES[template]}))
    turns, computed, real, prefill = [], [], generate.generate, generate.Runner.prefill

    def spy(runner, prompts, new, sample, eos_ids, on_tokens, **args):
        passes = itertools.count()

        def see(fresh):
            return on_tokens(fresh) or (next(passes) == 1 and interrupt and len(turns) == 1)

        done = real(runner, prompts, new, sample, eos_ids, see, **args)
        turns.append((prompts[0], done.rows[0]))
        return done

    def count(self, tokens, lengths, chunk=None, known=0):
        computed.append((tokens.shape[1], known))
        return prefill(self, tokens, lengths, chunk, known)

    monkeypatch.setattr(generate, "generate", spy)
    monkeypatch.setattr(generate.Runner, "prefill", count)
    flags = ["--checkpoint", tmp_path / "chat", "--interactive", "--temperature", "0", "--max-new-tokens", "9"]
    flags += ["--draft", named(draft, folders)] if draft else []
    printed, _ = run(*flags, stdin="\n".join(LINES) + "\n")
    net, tokenizer = load(tmp_path / "chat")
    each, held, texts = 1 + (draft == "near"), [], []
    assert len(turns) == len(LINES) and len(computed) == each * len(turns)
    for turn, (ids, row) in enumerate(turns):
        assert row == greedy_tokens(net, ids, len(row), end=2) and (len(row) == 9) != (interrupt and turn == 1)
        known = len(os.path.commonprefix([held, ids[:-1]]))
        mine, *others = computed[each * turn : each * (turn + 1)]
        assert mine == (len(ids), known) and (turn == 0 or 0 < known < len(ids))
        assert all(n == len(ids) and known - 4 <= small <= known for n, small in others)  # it may lack the end
        if turn and template != "keeps":  # which may have other tokens for the same text
            assert (known == len(held)) == (template == "text")
        held = (ids + row)[:-1]
        texts.append(tokenizer.continuation(ids, row))
    assert printed.replace("> ", "").split("\n")[: len(texts)] == texts
