"""All-reduces of integers, against integers by hand."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from helpers import BASE, last_logits, run_ranks, shard, unequal_rows

import tp
from extras.collectives import int8_sums
from extras.collectives.int8_sums import Int8Group
from extras.measure import link
from runtime.errors import InputError
from runtime.launch import World

SHAPES = [(3, 7, 640), (5, 9, 301), (1, 2, 48)]  # the last one is small: it travels as it is
OPS = torch.ops._c10d_functional


def partial(rank, shape, dtype):
    """Rows of unlike sizes, some of zeros."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(rank)) * torch.arange(shape[1])[:, None] ** 3
    return x.to(dtype)


def sums(world, dtype, shared):
    """Of each shape in turn: all in flight at a time, waited for in another order; and of one that is not finite."""
    gloo = world.dist_group or dist.group.WORLD
    group = Int8Group(world.group if shared else gloo, gloo, world.rank, world.tp_size, world.device)
    pending = [OPS.all_reduce(partial(world.rank, shape, dtype), "sum", group.group_name) for shape in SHAPES]
    found = [OPS.wait_tensor(one) for one in (pending[1], pending[0], pending[2])]
    x = torch.ones(200, 100, dtype=dtype)
    x[3, 3], x[7, 7] = (torch.nan, torch.inf) if world.rank == 1 else (1, 1)
    return found[1], found[0], found[2], OPS.wait_tensor(OPS.all_reduce(x, "sum", group.group_name))


def by_hand(x):
    """Numbers (n,) as they arrive: 64 at a time as multiples of a scale."""
    out = []
    for group in x.double().split(64):
        scale = (group.abs().max().float() / 127).bfloat16().double()
        out.append((group / scale).round().clamp(-127, 127) * scale if scale else 0 * group)
    return torch.cat(out)


@pytest.mark.parametrize(
    "ranks, dtype, shared",
    [
        (2, torch.bfloat16, True),
        (2, torch.float32, False),
        (3, torch.float32, True),
        (4, torch.bfloat16, False),
    ],
)
def test_sums_are_those_of_the_integers(ranks, dtype, shared):
    answers = run_ranks(ranks, sums, dtype, shared)
    for i, shape in enumerate(SHAPES):
        parts, got = [partial(rank, shape, dtype).flatten() for rank in range(ranks)], answers[0][i]
        assert all(torch.equal(got, answer[i]) for answer in answers) and got.dtype == dtype
        if got.nbytes > int8_sums.SMALL:
            parts = [by_hand(part) for part in parts]
        wanted = sum(part.double() for part in parts)
        if ranks > 2 and got.nbytes > int8_sums.SMALL:  # each rank's slice, whole groups, is quantized again
            width = -(-wanted.numel() // (64 * ranks)) * 64
            wanted = torch.cat([by_hand(part) for part in wanted.split(width)])
        if got.nbytes <= int8_sums.SMALL and not shared:
            continue  # gloo's own sum, which rounds each addition
        near = torch.isclose(got.flatten().double(), wanted, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-4)
        # where a number lies between two integers, rounding before may take it to the other one
        assert near.all() if ranks == 2 else near.float().mean() > 0.98
        step = wanted.abs().max() / 127 * (ranks > 2)
        assert ((got.flatten() - wanted).abs() <= 2**-7 * wanted.abs() + 1e-4 + step).all()
        assert not torch.equal(got, sum(partial(r, shape, dtype).float() for r in range(ranks)).to(dtype)) or i == 2
    assert all(not (answer[3][3, 3].isfinite() or answer[3][7, 7].isfinite()) for answer in answers)
    assert all((answer[3][100:] - ranks).abs().max() < 0.01 * ranks for answer in answers)


def logits(world, wirings, compile):
    found = []
    for wiring in wirings:
        config = dataclasses.replace(BASE, wiring=wiring, n_heads=12, n_kv_heads=4, intermediate_size=208)
        net = shard(config, world)
        exact = last_logits(net, *unequal_rows(config), compile=compile)
        group = Int8Group(world.group, None, world.rank, world.tp_size, world.device)
        net.comm = tp.TensorParallel(config, world.tp_size, group)
        found.append((wiring, exact, last_logits(net, *unequal_rows(config), compile=compile)))
    return found


@pytest.mark.parametrize(
    "ranks, compile, wirings",
    [
        (2, False, ["standard", "ladder", "parallel-ladder"]),
        (3, False, ["ladder"]),
        pytest.param(2, True, ["ladder"], marks=pytest.mark.slow),
    ],
)
def test_a_model_over_them_is_nearly_the_same(ranks, compile, wirings):
    for rank in run_ranks(ranks, small_too, wirings, compile):
        for wiring, exact, got in rank:
            error = (got - exact).norm() / exact.norm()
            assert 1e-4 < error < 0.03, (wiring, error)


def small_too(world, *args):
    with pytest.MonkeyPatch.context() as m:
        m.setattr(int8_sums, "SMALL", 0)
        return logits(world, *args)


def test_a_link_carries_fewer_bytes():
    inner, three = (Int8Group(None, None, 0, ranks, torch.device("cpu")) for ranks in (2, 3))
    group = link.LinkedGroup(inner, link.FREE, 0, 2, torch.device("cpu"))
    with pytest.raises(InputError, match=r"^--link with the sums of int8-\d+ takes two ranks"):
        link.emulate(World(0, 3, torch.device("cpu"), three), link.FREE)
    assert group.wire_bytes(torch.ones(12800, dtype=torch.bfloat16)) == 13200
    assert group.wire_bytes(torch.ones(64, dtype=torch.bfloat16)) == 128
