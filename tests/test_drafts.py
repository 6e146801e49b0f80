"""extras/drafts: greedy tokens as without a draft, else their distribution; each kind of draft, flags, chats."""

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
from helpers import BASE, StateWeights, naive, p_value, random_model, run_ranks
from safetensors.torch import save_file
from test_generate import edit_config, greedy_tokens, run, run_json
from test_quantize import INT4, INT8, quantized_state

import generate
import tp
from complete import complete, load
from extras.drafts import speculative
from extras.drafts.rewired import Auto, Rewired, rewire
from formats import checkpoint
from model import SingleDevice
from runtime import compiling, writing
from runtime.errors import InputError

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


def rewirings(net):
    """{name: the model in another wiring} of those that its norms suffice for."""
    models = {}
    for name in "ladder:1,", "desync:2", "spd", "upper-bound", "parallel-ladder":
        with contextlib.suppress(InputError):
            models[name] = rewire(net, speculative.read_draft(f"wiring:{name}", net.config, None, 2).config)
    return models


class Scripted(speculative.Fixed):
    """The numbers of proposals to ask for, over and over."""

    def __init__(self, *counts):
        self.counts, self.next = counts, itertools.cycle(counts)

    def choose(self):
        return next(self.next)


def auto():
    control = Auto()
    control.seconds = dict(zip(Auto.counts, (1.0, 1.1, 1.25, 1.5, 2.2), strict=True))
    return control


def make_runners(net, draft, control, rows, length, compile=False):
    """(a Runner with a cache of just that length, its Draft or None). draft: "ngram", a model, one of rewire, None."""
    length += 1 + max(control.counts) if draft else 0

    def runner_of(net, cache=None):
        return generate.Runner(net, cache or generate.make_cache(net, rows, length), compile)

    runner = runner_of(net)
    if draft == "ngram":
        return runner, speculative.Ngrams(control)
    if draft and draft._modules is net._modules:
        return runner, Rewired(control, runner_of(draft, runner.cache))
    return runner, draft and speculative.SmallModel(control, runner_of(draft))


def generated(net, draft=None, control=None, prompts=PROMPTS, new=14, sample=GREEDY, eos_ids=()):
    """(Generation, what drafted)."""
    shown, slots = [], max(map(len, prompts)) + new
    runner, draft = make_runners(net, draft, control, len(prompts), slots)
    done = generate.generate(runner, prompts, new, sample, eos_ids, shown.append, draft=draft)
    assert done.rows == [sum(ids, []) for ids in zip(*shown, strict=True)]
    return done, draft


# ---------------------------------------------------------------------------------------------------------------------
# Greedy: the tokens of decoding without a draft


def twins(world, wiring):
    """({name of a draft: how many of its proposals were accepted, in words}, sampled rows) of this rank.

    Each draft leaves the greedy tokens as they are. Generations end in turns where rows have their own ends, and after
    some number of tokens.
    """
    whole = net = mild(dataclasses.replace(BASE, wiring=wiring))
    if world is not None:
        state = StateWeights(whole.state_dict())
        net = tp.load_shard(whole.config, state, torch.float32, "cpu", world.rank, world.shares)
        net.comm = tp.TensorParallel(whole.config, world.shares, world.group)
    plain = generated(net)[0].rows
    ends = plain[0][3], plain[2][9]
    models = {"near": noisy(whole, 0.05), "ngram": "ngram", "other": random_model(OTHER)}
    words, ways = {}, itertools.cycle([((), 14), (ends, 14), (ends, 9), ((), 2), ((), 1)])
    for name, draft in (models | rewirings(net)).items():
        words[name] = set()
        for control, (eos_ids, new) in zip((Scripted(4), auto(), Scripted(1, 3)), ways, strict=False):
            done, used = generated(net, draft, control, new=new, eos_ids=eos_ids)
            expected = [[*itertools.takewhile(lambda i, ends=eos_ids: i not in ends, row[:new])] for row in plain]
            assert done.rows == expected, (name, control.counts, eos_ids, new)
            assert done.passes <= done.steps == max(min(len(row) + 1, new) for row in done.rows)
            most = max(control.counts)
            words[name] |= {"none" if n == 0 else "all" if n == most else "some" for n in used.accepted}
    sampler, drafts = generate.Sampler(1.0, seed=3), [models["near"], *rewirings(net).values()]
    return words, [generated(net, draft, speculative.Fixed(2), sample=sampler)[0].rows for draft in drafts]


