"""An edit of generate.sample takes effect wherever ids are chosen, before a model is loaded and afterwards.

The edit chooses the second best id, so that what it generates is known from a loop without a cache.
"""

import copy
import dataclasses
import functools

import pytest
import torch
from configs import BASE
from helpers import random_model, second_best, shard, stop_using_kernels
from running import main_on_ranks, run_ranks

import generate
import tp
from complete import complete, load
from generate import Runner
from ladder.decoding import fast_sampling
from ladder.decoding.batch import SINGLE_DEVICE, Sampler, make_cache
from ladder.decoding.drafts import of_model
from ladder.kernels import registry

PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [9], [3, 4, 3, 4, 3]]  # of unequal lengths, of which n-grams know two
NEW = 10
CONFIG = dataclasses.replace(BASE, eos_ids=())
SETTINGS = (0,), (0.8,), (1.3, 50, 0.9)  # temperature, top_k, top_p


def second_best_tokens(net, ids, count):
    """What follows the ids, the whole sequence computed again for each token."""
    row = []
    for _ in range(count):
        with torch.no_grad():
            row.append(int(net(torch.tensor([ids + row]))[0, -1].topk(2).indices[1]))
    return row


def replace(patch):
    patch.setattr(generate, "sample", second_best)


def reload(patch):  # as where a notebook reads generate.py again
    patch.setattr(generate.sample, "__wrapped__", second_best)


def wrap(patch):  # by a function that copies all that is known of the original
    @functools.wraps(generate.sample)
    def wrapper(logits, comm, sampler):
        return second_best(logits, comm, sampler)

    patch.setattr(generate, "sample", wrapper)


def replace_gather(patch):
    """What sample calls, so that it chooses the second best without being edited itself, if it is greedy."""

    def second_best_only(original, self, logits):
        full = original(self, logits).clone()
        return full.scatter(-1, full.argmax(-1, keepdim=True), torch.finfo(full.dtype).min)

    for kind in type(SINGLE_DEVICE), tp.TensorParallel:
        patch.setattr(kind, "gather_logits", functools.partialmethod(_call, kind.gather_logits, second_best_only))


def _call(self, original, edited, logits):
    return edited(original, self, logits)


EDITS = {edit.__name__: edit for edit in (replace, reload, wrap)}
WHEN = pytest.mark.parametrize("when", ["before", "after"])  # the kernel is in use


def edited(patch, edit, when):
    """Edit sample, before the kernel stands in or afterwards."""
    stop_using_kernels()
    registry.said.clear()
    if when == "before":
        EDITS[edit](patch)
    registry.use([fast_sampling.KERNEL])
    if when == "after":
        assert fast_sampling.is_in_use() and not fast_sampling.is_edited()
        EDITS[edit](patch)
    assert fast_sampling.is_edited() and not fast_sampling.is_in_use()


def rows_of(world, edit, when, draft):
    """[what each of SETTINGS generates], of an edit or none, on this rank, and what was drafted."""
    net = shard(CONFIG, world)
    small = random_model(CONFIG) if draft == "small" else draft
    rows = []
    drafted = []
    with pytest.MonkeyPatch.context() as patch:
        edited(patch, edit, when)
        for settings in SETTINGS:
            runner = Runner(net, make_cache(net, len(PROMPTS), 30))
            if draft:
                runner.draft = of_model(small, 3, runner, CONFIG.vocab_size)
            rows.append(generate.generate(runner, PROMPTS, NEW, Sampler(*settings)).rows)
            drafted.append(runner.draft and dict(runner.draft.accepted))
    return rows, drafted


@pytest.fixture(scope="module")
def expected():
    net = random_model(CONFIG)
    return [second_best_tokens(net, prompt, NEW) for prompt in PROMPTS]


@WHEN
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_in_a_batch(ranks, edit, when, expected):
    for rows, _ in run_ranks(ranks, rows_of, edit, when, None):
        assert rows == [expected] * len(SETTINGS)


@pytest.mark.parametrize("draft", ["ngram", "small"])
@pytest.mark.parametrize("edit", ["replace", "reload"])
@WHEN
@pytest.mark.parametrize("ranks", [1, 2])
def test_with_a_draft(ranks, when, edit, draft, expected, capsys):
    """Whose proposals are accepted where sample chooses the same; the small model is the model itself."""
    for rows, drafted in run_ranks(ranks, rows_of, edit, when, draft):
        assert rows == [expected] * len(SETTINGS)
        assert draft == "ngram" or all(accepted.get(3, 0) > 3 for accepted in drafted)
    if ranks == 1:
        assert capsys.readouterr().err.count("a draft's tokens are accepted where it chooses the same") == 1


