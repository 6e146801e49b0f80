"""Extras on a GPU: the emulated link, by one rank of two, and training; started like tests/test_gpu.py."""

import copy
import dataclasses

import pytest
import torch
from configs import WIRED, wired_id
from gpu import CONFIG, DEVICE, NEEDS_A_GPU, ON_CPU
from training_runs import check_resumption

from extras.measure import link
from extras.measure.clock import run_layers
from extras.measure.exposed import Case, own_all_reduce, replays
from generate import Runner
from ladder.benchmarking import timed
from ladder.checkpoints.random_weights import RandomWeights
from ladder.decoding.batch import make_cache
from ladder.ranks.world import World
from tp import TensorParallel, load_shard

pytestmark = [*NEEDS_A_GPU, pytest.mark.usefixtures("fresh_compiler")]


@pytest.fixture
def slow():
    """The world of one rank of two, 20 ms from the other."""
    return link.emulate(World(0, 1, DEVICE), link.Link("slow", 20_000.0, None), 2)


def start(world, x):
    return torch.ops._c10d_functional.all_reduce(x, "sum", world.group.group_name)


wait = torch.ops._c10d_functional.wait_tensor


def test_an_all_reduce_without_python_takes_what_the_link_of_the_moment_takes(slow):
    """Captured once in a CUDA graph, on a GPU."""
    comm = TensorParallel(CONFIG, slow.shares, slow.group)
    x = torch.ones(500_000, device=DEVICE)
    step = own_all_reduce(slow, Case(CONFIG, None, None, comm, x, slow.group.link, ()))
    for other, least, most in (("20000us", 0.019, 0.03), ("1gbps", 0.0155, 0.03), ("1000us+1gbps", 0.0165, 0.03)):
        slow.group.set_link(link.parse(other))
        assert least < timed(DEVICE, step) < most


@pytest.mark.skipif(ON_CPU, reason="needs a GPU: its kernel is Triton's")
def test_what_is_computed_meanwhile_hides_the_link(slow):
    from extras.measure.spin import spin_kernel

    x = torch.ones(1024, device=DEVICE)
    work = torch.zeros(2, dtype=torch.float64, device=DEVICE)
    work[0] = 20e6  # nanoseconds

    def waiting():
        wait(start(slow, x))
        spin_kernel[(1,)](work, 0)

    def hiding():
        pending = start(slow, x)
        spin_kernel[(1,)](work, 0)
        wait(pending)

    for step in (waiting, hiding):
        step()
    assert timed(DEVICE, hiding) < 0.75 * timed(DEVICE, waiting)


def test_a_killed_training_resumes_with_the_same_losses(retraining_flags, tmp_path, monkeypatch):
    """But for sums whose order the GPU chooses; without the state of the optimizer they are off by more."""
    flags = [*retraining_flags, "--device", DEVICE.type, "--compute-dtype", "float32"]
    check_resumption(flags, tmp_path, monkeypatch, rel=1e-3)


def simulated(changes, world):
    """(a model of one rank, its runner, compiled), in the world."""
    config = dataclasses.replace(CONFIG, **changes)
    net = load_shard(config, RandomWeights(config, DEVICE), torch.float32, DEVICE, world.rank, world.shares)
    net.comm = TensorParallel(config, world.shares, world.group)
    return net, Runner(net, make_cache(net, 2, 10), compile=True)


@pytest.mark.parametrize("changes", WIRED, ids=wired_id)
def test_collectives_stay_inside_the_cuda_graph(changes, slow, monkeypatch):
    """A replay calls no Python, computes the same, and takes as long as its all-reduces take."""
    net, runner = simulated(changes, slow)
    tokens = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]], device=DEVICE)
    lengths = torch.tensor([5, 5])
    plain = copy.copy(runner)
    plain.passes.decode = net
    step, eager = (replays(r, tokens, lengths.to(DEVICE))["decode"] for r in (runner, plain))
    before = eager().clone()
    sent = []
    send = slow.group._send
    monkeypatch.setattr(slow.group, "_send", lambda *args, **passes: sent.append(args) or send(*args, **passes))
    step()  # to capture
    sent.clear()
    seconds = timed(DEVICE, step)
    collectives = run_layers(net.config, 0.0, 0.0, 0.0).started
    assert len(sent) == (collectives if ON_CPU else 0)
    assert seconds > 0.95 * 0.02 * collectives
    assert torch.allclose(step(), before, rtol=1e-3, atol=1e-3)
