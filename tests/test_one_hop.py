"""Collectives in one hop: exactly the sums in the order of ranks, in any order, for nodes of one rank or several."""

import dataclasses
import functools
import os
import socket
import struct
import time

import pytest
import torch
from helpers import BASE, last_logits, random_model, run_ranks, shard, unequal_rows
from test_shared_memory import OPS, numbers

from extras.collectives import one_hop, shared_memory
from extras.measure import link
from runtime.errors import InputError

PAIRS = ["a", "a", "b", "b"]
PLACES = ["a", "b"], ["a", "b", "c"], ["a", "a", "b"], ["a", "b", "c", "d"], PAIRS
nodes = pytest.mark.parametrize("places", PLACES, ids="".join)


LARGEST = 2**16  # bytes to all peers together, as in one_hop.cpp


def connect(world, places):
    world.nodes = places
    return one_hop.connect(world)


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
    for interface, reason in ("nowhere", "no IPv4 address"), ("lo", "node 1 has not connected within 0.1 s"):
        with pytest.MonkeyPatch.context() as m:
            m.setenv("GLOO_SOCKET_IFNAME", interface if world.rank == 1 else "lo")
            m.setattr(one_hop, "PATIENCE", 0.1)
            if world.rank == 1:  # as behind a firewall
                m.setattr(one_hop.socket, "create_connection", lambda *args: socket.socketpair()[0])
            with pytest.raises(InputError, match=f"^the machines do not reach one another: .*{reason}"):
                connect(world, ["a", "b"])


def test_ranks_that_do_not_reach_one_another_say_so_alike():
    run_ranks(2, out_of_reach)


STRANGERS = {
    "a rank": b"\0\0\0\1" + bytes(9999), "silent": b"", "junk": bytes(range(256)) * 64, "closed": None,
    "reset": "reset", "a wrong token": b"0" * 32 + b"\0\0\0\1",
}  # fmt: skip


def among_strangers(world, names):
    """How long connecting takes when strangers come to rank 0 before rank 1 does, and the ranks' sum is right."""
    listen, tell, listeners, strangers = socket.create_server, world.tell, [], []

    def come(what):
        strangers.append(socket.create_connection(listeners[0].getsockname()))
        if what == "reset":
            strangers[-1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if isinstance(what, bytes):
            strangers[-1].sendall(what)
        else:
            strangers.pop().close()

    def create_server(*args):
        listeners.append(listen(*args))
        for name in names:
            come(STRANGERS[name])
        return listeners[0]

    def tell_strangers(token):
        for number in 0, 7:  # they know the token, but nobody expects these numbers
            come(token.encode() + number.to_bytes(4))
        return tell(token)

    with pytest.MonkeyPatch.context() as m:
        if world.rank == 0:
            m.setattr(one_hop.socket, "create_server", create_server)
            world.tell = tell_strangers
        start, group = time.monotonic(), connect(world, ["a", "b"])
    seconds, x = time.monotonic() - start, numbers(world.rank, 64, torch.float32)
    assert torch.equal(OPS.wait_tensor(OPS.all_reduce(x, "sum", group.group_name)), total("ab", 64, torch.float32))
    return seconds


@pytest.mark.parametrize("names", [*([name] for name in STRANGERS), [*STRANGERS] * 2], ids=",".join)
def test_strangers_are_dropped_and_delay_nobody(names):
    assert max(run_ranks(2, among_strangers, names)) < one_hop.PATIENCE / 2


def in_flight(world, places):
    """Sums and gathers of many sizes under way at once, more bytes than may be, waited for in some order."""
    group = connect(world, places)
    for order in range(8), range(7, -1, -1), [3, 0]:
        waited_for(world, places, group, order)


def waited_for(world, places, group, order):
    ranks = world.tp_size
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
def test_several_in_flight_waited_for_in_any_order_or_never(places):
    run_ranks(len(places), in_flight, places)


WAYS = ("standard", False), ("ladder", False), ("ladder", True)


def logits(world, places):
    world.group, results = connect(world, places), []
    for wiring, emulated in WAYS:
        used = link.emulate(world, link.Link("x", 3000.0, None)) if emulated else world
        results.append(last_logits(shard(dataclasses.replace(BASE, wiring=wiring), used), *unequal_rows(BASE)))
    return results


@pytest.mark.parametrize("places", [["a", "b"], ["a", "b", "c"], PAIRS], ids="".join)
def test_ranks_compute_what_one_device_does(places):
    first, *others = run_ranks(len(places), logits, places)
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))
    for (wiring, _), result in zip(WAYS, first, strict=True):
        alone = last_logits(random_model(dataclasses.replace(BASE, wiring=wiring)), *unequal_rows(BASE))
        assert torch.allclose(result, alone, atol=1e-4)


def without_memory(world):
    with pytest.MonkeyPatch.context() as m:
        if world.rank == 3:
            m.setattr(shared_memory, "_open", lambda **offer: os.stat("/nowhere"))
        group = connect(world, PAIRS)
    x = numbers(world.rank, 9, torch.float32)
    assert torch.equal(OPS.wait_tensor(OPS.all_reduce(x, "sum", group.group_name)), total("abcd", 9, torch.float32))


def test_where_the_ranks_of_one_node_cannot_share_memory_all_ranks_have_connections():
    run_ranks(4, without_memory)
