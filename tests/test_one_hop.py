"""Collectives in one hop: exactly the sums in the order of ranks, in any order, for nodes of one rank or several."""

import dataclasses
import functools
import os

import pytest
import torch
from helpers import BASE, last_logits, random_model, run_ranks, shard, unequal_rows
from test_shared_memory import OPS, numbers

from extras.collectives import one_hop
from extras.measure import link
from kernels import shared_memory
from runtime.errors import InputError

PAIRS = ["a", "a", "b", "b"]
PLACES = ["a", "b"], ["a", "b", "c"], ["a", "a", "b"], ["a", "b", "c", "d"], PAIRS
nodes = pytest.mark.parametrize("places", PLACES, ids="".join)


LARGEST = 2**16  # bytes to all peers together, as in one_hop.cpp


def connect(world, places):
    return one_hop.connect(world, "127.0.0.1", places)


def total(places, *args):
    """The sum of numbers(rank, *args), not in 16 bits, rounded for each node that shares memory, and at the end."""

    def add(parts):
        first = parts[0].float() if parts[0].dtype == torch.bfloat16 else parts[0]
        return functools.reduce(torch.add, parts[1:], first).to(parts[0].dtype)

    parts = [numbers(rank, *args) for rank in range(len(places))]
    return add([add(parts[:2]), add(parts[2:])] if places == PAIRS else parts)


def sums(world, places):
    group = connect(world, places)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for size in (1, 2, 31, 4096, 1 + LARGEST // 4, 4 + LARGEST // 2):  # none, or one, to the ring
            x = numbers(world.rank, size, dtype)
            found = OPS.wait_tensor(OPS.all_reduce(x, "sum", group.group_name))
            assert torch.equal(x, numbers(world.rank, size, dtype))
            if x.nbytes * (len({*places} if places == PAIRS else places) - 1) <= LARGEST:
                assert torch.equal(found, total(places, size, dtype))
            else:
                assert torch.allclose(found, total(places, size, dtype), rtol=0.02, atol=1)


@nodes
def test_sums_are_those_in_the_order_of_the_ranks_and_rounded_once(places):
    run_ranks(len(places), sums, places)


def out_of_reach(world):
    for address, reason in ("", "no IPv4 address"), ("192.0.2.1", "Cannot assign"):
        mine = address if world.rank == 1 else "127.0.0.1"
        with pytest.raises(InputError, match=f"^the machines do not reach one another: .*{reason}"):
            one_hop.connect(world, mine, ["a", "b"])


def test_ranks_that_do_not_reach_one_another_say_so_alike():
    run_ranks(2, out_of_reach)


def in_flight(world, places, order):
    """Sums and gathers of many sizes under way at once, more bytes than may be, waited for in an order."""
    group, ranks = connect(world, places), world.tp_size
    sizes = [1, 2048, 7, LARGEST // 4, 640, LARGEST // 4, LARGEST // 4, 10]
    started = [OPS.all_reduce(numbers(world.rank, n, torch.float32, n), "sum", group.group_name) for n in sizes]
    part = numbers(world.rank, 6, torch.float64).view(3, 2)
    whole = torch.ops.ladder.gather(part, ranks, group.group_name)  # completes what was started before
    assert torch.equal(whole, torch.stack([numbers(rank, 6, torch.float64).view(3, 2) for rank in range(ranks)]))
    for i in order:
        assert torch.equal(OPS.wait_tensor(started[i]), total(places, sizes[i], torch.float32, sizes[i]))
    part = numbers(world.rank, LARGEST, torch.bfloat16)  # the library's
    whole = torch.ops.ladder.gather(part, ranks, group.group_name)
    assert torch.equal(whole, torch.stack([numbers(rank, len(part), torch.bfloat16) for rank in range(ranks)]))
    for _ in range(5):  # never waited for
        OPS.all_reduce(torch.ones(LARGEST // 4), "sum", group.group_name)
    x = numbers(world.rank, 9, torch.float32)
    assert torch.equal(OPS.wait_tensor(OPS.all_reduce(x, "sum", group.group_name)), total(places, 9, torch.float32))


@nodes
@pytest.mark.parametrize("order", [range(8), range(7, -1, -1), [3, 0]], ids=str)
def test_several_in_flight_waited_for_in_any_order_or_never(places, order):
    run_ranks(len(places), in_flight, places, [*order], timeout=60)


def logits(world, places, wiring, emulated):
    world.group = connect(world, places)
    if emulated:
        world = link.emulate(world, link.Link("x", 3000.0, None))
    return last_logits(shard(dataclasses.replace(BASE, wiring=wiring), world), *unequal_rows(BASE))


@nodes
@pytest.mark.parametrize("wiring, emulated", [("standard", False), ("ladder", False), ("ladder", True)])
def test_ranks_compute_what_one_device_does(places, wiring, emulated):
    first, *others = run_ranks(len(places), logits, places, wiring, emulated)
    assert all(torch.equal(first, other) for other in others)
    alone = last_logits(random_model(dataclasses.replace(BASE, wiring=wiring)), *unequal_rows(BASE))
    assert torch.allclose(first, alone, atol=1e-4)


def without_memory(world):
    with pytest.MonkeyPatch.context() as m:
        if world.rank == 3:
            m.setattr(shared_memory, "_open", lambda **offer: os.stat("/nowhere"))
        group = connect(world, PAIRS)
    x = numbers(world.rank, 9, torch.float32)
    assert torch.equal(OPS.wait_tensor(OPS.all_reduce(x, "sum", group.group_name)), total("abcd", 9, torch.float32))


def test_where_the_ranks_of_one_node_cannot_share_memory_all_ranks_have_connections():
    run_ranks(4, without_memory)
