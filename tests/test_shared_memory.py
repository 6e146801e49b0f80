"""Collectives through shared memory: against sums in float64, in any order, with random delays, when a rank dies."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import HANGS, ROOT, free_port, run_ranks

from extras.collectives import shared_memory
from extras.measure import link

OPS = torch.ops._c10d_functional
SLOTS, SLOT = 4, 256  # bytes: small ones, so that small messages have many pieces
SIZES = [1, 2, 31, 63, 64, 65, 127, 128, 129, 512, 513, 1500]  # numbers; 64 or 128 fill a slot, 512 all of them
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64]


def numbers(rank, count, dtype, seed=0):
    """What a rank contributes; any rank can compute it. Of unequal sizes, so that rounding matters."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if not dtype.is_floating_point:
        return torch.randint(-1000, 1000, (count,), generator=generator, dtype=dtype)
    exponents = torch.randint(-6, 7, (count,), generator=generator)
    return (torch.randn(count, generator=generator, dtype=torch.float64) * 2.0**exponents).to(dtype)


def check_sum(found, tp_size, seed=0):
    """found: a sum of numbers(). A sum in float32, or better, is then rounded once."""
    parts = [numbers(rank, len(found), found.dtype, seed).double() for rank in range(tp_size)]
    exact, size = sum(parts), sum(part.abs() for part in parts)
    last = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24, torch.float64: 2**-53}
    rounding = last.get(found.dtype, 0)
    allowed = rounding * exact.abs() + tp_size * size * (2**-53 if found.dtype == torch.float64 else 2**-24)
    allowed += 2**-25 * (found.dtype == torch.float16)  # the smallest numbers
    assert ((found.double() - exact).abs() <= allowed * found.dtype.is_floating_point).all()


@contextlib.contextmanager
def small(world, slots=SLOTS, slot_bytes=SLOT):
    """A group of small slots, for the time of a block."""
    group = shared_memory.connect(world, slots, slot_bytes)
    try:
        yield group
    finally:
        torch.ops.ladder.leave_memory(group.group_name)


def same_everywhere(world, tensors):
    mine = [tensor.view(torch.uint8).tolist() for tensor in tensors]
    assert all(other == mine for other in world.gather(mine))


def sums(world):
    with small(world) as group:
        for dtype in DTYPES:
            found = []
            for size in SIZES:
                x = numbers(world.rank, size, dtype)
                found.append(OPS.wait_tensor(OPS.all_reduce(x, "sum", group.group_name)))
                assert torch.equal(x, numbers(world.rank, size, dtype))
                check_sum(found[-1], world.tp_size)
            same_everywhere(world, found)


@pytest.mark.parametrize("tp_size", [2, 3, 4])
def test_sums_of_any_size_and_dtype_are_exact_up_to_rounding_and_alike_on_all_ranks(tp_size):
    run_ranks(tp_size, sums)


