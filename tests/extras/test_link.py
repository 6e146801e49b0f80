"""The emulated link, one rank alone, and the measuring of exposed communication."""

import argparse
import dataclasses
import itertools
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cases import refused, slow_case
from configs import BASE, BY_HAND, WIRED, queued, staleness, wired_id
from file_edits import read_json
from helpers import last_logits, random_model, shard, unequal_rows
from running import RANKS, run_ranks

import generate
import tp
from extras.measure import clock as clocks
from extras.measure import exposed, link, probe
from generate import Runner
from ladder import benchmarking
from ladder.decoding.batch import Sampler, pad
from ladder.lanes import wirings
from ladder.ranks import gloo, launch
from ladder.ranks.meeting import JoinedWorld
from ladder.ranks.world import World
from model import interleave, list_sublayers

CPU = torch.device("cpu")
OPS = torch.ops._c10d_functional


# ---- The link --------------------------------------------------------------------------------------------------------


def test_seconds_of_named_links_and_numbers():
    """Latency and ring traffic."""
    ten_gigabit = link.parse("50us+10gbps")
    assert ten_gigabit.seconds(1_000_000, 4) == pytest.approx(50e-6 + 2 * 3 / 4 * 1e6 / 1.25e9)
    assert ten_gigabit.seconds(1_000_000, 4, passes=1) == pytest.approx(50e-6 + 3 / 4 * 1e6 / 1.25e9)
    assert link.FREE.seconds(1_000_000, 4) == 0 and link.parse("pcie") is link.LINKS["pcie"]
    for text, *numbers in ("0.5us", 0.5, None), ("100us+2.5gbps", 100, 2.5), ("8gbps", 0, 8), ("tcp+1.5ms", 1500, None):
        one = link.parse(text)
        assert (one.name, one.latency_us, one.gbps) == (text, *numbers)  # no two are alike
    for text in ("carrier-pigeon", "", "us", "-1us", "1s", "99999ms", "0gbps", "5"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"is none of free, .*, 50gbps or 100us\+50gbps"):
            link.parse(text)


def test_a_world_over_a_link():
    alone = World(0, 1, CPU)
    eight = link.emulate(alone, link.LINKS["pcie"], 8)
    assert (eight.rank, eight.tp_size, eight.simulated, eight.alone) == (0, 8, True, True)
    assert eight.group.link == link.LINKS["pcie"] and eight.group.inner is None
    real = JoinedWorld(1, 2, CPU, dist.group)
    two = link.emulate(real, link.FREE)
    assert (two.rank, two.tp_size, two.simulated) == (1, 2, False) and two.group.inner is dist.group
    assert link.emulate(JoinedWorld(1, 2, CPU, dist.group, shares=(3, 1)), link.FREE).shares == (3, 1)
    assert (eight.shares, two.shares) == ((1,) * 8, (1, 1))
    refused("a link needs two or more ranks, started with torchrun, or --simulate-tp", link.emulate, alone, link.FREE)
    words = "--simulate-tp is one rank alone: start it with python, not with torchrun"
    refused(words, link.emulate, real, link.FREE, 4)


class Clock:
    """Stands in for the module `time`, so that no busy machine changes what it says: only a sleep takes long."""

    def __init__(self):
        self.now = self.slept = 0.0

    def perf_counter(self):
        self.now += 1e-7  # as it must for those who spin
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.slept += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(link, "time", clock)
    monkeypatch.setattr(exposed, "time", clock)
    monkeypatch.setattr(benchmarking, "time", clock)
    return clock


@pytest.mark.parametrize("text, numbers, seconds", [
    ("20000us", [4000], 0.02),
    ("5000us+0.0112gbps", [4000], 0.025),  # 16 KB at 11.2 Mbit/s in a ring of 8 are 20 ms
    ("20000us", [4, 4], 0.04),  # one at a time
    ("tcp+20000us+0.0112gbps", [3000, 1], 0.035),  # at once, but for the 15 ms of the first one's bytes
])  # fmt: skip
def test_all_reduces_take_what_was_asked_for(clock, text, numbers, seconds):
    group = link.LinkedGroup(None, link.parse(text), 0, 8, CPU)
    for computing in 0.0, 0.015, 0.0:  # while the link carries them
        start = clock.now
        pending = [OPS.all_reduce(torch.ones(n), "sum", group.group_name) for n in numbers]
        clock.now += computing
        for one in pending:
            OPS.wait_tensor(one)
        assert clock.now - start == pytest.approx(seconds, abs=2e-5 if "tcp" in text else 2e-6)


