"""Tensor parallelism: what each rank holds, and that all ranks together compute what one device does."""

import dataclasses
import functools
import math

import pytest
import torch
from helpers import (
    BASE,
    WIRED,
    YARN,
    StateWeights,
    kind,
    last_logits,
    random_model,
    run_ranks,
    shard,
    unequal_rows,
    wired,
)
from reference import Reference

import tp
from model import VOCAB_BLOCK
from runtime import compiling, launch
from runtime.errors import InputError

SHAPES = {  # every kind of split at tp 2, 3, 4: even, uneven, replicated KV heads, odd sizes
    "6/2 heads": {},
    "15/5 heads, odd sizes": {"n_heads": 15, "n_kv_heads": 5, "intermediate_size": 101, "vocab_size": 130},
    "tied, biased": {"tie_embeddings": True, "qkv_bias": True},
    "biased everywhere, scaled rope": {
        "qkv_bias": True, "wo_bias": True, "mlp_bias": True, "nope_layers": (1,), "rope_scaling": YARN,
        "sliding_window": 4, "window_layers": (1, 2),
    },
    "head_dim of its own, QK norm": {"head_dim": 16, "qk_norm": True, "n_heads": 8, "n_kv_heads": 4},
}  # fmt: skip
BIASED = SHAPES["biased everywhere, scaled rope"]
UNEVEN = SHAPES["15/5 heads, odd sizes"]
CASES = [{**WIRED[i], **shape} for i, shape in enumerate(SHAPES.values())]
CASES += [{**changes, **UNEVEN} for changes in WIRED] + [{**changes, **BIASED} for changes in WIRED]
# compiled, each takes a while: one in the fast tests, all in the slow ones
COMPILED = {2: WIRED, 3: [WIRED[1], *wired("parallel")], 4: [WIRED[1], wired("desync")[0]]}
HALVED = {**UNEVEN, "head_dim": 64}  # which few_rows.cpp knows the attention of
LADDER = {"wiring": "ladder", "n_layers": 2}
UNLIKE = [(3, 1), (5, 2, 1), (1, 4, 2, 2)]
MANY = {"n_heads": 16, "n_kv_heads": 8, "intermediate_size": 101, "vocab_size": 130}
ONE = {**BIASED, "n_heads": 8, "n_kv_heads": 1, "vocab_size": 130}  # fewer than there are ranks


def covered(ranges):
    return [i for a, b in ranges for i in range(a, b)]