@pytest.mark.parametrize("ranks, wiring", [
    (1, "standard"), (1, "ladder"), (1, "parallel"), (1, "delayed-2"), (2, "spd"), (3, "standard"),
    pytest.param(4, "ladder", marks=pytest.mark.slow),
])  # fmt: skip
def test_greedy_tokens_do_not_know_of_a_draft(ranks, wiring):
    """Ranks accept alike, also where they sample."""
    results = run_ranks(ranks, twins, wiring) if ranks > 1 else [twins(None, wiring)]
    assert results == results[:1] * ranks
    words = results[0][0]
    assert words["near"] >= {"some", "all"} and len(words) >= (4 if wiring == "parallel" else 7)
    assert all(words[name] for name in words if name != "ngram")


@pytest.mark.parametrize(
    "prompts, counts, new", [(PROMPTS, (5, 2, 0), 14), (PROMPTS[:1], (3,), 5), (PROMPTS[:1], (3,), 6)]
)
def test_the_cache_of_a_small_model_is_as_if_it_had_read_all(prompts, counts, new):
    """However many of its proposals were accepted in each row; one row goes on, as in a chat."""
    net, draft, cached = mild(BASE), noisy(mild(BASE), 0.05), 0
    runner, used = make_runners(net, draft, Scripted(*counts), len(prompts), 40)
    for _ in range(3 - len(prompts) // 2):
        rows = generate.generate(runner, prompts, new, GREEDY, draft=used, cached_tokens=cached).rows
        texts = [prompt + row for prompt, row in zip(prompts, rows, strict=True)]
        for row, text in enumerate(texts):
            cache, n = draft.new_cache(1, len(text)), used.cached[row]
            with torch.no_grad():
                draft(torch.tensor([text]), cache=cache)
            assert n >= len(text) - 1 - max(counts)
            for result, expected in zip(itertools.chain(*used.runner.cache), itertools.chain(*cache), strict=True):
                assert torch.allclose(result[row, :, :n], expected[0, :, :n], atol=1e-5)
        prompts, cached = [text + [20, 21, 22] for text in texts], len(texts[0]) - 1


@pytest.mark.parametrize("wiring", ["spd", "desync:4"])
def test_a_draft_that_says_the_same_is_always_right(wiring):
    """On one rank these wirings are the standard one, so that the cache must be the model's in every pass."""
    net = mild(BASE)
    done, used = generated(net, rewire(net, dataclasses.replace(BASE, wiring=wiring)), speculative.Fixed(5), new=30)
    assert done.rows == generated(net, new=30)[0].rows and used.accepted.keys() == {5}


def test_a_draft_has_the_lanes_of_the_weights(capsys):
    laned = dataclasses.replace(BASE, wiring="spd/4")
    assert speculative.read_draft("wiring:delayed-2@2", laned, None, 1).config.wiring == "delayed-2/4"
    assert speculative.read_draft("wiring:standard", laned, None, 2).config.wiring == "standard"
    assert speculative.read_draft("wiring:spd/2", BASE, None, 2).config.lanes == 2
    assert capsys.readouterr().err == ""
    for config, ranks in (laned, 2), (BASE, 4):
        with pytest.raises(InputError, match="in 2 lanes"):
            speculative.read_draft("wiring:desync/2", config, None, ranks)


@pytest.mark.parametrize("draft", [None, "ngram", "near"])
def test_a_row_goes_on_to_its_own_context(draft):
    """A longer row does not take the room of a shorter one; what is proposed beyond the context is not shown."""
    net = mild(dataclasses.replace(BASE, max_seq_len=20))
    draft = noisy(net, 0.05) if draft == "near" else draft
    prompts = [[5, 6, 7] * 6, [7], [7, 8, 20]]
    done, _ = generated(net, draft, speculative.Fixed(4), prompts, new=18)
    assert done.rows == [greedy_tokens(net, prompt, n) for prompt, n in zip(prompts, (2, 18, 17), strict=True)]


def naive_lookup(text, count):
    """What followed the last three tokens, or else two, the last time before."""
    for n in (3, 2):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[-n:]:
                return (text[start + n :] * count)[:count]
    return None


def test_ngrams_are_what_followed_the_last_time():
    generator, draft = torch.Generator().manual_seed(0), speculative.Ngrams(speculative.Fixed(4))
    texts, counts = [[1], [1, 2], torch.randint(3, (30,), generator=generator).tolist()], set()
    draft.begin(None, torch.tensor([1, 2, 30]), None)
    for i in range(40):
        expected = [naive_lookup(text, 4) for text in texts]
        ids, _, has = draft.propose(4, texts, [False] * 3, GREEDY) or (None, None, [False] * 3)
        assert has == [row is not None for row in expected]
        assert not any(has) or ids.tolist() == [row or [0] * 4 for row in expected]
        counts.add(sum(has))
        for text in texts:
            text += torch.randint(3, (1 + i % 3,), generator=generator).tolist()
    assert {1, 3} <= counts and draft.propose(4, texts, [True] * 3, GREEDY) is None


# ---------------------------------------------------------------------------------------------------------------------
# Sampling: the model's own distribution


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "certain"])
@pytest.mark.parametrize("settings", [(1.0, None, 1.0), (1.3, 4, 0.7)], ids=str)  # temperature, top_k, top_p
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


