"""Exposed communication: how much of the all-reduces' time a step waited for, and a trace of where.

A step is one call of the model, a prefill or one token of decode.
"""

import itertools
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from link import Link
from model import WIRINGS, Config, InputError


class Clock:
    """The collectives of a model that is only time: as if sublayers and all-reduces took it, and nothing else did.

    compute: seconds from each start back to whatever stood before it, in order. all_reduce: seconds of one; the link
    carries one at a time.
    """

    tp_size = 1

    def __init__(self, compute, all_reduce):
        self.compute, self.all_reduce = iter(compute), all_reduce
        self.now = self.delivered = 0.0
        self.started = 0

    def start(self, partial):
        self.now += next(self.compute)
        self.started += 1
        self.delivered = max(self.now, self.delivered) + self.all_reduce
        return self.delivered

    def wait(self, pending):
        self.now = max(self.now, pending)
        return 0.0

    def settle(self, x, pending, after=None):
        return x if pending is None else self.wait(pending)


def run_clock(config, compute, all_reduce):
    """The Clock after one step of the config's wiring: the very loop of model.py, on a clock."""
    clock = Clock(compute, all_reduce)
    split, stream = WIRINGS[config.wiring]
    layers = [(i in config.stale_layers, split(None, None, None)) for i in range(config.n_layers)]
    stream(0.0, [(lambda x: 0.0, stale) for stale, sublayers in layers for _ in sublayers], clock, config)
    return clock


def count_all_reduces(config):
    """All-reduces of one step."""
    return run_clock(config, itertools.repeat(0.0), 0.0).started


def compute_times(start, log, end):
    """(seconds computed before each all-reduce of a step, seconds after the last), from a log of LinkedGroup's."""
    before, compute = start, []
    pauses = sorted((t, done) for _, t, done in log)  # from when a result was asked for to when it was there
    for started in sorted(s for s, _, _ in log):
        while pauses and pauses[0][1] <= started:
            before = max(before, pauses.pop(0)[1])
        compute.append(started - before)
        before = started
    return compute, end - max([before, *(done for _, done in pauses)])


class Case(NamedTuple):
    """Something to measure: functions that run one step of a model, and of the same model without its all-reduces.

    n_bytes: of the tensor that each all-reduce sums. link: of world.group, exchanged before each step.
    """

    config: Config
    step: Callable
    silent_step: Callable
    n_bytes: int
    link: Link


@torch.inference_mode()
def measure(world, cases, rounds=20, seconds=10):
    """Time the steps of {name: Case}, with and without all-reduces, in turns; returns {name: report in milliseconds}.

    rounds: of all cases; fewer, but at least 3, when they would take longer than so many seconds.
    step_ms, silent_ms: medians, and the quartiles of step_ms. exposed_ms: their difference. all_reduces: of a step.
    all_reduce_ms: one on its own. hidden: the share of all of them that exposed_ms is not. On a CPU, else null:
    blocked_ms: waited in a step. limit_ms: the least that the wiring's order allows; for ladder the sum of
    max(compute, all-reduce) over sublayers and the last all-reduce, for standard the sum of all of both.
    transport_ms: CPU time of threads that do not compute (with one that does): gloo's, on a core that could have.
    """
    alone, runs = {name: [] for name in cases}, {name: [] for name in cases}
    for _, (name, case) in itertools.product(range(rounds), cases.items()):
        world.group.link = case.link
        time.sleep(0.005)  # as after computing: nothing is under way, and the caches have forgotten the last one
        alone[name].append(_time(world, lambda n=case.n_bytes: sum_over(world, n)))
    for case in cases.values():  # may compile
        _run(world, case)
    start = time.perf_counter()
    for case in cases.values():
        _run(world, case)
    once = time.perf_counter() - start
    for _ in range(max(world.gather(max(3, min(rounds, int(seconds / once)))))):
        for name, case in cases.items():
            runs[name].append(_run(world, case))
    return {name: _report(case, statistics.median(alone[name]), runs[name]) for name, case in cases.items()}