def on_and_off(world, compile, cases):
    """For each case: the logits over the real group, and over it with an emulated link."""
    linked = link.LinkedGroup(world.group, link.Link("x", 200.0, 1.0), world.rank, world.tp_size, CPU)
    answers = []
    for changes in cases:
        config = dataclasses.replace(BASE, **changes, n_heads=15, n_kv_heads=5, intermediate_size=101)
        net = shard(config, world)
        logits = []
        for group in (world.group, linked):
            net.comm = tp.TensorParallel(config, world.shares, group)
            logits.append(last_logits(net, *unequal_rows(config), compile=compile, compile_prefill=compile))
        answers.append((wired_id(changes), *logits))
    return answers


@pytest.mark.parametrize("tp_size, cases", [
    (2, WIRED), (3, WIRED), slow_case(4, WIRED),
    slow_case(2, [{"wiring": "ladder"}]),
])  # fmt: skip
def test_an_emulated_link_changes_no_number(tp_size, cases):
    for answers in run_ranks(tp_size, on_and_off, cases is not WIRED, cases):
        assert len(answers) == len(cases)
        for name, plain, linked in answers:
            assert torch.equal(plain, linked), name
            assert plain.isfinite().all()


def policies(world):
    tasks = [int(i) for i in os.listdir("/proc/self/task")]
    names = {i: Path(f"/proc/self/task/{i}/comm").read_text() for i in tasks}
    return {os.sched_getscheduler(i) for i in tasks if "gloo" in names[i]}, os.sched_getscheduler(os.getpid())


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="the threads' policies are set on Linux only")
def test_gloos_threads_do_not_preempt_one_another():
    for threads, main in run_ranks(2, policies):
        assert threads in ({os.SCHED_RR}, {os.SCHED_BATCH})
        assert main == os.SCHED_OTHER


# ---- The ranks meet --------------------------------------------------------------------------------------------------


def test_the_interface_is_the_one_on_the_way_to_the_other_nodes(monkeypatch):
    own = gloo.address_towards("192.0.2.1")  # of a network for documentation: nobody answers, nothing is sent
    if not own or own.startswith("127."):
        pytest.skip("this machine has no address but loopback")
    assert gloo.address_towards(own) == own and gloo.address_towards("127.0.0.1") == "127.0.0.1"
    assert gloo.address_towards("no such host.invalid") == ""

    def chosen(master, rank, last):
        monkeypatch.setenv("MASTER_ADDR", master)
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
        store = dist.HashStore()
        if last:
            store.set("last rank's address", last)
        gloo.choose_interface(store, rank, 4)
        return os.environ.get("GLOO_SOCKET_IFNAME"), store

    name, store = chosen(own, 3, None)
    assert name in {i for _, i in socket.if_nameindex()} - {"lo"} and store.get("last rank's address").decode() == own
    assert chosen(own, 0, None)[0] == name  # node 0: its own address, that is not loopback's
    assert chosen("127.0.0.1", 0, own)[0] == name  # its own name is loopback's: the way to the last rank
    assert chosen("127.0.0.1", 0, "127.0.0.1")[0] == "lo"  # all on one machine
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    gloo.choose_interface(None, 0, 4)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"


# ---- The clock -------------------------------------------------------------------------------------------------------


def test_sublayers_share_the_time_by_the_bytes_of_their_weights():
    world = link.emulate(World(0, 1, CPU), link.FREE, 2)
    net = shard(BASE, world)
    prompts = pad([[5, 6], [7]], CPU)
    runner = Runner(net, net.new_cache(2, 8))
    blocks = [*net.layers]
    attention, feed_forward, output = (
        sum(4 * weight.numel() for module in modules for weight in module.parameters())
        for modules in ([b.attention for b in blocks], [b.feed_forward for b in blocks], [net.output])
    )
    for kind, rest in ("decode", output), ("prefill", 0):  # which computes few logits
        case = exposed.make_case(kind, runner, *prompts, world)
        assert case.n_bytes == (attention, feed_forward, rest)


