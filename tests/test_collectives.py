"""extras/collectives: sums against float64, in any order and with delays; how ranks meet; faults; strangers."""

import contextlib
import dataclasses
import io
import itertools
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from unittest.mock import MagicMock, call

import pytest
import torch
import torch.distributed as dist
from helpers import BASE, HANGS, ROOT, free_port, last_logits, random_model, run_ranks, shard, unequal_rows

import tp
from extras.collectives import int8_sums, one_hop, one_shot, shared_memory
from extras.collectives.int8_sums import Int8Group
from extras.measure import link
from runtime.errors import InputError, Verdict
from runtime.launch import World

OPS = torch.ops._c10d_functional
SLOTS, SLOT = 4, 256  # bytes: small ones, so that small messages have many pieces
LARGEST = 2**16  # bytes to all peers together, as in one_hop.cpp; gloo carries larger messages
SIZES = {  # numbers
    "memory": [1, 2, 31, 63, 64, 65, 127, 128, 129, 512, 513, 1500],  # 64 or 128 fill a slot, 512 all of them
    "one hop": [1, 2, 31, 4096, 1 + LARGEST // 4, 4 + LARGEST // 2],
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64]
PAIRS = ["a", "a", "b", "b"]  # the nodes of four ranks


def numbers(rank, count, dtype, seed=0):
    """What a rank contributes; any rank can compute it. Of unequal sizes, so that rounding matters."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if not dtype.is_floating_point:
        return torch.randint(-1000, 1000, (count,), generator=generator, dtype=dtype)
    exponents = torch.randint(-6, 7, (count,), generator=generator)
    return (torch.randn(count, generator=generator, dtype=torch.float64) * 2.0**exponents).to(dtype)


def check_sum(result, ranks, seed=0, roundings=1):
    """result: a sum of numbers(), in float32 or better, rounded so many times at its end."""
    terms = [numbers(rank, len(result), result.dtype, seed).double() for rank in range(ranks)]
    exact, size = sum(terms), sum(term.abs() for term in terms)
    last = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24, torch.float64: 2**-53}
    allowed = last.get(result.dtype, 0) * (exact.abs() if roundings == 1 else roundings * size)
    allowed += ranks * size * (2**-53 if result.dtype == torch.float64 else 2**-24)
    allowed += 2**-25 * (result.dtype == torch.float16)  # the smallest numbers
    assert ((result.double() - exact).abs() <= allowed * result.dtype.is_floating_point).all()


@contextlib.contextmanager
def small_slots(world):
    """A group of shared memory with small slots, for the time of a block."""
    group = shared_memory.connect(world, SLOTS, SLOT)
    try:
        yield group
    finally:
        torch.ops.ladder.leave_memory(group.group_name)


def connect(world, nodes):
    """The group of one hop among ranks of these nodes."""
    world.nodes = nodes
    return one_hop.connect(world)


def exchange(world, nodes):
    with small_slots(world) if nodes is None else contextlib.nullcontext(connect(world, nodes)) as group:
        sum_and_gather(world, nodes, group.group_name)
        send_at_random(world, nodes, group.group_name)


def roundings(nodes, nbytes):
    """How often a sum is rounded at its end: with pairs of ranks in each node there, too; by gloo at each addition."""
    if nodes is None:
        return 1
    peers = (2 if nodes == PAIRS else len(nodes)) - 1
    if nbytes * peers > LARGEST:
        return len(nodes)
    return 2 if nodes == PAIRS else 1


def sum_and_gather(world, nodes, name):
    for dtype in DTYPES:
        results = []
        for size in SIZES["memory" if nodes is None else "one hop"]:
            x = numbers(world.rank, size, dtype)
            results.append(OPS.wait_tensor(OPS.all_reduce(x, "sum", name)))
            assert torch.equal(x, numbers(world.rank, size, dtype))
            check_sum(results[-1], world.tp_size, roundings=roundings(nodes, x.nbytes))
        mine = [result.view(torch.uint8).tolist() for result in results]
        assert all(other == mine for other in world.gather(mine))
    for size in 1, 40, 700, LARGEST:
        whole = torch.stack([numbers(rank, 2 * size, torch.float32) for rank in range(world.tp_size)])
        own = whole[world.rank].view(2, size)
        result = torch.ops.ladder.gather(own, world.tp_size, name)
        assert torch.equal(result, whole.view(world.tp_size, 2, size))


def send_at_random(world, nodes, name):
    """Several messages at a time, more bytes than may be; each rank sleeps and waits when it likes, or never."""
    shared, own = random.Random(7), random.Random(world.rank)  # what is sent is the same on all ranks
    waits = shared if nodes == PAIRS else own  # one hop needs an order that the ranks of a node share
    pending, ranks = [], world.tp_size
    for i in range(300):
        size, dtype = shared.choice([1, 3, 64, 200, 900, LARGEST // 16]), shared.choice(DTYPES[::2])
        x = numbers(world.rank, size, dtype, i)
        gather = shared.random() < 0.2
        result = OPS.all_gather_into_tensor(x, ranks, name) if gather else OPS.all_reduce(x, "sum", name)
        if shared.random() < 0.9:
            pending.append((i, gather, x, result))
        if own.random() < 0.05:
            time.sleep(own.choice([0, 1e-4, 3e-3]))
        while pending and waits.random() < 0.45:
            i, gather, x, result = pending.pop(waits.randrange(len(pending)))
            result = OPS.wait_tensor(result)
            if gather:
                assert torch.equal(result, torch.cat([numbers(r, len(x), x.dtype, i) for r in range(ranks)])), i
            else:
                check_sum(result, ranks, i, roundings(nodes, x.nbytes))


NODES = {"ab": ["a", "b"], "abc": ["a", "b", "c"], "aab": ["a", "a", "b"], "abcd": ["a", "b", "c", "d"], "aabb": PAIRS}


@pytest.mark.parametrize("ranks, nodes", [*((n, None) for n in (2, 3, 4)), *((len(n), n) for n in NODES)])
def test_sums_are_exact_up_to_rounding_and_alike_on_all_ranks(ranks, nodes):
    """Of any size and type, in any order, with delays; in shared memory, and in one hop among the nodes."""
    run_ranks(ranks, exchange, NODES.get(nodes), timeout=120)


# ---------------------------------------------------------------------------------------------------------------------
# Shared memory


def large_sum(world, count):
    x = numbers(world.rank, count, torch.float32)
    check_sum(OPS.wait_tensor(OPS.all_reduce_(x, "sum", world.group.group_name)), world.tp_size)
    x = numbers(world.rank, count, torch.bfloat16).view(2, -1).t()  # no gaps, though not contiguous
    total = OPS.wait_tensor(OPS.all_reduce_(x, "sum", world.group.group_name))
    assert total.stride() == (1, count // 2)
    check_sum(total.t().flatten(), world.tp_size)
    with pytest.raises(RuntimeError, match="shared memory: the tensor has holes"):
        OPS.all_reduce_(torch.ones(4, 4)[:, ::2], "sum", world.group.group_name)
    with pytest.raises(RuntimeError, match="shared memory: one tensor, summed"):
        OPS.all_reduce(torch.ones(4), "max", world.group.group_name)


def test_a_message_larger_than_a_slot_and_what_is_refused():
    run_ranks(2, large_sum, 2_200_000)


def connect_without(world):
    """What connect() says, and connect_auto() prints, on every rank, when a function of the module fails on one."""

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    before, messages, printed = len(os.listdir("/proc/self/fd")), [], io.StringIO()
    for rank, name in (0, "_create"), (1, "_open"), (2, "build"):
        with pytest.MonkeyPatch.context() as m, contextlib.redirect_stderr(printed):
            if world.rank == rank:
                m.setattr(shared_memory, name, fail)
            with pytest.raises(shared_memory.Unavailable) as error:
                shared_memory.connect(world)
            assert tp.connect_auto(world) is world.group
        messages.append(str(error.value))
    assert len(os.listdir("/proc/self/fd")) == before
    return messages, printed.getvalue()


def test_all_ranks_do_without_where_one_cannot():
    """And one rank says that gloo sums."""
    why = "[Errno 28] No space left on device"
    said = f"gloo carries the all-reduces: {why}\n"
    assert run_ranks(3, connect_without) == [([why] * 3, said * 3), ([why] * 3, ""), ([why] * 3, "")]


def test_another_processs_file_is_not_taken_for_the_memory():
    offer, fd = shared_memory._create()
    try:
        assert os.pread(shared_memory._open(**offer), 4, 0).decode() == offer["token"][:4]
        for changes in ({"token": "0" * 32}, {"fd": 1}, {"fd": 999}):
            with pytest.raises(shared_memory.Unavailable, match="on another machine or in another|out of reach"):
                shared_memory._open(**{**offer, **changes})
    finally:
        os.close(fd)


def sum_over_a_link(world):
    """Times (start, asked, end) of two sums of 3 ms that are under way at once; seconds for 4000 bytes at 1 us each."""
    with small_slots(world) as group:
        linked = link.LinkedMemory(group, link.Link("x", 3000.0, None))
        linked.log, name = [], linked.group_name
        sums = [OPS.all_reduce(numbers(world.rank, 100, torch.bfloat16, i), "sum", name) for i in range(2)]
        for i, pending in enumerate(sums):
            check_sum(OPS.wait_tensor(pending), 2, i)
        times, linked.link = linked.log, link.Link("x", 0.0, 8e-3)
        x, start = torch.full((1000,), float(world.rank)), time.perf_counter()
        whole = torch.ops.ladder.gather(x, 2, name)
        assert torch.equal(whole, torch.tensor([[0.0], [1.0]]).expand(2, 1000))
        return [second for row in times for second in row], time.perf_counter() - start


def test_an_emulated_link_holds_back_what_shared_memory_has():
    for (start, asked, end, start_2, asked_2, end_2), seconds in run_ranks(2, sum_over_a_link):
        assert start < asked < end and start < start_2 < asked_2 < end_2 and seconds >= 0.004
        assert end >= start + 0.003 - 1e-9 and end_2 >= start + 0.006 - 1e-9  # it carries one after the other


# ---------------------------------------------------------------------------------------------------------------------
# One hop


def start_ranks(ranks, source, local, **environment):
    """Processes that run a source as ranks, so many on a node, without torchrun, which would end all with the first."""
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "LOCAL_WORLD_SIZE": str(local)}
    processes = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank % local), "GROUP_RANK": str(rank // local)}
        pipes, env = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}, {**os.environ, **environment, **own}
        processes.append(subprocess.Popen([sys.executable, "-c", source], cwd=ROOT, text=True, env=env, **pipes))
    return processes


NO_EXTRAS = (
    "import importlib.util as u; find = u.find_spec; u.find_spec = lambda n: None if n[:6] == 'extras' else find(n)"
)
JOIN = "from runtime import launch\n{}\nw = launch.join('cpu', {{'comm': '{}'}}); print(w.group.group_name)"


@pytest.mark.parametrize("comm, local, before, compiler, name, line", [
    ("auto", 1, "", "c++", "one-hop-0", ""),
    ("int8", 2, "", "c++", "int8-1", ""),
    ("auto", 2, "", "no-such-compiler", "0", "gloo carries .*: memory shared by ranks needs a C.. compiler: install"),
    ("auto", 1, NO_EXTRAS, "c++", "0", "gloo carries .*: --comm one-hop needs the folder extras/collectives"),
])  # fmt: skip
def test_the_collectives_of_a_run(comm, local, before, compiler, name, line, tmp_path):
    """Without a compiler, or the extra, gloo sums, and one rank says so."""
    cache = {"XDG_CACHE_HOME": str(tmp_path), "CXX": compiler} if compiler == "no-such-compiler" else {}
    source = JOIN.format(before, comm) + "; launch.dist.destroy_process_group()"
    done = [rank.communicate(timeout=HANGS) for rank in start_ranks(2, source, local, **cache)]
    errors = [re.sub("compiling .*, once ...\n", "", err) for _, err in done]
    assert [out.strip() for out, _ in done] == [name] * 2
    assert re.match(f"^{line}", errors[0]) and bool(errors[0]) == bool(line) and errors[1] == ""


DYING = """
import os, signal, torch; from runtime import launch

def main():
    world = launch.join("cpu")
    ops = torch.ops._c10d_functional
    for i in range(20):
        if i == 10 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        ops.wait_tensor(ops.all_reduce(torch.ones(100), "sum", world.group.group_name))

launch.run(main)
"""


def test_when_a_node_dies_the_others_end_and_name_it():
    """test_faults.py has the ranks of one node. Rank 0 holds the store here, with which the other one may lose it."""
    ranks = start_ranks(3, DYING, local=1)
    errors = [rank.communicate(timeout=90)[1] for rank in ranks]
    assert sorted(rank.returncode for rank in ranks) == [-signal.SIGKILL, 1, 1]
    assert any("node 1 is lost" in line for line in errors)


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


STRANGERS = [b"\0\0\0\1" + bytes(9999), b"", bytes(range(256)) * 64, b"0" * 32 + b"\0\0\0\1", "closed", "reset"]


def connect_among_strangers(world):
    """Connect, when strangers come to rank 0 before rank 1 does."""
    listen, tell, listeners, strangers, start = socket.create_server, world.tell, [], [], []

    def come(what):
        strangers.append(socket.create_connection(listeners[0].getsockname()))
        if what == "reset":
            strangers[-1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if isinstance(what, bytes):
            strangers[-1].sendall(what)
        else:
            strangers.pop().close()

    def create_server(*args):
        start.append(time.monotonic())
        listeners.append(listen(*args))
        for what in STRANGERS * 2:
            come(what)
        return listeners[0]

    def tell_strangers(token):
        for number in 0, 7:  # they know the token, but nobody expects these numbers
            come(token.encode() + number.to_bytes(4))
        return tell(token)

    with pytest.MonkeyPatch.context() as m:
        if world.rank == 0:
            m.setattr(one_hop.socket, "create_server", create_server)
            world.tell = tell_strangers
        group = connect(world, ["a", "b"])
    assert world.rank or time.monotonic() - start[0] < one_hop.PATIENCE / 2
    x = numbers(world.rank, 64, torch.float32)
    check_sum(OPS.wait_tensor(OPS.all_reduce(x, "sum", group.group_name)), 2)


def test_strangers_are_dropped_and_delay_nobody():
    run_ranks(2, connect_among_strangers)


WAYS = ("standard", False), ("ladder", False), ("ladder", True)


def hop_logits(world, nodes):
    world.group, results = connect(world, nodes), []
    for wiring, emulated in WAYS:
        used = link.emulate(world, link.Link("x", 3000.0, None)) if emulated else world
        results.append(last_logits(shard(dataclasses.replace(BASE, wiring=wiring), used), *unequal_rows(BASE)))
    return results


@pytest.mark.parametrize("nodes", [["a", "b"], ["a", "b", "c"], PAIRS], ids="".join)
def test_ranks_compute_what_one_device_does(nodes):
    first, *others = run_ranks(len(nodes), hop_logits, nodes)
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))
    for (wiring, _), result in zip(WAYS, first, strict=True):
        alone = last_logits(random_model(dataclasses.replace(BASE, wiring=wiring)), *unequal_rows(BASE))
        assert torch.allclose(result, alone, atol=1e-4)


def hop_without_memory(world):
    with pytest.MonkeyPatch.context() as m:
        if world.rank == 3:
            m.setattr(shared_memory, "_open", lambda **offer: os.stat("/nowhere"))
        group = connect(world, PAIRS)
    check_sum(OPS.wait_tensor(OPS.all_reduce(numbers(world.rank, 9, torch.bfloat16), "sum", group.group_name)), 4)


def test_where_the_ranks_of_one_node_cannot_share_memory_all_ranks_have_connections():
    run_ranks(4, hop_without_memory)


# ---------------------------------------------------------------------------------------------------------------------
# Sums of integers

SHAPES = [(3, 7, 640), (5, 9, 301), (1, 2, 48)]  # the last one is small: it travels as it is


def partial(rank, shape, dtype):
    """Rows of unlike sizes, some of zeros."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(rank)) * torch.arange(shape[1])[:, None] ** 3
    return x.to(dtype)


def int8_sums_of(world, dtype, shared):
    """Of each shape in turn: all in flight at a time, waited for in another order; and of one that is not finite."""
    gloo = world.dist_group or dist.group.WORLD
    group = Int8Group(world.group if shared else gloo, gloo, world.rank, world.tp_size, world.device)
    pending = [OPS.all_reduce(partial(world.rank, shape, dtype), "sum", group.group_name) for shape in SHAPES]
    results = [OPS.wait_tensor(one) for one in (pending[1], pending[0], pending[2])]
    x = torch.ones(200, 100, dtype=dtype)
    x[3, 3], x[7, 7] = (torch.nan, torch.inf) if world.rank == 1 else (1, 1)
    return results[1], results[0], results[2], OPS.wait_tensor(OPS.all_reduce(x, "sum", group.group_name))


def quantize_by_hand(x):
    """Numbers (n,) as they arrive: 64 at a time as multiples of a scale."""
    out = []
    for group in x.double().split(64):
        scale = (group.abs().max().float() / 127).bfloat16().double()
        out.append((group / scale).round().clamp(-127, 127) * scale if scale else 0 * group)
    return torch.cat(out)


@pytest.mark.parametrize("ranks, dtype, shared", [
    (2, torch.bfloat16, True), (2, torch.float32, False), (3, torch.float32, True), (4, torch.bfloat16, False),
])  # fmt: skip
def test_sums_are_those_of_the_integers(ranks, dtype, shared):
    answers = run_ranks(ranks, int8_sums_of, dtype, shared)
    for i, shape in enumerate(SHAPES[: 3 if shared else 2]):  # gloo's own sum rounds each addition
        terms, result = [partial(rank, shape, dtype).flatten() for rank in range(ranks)], answers[0][i]
        assert all(torch.equal(result, answer[i]) for answer in answers) and result.dtype == dtype
        large, exact = result.nbytes > int8_sums.SMALL, sum(term.float() for term in terms).to(dtype)
        expected = sum((quantize_by_hand(term) if large else term).double() for term in terms)
        if ranks > 2 and large:  # each rank's slice, whole groups, is quantized again
            width = -(-expected.numel() // (64 * ranks)) * 64
            expected = torch.cat([quantize_by_hand(term) for term in expected.split(width)])
        result, rtol = result.flatten(), 1e-5 if dtype == torch.float32 else 2**-7
        near = torch.isclose(result.double(), expected, rtol=rtol, atol=1e-4)
        # where a number lies between two integers, rounding before may take it to the other one
        assert near.all() if ranks == 2 else near.float().mean() > 0.98
        step = expected.abs().max() / 127 * (ranks > 2)
        assert ((result - expected).abs() <= 2**-7 * expected.abs() + 1e-4 + step).all()
        assert torch.equal(result, exact) != large
    assert all(not (answer[3][3, 3].isfinite() or answer[3][7, 7].isfinite()) for answer in answers)
    assert all((answer[3][100:] - ranks).abs().max() < 0.01 * ranks for answer in answers)


def int8_logits(world, wirings, compile):
    pairs = []
    for wiring in wirings:
        config = dataclasses.replace(BASE, wiring=wiring, n_heads=12, n_kv_heads=4, intermediate_size=208)
        net = shard(config, world)
        exact = last_logits(net, *unequal_rows(config), compile=compile)
        group = Int8Group(world.group, None, world.rank, world.tp_size, world.device)
        net.comm = tp.TensorParallel(config, world.shares, group)
        with pytest.MonkeyPatch.context() as m:
            m.setattr(int8_sums, "SMALL", 0)
            pairs.append((exact, last_logits(net, *unequal_rows(config), compile=compile)))
    return pairs


@pytest.mark.parametrize("ranks, compile, wirings", [
    (2, False, ["standard", "parallel-ladder"]), (3, False, ["ladder"]),
    pytest.param(2, True, ["ladder"], marks=pytest.mark.slow),
])  # fmt: skip
def test_a_model_over_integers_is_nearly_the_same(ranks, compile, wirings):
    for rank in run_ranks(ranks, int8_logits, wirings, compile):
        for exact, result in rank:
            assert 1e-4 < (result - exact).norm() / exact.norm() < 0.03


def test_a_link_carries_fewer_bytes():
    inner, three = (Int8Group(None, None, 0, ranks, torch.device("cpu")) for ranks in (2, 3))
    group = link.LinkedGroup(inner, link.FREE, 0, 2, torch.device("cpu"))
    with pytest.raises(InputError, match=r"^--link .* takes two ranks"):
        link.emulate(World(0, 3, torch.device("cpu"), three), link.FREE)
    assert group.wire_bytes(torch.ones(12800, dtype=torch.bfloat16)) == 13200
    assert group.wire_bytes(torch.ones(64, dtype=torch.bfloat16)) == 128


# ---------------------------------------------------------------------------------------------------------------------
# One shot, without a GPU: its order over pretended streams, and what it refuses


@pytest.fixture
def pretended(monkeypatch):
    """(a OneShotGroup of two equal ranks, a mock that sees what its streams, its kernels and NCCL are told)."""
    seen = MagicMock()
    seen.own.record_event.side_effect = itertools.count()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: seen.own)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: seen.main)
    monkeypatch.setattr(torch.cuda, "stream", seen.inside)
    monkeypatch.setattr(one_shot.symmetric, "rendezvous", lambda buffer, group: None)
    monkeypatch.setattr(one_shot.symmetric, "empty", torch.empty)

    def one(shared, op, group, out):
        seen.one_shot(op, group)
        out.copy_(2 * shared)

    def two(shared, op, group):
        seen.two_shot(op, group)
        return shared.mul_(2)

    monkeypatch.setattr(torch.ops.symm_mem, "one_shot_all_reduce_out", one, raising=False)
    monkeypatch.setattr(torch.ops.symm_mem, "two_shot_all_reduce_", two, raising=False)
    seen.nccl.group_name = "nccl"
    return one_shot.OneShotGroup(seen.nccl, 0, 2, "cpu"), seen


