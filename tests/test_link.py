"""The emulated link, one rank alone, and the measuring of exposed communication."""

import argparse
import dataclasses
import itertools
import json
import math
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import BASE, ROOT, WIRED, last_logits, random_model, run_ranks, script, shard, unequal_rows, wired_id
from torch.utils._python_dispatch import TorchDispatchMode

import exposed
import generate
import link
import tp
from model import WIRINGS, InputError

CPU = torch.device("cpu")


# ---------------------------------------------------------------------------------------------------------------------
# The link


def test_seconds_are_latency_and_ring_traffic():
    ten_gigabit = link.Link("x", 50.0, 10.0)
    assert ten_gigabit.seconds(1_000_000, 4) == pytest.approx(50e-6 + 2 * 3 / 4 * 1e6 / 1.25e9)
    assert ten_gigabit.seconds(1_000_000, 4, passes=1) == pytest.approx(50e-6 + 3 / 4 * 1e6 / 1.25e9)
    assert link.FREE.seconds(1_000_000, 4) == 0


def test_named_links_and_numbers():
    assert link.choose() is None
    assert link.choose("pcie") == link.LINKS["pcie"]
    assert link.choose("pcie", latency_us=5.0) == link.Link("custom", 5.0, link.LINKS["pcie"].gbps)
    assert link.choose(gbps=8.0).seconds(1_000_000, 2) == pytest.approx(1e-3)
    for name, known in link.LINKS.items():
        assert known.name == name and known.latency_us >= 0 and (known.gbps is None or known.gbps > 0)


@pytest.mark.parametrize(
    "flags, message",
    [
        (("carrier-pigeon",), "unknown --link 'carrier-pigeon'; known: free, nvlink,"),
        ((None, -1.0), "--link-latency-us is -1.0 but must be from 0 to 1e7"),
        ((None, 1e30), "--link-latency-us is 1e\\+30 but must be from 0 to 1e7"),
        ((None, math.nan), "--link-latency-us is nan"),
        ((None, None, 0.0), "--link-gbps is 0.0 but must be from 1e-3 to 1e6"),
        ((None, None, math.nan), "--link-gbps is nan"),
    ],
)
def test_bad_links_are_refused(flags, message):
    with pytest.raises(InputError, match=message):
        link.choose(*flags)


def all_reduce(group, x):
    ops = torch.ops._c10d_functional
    return ops.all_reduce(x, "sum", group.group_name)


def wait(pending):
    return torch.ops._c10d_functional.wait_tensor(pending)


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
    return clock


def time_of(function, clock=time):
    start = clock.perf_counter()
    function()
    return clock.perf_counter() - start


@pytest.mark.parametrize("latency_us, gbps, asked", [(20_000, None, 0.02), (5_000, 0.0112, 0.025)])
def test_one_all_reduce_takes_what_was_asked_for(clock, latency_us, gbps, asked):
    """The bytes: 16 KB at 11.2 Mbit/s in a ring of 8 are 20 ms."""
    group = link.LinkedGroup(None, link.Link("x", latency_us, gbps), 0, 8, CPU)
    x = torch.ones(4000, dtype=torch.float32)
    for _ in range(2):
        assert time_of(lambda: wait(all_reduce(group, x)), clock) == pytest.approx(asked, abs=2e-6)


def test_real_collectives_over_a_link_take_at_least_what_was_asked_for():
    for times in run_ranks(2, times_over_gloo):
        assert min(times) >= 0.02


def times_over_gloo(rank, tp_size):
    group = link.LinkedGroup(dist.group.WORLD, link.Link("x", 20_000, None), rank, tp_size, CPU)
    return [time_of(lambda: wait(all_reduce(group, torch.ones(1000)))) for _ in range(7)]


def test_the_link_carries_one_at_a_time_while_the_cpu_computes(clock):
    group = link.LinkedGroup(None, link.Link("x", 20_000, None), 0, 8, CPU)
    x = torch.ones(4)
    both = time_of(lambda: [wait(p) for p in [all_reduce(group, x), all_reduce(group, x)]], clock)
    assert both == pytest.approx(0.04, abs=2e-6)

    def overlapped():
        pending = all_reduce(group, x)
        clock.now += 0.015  # computes
        wait(pending)

    assert time_of(overlapped, clock) == pytest.approx(0.02, abs=2e-6)


