"""--comm one-shot, on a machine without a GPU: its order over pretended streams, and what it refuses."""

import contextlib
import types
import weakref

import pytest
import torch

from extras.collectives import one_shot
from runtime.errors import InputError
from runtime.launch import World


class Stream:
    """A stream that only logs what it is told."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_stream(self, other):
        self.log.append(f"{self.name} forks from {other.name}")

    def record_event(self):
        return len(self.log)  # how many entries it comes after

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {self.log[event - 1]}")


@pytest.fixture
def pretended(monkeypatch):
    """(a OneShotGroup of two equal ranks whose streams and kernels only log, the log)."""
    log, names = [], iter(["A", "B", "C"])
    computing = Stream(log, "main")
    current = [computing]

    @contextlib.contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    def one(shared, op, group, out):
        log.append(f"{current[-1].name}: one-shot {op} {next(names)} of {group}")
        return out.copy_(2 * shared)

    def two(shared, op, group):
        log.append(f"{current[-1].name}: two-shot {op} {next(names)} of {group}")
        return shared.mul_(2)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: Stream(log, f"stream {priority}"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(one_shot.symmetric, "rendezvous", lambda buffer, group: None)
    monkeypatch.setattr(torch.ops.symm_mem, "one_shot_all_reduce_out", one, raising=False)
    monkeypatch.setattr(torch.ops.symm_mem, "two_shot_all_reduce_", two, raising=False)
    monkeypatch.setattr(one_shot.symmetric, "empty", torch.empty)
    inner = types.SimpleNamespace(group_name="nccl", allreduce=lambda tensors, opts: log.append("nccl") or "nccl's")
    return one_shot.OneShotGroup(inner, 0, 2, "cpu"), log


def test_one_shot_sums_run_on_a_stream_of_their_own_from_start_to_wait(pretended):
    (group, log), ops = pretended, torch.ops._c10d_functional
    x, y = torch.randn(2, 1, 8), torch.randn(2, 1, 8)
    with torch.inference_mode():
        first, second = (ops.all_reduce(t, "sum", group.group_name) for t in (x, y))
        sums = ops.wait_tensor(first), ops.wait_tensor(second)
    assert torch.equal(sums[0], 2 * x) and torch.equal(sums[1], 2 * y)
    started = ["stream -1: one-shot sum A of nccl", "stream -1: one-shot sum B of nccl"]
    fork = "stream -1 forks from main"
    assert log == [fork, started[0], fork, started[1], *(f"main waits for {one}" for one in started)]


def test_a_sum_keeps_its_tensor_until_the_wait(pretended):
    group, _ = pretended
    x = torch.ones(4)
    work, held = group.allreduce([x]), weakref.ref(x)
    del x
    assert held() is not None
    work.wait()
    assert held() is None


def test_larger_sums_go_another_way(pretended):
    group, log = pretended
    for n, kernel in ((one_shot.ONE_SHOT, "one-shot"), (one_shot.ONE_SHOT + 4, "two-shot"), (2**24, "two-shot")):
        x = torch.ones(n // 4)
        group.allreduce([x]).wait()
        assert x.eq(2).all() and kernel in log[-2] and "main waits" in log[-1]
    assert group.allreduce([torch.ones(2**22 + 1)]) == "nccl's" and log[-1] == "nccl"


def test_one_shot_says_what_it_needs(pretended, monkeypatch):
    group, _ = pretended
    with pytest.raises(InputError, match="^--comm one-shot sums bfloat16 and float32: give --dtype$"):
        torch.ops._c10d_functional.all_reduce(torch.ones(4, dtype=torch.float16), "sum", group.group_name)
    gpu, needs = torch.device("cuda:0"), "^--comm one-shot is for ranks of one node, each with a GPU$"
    with pytest.raises(InputError, match=needs):
        one_shot.connect(World(0, 2, torch.device("cpu")))
    monkeypatch.setattr(World, "gather", lambda self, value: [value] * self.tp_size)

    def rendezvous(buffer, group):
        raise RuntimeError("CUDA driver error: peer access is not supported\nException raised from")

    monkeypatch.setattr(one_shot.symmetric, "rendezvous", rendezvous)
    monkeypatch.setattr(one_shot.symmetric, "empty", lambda n, dtype, device: torch.empty(n, dtype=dtype))
    with pytest.raises(InputError, match="one-shot needs GPUs that reach .*: CUDA driver error: .* not supported$"):
        one_shot.connect(World(0, 2, gpu, group.inner))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(InputError, match=needs):
        one_shot.connect(World(0, 2, gpu))