@pytest.mark.parametrize("tp_size", range(1, 13))
@pytest.mark.parametrize("n_heads, n_kv_heads", [(12, 12), (12, 4), (12, 3), (12, 2), (12, 1), (15, 5), (14, 2)])
def test_the_plan_gives_every_head_row_and_column_to_one_rank(n_heads, n_kv_heads, tp_size):
    config = dataclasses.replace(BASE, n_heads=n_heads, n_kv_heads=n_kv_heads, intermediate_size=101)
    G, H = n_heads // n_kv_heads, config.head_dim
    plans = [tp.shard_plan(config, rank, tp_size) for rank in range(tp_size)]
    assert covered(r for p in plans for r in p["wo"][1]) == list(range(n_heads * H))
    assert covered(r for p in plans for r in p["output"][1]) == list(range(config.vocab_size))
    for name in ("w1", "w3", "w2"):
        assert covered(r for p in plans for r in p[name][1]) == list(range(101))
    for plan in plans:
        heads = [i // H for i in covered(plan["wo"][1])][::H]
        rows = []  # group by group: this rank's query heads of it, its key, its value
        for group in sorted({head // G for head in heads}):
            slots = [head % G for head in heads if head // G == group] + [G, G + 1]
            rows += [(group * (G + 2) + slot) * H + i for slot in slots for i in range(H)]
        assert covered(plan["wqkv"][1]) == rows
        assert len(heads) % len({head // G for head in heads}) == 0  # groups of one size, as the model's view needs
        assert len(covered(plan["w1"][1])) in (101 // tp_size, 101 // tp_size + 1)
        for name in ("wqkv", "w1") if tp_size <= n_kv_heads else ("w1",):  # the first rank is the slowest
            assert len(covered(plan[name][1])) <= len(covered(plans[0][name][1]))


@pytest.mark.parametrize("tp_size", range(2, 17))
@pytest.mark.parametrize("columns", [384, 8192, 22016, 22016 + 64])
def test_int4_is_cut_as_its_kernel_on_a_gpu_wants_it_where_shares_stay_about_even(columns, tp_size):
    def widths(**changes):
        config = dataclasses.replace(BASE, n_heads=16, intermediate_size=columns, **changes)
        cuts = [tp.shard_plan(config, rank, tp_size)["w2"][1] for rank in range(tp_size)]
        assert covered(r for ranges in cuts for r in ranges) == list(range(columns))
        return [len(covered(ranges)) for ranges in cuts]

    int4 = {"quant": "int4", "group_size": 32}
    floats, ladder, spd = widths(wiring="ladder"), widths(wiring="ladder", **int4), widths(wiring="spd", **int4)
    if columns % 128 == 0 and columns >= 8 * 128 * tp_size:
        assert not any(width % 128 for width in ladder)
        assert max(ladder) <= 9 / 8 * columns / tp_size
    else:
        assert ladder == spd
    assert max(spd) - min(spd) <= 32  # there, which column is whose is a part of the function
    assert max(floats) - min(floats) <= 1


@pytest.mark.parametrize("shares", UNLIKE, ids=str)
@pytest.mark.parametrize("changes", [MANY, ONE, {**MANY, "intermediate_size": 4096}], ids=str)
def test_unlike_ranks_hold_what_their_shares_say(changes, shares):
    config = dataclasses.replace(BASE, **changes)
    plans = [tp.shard_plan(config, rank, shares) for rank in range(len(shares))]
    N, K, H = config.n_heads, config.n_kv_heads, config.head_dim
    heads = N * H, (H if len(shares) > K else N // K * H)
    for name, (whole, unit) in {"wo": heads, "w2": (config.intermediate_size, 1), "output": (130, VOCAB_BLOCK)}.items():
        widths = [len(covered(plan[name][1])) for plan in plans]
        assert covered(r for plan in plans for r in plan[name][1]) == list(range(whole))
        assert all(abs(n - whole * s / sum(shares)) < unit for n, s in zip(widths, shares, strict=True)), name


def test_equal_shares_are_a_number_of_ranks():
    config = dataclasses.replace(BASE, **MANY)
    for ranks in (1, 2, 3, 5):
        assert all(tp.shard_plan(config, r, ranks) == tp.shard_plan(config, r, (7,) * ranks) for r in range(ranks))


def test_int4_is_cut_finer_where_the_least_share_would_be_coarse():
    config = dataclasses.replace(BASE, n_kv_heads=6, intermediate_size=8192, quant="int4", group_size=64)
    for shares, size in ((3, 1), 128), ((5, 1), 128), ((9, 1, 9), 64):
        cuts = [stop for rank in range(len(shares)) for _, stop in tp.shard_plan(config, rank, shares)["w2"][1]]
        assert cuts[-1] == 8192 and functools.reduce(math.gcd, cuts) % size == 0
        assert size == 128 or any(cut % 128 for cut in cuts)


@pytest.mark.parametrize(
    "shares, changes, words",
    [
        ((10, 1), MANY, "1 of 11 is none of 8 KV heads: each needs 1 in 8"),
        ((9, 1, 1), {**MANY, "n_kv_heads": 2}, "1 of 10 is none of 8 query heads of a KV head: each needs 1 in 8"),
        ((7, 1), {**MANY, "intermediate_size": 4}, "1 of 8 is none of 4 parts of the MLP: each needs 1 in 4"),
    ],
)
def test_shares_that_leave_a_rank_with_nothing_are_refused(shares, changes, words):
    config = dataclasses.replace(BASE, **changes)
    with pytest.raises(InputError, match=f"--shares: {words}"):
        for rank in range(len(shares)):
            tp.shard_plan(config, rank, shares)


@pytest.mark.parametrize("tp_size", [7, 100])
def test_more_ranks_than_heads_is_refused(tp_size):
    with pytest.raises(InputError, match=f"tp {tp_size} cannot shard n_heads 6: use 1 to 6 ranks"):
        tp.shard_plan(BASE, 0, tp_size)
    with pytest.raises(InputError, match="cannot shard intermediate_size 5: use 1 to 5 ranks"):
        tp.shard_plan(dataclasses.replace(BASE, intermediate_size=5), 0, tp_size)


def test_a_rank_reads_only_its_slice():
    config = dataclasses.replace(BASE, n_heads=8, n_kv_heads=4, vocab_size=128)
    read = []

    class Counting(StateWeights):
        def fill(self, target, name, dim, ranges=None):
            super().fill(target, name, dim, ranges)
            read.append((name, target.numel()))

    state = random_model(config).state_dict()
    tp.load_shard(config, Counting(state), torch.float32, "cpu", rank=1, shares=4)
    assert len(read) == len(state)
    for name, count in read:
        whole = "embeddings" in name or "norm" in name
        assert count == state[name].numel() // (1 if whole else 4), name


def logits_of(world, cases, **compile):
    """The logits of every case on this rank."""
    return [last_logits(shard(config, world), *unequal_rows(config), **compile) for config in cases]


def halves(world, config, compile):
    """Logits in bfloat16 on this rank: plain, and with few_rows.cpp, which --compile takes."""
    nets = [shard(config, world, torch.bfloat16) for _ in range(2)]
    compiling.use_fast_modules(nets[1])
    return [last_logits(net, *unequal_rows(config), compile=c) for net, c in zip(nets, (False, compile), strict=True)]


def check_few_rows(tp_size, changes, compile):
    config = dataclasses.replace(BASE, **changes, **HALVED)
    answers = run_ranks(tp_size, halves, config, compile)
    plain, fast = answers[0]
    assert all(torch.equal(other[1], fast) for other in answers)
    expected = expected_logits(config, tp_size)
    assert (fast - expected).abs().max() < 0.05 * expected.abs().max()
    assert (fast - expected).abs().mean() < 1.2 * (plain - expected).abs().mean()


@pytest.mark.parametrize("tp_size", [2, 3, 4])
def test_few_rows_on_ranks_compute_what_one_device_does(tp_size):
    check_few_rows(tp_size, LADDER, compile=False)


@pytest.mark.slow
@pytest.mark.parametrize("tp_size, wiring", [(2, "ladder"), (2, "parallel"), (3, "parallel"), (4, "ladder")])
def test_compiled_few_rows_on_ranks_compute_what_one_device_does(tp_size, wiring):
    check_few_rows(tp_size, {"wiring": wiring}, compile=True)


def expected_logits(config, ranks):
    """(B, steps + 1, V) from the float64 reference, with the heads and columns of each rank's shard."""
    net = random_model(config)
    tokens, lengths = unequal_rows(config)
    plans = [tp.shard_plan(config, r, ranks) for r in range(ranks if isinstance(ranks, int) else len(ranks))]
    shards = [(tuple(i // config.head_dim for i in p["wo"][1][0]), p["w2"][1][0]) for p in plans]
    reference = Reference(config, net.state_dict(), shards)
    rows = []
    for row, length in enumerate(lengths):
        # each rank's part of the vocabulary comes from its own stream; they differ under upper-bound
        parts = [
            reference.logits(tokens[row, :length], rank)[-4:, slice(*p["output"][1][0])] for rank, p in enumerate(plans)
        ]
        rows.append(torch.cat([torch.from_numpy(p) for p in parts], dim=1))
    return torch.stack(rows)


def check_ranks(shares, cases, **compile):
    cases = [dataclasses.replace(BASE, **changes) for changes in cases]
    ranks = run_ranks(shares, functools.partial(logits_of, cases=cases, **compile))
    for case, config in enumerate(cases):
        logits = ranks[0][case]
        for other in ranks[1:]:
            assert torch.equal(other[case], logits), f"{config}: the ranks disagree"
        error = (logits - expected_logits(config, shares)).abs().max()
        assert error < 1e-4, f"{config}: {error}"
        if not config.named_wiring.laned:
            alone = last_logits(random_model(config), *unequal_rows(config))
            assert torch.allclose(logits, alone, atol=1e-4), config


@pytest.mark.parametrize("tp_size", [2, 3, 4])
def test_all_ranks_compute_what_one_device_does(tp_size):
    check_ranks(tp_size, CASES)


@pytest.mark.parametrize("shares", UNLIKE, ids=str)
def test_unlike_ranks_compute_what_one_device_does(shares):
    """Those wirings too that are another function on other ranks: of what each rank holds."""
    wirings = "standard", "ladder", "parallel", "spd", "desync"
    check_ranks(shares, [{"wiring": wiring, **shape} for shape in (MANY, ONE) for wiring in wirings])


@pytest.mark.parametrize("tp_size", [2, 3, 4])
def test_a_prefill_in_parts_and_what_follows_equal_those_in_one(tp_size):
    """Rows of five lengths, whose last tokens are in different parts."""
    windowed = {"sliding_window": 3, "window_layers": (0, 2)}
    cases = [dataclasses.replace(BASE, **changes, **UNEVEN, **windowed) for changes in WIRED]
    ranks = run_ranks(tp_size, logits_in_parts, cases)
    for i, config in enumerate(cases):
        expected = ranks[0][i][0]
        for logits in (logits for rank in ranks for logits in rank[i]):
            assert torch.allclose(logits, expected, atol=1e-5), config


def logits_in_parts(world, cases):
    """The logits of every case on this rank, prefilled in one, two and three parts."""
    nets, rows = [shard(config, world) for config in cases], unequal_rows(cases[0], batch=5)
    return [[last_logits(net, *rows, parts=parts) for parts in (1, 2, 3)] for net in nets]


def test_compiled_ranks_compute_what_one_device_does():
    check_ranks(2, [{**LADDER, **UNEVEN}], compile=True)


@pytest.mark.slow
@pytest.mark.parametrize("tp_size, changes", [(n, c) for n in COMPILED for c in COMPILED[n]], ids=str)
def test_compiled_ranks_of_every_wiring_compute_what_one_device_does(tp_size, changes):
    check_ranks(tp_size, [{**changes, **UNEVEN}], compile=True, compile_prefill=True)


@pytest.mark.slow
def test_compiled_ranks_of_several_nodes_do_too():
    """The same wrapper in C++, other groups."""
    config = dataclasses.replace(BASE, **LADDER, **UNEVEN)
    over_memory, *others = run_ranks(2, logits_over_all, config)[1]
    assert all(torch.allclose(over_memory, other, atol=1e-5) for other in others) and not over_memory.isnan().any()


def logits_over_all(world, config):
    from extras.collectives import one_hop

    found = []
    for group in (world.group, world.dist_group, one_hop.connect(world)):
        net = shard(config, world)
        net.comm = tp.TensorParallel(config, world.tp_size, group)
        found.append(last_logits(net, *unequal_rows(config), compile=True))
    return found


LANED = [c for c in WIRED if kind(c).laned and c["wiring"] != "upper-bound"]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_lanes_compute_the_same_on_any_number_of_ranks(tp_size):
    """Four lanes, two KV heads; with biases, which one lane adds."""
    cases = [dataclasses.replace(BASE, wiring=f"{c['wiring']}/4", **BIASED) for c in LANED]
    if tp_size == 1:
        found = [[last_logits(whole(config), *unequal_rows(config)) for config in cases]]
    else:
        found = run_ranks(tp_size, functools.partial(logits_of, cases=cases))
    for case, config in enumerate(cases):
        expected = expected_logits(config, 4)
        for rank in found:
            assert (rank[case] - expected).abs().max() < 1e-4, config


@pytest.mark.parametrize("how", [{"parts": 3}, pytest.param({"compile": True}, marks=pytest.mark.slow)], ids=str)
def test_several_lanes_of_a_rank_take_parts_and_are_compiled(how):
    cases = [dataclasses.replace(BASE, wiring=f"{name}/4") for name in ("spd", "delayed-2")]
    for rank in run_ranks(2, functools.partial(logits_of, cases=cases, **how)):
        for config, logits in zip(cases, rank, strict=True):
            assert (logits - expected_logits(config, 4)).abs().max() < 1e-4, config


def test_unlike_ranks_hold_unlike_numbers_of_lanes():
    config = dataclasses.replace(BASE, wiring="spd/4")
    assert [len(tp.lanes_of(config, rank, (3, 1))) for rank in range(2)] == [3, 1]
    for [logits] in run_ranks((3, 1), functools.partial(logits_of, cases=[config])):
        assert (logits - expected_logits(config, 4)).abs().max() < 1e-4


def test_lanes_have_the_same_neurons_in_int4():
    plain = dataclasses.replace(BASE, wiring="spd/4", intermediate_size=352, dim=64)
    int4 = dataclasses.replace(plain, quant="int4", group_size=32, kept=("wo",))
    for lane in range(4):
        assert (
            tp.shard_plan(int4, lane, 4)["w2"]
            == tp.shard_plan(plain, lane, 4)["w2"]
            == (1, [(88 * lane, 88 * (lane + 1))])
        )
    with pytest.raises(InputError, match="3 lanes cut groups of int4 at no multiple of 8 columns of w2: keep w2"):
        tp.shard_plan(dataclasses.replace(int4, wiring="spd/3"), 0, 3)


def whole(config):
    """The model on one device, which holds all its lanes."""
    return tp.load_shard(config, StateWeights(random_model(config).state_dict()), torch.float32, "cpu")


@pytest.mark.parametrize("lanes, ranks", [(4, 3), (8, 3), (4, (1, 2)), (2, 4), (7, 1)])
def test_lanes_that_ranks_cannot_share_are_refused(lanes, ranks):
    with pytest.raises(InputError, match="lanes"):
        tp.held(dataclasses.replace(BASE, wiring=f"spd/{lanes}"), torch.float32, 0, ranks)


def test_the_numbers_of_ranks_matter_where_the_table_says_so():
    for changes in WIRED:
        config = dataclasses.replace(BASE, **changes)
        two, three = expected_logits(config, 2), expected_logits(config, 3)
        assert torch.allclose(two, three, atol=1e-9) != config.named_wiring.laned, changes


def test_an_error_of_one_rank_ends_all():
    assert run_ranks(4, fail_on_rank_1) == ["rank 1 fails"] * 4


def fail_on_rank_1(world):
    world = launch.World(world.rank, world.tp_size, world.device, world.group)  # of all ranks, as join() makes it
    with world.together():
        pass
    assert world.tell([world.rank, "x"]) == [0, "x"] and world.tell(world.rank) == 0
    assert world.gather(world.rank) == [0, 1, 2, 3]
    try:
        with world.together():
            if world.rank == 1:
                raise InputError("rank 1 fails")
    except InputError as e:
        return str(e)


@pytest.mark.parametrize(
    "gpus, ranks, asked, device",
    [
        (0, 1, None, "cpu"), (1, 1, None, "cuda:0"), (1, 1, "cuda", "cuda:0"), (2, 1, "cuda:1", "cuda:1"),
        (1, 1, "cpu", "cpu"), (1, 2, None, "cpu"), (2, 2, None, "cuda:1"), (1, 1, "cuda:1", None), (0, 1, "cuda", None),
        (1, 2, "cuda", None), (1, 1, "xpu", None), (1, 1, "nonsense", None),
    ],
)  # fmt: skip
def test_the_device_of_a_rank(gpus, ranks, asked, device, monkeypatch):
    """The last local rank of `ranks`; the GPU is not there."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: d.index + 0)  # it refuses a device without an index
    rank_and_size = (0, 1) if ranks == 1 else (3, 4)
    if ranks > 1:
        monkeypatch.setenv("LOCAL_RANK", str(ranks - 1))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    if device is None:
        with pytest.raises(InputError, match="no such device: .*; this machine has cpu"):
            launch.choose_device(asked, *rank_and_size)
    else:
        assert str(launch.choose_device(asked, *rank_and_size)) == device