def sharded_probabilities(world, settings):
    logits = 3 * torch.randn(5, 131, generator=torch.Generator().manual_seed(0)) * (torch.arange(5)[:, None] + 0.1)
    logits[3, 70] = torch.nan
    config = dataclasses.replace(BASE, vocab_size=131)
    comm = tp.TensorParallel(config, world.shares, world.group)
    start, stop = tp.vocab_range(131, world.rank, world.shares)
    return speculative.probabilities(generate.Sampler(*settings), logits[:, start:stop], comm), logits


@pytest.mark.parametrize("settings", [(1.0, 5, 1.0), (0.7, None, 0.99), (1.0, None, 1.0)], ids=str)
def test_ranks_have_the_distribution_of_one_device(settings):
    """Of rows from flat, where more is kept than ranks send at first, to peaked; one row is not finite."""
    for (p, finite), logits in run_ranks(3, sharded_probabilities, settings):
        assert finite.tolist() == [True, True, True, False, True]
        for row in (0, 1, 2, 4):
            expected = torch.tensor(naive(logits[row].double(), *settings), dtype=torch.float64)
            assert torch.allclose(p[row].double(), expected, atol=1e-6)


@pytest.mark.parametrize("name, settings", [("ngram", (1.0, None, 1.0)), ("near", (0.7, 4, 1.0))])
def test_what_is_generated_with_a_draft_is_distributed_as_the_model_says(name, settings):
    """The first three tokens of 2500 rows of one prompt, together, against all texts that they may make."""
    B, V, prompt = 2500, 5, [1, 2, 3, 1, 2, 4, 1, 2, 0, 3, 1]
    net = mild(dataclasses.replace(BASE, n_layers=2, vocab_size=V, eos_ids=()))
    draft = noisy(net, 0.4) if name == "near" else name
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
@pytest.mark.parametrize("name", ["near", "ladder:1,"])
def test_compiled_there_is_one_graph_for_each_number_of_tokens(name):
    """A warm-up compiles them all: one and four tokens of the model, and two of a small one, or one of the same."""
    net = mild(dataclasses.replace(BASE, n_layers=2))
    expected = generated(net, new=30)[0].rows
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    stats = torch._dynamo.utils.counters["stats"]
    draft = noisy(net, 0.05) if name == "near" else rewirings(net)[name]
    runner, draft = make_runners(net, draft, Scripted(3, 3, 0), 3, 38, True)
    compiling.warm_up(runner, PROMPTS, 30, generate.BUCKET, draft=draft)
    assert draft.counts == (0, 3) and stats["unique_graphs"] == 3
    done = generate.generate(runner, PROMPTS, 30, GREEDY, draft=draft)
    assert done.rows == expected and sum(n * count for n, count in draft.accepted.items()) > 0
    later = generate.generate(runner, PROMPTS[::-1], 25, GREEDY, draft=draft).rows
    assert later == [row[:25] for row in expected[::-1]] and stats["unique_graphs"] == 3


@pytest.mark.parametrize("model, other", [(INT8, INT4), (INT4, INT4)], ids=["int8", "int4"])
def test_integers_may_draft_and_be_drafted_for(model, other):
    net, draft = (tp.load_shard(c, StateWeights(quantized_state(c)), torch.float32, "cpu") for c in (model, other))
    expected = generated(net)[0].rows
    for proposer in (draft, "ngram", *rewirings(net).values()):
        done, used = generated(net, proposer, speculative.Fixed(3))
        assert done.rows == expected
        if proposer is draft and model is other:
            assert used.accepted.keys() == {3}


