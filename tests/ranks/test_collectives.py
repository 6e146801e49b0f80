"""ladder/ranks: sums against float64, in any order and with delays; what sums in a run; faults."""

import contextlib
import io
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
import weakref
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import pytest
import torch
from cases import refused, slow_case
from configs import BASE
from helpers import ROOT, random_model, seeded
from running import HANGS, free_port, run_ranks

import generate
from extras.measure import link
from ladder.errors import InputError
from ladder.ranks import meeting, one_shot, shared_memory
from ladder.ranks.collectives import connect_auto
from ladder.ranks.world import World

OPS = torch.ops._c10d_functional
SLOTS, SLOT = 4, 256  # bytes: small ones, so that small messages have many pieces
SIZES = [1, 2, 31, 63, 64, 65, 127, 128, 129, 512, 513, 1500]  # numbers: 64 or 128 fill a slot, 512 all of them
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64]


def numbers(rank, count, dtype, seed=0):
    """What a rank contributes; any rank can compute it. Of unequal sizes, so that rounding matters."""
    generator = seeded(1000 * seed + rank)
    if not dtype.is_floating_point:
        return torch.randint(-1000, 1000, (count,), generator=generator, dtype=dtype)
    exponents = torch.randint(-6, 7, (count,), generator=generator)
    return (torch.randn(count, generator=generator, dtype=torch.float64) * 2.0**exponents).to(dtype)


def check_sum(result, ranks, seed=0):
    """result: a sum of numbers(), in float32 or better, rounded once at its end."""
    terms = [numbers(rank, len(result), result.dtype, seed).double() for rank in range(ranks)]
    exact = sum(terms)
    size = sum(term.abs() for term in terms)
    last = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24, torch.float64: 2**-53}
    allowed = last.get(result.dtype, 0) * exact.abs()
    allowed += ranks * size * (2**-53 if result.dtype == torch.float64 else 2**-24)
    allowed += 2**-25 * (result.dtype == torch.float16)  # the smallest numbers
    assert ((result.double() - exact).abs() <= allowed * result.dtype.is_floating_point).all()


def exchange(world):
    name = shared_memory.connect(world, SLOTS, SLOT).group_name
    sum_and_gather(world, name)
    send_at_random(world, name)


def sum_and_gather(world, name):
    for dtype in DTYPES:
        results = []
        for size in SIZES:
            x = numbers(world.rank, size, dtype)
            results.append(OPS.wait_tensor(OPS.all_reduce(x, "sum", name)))
            assert torch.equal(x, numbers(world.rank, size, dtype))
            check_sum(results[-1], world.tp_size)
        mine = [result.view(torch.uint8).tolist() for result in results]
        assert all(other == mine for other in world.gather(mine))
    for size in 1, 40, 700:
        whole = torch.stack([numbers(rank, 2 * size, torch.float32) for rank in range(world.tp_size)])
        own = whole[world.rank].view(2, size)
        result = torch.ops.ladder.gather(own, world.tp_size, name)
        assert torch.equal(result, whole.view(world.tp_size, 2, size))


def send_at_random(world, name):
    """Several messages at a time, more bytes than may be; each rank sleeps and waits when it likes, or never."""
    shared, own = random.Random(7), random.Random(world.rank)  # what is sent is the same on all ranks
    pending = []
    ranks = world.tp_size
    for i in range(300):
        size = shared.choice([1, 3, 64, 200, 900])
        dtype = shared.choice(DTYPES[::2])
        x = numbers(world.rank, size, dtype, i)
        gather = shared.random() < 0.2
        if gather:
            [result] = OPS.all_gather_into_tensor_coalesced([x], ranks, name)
        else:
            result = OPS.all_reduce(x, "sum", name)
        if shared.random() < 0.9:
            pending.append((i, gather, x, result))
        if own.random() < 0.05:
            time.sleep(own.choice([0, 1e-4, 3e-3]))
        while pending and own.random() < 0.45:
            i, gather, x, result = pending.pop(own.randrange(len(pending)))
            result = OPS.wait_tensor(result)
            if gather:
                assert torch.equal(result, torch.cat([numbers(r, len(x), x.dtype, i) for r in range(ranks)])), i
            else:
                check_sum(result, ranks, i)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_are_exact_up_to_rounding_and_alike_on_all_ranks(ranks):
    """Of any size and type, in any order, with delays."""
    run_ranks(ranks, exchange)


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

    messages = []
    printed = io.StringIO()
    for rank, name in (0, "create"), (1, "open_file"), (2, "build"):
        with pytest.MonkeyPatch.context() as m, contextlib.redirect_stderr(printed):
            if world.rank == rank:
                m.setattr(shared_memory, name, fail)
            with pytest.raises(InputError) as error:
                shared_memory.connect(world)
            assert connect_auto(world) is world.group
        messages.append(str(error.value))
    return messages, printed.getvalue()


