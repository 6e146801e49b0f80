"""Tensor parallelism: what each rank holds, and that all ranks together compute what one device does."""

import contextlib
import json
import math
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from cases import refused, slow_case
from configs import BASE, BIASED, FAMILIES, MANY, ONE_EACH, UNEQUAL_SHARES, WIRED, change
from helpers import (
    StateWeights,
    counted_kernels,
    last_logits,
    random_model,
    shard,
    unequal_rows,
    write_model,
)
from parity import check_ranks_against_the_reference, reference_logits
from running import run_ranks

import generate
import tp
from ladder.checkpoints import checkpoint
from ladder.errors import InputError
from ladder.ranks import launch, meeting, watch
from ladder.ranks.world import choose_device
from model import VOCAB_BLOCK

UNEVEN = {"n_heads": 15, "n_kv_heads": 5, "intermediate_size": 101, "vocab_size": 130}
SHAPES = [  # at tp 2, 3, 4: even and uneven splits, replicated KV heads, odd sizes
    BIASED,
    {"tie_embeddings": True, "qkv_bias": True},
    {"head_dim": 16, "heads": {"qk_norm": True}, "n_heads": 8, "n_kv_heads": 4},
]
CASES = [{**WIRED[1], **shape} for shape in SHAPES] + [{**changes, **UNEVEN, **BIASED} for changes in WIRED]
OTHERS = [{**family, "wiring": wiring} for family in FAMILIES for wiring in ("standard", "ladder")]
CASES += [{**shape, **changes} for shape in ({}, UNEVEN) for changes in OTHERS]
ONE_KV_HEAD = {**BIASED, "n_heads": 8, "n_kv_heads": 1, "vocab_size": 130}


# ---------------------------------------------------------------------------------------------------------------------
# The plan


def indices(ranges):
    return [i for start, stop in ranges for i in range(start, stop)]


HEADS = (12, 12), (12, 4), (12, 3), (12, 2), (12, 1), (15, 5), (14, 2)
ODD = {"intermediate_size": 101, "vocab_size": 143}
PLANS = [({"n_heads": n, "n_kv_heads": k, **ODD}, [(1,) * ranks for ranks in range(1, 13)]) for n, k in HEADS]
PLANS += [(changes, [*UNEQUAL_SHARES, (7, 7, 7)]) for changes in (MANY, ONE_KV_HEAD)]