def large_sum(world, count):
    x = numbers(world.rank, count, torch.float32)
    check_sum(OPS.wait_tensor(OPS.all_reduce_(x, "sum", world.group.group_name)), world.tp_size)
    x = numbers(world.rank, count, torch.bfloat16).view(2, -1).t()  # no gaps, though not contiguous
    total = OPS.wait_tensor(OPS.all_reduce_(x, "sum", world.group.group_name))
    assert total.stride() == (1, count // 2)
    check_sum(total.t().flatten(), world.tp_size)


def test_a_message_larger_than_a_slot():
    run_ranks(2, large_sum, 2_200_000)


def gathered(world):
    with small(world) as group:
        for size in (1, 40, 700):
            part = numbers(world.rank, 2 * size, torch.float32).view(2, size)
            whole = torch.stack([numbers(rank, 2 * size, torch.float32) for rank in range(world.tp_size)])
            found = torch.ops.ladder.gather(part, world.tp_size, group.group_name)
            assert torch.equal(found, whole.view(world.tp_size, 2, size))
            flat = OPS.wait_tensor(OPS.all_gather_into_tensor(part, world.tp_size, group.group_name))
            assert torch.equal(flat, whole.view(-1, size))


@pytest.mark.parametrize("tp_size", [2, 3, 4])
def test_parts_are_gathered_in_the_order_of_the_ranks(tp_size):
    run_ranks(tp_size, gathered)


def in_flight(world):
    for order in range(10), range(9, -1, -1), [3, 8, 0], []:
        waited_for(world, order)


def waited_for(world, order):
    """Sums and a gather under way at once, more than there are slots, are waited for in an order or never."""
    with small(world) as group:
        name, size = group.group_name, 150  # two pieces each, of float32
        started = [OPS.all_reduce(numbers(world.rank, size, torch.float32, i), "sum", name) for i in range(10)]
        whole = OPS.all_gather_into_tensor(numbers(world.rank, size, torch.float32, 99), world.tp_size, name)
        for i in order:
            check_sum(OPS.wait_tensor(started[i]), world.tp_size, i)
        if not order:
            del started
        rows = OPS.wait_tensor(whole).view(world.tp_size, size)
        for rank, row in enumerate(rows):
            assert torch.equal(row, numbers(rank, size, torch.float32, 99))


@pytest.mark.parametrize("tp_size", [2, 4])
def test_several_in_flight_waited_for_in_any_order_or_never(tp_size):
    run_ranks(tp_size, in_flight, timeout=60)


def what_it_refuses(world):
    x = torch.ones(4, 4)
    with pytest.raises(RuntimeError, match="shared memory: one tensor, summed"):
        OPS.all_reduce(x, "max", world.group.group_name)
    with pytest.raises(RuntimeError, match="shared memory: the tensor has holes"):
        OPS.all_reduce_(x[:, ::2], "sum", world.group.group_name)
    work = world.group.allreduce([x])
    world.gather(0)
    assert world.rank == 1 or work.is_completed()  # without a wait, since the others are here
    work.wait()
    assert torch.equal(x, torch.full((4, 4), 2.0))


def test_what_it_refuses_and_what_is_complete():
    run_ranks(2, what_it_refuses)


def many_rounds(world, rounds):
    """Random messages; each rank sleeps and waits when it likes."""
    shared, own = random.Random(7), random.Random(world.rank)  # what is sent is the same on all ranks
    ranks = world.tp_size
    with small(world) as group:
        name, pending = group.group_name, []
        for i in range(rounds):
            size, dtype = shared.choice([1, 3, 64, 200, 900]), shared.choice([torch.bfloat16, torch.float32])
            x = numbers(world.rank, size, dtype, i)
            gather = shared.random() < 0.2
            result = OPS.all_gather_into_tensor(x, ranks, name) if gather else OPS.all_reduce(x, "sum", name)
            pending.append((i, gather, size, dtype, result))
            if own.random() < 0.05:
                time.sleep(own.choice([0, 1e-4, 3e-3]))
            while pending and own.random() < 0.55:
                i, gather, size, dtype, result = pending.pop(own.randrange(len(pending)))
                result = OPS.wait_tensor(result)
                if gather:
                    assert torch.equal(result, torch.cat([numbers(r, size, dtype, i) for r in range(ranks)])), i
                else:
                    check_sum(result, ranks, i)


def test_random_messages_with_random_delays():
    run_ranks(3, many_rounds, 400)


def descriptors_left(world):
    """How many more files are open, and names in shared memory, after many groups than after one."""
    counts = []
    for _ in range(15):
        with small(world) as group:
            OPS.wait_tensor(OPS.all_reduce(torch.ones(100), "sum", group.group_name))
        del group
        mapped = Path("/proc/self/maps").read_text().count(shared_memory.NAME)
        counts.append((len(os.listdir("/proc/self/fd")), sorted(os.listdir("/dev/shm")), mapped))
    return counts


def test_groups_leave_nothing_behind():
    for counts in run_ranks(2, descriptors_left):
        assert counts[-1] == counts[0]


def unavailable(world, rank, name):
    """What connect() says, on every rank, when a function of the module fails on one."""

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    before = len(os.listdir("/proc/self/fd"))
    with pytest.MonkeyPatch.context() as m:
        if world.rank == rank:
            m.setattr(shared_memory, name, fail)
        with pytest.raises(shared_memory.Unavailable) as error:
            shared_memory.connect(world)
    assert len(os.listdir("/proc/self/fd")) == before
    return str(error.value)


@pytest.mark.parametrize("rank, name", [(0, "_create"), (1, "_open"), (2, "build")])
def test_all_ranks_do_without_where_one_cannot(rank, name):
    assert run_ranks(3, unavailable, rank, name) == ["[Errno 28] No space left on device"] * 3


def test_another_processs_file_is_not_taken_for_the_memory():
    offer, fd = shared_memory._create()
    try:
        assert os.pread(shared_memory._open(**offer), 4, 0).decode() == offer["token"][:4]
        for changes in ({"token": "0" * 32}, {"fd": 1}):
            with pytest.raises(shared_memory.Unavailable, match="on another machine or in another container"):
                shared_memory._open(**{**offer, **changes})
        with pytest.raises(shared_memory.Unavailable, match="out of reach: No such file or directory"):
            shared_memory._open(**{**offer, "fd": 999})
    finally:
        os.close(fd)


@pytest.mark.parametrize("comm, local, name", [("auto", 1, "one-hop-0"), ("library", 2, "0"), ("int8", 2, "int8-0")])
def test_ranks_of_several_nodes_take_one_hop_or_gloo_and_say_nothing(comm, local, name):
    source = "from runtime import launch; w = launch.join('cpu', {'comm': '%s'}); print(w.group.group_name)"
    source += "; launch.dist.destroy_process_group()"  # or, at its end, a process may say that threads still run
    done = [rank.communicate(timeout=HANGS) for rank in ranks(2, source % comm, LOCAL_WORLD_SIZE=str(local))]
    said = [re.sub("compiling kernels/.*, once ...\n", "", err) for _, err in done]
    assert [out.strip() for out, _ in done] == [name] * 2 and said == ["", ""]


NO_COMPILER = "needs a C++ compiler: install g++, or name one in $CXX"
NO_EXTRAS = (
    "import importlib.util as u; find = u.find_spec; u.find_spec = lambda n: None if n[:6] == 'extras' else find(n)"
)


@pytest.mark.parametrize(
    "local, before, why",
    [
        (2, "", f"memory shared by ranks {NO_COMPILER}"),
        (1, "", f"one hop between machines {NO_COMPILER}"),
        (1, NO_EXTRAS, "--comm one-hop needs the folder extras/collectives, which this copy does not have"),
    ],
)
def test_without_a_compiler_or_the_extra_gloo_does_it_and_one_line_says_so(local, before, why, tmp_path):
    source = f"from runtime import launch\n{before}\nw = launch.join('cpu'); print(w.group.group_name)"
    without = {"CXX": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path), "LOCAL_WORLD_SIZE": str(local)}
    done = [rank.communicate(timeout=HANGS) for rank in ranks(2, source, **without)]
    assert [out for out, _ in done] == ["0\n"] * 2
    assert done[0][1].startswith(f"gloo carries the all-reduces: {why}") and done[1][1] == ""


