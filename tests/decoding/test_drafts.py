"""ladder/decoding: greedy tokens as without a draft, else their distribution; each kind of draft, flags, chats."""

import copy
import dataclasses
import itertools
import os
import shutil
from collections import Counter

import pytest
import torch
from cases import refused, slow_case
from configs import BASE, LONGROPE
from decoding_runs import generate_json, run_generate, runner_with_draft
from file_edits import edit_config, write_json
from helpers import greedy_tokens, naive, p_value, random_model, seeded, shard, train_tokenizer, write_model
from running import run_ranks
from safetensors.torch import save_file

import generate
from complete import complete, load
from generate import Runner
from ladder.decoding import speculative
from ladder.decoding.batch import Sampler, make_cache
from ladder.decoding.drafts import of_model
from ladder.errors import InputError
from ladder.kernels import compiling
from ladder.text import terminal

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [7], [7, 8, 20]]
OTHER = dataclasses.replace(BASE, n_layers=2, n_heads=4, head_dim=6, dim=20, intermediate_size=30, wiring="ladder")
GREEDY = Sampler(0)


@torch.no_grad()
def mild(config):
    """A random model whose sublayers add so little to the stream that other wirings of it often say the same."""
    net = random_model(config)
    for block in net.layers:
        block.attention.wo.weight.mul_(0.2)
        block.feed_forward.w2.weight.mul_(0.2)
    return net


@torch.no_grad()
def noisy(net, noise):
    """A copy with other weights, which says the same the more often, the less the noise is."""
    net = copy.deepcopy(net)
    generator = seeded(1)
    for weight in net.parameters():
        weight.add_(noise * weight.std() * torch.randn(weight.shape, generator=generator))
    return net


@torch.no_grad()
def padded(net, rows):
    """A copy whose table and output head have so many rows: fewer, or more, which it would like best of all."""
    config = dataclasses.replace(net.config, vocab_size=rows)
    state = {name: weight.clone() for name, weight in net.state_dict().items()}
    for name in "tok_embeddings.weight", "output.weight":
        more = state[name].new_full((max(0, rows - len(state[name])), state[name].shape[1]), 9.0)
        state[name] = torch.cat((state[name], more.copysign(torch.randn_like(more))))[:rows]
    copied = random_model(config)
    copied.load_state_dict(state)
    return copied


def generated(net, draft=None, count=0, prompts=PROMPTS, new=14, sample=GREEDY, eos_ids=()):
    """(Generation, what drafted)."""
    runner = runner_with_draft(net, draft, count, len(prompts), max(map(len, prompts)) + new)
    done = generate.Generation(runner, prompts, new, sample, eos_ids)
    shown = [*done]
    assert done.rows == [sum(ids, []) for ids in zip(*shown, strict=True)]
    return done, runner.draft


# ---- Greedy: the tokens of decoding without a draft ------------------------------------------------------------------


def twins(world, wiring):
    """({name of a draft: how many of its proposals were accepted, in words}, sampled rows) of this rank.

    Each draft leaves the greedy tokens as they are. The longest row just fits the original context of longrope.
    Generations end in turns where rows have their own ends, and after some number of tokens.
    """
    rope = {**LONGROPE, "original_max_position_embeddings": max(map(len, PROMPTS)) + 14}
    whole = mild(dataclasses.replace(BASE, wiring=wiring, rotary_dim=6, rope_scaling=rope))
    net = whole if world is None else shard(whole.config, world, state=whole.state_dict())
    plain = generated(net)[0].rows
    ends = plain[0][3], plain[2][9]
    models = {"near": noisy(whole, 0.05), "ngram": "ngram", "other": random_model(OTHER)}
    words = {}
    ways = itertools.cycle([((), 14), (ends, 14), (ends, 9), ((), 2), ((), 1)])
    for name, draft in models.items():
        words[name] = set()
        for count, (eos_ids, new) in zip((4, 7, 1), ways, strict=False):
            done, used = generated(net, draft, count, new=new, eos_ids=eos_ids)
            expected = [[*itertools.takewhile(lambda i, ends=eos_ids: i not in ends, row[:new])] for row in plain]
            assert done.rows == expected, (name, count, eos_ids, new)
            assert done.steps <= done.new_tokens == max(min(len(row) + 1, new) for row in done.rows)
            words[name] |= {"none" if n == 0 else "all" if n == count else "some" for n in used.accepted}
    samplers = itertools.cycle([Sampler(1.0, seed=3), Sampler(1.3, 4, 0.8, seed=3)])
    unlike = noisy(whole, 0.05 * (1 + (world.rank if world else 0)))  # each rank's proposes others
    drafts = {"near": models["near"], "unlike": unlike}
    rows = {name: generated(net, draft, 2, sample=next(samplers))[0].rows for name, draft in drafts.items()}
    return words, rows


