"""extras/drafts: the model's own weights in another wiring as a draft, and @auto."""

import contextlib
import dataclasses

import pytest
import torch
from helpers import BASE, StateWeights, run_ranks
from test_generate import run_json
from test_quantize import INT4, quantized_state
from test_speculative import FLAGS, check_flag, check_graphs, generated, mild, noisy, twins

import generate
import tp
from extras.drafts import speculative
from extras.drafts.rewired import Auto, Rewired, rewire
from runtime.errors import InputError


def rewired(draft, control, runner, runner_of):
    """The Draft of a model with the weights of the runner's."""
    return Rewired(control, runner_of(draft, runner.cache))


def rewirings(net):
    """{name: the model in another wiring} of those that its norms suffice for."""
    models = {}
    for name in "ladder:1,", "desync:2", "spd", "upper-bound", "parallel-ladder":
        with contextlib.suppress(InputError):
            models[name] = rewire(net, speculative.read_draft(f"wiring:{name}", net.config, None, 2).config)
    return models


def auto():
    control = Auto()
    control.seconds = dict(zip(Auto.counts, (1.0, 1.1, 1.25, 1.5, 2.2), strict=True))
    return control


@pytest.mark.parametrize("wiring", ["standard", "ladder", "parallel", "pair", "delayed-2"])
def test_greedy_tokens_do_not_know_of_a_draft(wiring):
    words, _ = twins(None, wiring, (3, auto), rewirings, rewired)
    assert len(words) >= (1 if wiring == "parallel" else 4) and all(words.values())


@pytest.mark.parametrize("ranks, wiring", [(2, "standard"), pytest.param(3, "ladder", marks=pytest.mark.slow)])
def test_nor_on_any_number_of_ranks(ranks, wiring):
    results = run_ranks(ranks, twins, wiring, (3, auto), rewirings, rewired)
    assert results == results[:1] * ranks


def test_auto_leaves_the_tokens_of_other_drafts_too():
    net = mild(BASE)
    expected = generated(net)[0].rows
    for draft in ("ngram", noisy(net, 0.05)):
        assert generated(net, draft, auto())[0].rows == expected


@pytest.mark.parametrize("wiring", ["spd", "desync:4"])
def test_a_draft_that_says_the_same_is_always_right(wiring):
    """On one rank these wirings are the standard one, so that the cache must be the model's in every pass."""
    net = mild(BASE)
    draft = rewire(net, dataclasses.replace(BASE, wiring=wiring))
    done, used = generated(net, draft, speculative.Fixed(5), new=30, make=rewired)
    assert done.rows == generated(net, new=30)[0].rows and used.accepted.keys() == {5}


def test_a_model_of_integers_drafts_for_itself():
    net = tp.load_shard(INT4, StateWeights(quantized_state(INT4)), torch.float32, "cpu")
    expected = generated(net)[0].rows
    for draft in rewirings(net).values():
        assert generated(net, draft, speculative.Fixed(3), make=rewired)[0].rows == expected


@pytest.mark.parametrize("draft", ["wiring:standard", "wiring:ladder", "wiring:delayed-2", "wiring:desync"])
def test_several_lanes_on_a_rank_draft_for_themselves(draft):
    load_lanes = pytest.importorskip("extras.lanes.lanes").load_lanes
    config = dataclasses.replace(BASE, wiring="spd/2")
    net = load_lanes(config, StateWeights(mild(config).state_dict()), torch.float32, "cpu")
    other = rewire(net, speculative.read_draft(draft, config, None, 1).config)
    done, used = generated(net, other, speculative.Fixed(3), make=rewired)
    assert done.rows == generated(net)[0].rows and used.accepted.keys() > {0} and other.config.wiring != "spd/2"


@pytest.mark.slow
def test_compiled_there_is_one_graph_for_each_number_of_tokens():
    """One and four tokens of the model, and one of the draft."""
    check_graphs(lambda net: rewirings(net)["ladder:1,"], 3, rewired)


def test_a_draft_has_the_lanes_of_the_weights(capsys):
    laned = dataclasses.replace(BASE, wiring="spd/4")
    assert speculative.read_draft("wiring:delayed-2@2", laned, None, 1).config.wiring == "delayed-2/4"
    assert speculative.read_draft("wiring:standard", laned, None, 2).config.wiring == "standard"
    assert speculative.read_draft("wiring:spd/2", BASE, None, 2).config.lanes == 2
    assert capsys.readouterr().err == ""
    for config, ranks in (laned, 2), (BASE, 4):
        with pytest.raises(InputError, match="needs the weights in 2 lanes, .*; here they are in 4"):
            speculative.read_draft("wiring:desync/2", config, None, ranks)


def asked(control, passes, accepted):
    """What auto asks for in so many passes; accepted(pass, count): of the proposals, None where there are none."""
    counts = []
    for i in range(passes):
        counts.append(control.choose())
        if counts[-1] and (n := accepted(i, counts[-1])) is not None:
            control.note(counts[-1], [n] * 2)
    return counts


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


def test_auto_tries_again():
    """In vain it asks seldom; and where the text has changed it finds out."""
    control = Auto()
    control.seconds = {0: 1.0, 1: 1.3, 3: 1.7, 7: 2.9}
    vain = asked(control, 1000, lambda i, count: 0)
    assert 0 < sum(count > 0 for count in vain[100:]) < 60
    assert asked(control, 300, lambda i, count: count)[-100:] == [7] * 100


@pytest.fixture(scope="module")
def plain(tiny, tmp_path_factory):
    return run_json(tiny, *FLAGS, out=tmp_path_factory.mktemp("plain") / "out")[0]


@pytest.mark.parametrize("draft", ["wiring:ladder:0,2@3", "wiring:spd@3", "wiring:upper-bound@1"])
def test_the_flag_leaves_the_text_as_it_is(draft, tiny, plain, tmp_path):
    result = check_flag(draft, tiny, plain, tmp_path / "out")
    assert f"{result['draft']}@{result['speculate']}" == draft
    assert draft.startswith("wiring:ladder") or result["accepted"][-1] and result["passes"] < plain["passes"]


def test_auto_on_two_ranks(tiny, plain, tmp_path):
    """It times the passes first, and all ranks go by the same times."""
    result = check_flag("ngram@auto", tiny, plain, tmp_path / "out", ranks=2)
    assert result["speculate"] == "auto" and result["compile_s"] == 0


@pytest.mark.parametrize("draft, own, line", [
    ("wiring:ladder", "--wiring=ladder:0-2", "ladder is the wiring that the model runs in: name another"),
    ("wiring:desync:2", "--wiring=desync", "desync:2 is the wiring that the model runs in"),
    ("wiring:parallel-ladder:2", "--wiring=parallel", "parallel-ladder:2 needs ffn_norm, which parallel has not"),
])  # fmt: skip
def test_a_draft_that_cannot_be_is_one_clear_line(draft, own, line, tiny):
    with pytest.raises(InputError) as error:
        generate.main(["--checkpoint", str(tiny), "--prompt", "a", "--draft", draft, own])
    assert line in str(error.value) and "\n" not in str(error.value)