def test_waiting_leaves_the_cpu_alone(clock):
    group = link.LinkedGroup(None, link.Link("x", 100_000, None), 0, 8, CPU)
    wait(all_reduce(group, torch.ones(4)))
    assert 0.0997 <= clock.slept < 0.1


def on_and_off(rank, tp_size):
    """For each wiring, eager and compiled: the logits over the real group, and over it with an emulated link."""
    linked = link.LinkedGroup(dist.group.WORLD, link.Link("x", 200.0, 1.0), rank, tp_size, CPU)
    answers = []
    for changes, compile in itertools.product(WIRED, (False, True)):
        if compile and (changes["wiring"], tp_size) != ("ladder", 2):
            continue
        config = dataclasses.replace(BASE, **changes, n_heads=15, n_kv_heads=5, intermediate_size=101)
        net, logits = shard(config, rank, tp_size), []
        for group in (dist.group.WORLD, linked):
            net.comm = tp.TensorParallel(config, tp_size, group)
            logits.append(last_logits(net, *unequal_rows(config), compile=compile))
        answers.append((f"{wired_id(changes)} compiled: {compile}", *logits))
    return answers


@pytest.mark.parametrize("tp_size", [2, 3, 4])
def test_an_emulated_link_changes_no_number(tp_size):
    for answers in run_ranks(tp_size, on_and_off):
        for name, plain, linked in answers:
            assert torch.equal(plain, linked), name
            assert plain.isfinite().all()


def test_a_gpus_link_is_a_spinning_kernel_on_a_stream_of_its_own(monkeypatch):
    """That it forks from and joins the current stream, as a CUDA graph needs; without a GPU, on stand-ins."""
    calls = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            calls.append(f"on {self.name}")

        def __exit__(self, *_):
            calls.append("off")

        def wait_stream(self, other):
            calls.append(f"{self.name} waits for {other.name}")

        def record_event(self):
            calls.append(f"{self.name} records")
            return "delivered"

        def wait_event(self, event):
            calls.append(f"{self.name} waits until {event}")

    main = Stream("main")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: Stream("link"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: calls.append(f"spin {cycles}"))
    monkeypatch.setattr(link, "_cycles_per_second", lambda: 1e9)
    group = link.LinkedGroup(None, link.Link("x", 3.0, None), 0, 8, torch.device("cuda"))
    work = group.allreduce([torch.ones(4)])
    assert calls == ["link waits for main", "on link", "spin 3000", "link records", "off"]
    calls.clear()
    work.wait()
    assert calls == ["main waits until delivered"]


def policies(rank, tp_size):
    tasks = [int(i) for i in os.listdir("/proc/self/task")]
    names = {i: Path(f"/proc/self/task/{i}/comm").read_text() for i in tasks}
    return {os.sched_getscheduler(i) for i in tasks if "gloo" in names[i]}, os.sched_getscheduler(os.getpid())


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="the threads' policies are set on Linux only")
def test_gloos_threads_do_not_preempt_one_another():
    for gloo, main in run_ranks(2, policies):
        assert gloo in ({os.SCHED_FIFO}, {os.SCHED_BATCH})
        assert main == os.SCHED_OTHER


# ---------------------------------------------------------------------------------------------------------------------
# The clock