@pytest.mark.parametrize("ranks, wiring", [
    (1, "standard"), (1, "ladder"), (1, "parallel"), (1, "delayed-2"), (2, "spd"),
    slow_case(3, "standard"), slow_case(4, "ladder"),
])  # fmt: skip
def test_greedy_tokens_do_not_know_of_a_draft(ranks, wiring):
    """Ranks accept alike, also where they sample, which depends on the number of lanes alone."""
    results = run_ranks(ranks, twins, wiring) if ranks > 1 else [twins(None, wiring)]
    assert results == results[:1] * ranks
    words, rows = results[0]
    if ranks > 2:
        assert rows["near"] == twins(None, wiring)[1]["near"]
    assert words["near"] >= {"some", "all"}
    assert all(words[name] for name in words if name != "ngram")


@pytest.mark.parametrize("prompts, count, new", [(PROMPTS, 5, 14), (PROMPTS[:1], 3, 5), (PROMPTS[:1], 1, 6)])
def test_a_small_model_proposes_what_it_would_say_itself(prompts, count, new):
    """However many of its proposals were accepted in each row; one row goes on, as in a chat."""
    net = mild(BASE)
    draft = noisy(mild(BASE), 0.05)
    cached = 0
    seen = []
    runner = runner_with_draft(net, draft, count, len(prompts), 40)
    used = runner.draft
    propose = runner.draft.propose

    def checked(sequences, done, sample):
        proposals = propose(sequences, done, sample)
        for ids, proposed in zip(sequences, proposals[0].tolist(), strict=True):
            assert proposed == greedy_tokens(draft, ids, count)
        seen.append(sequences)
        return proposals

    used.propose = checked
    for _ in range(3 - len(prompts) // 2):
        rows = generate.generate(runner, prompts, new, GREEDY, cached_tokens=cached).rows
        prompts = [prompt + row + [20, 21, 22] for prompt, row in zip(prompts, rows, strict=True)]
        assert used.cached >= min(map(len, prompts)) - 3 - (1 + count)
        cached = len(prompts[0]) - 4
    assert len(seen) > 3


@pytest.mark.parametrize("draft", [None, "ngram", "near"])
def test_a_row_goes_on_to_its_own_context(draft):
    """A longer row does not take the room of a shorter one; what is proposed beyond the context is not shown."""
    net = mild(dataclasses.replace(BASE, max_seq_len=20))
    draft = noisy(net, 0.05) if draft == "near" else draft
    prompts = [[5, 6, 7] * 6, [7], [7, 8, 20]]
    done, _ = generated(net, draft, 4, prompts, new=18)
    assert done.rows == [greedy_tokens(net, prompt, n) for prompt, n in zip(prompts, (2, 18, 17), strict=True)]


@pytest.mark.parametrize("rows", [BASE.vocab_size - 40, BASE.vocab_size - 1, BASE.vocab_size + 1, BASE.vocab_size + 40])
def test_a_draft_s_table_may_be_padded_otherwise(rows):
    """It proposes no id that the model lacks, and goes on after one that it lacks itself."""
    net = mild(BASE)
    ends = [[BASE.vocab_size - 1], [7, BASE.vocab_size - 1, BASE.vocab_size - 2, 5]]
    for prompts in PROMPTS, ends:
        plain = generated(net, prompts=prompts)[0].rows
        done, used = generated(net, padded(noisy(net, 0.02), rows), 4, prompts)
        assert done.rows == plain and (rows < BASE.vocab_size or used.accepted[4])
    words = f"draft has another vocabulary, of {rows} tokens, and the model's 131"  # no tokenizer leaves so many rows
    refused(words, of_model, padded(net, rows), 4, Runner(net, make_cache(net, 1, 20)), 80)


def padded_draft_on_ranks(world, rows):
    net = mild(BASE)
    draft = padded(noisy(mild(BASE), 0.02), rows)
    net, draft = (shard(each.config, world, state=each.state_dict()) for each in (net, draft))
    return generated(net, draft, 3)[0].rows, generated(net, draft, 3, sample=Sampler(1.0, seed=4))[0].rows


@pytest.mark.parametrize("rows", [BASE.vocab_size - 40, BASE.vocab_size + 40])
def test_such_a_draft_may_be_shared_out(rows):
    results = run_ranks(2, padded_draft_on_ranks, rows)
    assert results[0] == results[1] and results[0][0] == generated(mild(BASE))[0].rows


def naive_lookup(ids, count):
    """What followed the last three tokens, or else two, the last time before."""
    for n in (3, 2):
        for start in range(len(ids) - n - 1, -1, -1):
            if ids[start : start + n] == ids[-n:]:
                return (ids[start + n :] * count)[:count]
    return None


def test_ngrams_are_what_followed_the_last_time():
    generator = seeded(0)
    draft = speculative.Ngrams(4)
    rows = [[1], [1, 2], torch.randint(3, (30,), generator=generator).tolist()]
    counts = set()
    draft.begin()
    for i in range(40):
        expected = [naive_lookup(ids, 4) for ids in rows]
        proposed, _, has = draft.propose(rows, [False] * 3, GREEDY)
        assert has == [row is not None for row in expected]
        assert proposed.tolist() == [row or [0] * 4 * any(expected) for row in expected]
        counts.add(sum(has))
        for ids in rows:
            ids += torch.randint(3, (1 + i % 3,), generator=generator).tolist()
    assert {1, 3} <= counts and draft.propose(rows, [True] * 3, GREEDY)[0].shape == (3, 0)


# ---- Sampling: the model's own distribution --------------------------------------------------------------------------


PADDED = [slow_case(name) for name in ("wider", "narrower")]


@pytest.mark.parametrize("name", ["ngram", "near", *PADDED])
@pytest.mark.parametrize("settings", [(1.0, None, 1.0), (0.7, 4, 0.95)], ids=str)  # temperature, top_k, top_p
def test_what_is_generated_with_a_draft_is_distributed_as_the_model_says(name, settings):
    """The first three tokens of 5000 rows of one prompt, together, against all texts that they may make."""
    B = 5000
    V = 5
    prompt = [1, 2, 3, 1, 2, 4, 1, 2, 0, 3, 1]
    net = mild(dataclasses.replace(BASE, n_layers=2, vocab_size=V, eos_ids=()))
    draft = name if name == "ngram" else noisy(net, 0.4)
    draft = padded(draft, {"wider": V + 3, "narrower": V - 1}[name]) if name.endswith("er") else draft
    done, draft = generated(net, draft, 2, [prompt] * B, 5, Sampler(*settings, seed=2))
    exact = copy.deepcopy(net).double()
    shares = {(): 1.0}
    for _ in range(3):
        with torch.no_grad():
            logits = exact(torch.tensor([[*prompt, *text] for text in shares]))[:, -1]
        ways = [(text, share, naive(row, *settings)) for (text, share), row in zip(shares.items(), logits, strict=True)]
        shares = {(*text, i): share * p for text, share, row in ways for i, p in enumerate(row)}
    counts = Counter(tuple(row[:3]) for row in done.rows)
    assert p_value([([counts[text] for text in shares], shares.values())], 10) > 1e-4
    assert min(draft.accepted[n] for n in range(3)) > 100


# ---- Compiled, and numbers that are not finite -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["near", "ngram"])
def test_compiled_there_is_one_graph_for_each_number_of_tokens(name):
    """A warm-up compiles them all: four tokens of the model, or one, and two and one of a small one."""
    net = mild(dataclasses.replace(BASE, n_layers=2))
    expected = generated(net, new=30)[0].rows
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    stats = torch._dynamo.utils.counters["stats"]
    draft = noisy(net, 0.05) if name == "near" else name
    runner = runner_with_draft(net, draft, 3, 3, 38, True)
    compiling.warm_up(runner, PROMPTS, 30, GREEDY)
    graphs = stats["unique_graphs"]
    assert graphs == {"near": 3, "ngram": 2}[name]
    done = generate.generate(runner, PROMPTS, 30, GREEDY)
    assert done.rows == expected and (name == "ngram" or sum(runner.draft.accepted[n] for n in (1, 2, 3)) > 0)
    later = generate.generate(runner, PROMPTS[::-1], 25, GREEDY).rows
    assert later == [row[:25] for row in expected[::-1]] and stats["unique_graphs"] == graphs


def spoil(runner, row, step):
    """Make a row's logits NaN from a decode step on, after the second token of a pass, or the only one."""
    decode = runner.decode
    steps = itertools.count(1)

    def wrong(tokens, *args):
        logits = decode(tokens, *args).clone()
        if next(steps) >= step:
            logits[row, min(1, tokens.shape[1] - 1)] = torch.nan
        return logits

    runner.decode = wrong


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_logits_that_are_not_finite_are_named_and_those_of_a_draft_do_no_harm(temperature):
    """The model's come in the third pass, of five tokens, after the second of them: the draft is the model."""
    net = mild(BASE)
    sizes = []
    sample = Sampler(temperature)
    runner = runner_with_draft(net, copy.deepcopy(net), 4, 3, 40)
    spoil(runner, 1, 3)
    with pytest.raises(InputError, match="row 1 in step 12 are NaN or infinite"):
        for fresh in generate.Generation(runner, PROMPTS, 30, sample):
            sizes.append([*map(len, fresh)])
    assert sizes == [[1] * 3, [5] * 3, [5] * 3]
    runner = runner_with_draft(net, noisy(net, 0.05), 3, 3, 27)
    spoil(runner.draft.runner, 1, 2)
    rows = generate.generate(runner, PROMPTS, 20, sample).rows
    assert temperature or rows == generated(net, new=20)[0].rows
    assert [len(row) for row in rows] == [20] * 3 and all(0 <= i < BASE.vocab_size for i in sum(rows, []))


# ---- Flags and reports -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def near(tiny, tmp_path_factory):
    """The folder of a draft for tiny."""
    folder = shutil.copytree(tiny, tmp_path_factory.mktemp("drafts") / "near")
    save_file(noisy(load(tiny)[0], 0.02).state_dict(), folder / "model.safetensors")
    return folder


def test_a_vocabulary_is_known_by_its_tokens_and_not_by_its_padding(tiny, near, tmp_path, capsys):
    flags = ["--checkpoint", tiny, "--temperature", "0", "--max-new-tokens", "8", "--prompt", "Once"]
    plain = run_generate(*flags)[0]
    net, tokenizer = load(tiny)
    for rows in 302, 312:
        draft = padded(load(near)[0], rows)
        folder = shutil.copytree(tiny, tmp_path / str(rows))
        write_model(folder, draft.config, draft.state_dict())
        assert run_generate(*flags, "--draft", folder)[0] == plain
        [text] = complete(net, tokenizer, ["Once"], 8, temperature=0, draft=load(folder)[0])
        assert plain.endswith(f"{text}\n")
    train_tokenizer(["Another text. It has other words, but as many tokens as the model."] * 30, 300, folder / "new")
    (folder / "new").replace(folder / "tokenizer.model")
    refused(f"--draft {folder} has another vocabulary: token [0-9]+ is '", run_generate, *flags, "--draft", folder)


DRAFTS = [("ngram@3", 2), ("near@3", 1)]


def test_the_flag_leaves_the_text_as_it_is(tiny, near, tmp_path):
    flags = ["--temperature", "0", "--max-new-tokens", "12", "--prompt", "a", "--prompt", "Once", "--prompt", "The"]
    plain = generate_json(tiny, *flags, out=tmp_path / "plain")[0]
    for draft, ranks in DRAFTS:
        named = near.parent / draft if draft.startswith("near") else draft
        result, _, stderr = generate_json(tiny, *flags, "--draft", named, out=tmp_path / draft, ranks=ranks)
        assert result["tokens"] == plain["tokens"] and result["texts"] == plain["texts"]
        assert f"{result['draft']}@{result['speculate']}" == draft
        mean = sum(n * times for n, times in enumerate(result["accepted"])) / (sum(result["accepted"]) or 1)
        assert f"draft {draft}: {result['passes']} passes; {sum(result['accepted'])} times a row had" in stderr
        assert f"{mean:.2f} of them accepted on average" in stderr
        if draft.startswith("near"):
            assert result["accepted"][-1] and result["passes"] < plain["passes"]
            assert result["drafted"] == result["speculate"] * result["passes"]
            # of a pass and of each proposal, which reads as many weights
            assert result["step_bytes"] == pytest.approx((1 + result["speculate"]) * plain["step_bytes"], rel=0.02)


# ---- A chat keeps its cache from turn to turn ------------------------------------------------------------------------

LINES = ["Once upon a time", "The dog", "the park and the dog ran", "a"]
TEMPLATES = {  # which keep what was said as it is, or change it
    "text": None,
    "keeps": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]",
    "changes": "{% for m in messages %}[{{ m.role if loop.last else 'x' }}]{{ m.content }}{% endfor %}[a]",
}