def ranks(tp_size, source, **environment):
    """Processes that run a source as ranks, without torchrun, which would end them all as soon as one does."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(tp_size)}
    address["GLOO_SOCKET_IFNAME"] = "lo"
    local = int(environment.get("LOCAL_WORLD_SIZE", tp_size))
    return [
        subprocess.Popen(
            [sys.executable, "-c", source], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, **address, "RANK": str(rank), "LOCAL_RANK": str(rank % local)}
            | {"GROUP_RANK": str(rank // local), **environment},
        )
        for rank in range(tp_size)
    ]  # fmt: skip


DYING = """
import os, signal, time, torch; from runtime import launch

def main():
    world = launch.join("cpu")
    x, ops, name = torch.ones(100), torch.ops._c10d_functional, world.group.group_name

    def step(x):
        return ops.wait_tensor(ops.all_reduce(x + 1, "sum", name))

    for i in range(20):
        if i == 10 and world.rank == 1:
            print("dies", time.monotonic(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        with torch.inference_mode():
            step(x)

launch.run(main)
"""


@pytest.mark.parametrize("local", [3, 1])
def test_when_a_rank_dies_those_that_wait_for_it_end_with_one_line(local):
    found = ranks(3, DYING, LOCAL_WORLD_SIZE=str(local))
    output = [rank.communicate(timeout=90) for rank in found]
    assert sorted(rank.returncode for rank in found) == [-signal.SIGKILL, 1, 1]
    # rank 0 holds the store here: once it has gone, rank 2 cannot ask who speaks, and does if it is alone on its node
    line, *more = [line for _, errors in output for line in errors.splitlines() if line.startswith("-c: ")]
    seen = ["rank 1 of 3 was killed (signal 9", "rank 1 of 3 has died"]  # its parent may have asked
    assert any(text in line for text in (seen if local == 3 else ["node 1 is lost"]))
    assert not more or local == 1


def linked(world):
    with small(world) as group:
        linked = link.LinkedMemory(group, link.Link("x", 3000.0, None))
        linked.log, start, sums = [], time.perf_counter(), []
        for i in range(4):  # two at a time, which the link carries one after the other
            sums.append(OPS.all_reduce(numbers(world.rank, 100, torch.bfloat16, i), "sum", linked.group_name))
            if i % 2:
                check_sum(OPS.wait_tensor(sums[i - 1]), 2, i - 1)
                check_sum(OPS.wait_tensor(sums[i]), 2, i)
        times = [time - start for row in linked.log for time in row]
        part = torch.full((1000,), float(world.rank))
        latency = time.perf_counter()
        linked.link = link.Link("x", 0.0, 8e-3)  # a byte takes a microsecond
        whole = torch.ops.ladder.gather(part, 2, linked.group_name)
        gathered = time.perf_counter() - latency
        assert torch.equal(whole, torch.tensor([[0.0], [1.0]]).expand(2, 1000))
        latency = time.perf_counter()
        OPS.wait_tensor(OPS.all_reduce(part, "sum", linked.group_name))
        reduced, log = time.perf_counter() - latency, linked.log
        linked.link, linked.log = link.Link("x", 50_000.0, None, tcp=True), []
        for pending in [OPS.all_reduce(part, "sum", linked.group_name) for _ in range(2)]:
            OPS.wait_tensor(pending)
        [[_, _, first], [start, _, second]] = linked.log
        return times, gathered, reduced, log, second - start, second - first


def test_an_emulated_link_holds_back_what_shared_memory_has():
    for times, gathered, reduced, log, one, between in run_ranks(2, linked):
        starts, asked, ends = times[::3], times[1::3], times[2::3]
        assert len(starts) == 4 and starts[0] > 0 and starts == sorted(starts)
        assert all(a < b < c for a, b, c in zip(starts, asked, ends, strict=True))
        # a second one starts when the first is delivered
        least = [starts[0] + 0.003, starts[0] + 0.006, starts[2] + 0.003, starts[2] + 0.006]
        assert all(end >= at - 1e-9 for end, at in zip(ends, least, strict=True))
        # of 4000 bytes: a ring of two passes on half of the result, or twice half of the tensor
        assert gathered >= 0.004 and reduced >= 0.004 and len(log) == 1
        assert one >= 0.05 and between < 0.045  # by tcp the second one does not wait for the first