@WHEN
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_in_the_server_s_rows(ranks, edit, when, expected):
    pytest.importorskip("extras.serve.rows")
    for rows in run_ranks(ranks, served, edit, when):
        assert rows == expected


def served(world, edit, when):
    """The answers of rows with settings of their own."""
    from decoding_runs import ASK, Rows

    net = shard(CONFIG, world)
    answers = [[] for _ in PROMPTS]
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        edited(patch, edit, when)
        rows = Rows(Runner(net, net.new_cache(len(PROMPTS), 40)), ())
        for i, (prompt, settings) in enumerate(zip(PROMPTS, SETTINGS, strict=True)):
            sampling = dict(zip(("temperature", "top_k", "top_p"), settings, strict=False))
            rows.start(i, ASK | {"max_tokens": NEW, "ids": prompt, "sampling": sampling})
        while rows.busy:
            for i, token, *_ in rows.step():
                answers[i].append(token.id)
    return answers


@WHEN
@pytest.mark.parametrize("draft", [None, "ngram"])
def test_in_complete(draft, when, tiny, monkeypatch):
    model, tokenizer = load(tiny)
    if when == "before":
        stop_using_kernels()
    texts = ["Once upon a time", "The dog"]
    rows = [second_best_tokens(model, tokenizer.encode(text), NEW) for text in texts]
    replace(monkeypatch)
    for temperature in 0, 0.8:
        completed = complete(model, tokenizer, texts, NEW, temperature, draft=draft)
        assert completed == [tokenizer.decode(row) for row in rows]


@pytest.mark.parametrize("ranks", [1, 2])
def test_in_the_script(ranks, tiny):
    ids = [5, 6, 7, 5, 6]
    model, tokenizer = load(tiny)
    text = tokenizer.decode(second_best_tokens(model, ids, NEW))
    arguments = "--checkpoint", tiny, "--prompt", "ids:5,6,7,5,6", "--max-new-tokens", NEW, "--dtype", "float32"
    for more in (), ("--plain",), ("--draft", tiny):
        for printed, _ in main_on_ranks(ranks, edited_main, *arguments, *more)[:1]:
            assert printed.strip().endswith(text.strip()), more


def edited_main(arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(registry.PLAIN, "")
        reload(patch)
        generate.main(arguments)


def test_what_sample_calls_may_be_replaced_as_well(expected, monkeypatch):
    """The kernel gathers otherwise, so it stands back, and says why."""
    net = random_model(CONFIG)
    sampler = Sampler(0)
    registry.use([fast_sampling.KERNEL])
    replace_gather(monkeypatch)
    assert fast_sampling.is_edited() and not fast_sampling.is_in_use()
    assert generate.generate(Runner(net, make_cache(net, 3, 30)), PROMPTS, NEW, sampler).rows == expected


def test_a_line_says_that_the_kernel_stands_back(monkeypatch, capsys):
    reload(monkeypatch)
    registry.use([fast_sampling.KERNEL])
    line = "generate.sample was changed: it runs as written, without the kernels of generate.sample"
    assert capsys.readouterr().err.count(line) == 1


def test_plain_is_no_edit(monkeypatch):
    """So that a draft draws by the same rule, and the same ids, with --plain as without."""
    net = random_model(CONFIG)
    rows = []
    for plain in "", "1":
        monkeypatch.setenv(registry.PLAIN, plain)
        stop_using_kernels()
        registry.use([fast_sampling.KERNEL])
        assert fast_sampling.is_in_use() == (not plain) and not fast_sampling.is_edited()
        runner = Runner(net, make_cache(net, len(PROMPTS), 30))
        runner.draft = of_model(copy.deepcopy(net), 3, runner, CONFIG.vocab_size)
        rows.append(generate.generate(runner, PROMPTS, NEW, Sampler(0.8, 40)).rows)
    assert rows[0] == rows[1]


def test_an_edit_that_is_undone_is_none(monkeypatch):
    registry.use([fast_sampling.KERNEL])
    with monkeypatch.context() as patch:
        reload(patch)
        assert fast_sampling.is_edited() and not fast_sampling.is_in_use()
    assert fast_sampling.is_in_use() and not fast_sampling.is_edited()