def test_all_ranks_do_without_where_one_cannot():
    """And one rank says that gloo sums."""
    why = "[Errno 28] No space left on device"
    said = f"gloo carries the all-reduces: {why}\n"
    assert run_ranks(3, connect_without) == [([why] * 3, said * 3), ([why] * 3, ""), ([why] * 3, "")]


def test_another_processs_file_is_not_taken_for_the_memory():
    offer = shared_memory.create()
    own = shared_memory.open_file(**offer)
    assert os.path.sameopenfile(offer["fd"], own)
    for changes in ({"name": offer["name"][:-1] + "x"}, {"fd": 1}, {"fd": 999}):
        refused("on another machine or in another|out of reach", shared_memory.open_file, **offer | changes)
    for changes in ({"pid": "1/../self"}, {"fd": None}, {"x": 1}):  # of a stranger, by way of the store
        with pytest.raises(InputError), shared_memory.explained():
            shared_memory.open_file(**offer | changes)
    os.close(offer["fd"])
    os.close(own)


def sum_over_a_link(world):
    """Seconds of two sums of 3 ms that are under way at once, and of a gather of 4000 bytes at 1 us each."""
    slow = link.Link("x", 3000.0, None)
    inner = shared_memory.connect(world, SLOTS, SLOT)
    group = link.LinkedGroup(inner, slow, world.rank, 2, world.device)
    start = time.perf_counter()
    ends = []
    sums = [OPS.all_reduce(numbers(world.rank, 100, torch.bfloat16, i), "sum", group.group_name) for i in range(2)]
    for i, pending in enumerate(sums):
        check_sum(OPS.wait_tensor(pending), 2, i)
        ends.append(time.perf_counter() - start)
    group.set_link(link.Link("x", 0.0, 8e-3))
    x = torch.full((1000,), float(world.rank))
    start = time.perf_counter()
    whole = torch.ops.ladder.gather(x, 2, group.group_name)
    assert torch.equal(whole, torch.tensor([[0.0], [1.0]]).expand(2, 1000))
    return [*ends, time.perf_counter() - start]


def test_an_emulated_link_holds_back_what_shared_memory_has():
    for first, second, gather in run_ranks(2, sum_over_a_link):  # it carries one after the other
        assert first >= 0.003 and second >= 0.006 and gather >= 0.004


# ---------------------------------------------------------------------------------------------------------------------
# What sums in a run