def spoil(runner, row, step):
    """Make a row's logits NaN from a decode step on, after the second token of a pass, or the only one."""
    decode, steps = runner.decode, itertools.count(1)

    def wrong(tokens, *args):
        logits = decode(tokens, *args).clone()
        if next(steps) >= step:
            logits[row, min(1, tokens.shape[1] - 1)] = torch.nan
        return logits

    runner.decode = wrong


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_logits_that_are_not_finite_are_named_and_those_of_a_draft_do_no_harm(temperature):
    """The model's come in the third pass, of five tokens, after the second of them: the draft is the model."""
    net, sizes, sample = mild(BASE), [], generate.Sampler(temperature)
    runner, draft = make_runners(net, copy.deepcopy(net), speculative.Fixed(4), 3, 40)
    spoil(runner, 1, 3)
    with pytest.raises(InputError, match="row 1 in step 12 are NaN or infinite"):
        generate.generate(runner, PROMPTS, 30, sample, on_tokens=lambda f: sizes.append([*map(len, f)]), draft=draft)
    assert sizes == [[1] * 3, [5] * 3, [5] * 3]
    runner, draft = make_runners(net, noisy(net, 0.05), speculative.Fixed(3), 3, 27)
    spoil(draft.runner, 1, 2)
    rows = generate.generate(runner, PROMPTS, 20, sample, draft=draft).rows
    assert temperature or rows == generated(net, new=20)[0].rows
    assert [len(row) for row in rows] == [20] * 3 and all(0 <= i < BASE.vocab_size for i in sum(rows, []))


# ---------------------------------------------------------------------------------------------------------------------
# @auto


def choices(control, passes, accepted):
    """What auto asks for in so many passes; accepted(pass, count): of the proposals, None where there are none."""
    counts = []
    for i in range(passes):
        counts.append(control.choose())
        if counts[-1] and (n := accepted(i, counts[-1])) is not None:
            control.note(counts[-1], [n] * 2)
    return counts


def test_auto_asks_for_what_pays_and_tries_again():
    """In vain it asks seldom; and where the text has changed it finds out."""
    for seconds, accepted, chosen in (
        ((1.0, 2.0, 4.0, 8.0), lambda i, count: count, {0}),  # passes cost what their tokens do
        ((1.0, 1.05, 3.0, 9.0), lambda i, count: min(count, 1), {1}),
        ((1.0, 1.3, 1.7, 4.0), lambda i, count: None if i % 5 else count, {3}),  # there are none in most passes
        ((1.0, 1.2, 1.5, 1.9), lambda i, count: min(count, (7, 1, 2)[i % 3]), {7}),  # after a refused one: no sign
    ):
        control = Auto()
        control.seconds = dict(zip((0, 1, 3, 7), seconds, strict=True))
        assert set(choices(control, 500, accepted)[50:]) == chosen
    control = Auto()
    control.seconds = {0: 1.0, 1: 1.3, 3: 1.7, 7: 2.9}
    assert 0 < sum(count > 0 for count in choices(control, 1000, lambda i, count: 0)[100:]) < 60
    assert choices(control, 300, lambda i, count: count)[-100:] == [7] * 100


# ---------------------------------------------------------------------------------------------------------------------
# Flags and reports


@pytest.fixture(scope="module")
def folders(tiny, tmp_path_factory):
    """Folders of drafts for tiny, by name."""
    root, config = tmp_path_factory.mktemp("drafts"), checkpoint.read_config(tiny)
    larger = dataclasses.replace(OTHER, vocab_size=1024)
    for name, model in ("near", noisy(load(tiny)[0], 0.02)), ("larger", random_model(larger)):
        shutil.copytree(tiny, root / name)
        writing.write_config(root / name, config if name == "near" else larger)
        save_file(model.state_dict(), root / name / "model.safetensors")
    return root


DRAFTS = [("ngram@3", 1), ("near@3", 1), ("wiring:ladder:0,2@3", 1), ("wiring:spd@1", 1), ("ngram@auto", 2)]


def test_the_flag_leaves_the_text_as_it_is(tiny, folders, tmp_path):
    flags = ["--temperature", "0", "--max-new-tokens", "12", "--prompt", "a", "--prompt", "Once", "--prompt", "The"]
    plain = run_json(tiny, *flags, out=tmp_path / "plain")[0]
    for draft, ranks in DRAFTS:
        named = folders / draft if draft.startswith("near") else draft
        result, _, stderr = run_json(tiny, *flags, "--draft", named, out=tmp_path / draft, ranks=ranks)
        assert result["tokens"] == plain["tokens"] and result["texts"] == plain["texts"]
        assert f"{result['draft']}@{result['speculate']}" == draft
        mean = sum(n * times for n, times in enumerate(result["accepted"])) / (sum(result["accepted"]) or 1)
        assert f"draft {draft}: {result['passes']} passes; {sum(result['accepted'])} times a row had" in stderr
        assert f"{mean:.2f} of them accepted on average" in stderr
        if draft.startswith(("near", "wiring:spd")):
            assert result["accepted"][-1] and result["passes"] < plain["passes"]
            assert result["drafted"] == result["speculate"] * result["passes"]
            # of a pass and of each proposal, which needs the same weights
            assert result["step_bytes"] == pytest.approx((1 + result["speculate"]) * plain["step_bytes"], rel=0.02)


