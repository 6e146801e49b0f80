"""Several lanes on a rank: any number of ranks computes what as many ranks as lanes do."""

import dataclasses

import pytest
import torch
from cases import refused, slow_case
from configs import BASE, BIASED, ONE_EACH, change
from decoding_runs import answer_in_turns
from helpers import ALONE, StateWeights, random_model, rank_logits, shard
from parity import check_ranks_against_the_reference
from quantized_models import BIASED_INT4, INT4, INT8, dequantized_state, quantized_state
from running import run_ranks

import tp
from ladder.lanes.lanes import lanes_of_rank, load_lanes
from ladder.memory import step_bytes
from ladder.progress import progress

LANED = [c["wiring"] for c in ONE_EACH if dataclasses.replace(BASE, **c).named_wiring.reads_partials]
LANED = [*(f"{wiring}/4" for wiring in LANED if wiring != "upper-bound"), "desync:3/4", "delayed-3/4"]


@pytest.mark.parametrize("shares", [(1,), (1, 1), (3, 1), (2, 1, 1), (1, 1, 1, 1)], ids=str)
def test_lanes_compute_the_same_on_any_ranks(shares):
    """Of four lanes and two KV heads, with biases, which one lane adds. (3, 1): three lanes, and a rank with one."""
    check_ranks_against_the_reference(shares, [{"wiring": wiring, **BIASED} for wiring in LANED])


@pytest.mark.parametrize("how", [{"splits": 3}, slow_case({"compile": True})], ids=str)
def test_lanes_of_a_rank_take_chunks_and_are_compiled(how):
    check_ranks_against_the_reference(2, [{"wiring": wiring} for wiring in ("spd/4", "delayed-2/4")], **how)


def test_lanes_have_the_same_neurons_in_int4():
    plain = dataclasses.replace(BASE, wiring="spd/4", intermediate_size=352, dim=64)
    int4 = dataclasses.replace(plain, quant="int4", group_size=32, not_quantized=("wo",))
    for lane in range(4):
        expected = (1, [(88 * lane, 88 * (lane + 1))])
        assert all(tp.shard_plan(config, lane, (1,) * 4)["w2"] == expected for config in (int4, plain))
    words = "3 lanes cut groups of columns at no multiple of 8 columns of w2: keep w2 as it is"
    refused(words, tp.shard_plan, dataclasses.replace(int4, wiring="spd/3"), 0, (1,) * 3)


@pytest.mark.parametrize(
    "lanes, shares, fit", [(4, (1, 1, 1), "1, 2, 4"), (8, (1, 2), "1, 2, 4, 8"), (2, (1,) * 4, "1, 2")]
)
def test_lanes_that_ranks_cannot_share_are_refused(lanes, shares, fit):
    words = f"the {lanes} lanes of .* do not fit . ranks: use {fit} ranks of equal shares"
    refused(words, lanes_of_rank, dataclasses.replace(BASE, wiring=f"spd/{lanes}"), 0, shares)


def test_quantized_lanes_are_dealt_to_unlike_ranks():
    """What a rank holds is asked for by its shares, too: then, as for the lanes, 8 columns of w2 stay together."""
    config = change(BASE, wiring="spd/4", quant="int4", group_size=32, intermediate_size=256, dim=64, n_heads=8)
    assert tp.shard_plan(config, 0, (2, 1, 1))["w2"] == (1, [(0, 128)])
    words = "8 lanes cut groups of columns"
    refused(words, tp.shard_plan, change(config, wiring="spd/8", intermediate_size=96), 0, (1, 1))


@pytest.mark.parametrize("shares, alone", [((1,) * 4, True), ((1, 1), False), ((2, 1, 1), False)])
def test_a_lane_on_each_rank_is_a_transformer(shares, alone):
    assert (change(BASE, wiring="spd/4").named_wiring.loader(shares) is None) == alone


def test_ranks_with_more_lanes_are_not_taken_for_having_come_further(monkeypatch):
    """Nor while they load them: if one hangs then, it is the one to name."""
    config = dataclasses.replace(BASE, wiring="spd/4")
    beats = [progress.beats]
    seen = []
    monkeypatch.setattr(StateWeights, "read", lambda own, name: seen.append(progress.beats) or own.state[name])
    for rank in 0, 1:
        load_lanes(config, StateWeights(random_model(config).state_dict()), torch.float32, "cpu", rank, (3, 1))
        beats.append(progress.beats)
        assert max(seen) == beats[-1]
    assert beats[2] - beats[1] == beats[1] - beats[0] > 0


@pytest.mark.parametrize("config", [INT8, INT4, BIASED_INT4], ids=["int8", "int4", "biased"])
def test_lanes_of_integers_compute_what_their_numbers_say(config):
    """On one device, which holds all four, and on equal and unequal ranks."""
    config = dataclasses.replace(config, wiring="spd/4")
    state = quantized_state(config)
    plain = dataclasses.replace(config, quant=None, group_size=None)
    expected = rank_logits(None, plain, dequantized_state(state))
    for ranks in 1, 2, (3, 1):
        for logits in run_ranks(ranks, rank_logits, config, state):
            assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()


def test_what_counts_bytes_and_serves_rows_finds_the_attentions_of_all_lanes():
    net = shard(dataclasses.replace(BASE, wiring="spd/2"))
    one = random_model(BASE)
    cache = net.new_cache(2, 9)
    cache_of_one = one.new_cache(2, 9)
    assert len(net.attentions) == len(cache) == 2 * len(cache_of_one)
    read = [step_bytes(model, c, 3) - step_bytes(model, c, 0) for model, c in ((net, cache), (one, cache_of_one))]
    assert read[0] == read[1] > 0
    requests = [(0, {"ids": [1, 5, 6], "max_tokens": 4}), (1, {"ids": [1, 9], "max_tokens": 3})]
    config = dataclasses.replace(BASE, wiring="spd/2", eos_ids=())
    rows = answer_in_turns(ALONE, config, requests, 2)[0]
    assert [len(ids) for ids in rows] == [4, 3]