def start_ranks(ranks, source, local, **environment):
    """Processes that run a source as ranks, so many on a node, without torchrun, which would end all with the first."""
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "LOCAL_WORLD_SIZE": str(local)}
    processes = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank % local), "GROUP_RANK": str(rank // local)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        env = {**os.environ, **environment, **own}
        processes.append(subprocess.Popen([sys.executable, "-c", source], cwd=ROOT, text=True, env=env, **pipes))
    return processes


JOIN = "from ladder.ranks import launch\n{}\nw = launch.join('cpu', {{'comm': '{}'}}); print(w.group.group_name)"


@pytest.mark.parametrize("comm, local, before, compiler, name, line", [
    slow_case("auto", 1, "", "c++", "0", ""),
    ("shared-memory", 2, "", "c++", "shared-memory-0", ""),
    ("int8", 1, "", "c++", "int8-0", ""),
    ("auto", 2, "", "no-such-compiler", "0", "gloo carries .*: memory shared by ranks needs a C.. compiler: install"),
])  # fmt: skip
def test_the_collectives_of_a_run(comm, local, before, compiler, name, line, tmp_path):
    """Between nodes and without a compiler gloo sums; of a missing compiler one rank says so."""
    cache = {"XDG_CACHE_HOME": str(tmp_path), "CXX": compiler} if compiler == "no-such-compiler" else {}
    source = JOIN.format(before, comm) + "; launch.dist.destroy_process_group()"
    done = [rank.communicate(timeout=HANGS) for rank in start_ranks(2, source, local, **cache)]
    errors = [re.sub("compiling .*, once ...\n", "", err) for _, err in done]
    assert [out.strip() for out, _ in done] == [name] * 2
    met = "all 2 ranks have met; what they compute is printed at 127.0.0.1\n"  # on a node without rank 0
    assert re.match(f"^{line}", errors[0]) and bool(errors[0]) == bool(line) and errors[1] == met * (local == 1)


DYING = """
import os, signal, torch; from ladder.ranks import launch

def main():
    world = launch.join("cpu")
    ops = torch.ops._c10d_functional
    for i in range(20):
        if i == 10 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        ops.wait_tensor(ops.all_reduce(torch.ones(100), "sum", world.group.group_name))

launch.run(main)
"""


@pytest.mark.slow
def test_when_a_node_dies_the_others_end_and_name_its_rank():
    """test_faults.py has the ranks of one node. Rank 0 holds the store here, with which the other one may lose it."""
    ranks = start_ranks(3, DYING, local=1)
    errors = [rank.communicate(timeout=90)[1] for rank in ranks]
    assert sorted(rank.returncode for rank in ranks) == [-signal.SIGKILL, 1, 1]
    assert any(re.search(": rank 1 of 3 is lost in preparation$", line, re.M) for line in errors)


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
    group, seen = pretended
    x = torch.randn(2, 1, 8)
    y = torch.randn(2, 1, 8)
    with torch.inference_mode():
        first, second = (OPS.all_reduce(t, "sum", group.group_name) for t in (x, y))
        sums = OPS.wait_tensor(first), OPS.wait_tensor(second)
    assert torch.equal(sums[0], 2 * x) and torch.equal(sums[1], 2 * y)
    inside = [call.inside(seen.own), call.inside().__enter__()]
    after = call.inside().__exit__(None, None, None)
    start = [call.own.wait_stream(seen.main), *inside, call.one_shot("sum", "nccl"), call.own.record_event(), after]
    assert seen.mock_calls == [*start, *start, call.main.wait_event(0), call.main.wait_event(1)]
    x = torch.ones(4)
    work = group.allreduce([x])
    reference = weakref.ref(x)
    del x
    assert reference() is not None  # until the wait
    work.wait()
    assert reference() is None


def test_only_who_asks_for_one_shot_sums_gets_them():
    """No GPU has run them: auto takes NCCL on GPUs, without a try."""
    world = World(0, 2, torch.device("cuda"), group="NCCL's")
    world.nodes = ["0", "0"]
    assert connect_auto(world) == "NCCL's"


def test_larger_sums_go_another_way_and_some_are_refused(pretended):
    group, seen = pretended
    for n, kernel in (one_shot.ONE_SHOT, "one_shot"), (one_shot.ONE_SHOT + 4, "two_shot"), (2**24, "two_shot"):
        x = torch.ones(n // 4)
        group.allreduce([x]).wait()
        assert x.eq(2).all() and seen.mock_calls[-4] == getattr(call, kernel)("sum", "nccl")
    assert group.allreduce([torch.ones(2**22 + 1)]) is seen.nccl.allreduce.return_value
    assert group.allreduce([torch.ones(4, dtype=torch.float16)]) is seen.nccl.allreduce.return_value
    for ranks, device in (2, "cpu"), (3, "cuda"):
        words = "^--comm one-shot is for 2, 4 or 8 ranks of one node, on GPUs$"
        refused(words, one_shot.connect, World(0, ranks, torch.device(device)))


def test_one_shot_sums_are_tried_against_nccls_before_they_are_used(pretended, monkeypatch):
    """A wrong one in any of the sizes."""
    group, seen = pretended
    seen.nccl.allreduce.side_effect = lambda tensors: (tensors[0].mul_(2), MagicMock())[1]
    one_shot.check(group, 0, "cpu")
    right = torch.ops.symm_mem.two_shot_all_reduce_
    monkeypatch.setattr(torch.ops.symm_mem, "two_shot_all_reduce_", lambda x, *args: right(x, *args)[:].add_(x > 30))
    refused("are wrong", one_shot.check, group, 0, "cpu")


class Slow:
    """A process group whose sums take some seconds longer on this rank, before they begin."""

    def __init__(self, group, seconds):
        self.group = group
        self.seconds = seconds

    def allreduce(self, tensors):
        time.sleep(self.seconds)
        return self.group.allreduce(tensors)


def find_slow_link(world, seconds):
    given = world.group
    try:
        world.group = Slow(given, seconds[world.rank])
        return meeting.sums_slowly(world)
    finally:
        world.group = given


def test_a_slow_link_is_found_by_all_ranks_alike():
    """One rank's delay makes all cut their prompts in parts, since they must agree on these."""
    assert run_ranks(2, find_slow_link, (0, 0.02)) == [True, True]


@pytest.mark.parametrize("slow, tokens, parts", [(False, 511, 1), (False, 512, 2), (True, 15, 1), (True, 16, 2)])
def test_how_many_parts_a_prompt_has(slow, tokens, parts):
    net = random_model(BASE)
    net.comm = SimpleNamespace(tp_size=2, slow_link=slow, on_host=frozenset())
    assert generate.Runner(net, net.new_cache(1, 2)).choose_splits(1, tokens) == parts