@pytest.mark.parametrize("drafts, template", [(False, "text"), (True, "changes"), (True, "keeps")])
def test_a_chat_computes_only_what_is_new(drafts, template, tiny, near, tmp_path, monkeypatch):
    """And answers as if it computed all. The second answer is interrupted."""
    shutil.copytree(tiny, tmp_path / "chat")
    edit_config(tmp_path / "chat", max_seq_len=400)
    if TEMPLATES[template]:
        write_json(tmp_path / "chat" / "tokenizer_config.json", {"chat_template": TEMPLATES[template]})
    turns = []
    computed = []
    prefill = Runner.prefill

    class Spy(generate.Generation):
        def __iter__(self):
            turns.append(self)
            passes = super().__iter__()
            return itertools.islice(passes, 2) if len(turns) == 2 else passes

    def count(self, tokens, lengths, cached_tokens):
        computed.append((tokens.shape[1], cached_tokens))
        return prefill(self, tokens, lengths, cached_tokens)

    monkeypatch.setattr(terminal, "Generation", Spy)
    monkeypatch.setattr(Runner, "prefill", count)
    flags = ["--checkpoint", tmp_path / "chat", "--chat", "--temperature", "0", "--max-new-tokens", "9"]
    printed, _ = run_generate(*flags, *["--draft", near] * drafts, stdin="\n".join(LINES) + "\n")
    net, tokenizer = load(tmp_path / "chat")
    each = 1 + drafts
    cached = []
    texts = []
    assert len(turns) == len(LINES) and len(computed) == each * len(turns)
    for turn, answer in enumerate(turns):
        [ids] = answer.prompts
        [row] = answer.rows
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