def test_one_shot_sums_run_on_a_stream_of_their_own_from_start_to_wait(pretended):
    (group, seen), x, y = pretended, torch.randn(2, 1, 8), torch.randn(2, 1, 8)
    with torch.inference_mode():
        first, second = (OPS.all_reduce(t, "sum", group.group_name) for t in (x, y))
        sums = OPS.wait_tensor(first), OPS.wait_tensor(second)
    assert torch.equal(sums[0], 2 * x) and torch.equal(sums[1], 2 * y)
    inside, after = [call.inside(seen.own), call.inside().__enter__()], call.inside().__exit__(None, None, None)
    start = [call.own.wait_stream(seen.main), *inside, call.one_shot("sum", "nccl"), call.own.record_event(), after]
    assert seen.mock_calls == [*start, *start, call.main.wait_event(0), call.main.wait_event(1)]
    x = torch.ones(4)
    work, reference = group.allreduce([x]), weakref.ref(x)
    del x
    assert reference() is not None  # until the wait
    work.wait()
    assert reference() is None


def test_larger_sums_go_another_way_and_some_are_refused(pretended):
    group, seen = pretended
    for n, kernel in (one_shot.ONE_SHOT, "one_shot"), (one_shot.ONE_SHOT + 4, "two_shot"), (2**24, "two_shot"):
        x = torch.ones(n // 4)
        group.allreduce([x]).wait()
        assert x.eq(2).all() and seen.mock_calls[-4] == getattr(call, kernel)("sum", "nccl")
    assert group.allreduce([torch.ones(2**22 + 1)]) is seen.nccl.allreduce.return_value
    with pytest.raises(InputError, match="bfloat16 and float32: give --dtype$"):
        OPS.all_reduce(torch.ones(4, dtype=torch.float16), "sum", group.group_name)
    with pytest.raises(InputError, match="^--comm one-shot is for 2, 4 or 8 ranks of one node, each with a GPU$"):
        one_shot.connect(World(0, 2, torch.device("cpu")))
    with pytest.raises(InputError, match="^--comm one-shot is for 2, 4 or 8 ranks of one node, each with a GPU$"):
        one_shot.connect(World(0, 3, torch.device("cuda")))


@pytest.mark.parametrize("fault, line", [(None, None), ("wrong", "are wrong"), ("endless", "do not end within 0 s")])
def test_one_shot_sums_are_tried_against_nccls_before_they_are_used(fault, line, pretended, monkeypatch):
    """A wrong one in any of the sizes, or one that does not end, behind which NCCL's would wait."""
    group, seen = pretended
    seen.nccl.allreduce.side_effect = lambda tensors: (tensors[0].mul_(2), MagicMock())[1]
    seen.main.record_event.return_value.query.side_effect = lambda: fault != "endless"
    monkeypatch.setattr(one_shot, "PATIENCE", 0)
    if fault != "wrong":
        expected = pytest.raises(Verdict, match=line) if line else contextlib.nullcontext()
        with expected:
            one_shot.check(group, 0, "cpu")
        return
    right = torch.ops.symm_mem.two_shot_all_reduce_
    monkeypatch.setattr(torch.ops.symm_mem, "two_shot_all_reduce_", lambda x, *args: right(x, *args)[:].add_(x > 30))
    with pytest.raises(InputError, match=line):
        one_shot.check(group, 0, "cpu")


@pytest.mark.parametrize("nvlink, own, name", [(True, 1e-5, "one-shot"), (True, 3e-5, "nccl"), (False, 1e-5, "nccl")])
def test_auto_takes_one_shot_sums_over_nvlink_where_they_are_faster(nvlink, own, name, pretended, monkeypatch, capsys):
    group, seen = pretended
    for function, result in {"has_nvlink": nvlink, "OneShotGroup": group, "check": None}.items():
        monkeypatch.setattr(one_shot, function, lambda *args, result=result: result)
    times, ones = iter((own, 2e-5)), torch.ones
    monkeypatch.setattr(one_shot, "timed", lambda device, step: next(times))
    monkeypatch.setattr(torch, "ones", lambda *size, device=None, **dtype: ones(*size, **dtype))
    world = World(0, 2, torch.device("cuda"), seen.nccl)
    world.alone = True
    assert tp.connect_auto(world).group_name.startswith(name)
    assert capsys.readouterr().err.startswith("NCCL carries the all-reduces: ") == (name == "nccl")