def test_complete_takes_a_draft(tiny, folders):
    (model, tokenizer), (near, _) = load(tiny), load(folders / "near")
    texts = ["Once upon a time", "The dog ran", "a"]
    plain = complete(model, tokenizer, texts, 9, temperature=0)
    for draft in ("ngram", near):
        assert complete(model, tokenizer, texts, 9, temperature=0, draft=draft, proposals=3) == plain


def test_a_draft_that_cannot_be_is_one_clear_line(tiny, folders):
    for draft, wiring, line in (
        (folders / "larger", "standard", "has another vocabulary, of 1,024 tokens, and the model's 300"),
        ("nowhere", "standard", "'nowhere' is no folder"),
        ("ngram@0", "standard", "@0 must be from 1 to the context"),
        ("wiring:desync:2", "desync", "desync:2 is the wiring that the model runs in"),
        ("wiring:parallel-ladder:2", "parallel", "parallel-ladder:2 needs ffn_norm"),
    ):
        with pytest.raises(InputError, match=line):
            generate.main(["--checkpoint", str(tiny), "--prompt", "a", "--draft", str(draft), "--wiring", wiring])


# ---------------------------------------------------------------------------------------------------------------------
# A chat keeps its cache from turn to turn

LINES = ["Once upon a time", "The dog", "the park and the dog ran", "a"]
TEMPLATES = {  # which keep what was said as it is, or change it
    "text": None,
    "keeps": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]",
    "changes": "{% for m in messages %}[{{ m.role if loop.last else 'x' }}]{{ m.content }}{% endfor %}[a]",
}


@pytest.mark.parametrize("draft, template", [(None, "text"), ("near", "changes"), ("near", "keeps")])
def test_a_chat_computes_only_what_is_new(draft, template, tiny, folders, tmp_path, monkeypatch):
    """And answers as if it computed all. The second answer is interrupted."""
    shutil.copytree(tiny, tmp_path / "chat")
    edit_config(tmp_path / "chat", max_seq_len=400)
    if TEMPLATES[template]:
        (tmp_path / "chat" / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATES[template]}))
    turns, computed, real, prefill = [], [], generate.generate, generate.Runner.prefill

    def spy(runner, prompts, new, sample, eos_ids, on_tokens, **args):
        passes = itertools.count()
        stop = len(turns) == 1
        done = real(runner, prompts, new, sample, eos_ids, lambda f: on_tokens(f) or next(passes) == 1 and stop, **args)
        turns.append((prompts[0], done.rows[0]))
        return done

    def count(self, tokens, lengths, pass_tokens=None, cached_tokens=0):
        computed.append((tokens.shape[1], cached_tokens))
        return prefill(self, tokens, lengths, pass_tokens, cached_tokens)

    monkeypatch.setattr(generate, "generate", spy)
    monkeypatch.setattr(generate.Runner, "prefill", count)
    flags = ["--checkpoint", tmp_path / "chat", "--chat", "--temperature", "0", "--max-new-tokens", "9"]
    flags += ["--draft", folders / draft] if draft else []
    printed, _ = run(*flags, stdin="\n".join(LINES) + "\n")
    net, tokenizer = load(tmp_path / "chat")
    each, cached, texts = 1 + (draft == "near"), [], []
    assert len(turns) == len(LINES) and len(computed) == each * len(turns)
    for turn, (ids, row) in enumerate(turns):
        assert row == greedy_tokens(net, ids, len(row), end=2) and (len(row) == 9) == (turn != 1)
        known = len(os.path.commonprefix([cached, ids[:-1]]))
        mine, *others = computed[each * turn : each * (turn + 1)]
        assert mine == (len(ids), known) and (turn == 0 or 0 < known < len(ids))
        assert all(n == len(ids) and known - 4 <= small <= known for n, small in others)  # it may lack the end
        if turn and template != "keeps":  # which may have other tokens for the same text
            assert (known == len(cached)) == (template == "text")
        cached = (ids + row)[:-1]
        texts.append(tokenizer.continuation(ids, row))
    assert printed.replace("> ", "").split("\n")[: len(texts)] == texts