@pytest.mark.parametrize(
    "changes, compute, all_reduce, expected",
    [
        # four sublayers of 2: the sum of all; or the longer one of each pair, the first compute and the last all-reduce
        ({"wiring": "standard"}, [2, 2, 2, 2], 3, 4 * (2 + 3)),
        ({"wiring": "ladder"}, [2, 2, 2, 2], 3, 2 + 3 * 3 + 3),
        ({"wiring": "ladder"}, [2, 2, 2, 2], 1, 4 * 2 + 1),
        ({"wiring": "ladder"}, [2, 5, 2, 5], 3, 2 + 5 + 3 + 5 + 3),
        ({"wiring": "hybrid", "ladder_layers": 1}, [2, 2, 2, 2], 3, (2 + 3) + 2 + 3 + 3 + 3),
        ({"wiring": "parallel"}, [4, 4], 3, 2 * (4 + 3)),
        ({"wiring": "desync", "desync_period": 2}, [4, 4], 3, 2 * (4 + 3)),
        ({"wiring": "desync", "desync_period": 3}, [6, 2], 3, 6 + 3 + 2 + 3),
        ({"wiring": "upper-bound"}, [], 3, 0),
    ],
    ids=str,
)
def test_the_clock_adds_up_each_wiring(changes, compute, all_reduce, expected):
    config = dataclasses.replace(BASE, n_layers=2, **changes)
    clock = exposed.run_clock(config, compute, all_reduce)
    assert clock.now == expected
    assert clock.started == exposed.count_all_reduces(config) == len(compute)


def test_compute_times_are_what_lies_between_waits_and_starts():
    # start1 at 2; start2 at 5, then wait1 until 6; start3 at 8, wait2 until 9; wait3 until 12; the head until 15
    log = [(2.0, 5.0, 6.0), (5.0, 8.0, 9.0), (8.0, 9.0, 12.0)]
    assert exposed.compute_times(1.0, log, 15.0) == ([1.0, 3.0, 2.0], 3.0)
    standard = [(2.0, 2.0, 4.0), (5.0, 5.0, 6.0)]
    assert exposed.compute_times(0.0, standard, 7.0) == ([2.0, 1.0], 1.0)
    assert exposed.compute_times(1.0, [], 4.0) == ([], 3.0)


def a_report(changes, **times):
    config = dataclasses.replace(BASE, n_layers=2, **changes)
    case = exposed.Case(config, None, None, torch.zeros(2, 1, 48), link.FREE)
    return exposed._report(case, [exposed.Run(**times)] * 3)


@pytest.mark.parametrize(
    "changes, compute, limit",
    [
        # 50 ms of computing without all-reduces, of which 10 after the last: 10 for each of four sublayers. 15 an
        # all-reduce. The compute times of the step itself, half as long again, are scaled to that.
        ({"wiring": "standard"}, [0.015] * 4, 4 * (10 + 15) + 10),
        ({"wiring": "ladder"}, [0.015] * 4, 10 + 3 * 15 + 15 + 10),
        ({"wiring": "hybrid", "ladder_layers": 1}, [0.015] * 4, (10 + 15) + 10 + 15 + 15 + 15 + 10),
        ({"wiring": "parallel"}, [0.03] * 2, 2 * (20 + 15) + 10),
        ({"wiring": "desync", "desync_period": 2}, [0.03] * 2, 2 * (20 + 15) + 10),
    ],
    ids=str,
)
def test_the_report(changes, compute, limit):
    r = a_report(
        changes, alone=0.015, step=0.12, silent=0.05, blocked=0.06, compute=compute, tail=0.01, transport=0.002
    )
    assert r["limit_ms"] == pytest.approx(limit)
    assert (r["step_ms"], r["silent_ms"], r["exposed_ms"]) == pytest.approx((120, 50, 70))
    assert r["all_reduces"] == len(compute) and r["all_reduce_bytes"] == 2 * 48 * 4 and r["rounds"] == 3
    assert r["hidden"] == pytest.approx(1 - 70 / (15 * len(compute)))
    assert (r["all_reduce_ms"], r["blocked_ms"], r["transport_ms"]) == pytest.approx((15, 60, 2))
    assert "exposed 70.00 of " in exposed.report("decode", r)


def test_the_report_without_all_reduces_and_without_the_cpus_clock():
    r = a_report({"wiring": "upper-bound"}, alone=0.015, step=0.05, silent=0.05, blocked=0, compute=[], tail=0.05)
    assert r["limit_ms"] == pytest.approx(50) and r["all_reduces"] == 0 and r["hidden"] is None
    assert "without any all-reduce" in exposed.report("decode", r)
    gpu = a_report({"wiring": "ladder"}, alone=0.015, step=0.12, silent=0.04)
    assert gpu["limit_ms"] == pytest.approx(10 + 3 * 15 + 15)
    assert gpu["blocked_ms"] is None and gpu["transport_ms"] is None