@pytest.mark.parametrize("changes, many_shares", PLANS, ids=str)
def test_every_head_row_and_column_is_one_ranks_in_proportion_to_its_share(changes, many_shares):
    config = change(BASE, **changes)
    N = config.n_heads
    K = config.n_kv_heads
    H = config.head_dim
    for shares in many_shares:
        plans = [tp.shard_plan(config, rank, shares) for rank in range(len(shares))]
        units = dict.fromkeys(("w1", "w2", "w3"), (config.intermediate_size, 1))
        units |= {"output": (config.vocab_size, VOCAB_BLOCK), "wo": (N * H, H if len(shares) > K else N // K * H)}
        for name, (whole, unit) in units.items():
            assert indices(r for plan in plans for r in plan[name][1]) == list(range(whole)), name
            widths = [len(indices(plan[name][1])) for plan in plans]
            if name != "wo" or len(shares) <= K or K == 1:  # else some ranks share a KV head, and others have one alone
                assert all(abs(n - whole * s / sum(shares)) < unit for n, s in zip(widths, shares, strict=True)), name
                assert len({*shares}) > 1 or widths[0] == max(widths)
        for plan in plans:
            check_heads(indices(plan["wqkv"][1]), [i // H for i in indices(plan["wo"][1])][::H], N // K, H)


def check_heads(rows, heads, G, H):
    """Rows of wqkv hold, KV head by KV head, the query heads of this rank's columns of wo, the key, the value."""
    groups = sorted({head // G for head in heads})
    slots = [(g, slot) for g in groups for slot in [*(head % G for head in heads if head // G == g), G, G + 1]]
    assert rows == [(g * (G + 2) + slot) * H + i for g, slot in slots for i in range(H)]
    assert len(heads) % len(groups) == 0  # groups of one size, as the model's view needs


@pytest.mark.parametrize("columns, wiring, shares, unit", [
    (7168 + 128, "ladder", (1,) * 7, 128), (7168 - 128, "ladder", (1,) * 7, 32), (22016 + 64, "ladder", (1, 1), 32),
    (8192, "ladder", (5, 1), 128), (8192, "ladder", (9, 1, 9), 32), (8192, "spd", (1,) * 7, 32),
    (160, "ladder", (1,) * 3, 32), (160, "ladder", (1,) * 5, 32), (160, "ladder", (1,) * 8, 16),  # halves of groups
])  # fmt: skip
def test_int4_is_cut_at_multiples_of_128_columns_where_shares_stay_about_even(columns, wiring, shares, unit):
    """The kernel on a GPU wants that; where lanes are part of the function, which neuron is whose may not change."""
    changes = {"dim": 128, "n_heads": 40, "n_kv_heads": 20, "intermediate_size": columns, "wiring": wiring}
    config = change(BASE, **changes, quant="int4", group_size=32)
    cuts = [stop for rank in range(len(shares)) for _, stop in tp.shard_plan(config, rank, shares)["w2"][1]]
    assert cuts[-1] == columns and math.gcd(*cuts, 128) == unit and cuts == sorted({*cuts})


@pytest.mark.parametrize("shares, changes, words", [
    ((10, 1), MANY, "--shares: 1 in 11 gets none of 8 KV heads: give 1 in 8 or more"),
    ((9, 1, 1), {**MANY, "n_kv_heads": 2}, "1 in 10 gets none of 8 query heads of a KV head: give 1 in 8 or more"),
    ((7, 1), {**MANY, "intermediate_size": 4}, "1 in 8 gets none of 4 parts of the MLP: give 1 in 4 or more"),
    ((1,) * 7, {}, "7 ranks or lanes cannot shard n_heads 6: use 1 to 6"),
    ((1,) * 6, {"intermediate_size": 5}, "cannot shard 5 neurons: use 1 to 5"),
])  # fmt: skip
def test_a_rank_without_a_head_or_a_neuron_is_refused(shares, changes, words):
    config = change(BASE, **changes)
    with pytest.raises(InputError, match=words):
        for rank in range(len(shares)):
            tp.shard_plan(config, rank, shares)


def test_heads_that_two_ranks_hold_are_refused(monkeypatch):
    """Their partials would not add up, and the text would be nonsense."""
    ranges = tp.head_ranges
    monkeypatch.setattr(tp, "head_ranges", lambda config, rank, shares: ranges(config, 0, shares))
    words = "the ranks hold columns 0 to 24, 0 to 24 of wo: each of its 48 must be held once"
    refused(words, tp.load_shard, BASE, StateWeights(random_model(BASE).state_dict()), torch.float32, "cpu", 0, (1, 1))


def test_ids_that_two_ranks_hold_are_refused(monkeypatch):
    ranges = tp.vocab_range
    monkeypatch.setattr(tp, "vocab_range", lambda vocab_size, rank, shares: ranges(vocab_size, 0, shares))
    words = f"of output: each of its {BASE.vocab_size} must be held once"
    refused(words, tp.load_shard, BASE, StateWeights(random_model(BASE).state_dict()), torch.float32, "cpu", 0, (1, 1))


def test_a_vector_of_an_mlp_is_cut_as_the_plan_says(monkeypatch):
    """One of a family's own, as docs/change-it.md has it for an attention: each rank holds its part."""
    config = change(BASE, n_kv_heads=6)
    plan = tp.shard_plan
    monkeypatch.setattr(tp, "shard_plan", lambda *where: plan(*where) | {"neuron_scale": plan(*where)["w1"]})
    net = tp.build(config)
    for block in net.layers:
        block.feed_forward.neuron_scale = torch.nn.Parameter(torch.empty(100, device="meta"))
    for rank, (start, stop) in enumerate([(0, 67), (67, 100)]):
        piece = tp.shard_slices(net, torch.float32, rank, (2, 1))["layers.1.feed_forward.neuron_scale"]
        assert (piece.shape, piece.ranges) == ((stop - start,), [(start, stop)])


def test_a_rank_reads_only_its_slice():
    config = change(BASE, n_heads=8, n_kv_heads=4, vocab_size=128)
    read = []

    class Counting(StateWeights):
        def fill(self, target, name, dim, ranges=None):
            super().fill(target, name, dim, ranges)
            read.append((name, target.numel()))

    state = random_model(config).state_dict()
    tp.load_shard(config, Counting(state), torch.float32, "cpu", rank=1, shares=(1,) * 4)
    assert len(read) == len(state)
    for name, count in read:
        whole = "embeddings" in name or "norm" in name
        assert count == state[name].numel() // (1 if whole else 4), name


def test_a_header_is_parsed_once_and_a_file_is_mapped_only_while_a_tensor_of_it_lives(tiny, monkeypatch):
    parsed = []
    for module, name in (checkpoint, "safe_open"), (checkpoint.json, "loads"):
        function = getattr(module, name)
        count = lambda *args, function=function, **flags: parsed.append(function) or function(*args, **flags)  # noqa: E731
        monkeypatch.setattr(module, name, count)
    weights = checkpoint.Weights(tiny)
    maps = Path("/proc/self/maps")
    assert len(parsed) == 2
    config = change(BASE, n_heads=15, n_kv_heads=5, intermediate_size=101, vocab_size=300)
    tp.load_shard(config, weights, torch.float32, "cpu")
    tensors = [weights.read(name) for name in weights.names()]
    assert len(parsed) == 2 and len(tensors) > 20
    assert not maps.exists() or str(tiny) in maps.read_text()
    tensors.clear()
    assert not maps.exists() or str(tiny) not in maps.read_text()


def write_safetensors(folder, header, data):
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("shift", range(9))  # earlier versions of safetensors did not align the header
def test_tensors_of_any_dtype_are_read_wherever_they_begin(shift, tmp_path):
    names = {dtype: name for name, dtype in checkpoint.STORED_DTYPES.items()}
    tensors = {"shift": torch.zeros(shift, dtype=torch.uint8), "scalar": torch.tensor(3.5), "none": torch.zeros(0, 4)}
    tensors |= {name: torch.arange(6).view(2, 3).to(dtype) for dtype, name in names.items()}
    header = {}
    data = b""
    for name, tensor in tensors.items():
        stop = len(data) + tensor.nbytes
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [len(data), stop]}
        data += bytes(tensor.flatten().view(torch.uint8).tolist())
    write_safetensors(tmp_path, header, data)
    weights = checkpoint.Weights(tmp_path)
    for name, tensor in tensors.items():
        stored = weights.read(name)
        assert stored.dtype == tensor.dtype and stored.shape == tensor.shape, name
        assert torch.equal(stored.clone().flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name


def test_a_dtype_that_is_unknown_here_is_refused(tmp_path):
    write_safetensors(tmp_path, {"w": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}, bytes(2))
    refused("model.safetensors: tensor w holds F4, which is not supported", checkpoint.Weights(tmp_path).read, "w")


# ---------------------------------------------------------------------------------------------------------------------
# The numbers


@pytest.mark.parametrize("tp_size", [2, 3, slow_case(4)])
def test_all_ranks_compute_what_one_device_does(tp_size):
    check_ranks_against_the_reference(tp_size, CASES)


@pytest.mark.parametrize("shares", UNEQUAL_SHARES, ids=str)
def test_ranks_of_unequal_shares_compute_what_one_device_does(shares):
    """In a wiring with lanes, what these heads and neurons of each rank compute."""
    wirings = "standard", "ladder", "spd", "desync"
    check_ranks_against_the_reference(
        shares, [{"wiring": wiring, **shape} for shape in (MANY, ONE_KV_HEAD) for wiring in wirings]
    )


@pytest.mark.parametrize("tp_size", [2, 3, slow_case(4)])
def test_a_prefill_in_chunks_and_what_follows_equal_those_in_one(tp_size):
    """Rows of five lengths, whose last tokens are in different splits."""
    windowed = {"heads": {"sliding_window": 3, "window_layers": (0, 2)}}
    cases = [change(BASE, **{**UNEVEN, **windowed, **changes}) for changes in ONE_EACH + OTHERS]
    for rank in run_ranks(tp_size, logits_in_chunks, cases):
        for config, (expected, *others) in zip(cases, rank, strict=True):
            assert all(torch.allclose(logits, expected, atol=1e-5) for logits in others), config


def logits_in_chunks(world, cases):
    nets = [shard(config, world) for config in cases]
    rows = unequal_rows(cases[0], batch=5)
    return [[last_logits(net, *rows, splits=splits) for splits in (1, 2, 3)] for net in nets]


COMPILED = [(2, changes, True) for changes in (*ONE_EACH, OTHERS[1], OTHERS[3])]
COMPILED += [(3, changes, True) for changes in (WIRED[1], OTHERS[-1])]
COMPILED += [(4, changes, True) for changes in (WIRED[1], OTHERS[3], {"wiring": "desync"})]


@pytest.mark.slow
@pytest.mark.parametrize("tp_size, changes, prefill", [(2, {"wiring": "ladder", "n_layers": 2}, False), *COMPILED])
def test_compiled_ranks_of_every_wiring_compute_what_one_device_does(tp_size, changes, prefill):
    check_ranks_against_the_reference(tp_size, [{**changes, **UNEVEN}], compile=True, compile_prefill=prefill)


def over_gloo(config, world):
    net = shard(config, world)
    net.comm = tp.TensorParallel(config, world.shares, world.dist_group)
    return net


@pytest.mark.slow
def test_compiled_ranks_compute_it_over_gloo_too():
    check_ranks_against_the_reference(2, [{**WIRED[1], **UNEVEN}], load=over_gloo, compile=True)


def bfloat16_logits(world, config, folder, compile):
    """Return this rank's logits, plain and with skinny_gemm.cpp, as generate.py loads the model."""
    plain = last_logits(shard(config, world, torch.bfloat16), *unequal_rows(config))
    net = generate.load_model(config, folder, "bfloat16", world)
    with counted_kernels() as counts:
        logits = last_logits(net, *unequal_rows(config), compile=compile)
    assert counts["model.Linear.forward"]
    return [plain, logits]


FEW_ROWS = [(tp_size, {"wiring": "ladder", "n_layers": 2}, False) for tp_size in (1, 2, 3)]
FEW_ROWS += [slow_case(4, {"wiring": "ladder", "n_layers": 2}, False)]
FEW_ROWS += [(2, changes, False) for changes in OTHERS[1:8:2]]
FEW_ROWS += [slow_case(2, {"wiring": "parallel", "n_layers": 2}, True)]
FEW_ROWS += [slow_case(3, changes, True) for changes in (FEW_ROWS[0][1], OTHERS[1])]


@pytest.mark.parametrize("tp_size, changes, compile", FEW_ROWS)
def test_few_rows_on_ranks_compute_what_one_device_does(tp_size, changes, compile, tmp_path):
    config = change(BASE, **{**UNEVEN, **changes, "head_dim": 64})  # for its decode_attention
    write_model(tmp_path, config, dtype=torch.bfloat16)
    if tp_size == 1:
        ranks = [bfloat16_logits(launch.World(0, 1, torch.device("cpu")), config, str(tmp_path), compile)]
    else:
        ranks = run_ranks(tp_size, bfloat16_logits, config, str(tmp_path), compile)
    plain, fast = ranks[0]
    assert all(torch.equal(other[1], fast) for other in ranks)
    expected = reference_logits(config, tp_size)
    assert (fast - expected).abs().max() < 0.05 * expected.abs().max()
    assert (fast - expected).abs().mean() < 1.2 * (plain - expected).abs().mean()


def test_the_number_of_ranks_matters_where_the_table_says_so():
    for changes in ONE_EACH:
        config = change(BASE, **changes)
        two = reference_logits(config, 2)
        three = reference_logits(config, 3)
        assert torch.allclose(two, three, atol=1e-9) != config.named_wiring.reads_partials, changes


# ---------------------------------------------------------------------------------------------------------------------
# Ranks


@pytest.mark.parametrize("gpus, n_ranks, asked, device", [
    (0, 1, None, "cpu"), (1, 1, "cuda", "cuda:0"), (2, 1, "cuda:1", "cuda:1"), (1, 2, None, "cpu"),
    (2, 2, None, "cuda:1"), (1, 1, "cuda:1", None), (0, 1, "cuda", None), (1, 2, "cuda", None),
    (2, 2, "cuda:0", "cuda:0"), (1, 2, "cuda:0", "cuda:0"),
    ("its own", 2, None, "cuda:0"), ("its own", 2, "cuda", "cuda:0"), ("its own", 2, "cpu", "cpu"),
    (2, 2, "old driver", "cuda:1 cannot be used: too old"), (2, 2, "slice", "which NCCL does not connect"),
])  # fmt: skip
def test_the_device_of_a_rank(gpus, n_ranks, asked, device, monkeypatch, capsys):
    """Of the last of the local ranks; the GPU is not there."""

    def set_device(device):
        if asked == "old driver":
            raise RuntimeError("too old\nsecond line")
        return device.index + 0  # it refuses a device without an index

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1 if gpus == "its own" else gpus)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100 MIG 1g.5gb" if asked == "slice" else "A100")
    rank_and_size = (0, 1) if n_ranks == 1 else (3, 4)
    if n_ranks > 1:
        monkeypatch.setenv("LOCAL_RANK", str(n_ranks - 1))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(n_ranks))
    words = device if device and " " in device else "no such device: .*; this machine has cpu"
    error = device is None or " " in device
    with pytest.raises(InputError, match=words) if error else contextlib.nullcontext():
        flag = None if asked in ("slice", "old driver") else asked
        assert str(choose_device(flag, *rank_and_size, own_gpu=gpus == "its own")) == device
    assert capsys.readouterr().err == ""  # rank 0 says it


def test_gpus_that_are_not_used_are_said_by_one_rank(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert str(choose_device(None, 0, 2)) == "cpu"
    words = f"running on the CPU: PyTorch {torch.__version__} sees 1 GPUs for 2 ranks here; each rank needs one"
    words += " (to try several on one: --device cuda:0)\n"
    assert capsys.readouterr().err == words


@pytest.mark.parametrize("gpus, device", [("a b", "cuda:0"), ("a a", "cpu"), ("a b,c", "cpu"), (" b", "cpu")])
def test_ranks_that_each_see_one_gpu_use_it_if_these_differ(gpus, device, monkeypatch):
    """As where a job gives each task a GPU: the last of two ranks, by the UUIDs that they see."""
    every = [one.split(",") if one else [] for one in gpus.split(" ")]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(meeting, "visible_gpus", lambda device: every[1])
    monkeypatch.setattr(watch, "start", Mock())
    monkeypatch.setattr(meeting.JoinedWorld, "gather", lambda self, value: [" ".join(each) for each in every])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    monkeypatch.setattr(meeting, "make_group", lambda *args: None)
    assert str(launch.join(None, {"comm": "library"}).device) == device