@pytest.mark.parametrize("wiring, splits, limit", [
    # 50 ms of computing without all-reduces: of two layers each attention takes 6, each MLP 14, the head 10. 15 an
    # all-reduce.
    ("standard", 1, 50 + 4 * 15),
    ("standard", 2, 3 + 8 * 15 + 10),
    ("ladder", 1, 6 + 3 * 15 + 15 + 10),
    ("ladder:1", 1, (6 + 15) + 14 + 15 + 15 + 15 + 10),
    ("desync:2", 1, 50 + 2 * 15),
    ("upper-bound", 1, 50),
])  # fmt: skip
def test_the_report(wiring, splits, limit):
    times = {"all_reduce": 0.015, "step": 0.12, "silent": 0.05}
    config = dataclasses.replace(BASE, n_layers=2, wiring=wiring)
    case = exposed.Case(config, None, None, None, torch.zeros(2, 1, 48), link.FREE, (1200, 2800, 1000), splits)
    r = exposed._report(case, [times] * 3)
    n = {"upper-bound": 0, "desync:2": 2}.get(wiring, 4) * splits
    assert r["limit_ms"] == pytest.approx(limit)
    assert (r["step_ms"], r["silent_ms"], r["exposed_ms"]) == pytest.approx((120, 50, 70))
    assert r["all_reduces"] == n and r["all_reduce_bytes"] == 2 * 48 * 4 and r["rounds"] == 3
    assert r["hidden"] == (pytest.approx(1 - 70 / (15 * n)) if n else None)
    assert r["all_reduce_ms"] == pytest.approx(15)


def test_on_the_clock_chunks_hide_one_another():
    """Two of half the work: all but the first computing and the last sum; a ladder has nothing left to hide."""
    standard, ladder = (dataclasses.replace(BASE, n_layers=2, wiring=wiring) for wiring in ("standard", "ladder"))
    assert clocks.run_layers(standard, 2, 2, 2, splits=2).started == 8
    assert clocks.run_layers(standard, 4, 4, 4).now == 4 * (4 + 4)
    assert clocks.run_layers(standard, 2, 2, 2, splits=2).now == 2 + 7 * 2 + 2
    assert clocks.run_layers(ladder, 4, 4, 4).now == 4 + 3 * 4 + 4
    assert clocks.run_layers(ladder, 2, 2, 2, splits=2).now == 2 + 7 * 2 + 2


@pytest.mark.parametrize("changes", BY_HAND, ids=wired_id)
def test_measuring_sublayers_that_only_sleep(clock, changes, monkeypatch):
    """Against the sum by hand."""
    config = dataclasses.replace(BASE, **changes)
    nap = 0.004
    latency = 0.01
    x = torch.zeros(2)
    group = link.LinkedGroup(None, link.Link("x", 1e6 * latency, None), 0, 8, CPU)
    world = World(0, 8, CPU, group)

    def sleep(*_):
        clock.sleep(nap)
        return torch.zeros(2)

    def norm(x):
        return x

    block = SimpleNamespace(attention=sleep, feed_forward=sleep, attention_norm=norm, ffn_norm=norm)
    sleeps = list_sublayers(config, [block] * config.n_layers)
    naps = []
    for h, _ in sleeps:
        start = clock.now
        h(x)
        naps.append(clock.now - start)
    comm, silent = (kind(config, (1,) * 8, group) for kind in (tp.TensorParallel, exposed.Silent))
    steps = [lambda c=c: interleave([config.named_wiring.loop(x, sleeps, c, config)]) for c in (comm, silent)]
    case = exposed.Case(config, *steps, comm, x, group.link, (1, 1, 0))
    sums = []
    send = group._send
    monkeypatch.setattr(group, "_send", lambda n_bytes: sums.append(n_bytes) or send(n_bytes))
    for step, n in zip(steps, (clocks.run_layers(config, 0.0, 0.0, 0.0).started, 0), strict=True):
        sums.clear()
        step()
        assert len(sums) == n
    r = exposed.measure(world, {"decode": case}, seconds=0)["decode"]
    compute = nap * 2 * config.n_layers
    waited = latency * r["all_reduces"]
    if config.named_wiring.loop not in (wirings.desynced_loop, wirings.silent_loop):
        waited = queued(naps, latency, staleness(config)) - compute
    expected = {"silent": compute, "step": compute + waited, "limit": compute + waited, "all_reduce": latency}
    assert {name: r[f"{name}_ms"] / 1e3 for name in expected} == pytest.approx(expected, abs=1e-5)