@pytest.mark.parametrize("changes", WIRED, ids=wired_id)
def test_measuring_sublayers_that_only_sleep(clock, changes):
    """Against the sum by hand: a stale sublayer, but for the first of all, computes during the all-reduce before it."""
    config = dataclasses.replace(BASE, **changes)
    nap, latency = 0.004, 0.01
    group = link.LinkedGroup(None, link.Link("x", 1e6 * latency, None), 0, 8, CPU)
    world = tp.World(0, 8, CPU, group, simulated=True)
    split, stream = WIRINGS[config.wiring]
    sleeps = [
        (lambda x: clock.sleep(nap) or torch.zeros(2), i in config.stale_layers)
        for i in range(config.n_layers) for _ in split(None, None, None)
    ]  # fmt: skip
    comm, silent, x = tp.TensorParallel(config, 8, group), tp.Silent(config, 8, group), torch.zeros(2)
    steps = [lambda: stream(x, sleeps, comm, config), lambda: stream(x, sleeps, silent, config)]
    logs = []
    for step in steps:
        group.log = []
        step()
        logs.append(len(group.log))
    assert logs == [exposed.count_all_reduces(config), 0]
    r = exposed.measure(world, {"decode": exposed.Case(config, *steps, x, group.link)}, rounds=3)["decode"]
    compute, hidden = nap * len(sleeps), nap * (2 * len(config.stale_layers) - (0 in config.stale_layers))
    waited = latency * r["all_reduces"] - hidden
    expected = {"silent": compute, "step": compute + waited, "limit": compute + waited, "blocked": waited}
    expected["all_reduce"] = latency
    assert {name: r[f"{name}_ms"] / 1e3 for name in expected} == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_all_reduce_on_its_own_is_timed_without_anything_else(clock, dtype):
    """8 MB at 16 Gbit/s in a ring of 2 are 4 ms; to make or to copy them would take another."""

    class Copying(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            fresh = all(value.alias_info is None for value in op._schema.returns) and "wait_tensor" not in str(op)
            clock.now += 1e-3 * (fresh or "copy_" in str(op))
            return op(*args, **(kwargs or {}))

    config = dataclasses.replace(BASE, wiring="upper-bound")
    group = link.LinkedGroup(None, link.Link("x", 0.0, 16.0), 0, 2, CPU)
    world = tp.World(0, 2, CPU, group, simulated=True)
    partial = torch.zeros(8_000_000 // dtype.itemsize, dtype=dtype)
    case = exposed.Case(config, lambda: None, lambda: None, partial, group.link)
    with Copying():
        assert exposed._run(world, case).alone == pytest.approx(0.004, abs=2e-6)


# ---------------------------------------------------------------------------------------------------------------------
# The flags of generate.py


def test_one_rank_alone_predicts_times_and_prints_no_text(tmp_path):
    out = tmp_path / "out.jsonl"
    flags = [
        "--model",
        "1b",
        "--n-layers",
        "2",
        "--random-weights",
        "--prompt-length",
        "5",
        "--batch",
        "2",
        "--json",
        out,
    ]
    done = script(
        "generate.py", *flags, "--simulate-tp", "8", "--link-latency-us", "4000", "--max-new-tokens", "3", "--exposed"
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["tp"] == 8 and result["simulated"] and result["n_layers"] == 2
    assert result["link"] == {"name": "custom", "latency_us": 4000.0, "gbps": None}
    assert result["tokens"] is None and result["texts"] is None and done.stdout == ""
    assert "PREDICTED" in done.stderr and "its text means nothing" in done.stderr
    assert result["tpot_ms"] >= 4 * 4 + 4  # four all-reduces and the gathered logits
    for kind, report in result["exposed"].items():
        assert report["all_reduces"] == 4
        assert report["all_reduce_bytes"] == 2 * 2048 * 2 * (5 if kind == "prefill" else 1)
        assert report["step_ms"] - report["silent_ms"] == pytest.approx(report["exposed_ms"])
        assert report["blocked_ms"] >= 4 * 4 * 0.9
    whole = 2 * (2048 * (2048 + 2 * 512) + 2048 * 2048 + 3 * 2048 * 8192) + 2048 * 128256  # elements of the matrices
    cache = 2 * 2 * 2 * 8 * 64 * (6 + 7) / 2  # layers, k and v, rows, KV heads, their size, slots filled
    assert result["step_bytes"] == 2 * (whole + cache) // 8 + 2 * 5 * 2048


@pytest.mark.parametrize("ranks", [1, 2])
def test_profile_writes_a_trace_of_each_rank(ranks, tmp_path):
    flags = ["--model", "1b", "--n-layers", "1", "--random-weights", "--prompt-length", "3", "--max-new-tokens", "2"]
    done = script("generate.py", *flags, "--profile", tmp_path / "traces", ranks=ranks)
    assert done.returncode == 0, done.stderr
    files = sorted((tmp_path / "traces").iterdir())
    assert [f.name for f in files] == [f"rank{i}.json" for i in range(ranks)]
    for file in files:
        names = [event.get("name") for event in json.loads(file.read_text())["traceEvents"]]
        assert {"prefill", "decode"} <= set(names)
        assert ("c10d::allreduce_" in names) == (ranks > 1)


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            ["--link", "pcie"],
            "one rank has no link (--link, --exposed): start two or more with torchrun, or use --simulate-tp",
        ),
        (["--exposed"], "one rank has no link"),
        (["--simulate-tp", "1"], "--simulate-tp is 1 but must be at least 2"),
        (["--json", "/proc/x"], "--json /proc/x cannot be written: "),
        (["--simulate-tp", "8"], "--simulate-tp needs a link to predict"),
        (["--simulate-tp", "0", "--link", "pcie"], "--simulate-tp is 0 but must be at least 1"),
        (["--simulate-tp", "33", "--link", "pcie"], "tp 33 cannot shard n_heads 32: use 1 to 32 ranks"),
        (["--n-layers", "17"], "--n-layers is 17 but 1b has 16"),
        (["--profile", "/proc/nowhere/x"], "--profile /proc/nowhere/x cannot be made: "),
        (["--profile", "/proc"], "--profile /proc/rank0.json cannot be written: "),
    ],
)
def test_bad_flags_end_in_one_line(flags, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["generate.py"])
    small = dataclasses.replace(generate.SIZES["1b"], dim=64, intermediate_size=64, vocab_size=64, head_dim=2)
    monkeypatch.setitem(generate.SIZES, "1b", small)
    argv = ["--model", "1b", "--random-weights", "--prompt-length", "3", "--max-new-tokens", "1", *flags]
    with pytest.raises(SystemExit) as end:
        tp.run(lambda: generate.main(argv))
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"generate.py: {message}")