def _run(world, case):
    """Seconds of a step, of a silent one, and on the CPU of what _report wants of the first."""
    group = world.group
    group.link, group.log = case.link, [] if world.device.type == "cpu" else None
    start, others = time.perf_counter(), time.process_time() - time.thread_time()
    step = _time(world, case.step)
    transport = time.process_time() - time.thread_time() - others
    log, group.log = group.log, None
    silent = _time(world, case.silent_step)
    if log is None:
        return step, silent
    compute, tail = compute_times(start, log, start + step)
    return step, silent, sum(done - asked for _, asked, done in log), transport, compute, tail


def _report(case, alone, runs):
    steps, silents, *on_cpu = zip(*runs, strict=True)
    step, silent = statistics.median(steps), statistics.median(silents)
    blocked = limit = transport = None
    if on_cpu:
        blocked, transport, tail = (statistics.median(on_cpu[i]) for i in (0, 1, 3))
        compute = [statistics.median(times) for times in zip(*on_cpu[2], strict=True)]
        # Communication takes some of the CPU too, which shall not pass for computing: as much as without it.
        scale = (silent - tail) / sum(compute) if compute else 0.0
        limit = run_clock(case.config, [scale * c for c in compute], alone).now + tail if compute else silent
    count = count_all_reduces(case.config)
    low, _, high = statistics.quantiles(steps, n=4)
    return {
        "step_ms": 1e3 * step, "quartiles_ms": [1e3 * low, 1e3 * high], "silent_ms": 1e3 * silent,
        "exposed_ms": 1e3 * (step - silent), "all_reduces": count, "all_reduce_bytes": case.n_bytes,
        "all_reduce_ms": 1e3 * alone, "hidden": 1 - (step - silent) / (count * alone) if count else None,
        "blocked_ms": 1e3 * blocked if on_cpu else None, "limit_ms": 1e3 * limit if on_cpu else None,
        "transport_ms": 1e3 * transport if on_cpu else None, "rounds": len(runs),
    }  # fmt: skip


def sum_over(world, n_bytes):
    """One all-reduce of so many bytes, waited for."""
    ops = torch.ops._c10d_functional
    zeros = torch.zeros(n_bytes // 2, dtype=torch.bfloat16, device=world.device)
    return ops.wait_tensor(ops.all_reduce(zeros, "sum", world.group.group_name))


def _time(world, step):
    start = time.perf_counter()
    step()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return time.perf_counter() - start


def report(kind, r):
    """The report in two lines for people."""
    if not r["all_reduces"]:
        return f"{kind}: {r['step_ms']:.2f} ms a step, without any all-reduce"
    travel = r["all_reduces"] * r["all_reduce_ms"]
    lines = (
        f"{kind}: {r['step_ms']:.2f} ms a step, {r['silent_ms']:.2f} without its {r['all_reduces']} all-reduces of "
        f"{r['all_reduce_bytes']:,} bytes, which take {r['all_reduce_ms']:.3f} ms each\n"
        f"  exposed {r['exposed_ms']:.2f} of {travel:.2f} ms of communication, {100 * r['hidden']:.0f} % hidden"
    )
    if r["limit_ms"]:
        above = 100 * (r["step_ms"] / r["limit_ms"] - 1)
        lines += f"; {above:+.1f} % from this wiring's limit of {r['limit_ms']:.2f} ms"
        lines += f"; gloo took {r['transport_ms']:.2f} ms of the CPU" * (r["transport_ms"] >= 0.01)
    return lines


@torch.inference_mode()
def profile(folder, world, steps):
    """Trace {name: step} into folder/rankN.json, for chrome://tracing or ui.perfetto.dev."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if world.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as trace:
        for name, step in steps.items():
            with torch.profiler.record_function(name):
                _time(world, step)
    path = Path(folder) / f"rank{world.rank}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(f"{path}.tmp")
        os.replace(f"{path}.tmp", path)
    except OSError as e:
        raise InputError(f"--profile {folder} cannot be written: {e.strerror}") from None
