"""The emulated link, one rank alone, and the measuring of exposed communication."""

import dataclasses
import itertools
import json
import math
import os
import statistics
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import BASE, WIRED, last_logits, run_ranks, script, shard, unequal_rows, wired_id

import exposed
import generate
import link
import tp
from model import InputError

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
        ((None, -1.0), "--link-latency-us is -1.0 but must be 0 or more"),
        ((None, math.nan), "--link-latency-us is nan"),
        ((None, None, 0.0), "--link-gbps is 0.0 but must be above 0"),
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


def time_of(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


@pytest.mark.parametrize("latency_us, gbps, asked", [(20_000, None, 0.02), (5_000, 0.0112, 0.025)])
def test_one_all_reduce_takes_what_was_asked_for(latency_us, gbps, asked):
    """The bytes: 16 KB at 11.2 Mbit/s in a ring of 8 are 20 ms."""
    group = link.LinkedGroup(None, link.Link("x", latency_us, gbps), 0, 8, CPU)
    x = torch.ones(4000, dtype=torch.float32)
    times = [time_of(lambda: wait(all_reduce(group, x))) for _ in range(7)]
    assert min(times) >= asked
    assert min(times) < asked + 0.002  # of seven: a busy machine may wake late


def test_real_collectives_over_a_link_take_at_least_what_was_asked_for():
    for times in run_ranks(2, times_over_gloo):
        assert min(times) >= 0.02
        assert min(times) < 0.02 + 0.01


def times_over_gloo(rank, tp_size):
    group = link.LinkedGroup(dist.group.WORLD, link.Link("x", 20_000, None), rank, tp_size, CPU)
    return [time_of(lambda: wait(all_reduce(group, torch.ones(1000)))) for _ in range(7)]


def test_the_link_carries_one_at_a_time_while_the_cpu_computes():
    group = link.LinkedGroup(None, link.Link("x", 20_000, None), 0, 8, CPU)
    x = torch.ones(4)
    assert time_of(lambda: [wait(p) for p in [all_reduce(group, x), all_reduce(group, x)]]) >= 0.04

    def overlapped():
        pending = all_reduce(group, x)
        end = time.perf_counter() + 0.015
        while time.perf_counter() < end:
            pass
        wait(pending)

    assert min(time_of(overlapped) for _ in range(5)) < 0.015 + 0.02  # less than the sum of both


def test_waiting_leaves_the_cpu_alone():
    group = link.LinkedGroup(None, link.Link("x", 100_000, None), 0, 8, CPU)
    before = time.process_time()
    for _ in range(3):
        wait(all_reduce(group, torch.ones(4)))
    assert time.process_time() - before < 0.1  # of 0.3 s


def on_and_off(rank, tp_size):
    """For each wiring, eager and compiled: the logits over the real group, and over it with an emulated link."""
    linked = link.LinkedGroup(dist.group.WORLD, link.Link("x", 200.0, 1.0), rank, tp_size, CPU)
    answers = []
    for changes, compile in itertools.product(WIRED, (False, True)):
        if compile and changes["wiring"] != "ladder":
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
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("link"))
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


@pytest.mark.parametrize("changes", WIRED, ids=wired_id)
def test_the_report_of_sublayers_and_links_of_known_times(changes, monkeypatch):
    """Sublayers that only sleep: the report finds the clock's own step, in the right place of each figure."""
    config = dataclasses.replace(BASE, **changes)
    nap, latency = 0.004, 0.01
    group = link.LinkedGroup(None, link.Link("x", 1e6 * latency, None), 0, 8, CPU)
    world = tp.World(0, 8, CPU, group, simulated=True)
    split, stream = exposed.WIRINGS[config.wiring]
    sleeps = [
        (lambda x: time.sleep(nap) or torch.zeros(2), i in config.stale_layers)
        for i in range(config.n_layers) for _ in split(None, None, None)
    ]  # fmt: skip
    comm, silent = tp.TensorParallel(config, 8, group), tp.Silent(config, 8, group)
    x = torch.zeros(2)
    case = exposed.Case(
        config, lambda: stream(x, sleeps, comm, config), lambda: stream(x, sleeps, silent, config), 8, group.link
    )
    report = exposed.measure(world, {"decode": case}, rounds=3)["decode"]
    starts = exposed.count_all_reduces(config)
    assert report["all_reduces"] == starts and report["all_reduce_bytes"] == 8
    assert report["silent_ms"] >= 1e3 * nap * len(sleeps)
    assert report["step_ms"] >= report["limit_ms"] * 0.9
    assert report["exposed_ms"] == pytest.approx(report["step_ms"] - report["silent_ms"])
    if starts:
        assert report["all_reduce_ms"] >= 1e3 * latency
        runs = exposed.run_clock(config, [nap * len(sleeps) / starts] * starts, latency).now
        assert report["step_ms"] >= 1e3 * runs * 0.99  # the sleeps of desync are not spread evenly
    if config.wiring == "standard":
        assert report["blocked_ms"] >= 0.9e3 * starts * latency
        assert report["hidden"] < 0.3
    if config.wiring == "ladder":  # 6 ms of each 10 are left
        assert report["blocked_ms"] <= 1e3 * starts * latency * 0.9
        assert report["hidden"] > 0.2
    assert "exposed" in exposed.report("decode", report) or not starts


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
    cache = 2 * 2 * 2 * 8 * 64 * 8  # layers, k and v, rows, KV heads, their size, slots
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
        (["--link", "pcie"], "a link needs two ranks or more"),
        (["--exposed"], "a link needs two ranks or more"),
        (["--simulate-tp", "8"], "--simulate-tp needs a link to predict"),
        (["--simulate-tp", "0", "--link", "pcie"], "--simulate-tp is 0 but must be at least 1"),
        (["--simulate-tp", "33", "--link", "pcie"], "tp 33 cannot shard n_heads 32: use 1 to 32 ranks"),
        (["--n-layers", "17"], "--n-layers is 17 but 1b has 16"),
        (["--profile", "/proc/nowhere/x"], "--profile /proc/nowhere/x cannot be written"),
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


def test_overlap_benchmark_writes_a_line_a_case_and_shows_its_table(tmp_path):
    out = tmp_path / "out.jsonl"
    done = script(
        "benchmarks/overlap.py", "--model", "1b", "--n-layers", "2", "--simulate-tp", "8", "--links", "0,2000",
        "--wirings", "standard,ladder,hybrid", "--rounds", "3", "--eager", "--json", out,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["link"]["name"], line["wiring"]) for line in lines] == list(
        itertools.product(["0", "2000"], ["standard", "ladder", "hybrid"])
    )
    assert statistics.mean(line["step_ms"] for line in lines[3:]) > statistics.mean(
        line["step_ms"] for line in lines[:3]
    )
    shown = script("benchmarks/overlap.py", "--show", out)
    assert shown.stdout.strip() == done.stdout.strip() and shown.stdout.count("|") == 4 * 6