def test_simulating_under_torchrun_is_refused():
    flags = ["--model", "1b", "--random-weights", "--prompt-length", "3", "--simulate-tp", "4", "--link", "pcie"]
    done = script("generate.py", *flags, ranks=2)
    assert "--simulate-tp is one rank alone: start it with python, not with torchrun" in done.stderr
    assert done.stderr.count("generate.py: ") == 1


def test_measuring_runs_what_is_compiled_already():
    """Steps have the tensors that generate() has: else a trace would show the compiler at work."""
    torch._dynamo.reset()
    net, graphs = random_model(BASE), torch._dynamo.utils.counters["stats"]
    graphs.clear()
    prefill, decode = generate.compiled(net, argparse.Namespace(compile=True, compile_prefill=True))
    prompts = [[5, 6, 7], [8, 9]]
    cache = net.new_cache(2, 8)
    generate.generate(prompts, 4, generate.make_sampler(0), prefill, decode, cache)
    assert graphs["unique_graphs"] == 2
    for step in generate.steps(prompts, prefill, decode, cache).values():
        with torch.inference_mode():
            step()
    assert graphs["unique_graphs"] == 2


def test_exposed_compiled_on_real_ranks(tmp_path):
    out = tmp_path / "out.jsonl"
    done = script(
        "generate.py", "--model", "1b", "--n-layers", "1", "--random-weights", "--prompt-length", "4",
        "--max-new-tokens", "3", "--compile", "--compile-prefill", "--link-latency-us", "2000", "--exposed",
        "--json", out, ranks=2,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["tp"] == 2 and not result["simulated"] and len(result["tokens"][0]) == 3
    for kind, r in result["exposed"].items():
        assert r["all_reduces"] == 2
        assert r["step_ms"] >= 3 * 2 and r["blocked_ms"] > 0  # two all-reduces and the gathered logits
        assert r["limit_ms"] >= r["silent_ms"] and r["transport_ms"] > 0
        assert f"{kind}: {r['step_ms']:.2f} ms a step" in done.stderr


@pytest.mark.skipif(not os.environ.get("LADDER_TEST_GPU"), reason="LADDER_TEST_GPU is not set: needs a GPU")
def test_a_cuda_graph_captures_the_link():
    """In a process of its own, which sees the GPU: the replayed graph takes as long as its link, and overlaps."""
    code = """
import torch, link
device = torch.device("cuda")
group = link.LinkedGroup(None, link.Link("x", 2000.0, None), 0, 8, device)
ops, x = torch.ops._c10d_functional, torch.ones(1024, device=device)
def step():
    pending = ops.all_reduce(x, "sum", group.group_name)
    torch.cuda._sleep(int(0.001 * group.cycles_per_second))  # computes meanwhile
    return ops.wait_tensor(pending)
step()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    step()
times = []
for _ in range(5):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    times.append(begin.elapsed_time(end))
assert 2.0 <= min(times) < 2.5, times
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": "0"})
    assert done.returncode == 0


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--show", "missing"], "--show missing"), (["--show", "README.md"], "--show README.md has lines that"),
        (["--n-layers", "0"], "--n-layers is 0 but"), (["--seconds", "nan"], "--seconds is nan"),
        (["--json", "/proc/x/y"], "--json /proc/x/y cannot be written"),
        (["--rounds", "0"], "--rounds is 0 but must be at least 3"), (["--n-layers", "1"], "--n-layers is 1 but"),
        (["--label", "x"], "--links 0 emulates one, but"), (["--links", "x"], "--links 'x' is neither a number"),
        (["--wirings", "x"], "unknown wiring 'x'"), (["--model", "x"], "unknown --model 'x'"),
    ],
)  # fmt: skip
def test_bad_flags_of_the_benchmark(flags, message):
    flags = [ROOT / flag if flag == "README.md" else flag for flag in flags]
    done = script("benchmarks/overlap.py", *flags)
    message = message.replace("README.md", str(ROOT / "README.md"))
    assert done.returncode == 2 and done.stderr.startswith(f"overlap.py: {message}") and done.stderr.count("\n") == 1


def test_overlap_benchmark_writes_a_line_a_case_and_shows_its_table(tmp_path):
    out = tmp_path / "out.jsonl"
    done = script(
        "benchmarks/overlap.py", "--model", "1b", "--n-layers", "2", "--simulate-tp", "8", "--links", "0,5000",
        "--wirings", "standard,ladder,hybrid", "--rounds", "3", "--eager", "--json", out,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    cases = list(itertools.product(["0", "5000"], ["standard", "ladder", "hybrid"]))
    assert [(line["link"]["name"], line["wiring"]) for line in lines] == cases
    assert lines[3]["step_ms"] >= 4 * 5  # over the slow link
    assert lines[0]["command"].endswith(shlex.join(done.args[1:]))
    shown = script("benchmarks/overlap.py", "--show", out)
    assert shown.stdout == done.stdout
    out.write_text("".join(json.dumps(line) + "\n" for line in [*lines[1:], {**lines[0], "batch": 2}]))
    tables = script("benchmarks/overlap.py", "--show", out).stdout.split("\n\n")
    assert len(tables) == 4 and "batch 2" in tables[2]
    assert tables[1].splitlines()[0] == "| link | one all-reduce, ms | ladder | hybrid | standard |"
    assert tables[1].splitlines()[2].endswith("|  |")  # the line that was moved to a table of its own