def test_the_models_own_collective_is_timed(clock):
    """One that sends a quarter of the bytes and takes 1 ms of its own: 8 MB at 16 Gbit/s in a ring of 2 are 4 ms."""

    class Quarter(tp.TensorParallel):
        def start(self, partial):
            clock.now += 1e-3
            return super().start(partial[: len(partial) // 4])

    config = dataclasses.replace(BASE, wiring="upper-bound")
    group = link.LinkedGroup(None, link.Link("x", 0.0, 16.0), 0, 2, CPU)
    world = World(0, 2, CPU, group)
    for comm, wanted in (tp.TensorParallel, 0.004), (Quarter, 0.002):
        steps = lambda: None, lambda: None  # noqa: E731
        case = exposed.Case(config, *steps, comm(config, (1, 1), group), torch.zeros(2_000_000), group.link, ())
        run = exposed._run(world, case, exposed.own_all_reduce(world, case))
        assert run["all_reduce"] == pytest.approx(wanted, abs=2e-6)


def test_medians_turns_and_quartiles(monkeypatch):
    seconds = itertools.cycle([1.0, 2.0, 9.0])
    turns = itertools.count(1)
    monkeypatch.setattr(benchmarking, "timed", lambda device, step: next(seconds))
    assert benchmarking.read_bandwidth(CPU, size=4000, repeats=9) == 4000 / 2
    ways = dict.fromkeys(("a", "b"), lambda: next(turns))
    assert benchmarking.in_turns(ways, 3) == {"a": [1, 3, 5], "b": [2, 4, 6]}
    assert benchmarking.quartiles([4.0]) == (4.0, 4.0, 4.0)
    assert benchmarking.quartiles([1, 2, 3, 4, 100]) == (2, 3, 4) and benchmarking.quartiles([5, 9]) == (6, 7, 8)


def test_measuring_runs_what_is_compiled_already(monkeypatch):
    """Steps have the tensors that generate() has: else a trace would show the compiler at work."""
    torch._dynamo.reset()
    compile = torch.compile  # the graphs are what counts, not their code
    monkeypatch.setattr(torch, "compile", lambda net, dynamic=None, **_: compile(net, dynamic=dynamic, backend="eager"))
    net = random_model(dataclasses.replace(BASE, n_layers=1))
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    runner = Runner(net, net.new_cache(2, 8), compile=True, compile_prefill=True)
    prompts = [[5, 6, 7], [8, 9]]
    generate.generate(runner, prompts, 4, Sampler(0))
    for step in exposed.replays(runner, *pad(prompts, CPU)).values():
        step()
    assert graphs["unique_graphs"] == 2


def probed(world, out):
    with pytest.MonkeyPatch.context() as m:
        m.setattr(probe, "MESSAGE_BYTES", [1024, 4096])
        m.setattr(launch, "join", lambda *_: world)
        m.setattr(benchmarking, "read_bandwidth", lambda *_: 2e9)
        probe.main(["--json", out])


def test_the_probe_times_all_reduces(tmp_path):
    run_ranks(RANKS, probed, str(tmp_path / "out.jsonl"))
    line = read_json(tmp_path / "out.jsonl")
    assert line["probe"]["bandwidth"] == [2e9] * RANKS and line["tp"] == RANKS
    assert [r["bytes"] for r in line["probe"]["all_reduce"]] == [1024, 4096]
    assert line["probe"]["all_reduce"][0]["us"] > 0
