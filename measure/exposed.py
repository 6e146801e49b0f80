"""Exposed communication: how much of the all-reduces' time a step waited for, and a trace of where.

A step is one call of the model, a prefill or one token of decode.
"""

import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from measure import report
from measure.clock import count_all_reduces, run_clock
from measure.link import Link
from measure.timing import in_turns, quartiles, timed
from model import Config, InputError, SingleDevice
from runtime import writing
from tp import TensorParallel


class Silent(TensorParallel):
    """No all-reduce: every wiring computes what it always does, on partials, to measure what the all-reduces cost."""

    start, wait, settle = SingleDevice.start, SingleDevice.wait, SingleDevice.settle


def silenced(model, world):
    """The same model, of the same weights, without its all-reduces."""
    model = copy.copy(model)
    model.comm = Silent(model.config, world.tp_size, world.group)
    return model


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

    partial: a tensor such as each all-reduce sums. link: of world.group, exchanged before each step.
    """

    config: Config
    step: Callable
    silent_step: Callable
    partial: torch.Tensor
    link: Link


class Run(NamedTuple):
    """Seconds of one round of a case. From the CPU's clock, or None: waited, computed (before each start, and after the
    last), and taken by the threads that communicate."""

    alone: float
    step: float
    silent: float
    blocked: float | None = None
    compute: list | None = None
    tail: float | None = None
    transport: float | None = None


@torch.inference_mode()
def measure(world, cases, rounds=20, seconds=10):
    """Time the steps of {name: Case}, with and without all-reduces, in turns; returns {name: report}, as _report says.

    rounds: of all cases; fewer, but at least 3, when they would take longer than so many seconds.
    """
    for case in cases.values():  # may compile
        _run(world, case)
    ways = {name: lambda case=case: _run(world, case) for name, case in cases.items()}
    start = time.perf_counter()
    first = in_turns(ways, 1)
    fitting = int(seconds / (time.perf_counter() - start))
    runs = in_turns(ways, min(world.gather(max(3, min(rounds, fitting)))) - 1)
    return {name: _report(case, first[name] + runs[name]) for name, case in cases.items()}


def _run(world, case):
    group, ops = world.group, torch.ops._c10d_functional
    group.link = case.link

    def all_reduce(x):
        ops.wait_tensor(ops.all_reduce_(x, "sum", group.group_name))

    timed(world.device, lambda: all_reduce(case.partial.flatten()[:1]))  # so that all ranks are here
    alone = timed(world.device, lambda: all_reduce(case.partial))
    silent = timed(world.device, case.silent_step)
    if world.device.type != "cpu":
        return Run(alone, timed(world.device, case.step), silent)
    group.log, start, transport = [], time.perf_counter(), _cpu_seconds(world.threads)
    step = timed(world.device, case.step)
    transport = _cpu_seconds(world.threads) - transport
    log, group.log = group.log, None
    compute, tail = compute_times(start, log, start + step)
    return Run(alone, step, silent, sum(done - asked for _, asked, done in log), compute, tail, transport)


def _cpu_seconds(threads):
    """The CPU time that threads of this process have had; on Linux, the only system whose threads tp.py knows."""
    return sum(1e-9 * int(Path(f"/proc/self/task/{i}/schedstat").read_text().split()[0]) for i in threads)


def _report(case, runs):
    """What the runs of a case say, medians in milliseconds.

    step_ms with its quartiles, silent_ms: with and without all-reduces. exposed_ms: their difference. all_reduces: of a
    step. all_reduce_ms: one on its own. hidden: the share of all of them that exposed_ms is not.
    limit_ms: the least that the wiring's order allows, see Clock. It takes the compute times from the step itself,
    scaled to add up to the silent step, since communication takes some of the CPU too; on a GPU they are all alike.
    From the CPU's clock, else null: blocked_ms, waited in a step; transport_ms, CPU time of the threads that
    communicate, on a core that could have computed.
    """

    def median(key):
        values = [getattr(run, key) for run in runs]
        return None if values[0] is None else statistics.median(values)

    alone, step, silent, blocked, transport, tail = (
        median(key) for key in ("alone", "step", "silent", "blocked", "transport", "tail")
    )
    count = count_all_reduces(case.config)
    compute, tail = [1.0] * count, tail or 0.0
    if runs[0].compute:
        compute = [statistics.median(times) for times in zip(*(run.compute for run in runs), strict=True)]
    scale = max(0.0, silent - tail) / sum(compute) if count else 0.0
    limit = run_clock(case.config, [scale * c for c in compute], alone).now + tail if count else silent
    low, _, high = quartiles([run.step for run in runs])

    def ms(seconds):
        return None if seconds is None else 1e3 * seconds

    return {
        "step_ms": ms(step), "quartiles_ms": [ms(low), ms(high)], "silent_ms": ms(silent),
        "exposed_ms": ms(step - silent), "all_reduces": count, "all_reduce_bytes": case.partial.nbytes,
        "all_reduce_ms": ms(alone), "hidden": 1 - (step - silent) / (count * alone) if count else None,
        "limit_ms": ms(limit), "blocked_ms": ms(blocked), "transport_ms": ms(transport), "rounds": len(runs),
    }  # fmt: skip


@torch.inference_mode()
def replays(runner, tokens, lengths):
    """Functions that run the prefill, in one pass, and a decode step at the end of the cache, any number of times.

    runner: a generate.Runner. tokens, lengths: of its prompts, as generate.pad makes them.
    """
    token, slots = tokens[:, :1].clone(), runner.cache[0][0].shape[2]  # as generate() has it: else another graph

    @torch.inference_mode()
    def decode_step(longest=slots - 1):
        return runner.decode(token, torch.full_like(lengths, longest - 1), longest)

    return {"prefill": lambda: runner.prefill(tokens, lengths), "decode": decode_step}


def measure_runner(runner, silent, tokens, lengths, world):
    """The reports on the prefill, in one pass, and on a decode step; silent: the runner of the silenced model."""
    if world.rank == 0:
        print("measuring what communication costs ...", file=sys.stderr)
    model, reports, silent_steps = runner.model, {}, replays(silent, tokens, lengths)
    for kind, step in replays(runner, tokens, lengths).items():
        partial = model.norm.weight.new_zeros(len(tokens), 1 if kind == "decode" else tokens.shape[1], model.config.dim)
        case = Case(model.config, step, silent_steps[kind], partial, world.group.link)
        reports |= measure(world, {kind: case})
    return reports


@torch.inference_mode()
def profile(folder, world, steps):
    """Trace {name: step} into folder/rankN.json, for chrome://tracing or ui.perfetto.dev."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if world.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    for step in steps.values():
        timed(world.device, step)  # may compile
    with torch.profiler.profile(activities=activities) as trace:
        for name, step in steps.items():
            with torch.profiler.record_function(name):
                timed(world.device, step)
    path = report.trace_file(folder, world.rank)
    with writing.new_file(path) as unfinished:
        trace.export_chrome_trace(str(unfinished))
        if not unfinished.exists():  # the profiler says on stderr that it failed, and no more
            raise InputError(f"cannot write {path}: the profiler failed to; is the disk full?")
    if world.rank == 0:
        print(f"trace in {path}", file=sys.stderr)
