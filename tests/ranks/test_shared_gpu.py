"""Ranks that share a GPU, on a machine without one: what they are told, how they sum, what of the memory they count."""

import os
import types

import pytest
import torch
from cases import refused
from configs import BASE
from helpers import random_model, rank_logits
from running import run_ranks

from generate import Runner
from ladder import memory
from ladder.decoding.batch import make_cache
from ladder.kernels import compiling, cuda_graphs
from ladder.ranks import launch, meeting, shared_gpu, watch
from ladder.ranks.world import World


@pytest.fixture
def shared(monkeypatch):
    """Let rank 1 of 2 on one pretended GPU meet; a function that does so and returns its World."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in shared_gpu.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(watch, "start", lambda *args: None)
    monkeypatch.setattr(meeting.JoinedWorld, "gather", lambda self, value: [value] * self.tp_size)
    monkeypatch.setattr(meeting, "visible_gpus", lambda device: ["GPU-a", "GPU-b"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    monkeypatch.setattr(meeting, "make_group", lambda *args: None)
    return lambda: launch.join("cuda:0", {"comm": "library"})


def test_ranks_that_name_a_gpu_share_it(shared):
    world = shared()
    assert str(world.device) == "cuda:0" and world.devices == ["GPU-a"] * 2 and world.shares_gpu
    assert not World(0, 2, torch.device("cuda:0")).shares_gpu


@pytest.mark.parametrize("version, nccl", [((2, 29, 7), False), ((2, 30, 0), True), ((2, 31, 1), True)])
def test_nccl_connects_ranks_that_share_a_gpu_if_it_can(version, nccl, shared, monkeypatch, capsys):
    world = shared()
    made = []
    world.rank = 0
    monkeypatch.undo()
    monkeypatch.setattr(shared_gpu, "nccl_version", lambda: version)
    monkeypatch.setattr(os, "environ", {"NCCL_MAX_CTAS": "1"})
    monkeypatch.setattr(world, "gather", lambda value: [value] * 2, raising=False)
    monkeypatch.setattr(world, "agree", lambda values: None, raising=False)
    options = types.SimpleNamespace
    monkeypatch.setattr(meeting.dist, "ProcessGroupNCCL", options(Options=lambda **_: options()), raising=False)
    monkeypatch.setattr(meeting.dist, "init_process_group", lambda backend, **_: made.append(backend))
    monkeypatch.setattr(meeting.dist, "barrier", lambda: None)
    monkeypatch.setattr(meeting.dist, "group", options(WORLD="torch's"))
    monkeypatch.setattr(meeting.store, "torchrun_store", lambda: None)
    monkeypatch.setattr(shared_gpu, "ThroughHost", lambda name, inner, rank, size: ("through the host", inner))
    meeting.make_group(world, {})
    assert made == (["nccl"] if nccl else ["gloo"])
    assert world.group == ("torch's" if nccl else ("through the host", "torch's"))
    assert os.environ == shared_gpu.SETTINGS | {"NCCL_MAX_CTAS": "1"}
    said = capsys.readouterr().err
    assert "not for speed" in said and ("gloo" in said) != nccl and said.count("\n") == 1


def through_host(world, config):
    world.group = shared_gpu.ThroughHost(
        "host", world.dist_group or torch.distributed.group.WORLD, world.rank, world.tp_size
    )
    return rank_logits(world, config)


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_and_gathers_through_the_host_are_right(ranks):
    """In unequal rows, by real gloo; on a CPU each tensor is its own copy in the host's memory."""
    exact = rank_logits(None, BASE)
    for logits in run_ranks(ranks, through_host, BASE):
        assert torch.allclose(logits, exact, atol=1e-4)


def test_sums_through_the_host_are_not_captured(monkeypatch):
    net = random_model(BASE)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(type(net), "device", torch.device("cuda"))
    cache = net.layers  # any
    assert Runner(net, cache).passes.graphs.is_eager
    net.comm = types.SimpleNamespace(on_host=shared_gpu.ThroughHost.on_host, tp_size=2)
    assert Runner(net, cache).passes.graphs is None
    monkeypatch.setattr(compiling, "prepare", lambda device: None)
    refused("--compile captures sums", Runner, net, cache, compile=True)


@pytest.mark.parametrize("is_eager", [True, False])
def test_an_eager_step_that_cannot_be_captured_runs_without_a_graph(is_eager, monkeypatch, capsys):
    def captured(function, pool, generator):
        function()
        raise RuntimeError("operation not permitted\nmore")

    monkeypatch.setattr(cuda_graphs, "captured", captured)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 2))
    net = random_model(BASE)
    graphs = cuda_graphs.Graphs(net, None if is_eager else compiling._compiling)
    tokens = torch.tensor([[3], [4]])
    positions = torch.tensor([[0], [0]])
    if not is_eager:
        with pytest.raises(RuntimeError, match="not permitted"):
            graphs(tokens, positions, make_cache(net, 2, 4), 3)
        return
    for _ in range(2):
        logits = graphs(tokens, positions, make_cache(net, 2, 4), 3)
        assert torch.equal(logits, net(tokens, positions, make_cache(net, 2, 4), 3))
    assert capsys.readouterr().err == "decode steps run without CUDA graphs, thus slower: operation not permitted\n"


def test_ranks_that_share_a_gpu_share_its_memory(monkeypatch, capsys):
    """Of two ranks on one GPU and one on another, the first two have half of it each."""
    monkeypatch.setattr(memory, "GRAPH_BYTES", 0)
    needed = []
    monkeypatch.setattr(memory, "cache_bytes", lambda *args: 1000)
    for devices in ("a", "b", "c"), ("a", "a", "b"):
        world = World(0, 3, torch.device("cuda"))
        world.devices = devices
        for free in range(0, 600_000, 1000):
            monkeypatch.setattr(memory, "free_bytes", lambda device, free=free: free)
            memory.warn_of_memory(world, BASE, torch.float32, 3, 25)
            if not capsys.readouterr().err:
                break
        needed.append(free)
    assert needed[1] == pytest.approx(2 * needed[0], abs=2000) and needed[0] > 1000
