"""How long an all-reduce of gloo's takes when its threads are scheduled in different ways; see kernels/gloo.py.

torchrun --standalone --nproc_per_node=2 -m benchmarks.gloo_threads --json gloo_threads.jsonl

Each rank computes for 2 ms and then waits for an all-reduce of 4 KB. The time of one counts from when the last rank
started it. The policies take turns; real-time ones need root or CAP_SYS_NICE.
"""

import itertools
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.lines import command
from measure.report import git_commit
from measure.results import markdown
from measure.timing import in_turns
from model import InputError
from runtime import cli, launch, writing
from runtime.cli import count

POLICIES = {"other (the default)": os.SCHED_OTHER, "batch": os.SCHED_BATCH, "fifo (real-time)": os.SCHED_FIFO}
EACH = 50  # all-reduces in a turn


def all_reduces(n):
    """(start, end) of n all-reduces, on the clock that all processes of a machine share."""
    x, times = torch.ones(2048, dtype=torch.bfloat16), []
    for _ in range(n):
        end = time.monotonic() + 0.002
        while time.monotonic() < end:
            pass
        start = time.monotonic()
        dist.all_reduce(x)
        times.append((start, time.monotonic()))
    return times


def schedule(policy):
    for task in Path("/proc/self/task").iterdir():
        if "gloo" in (task / "comm").read_text():
            os.sched_setscheduler(int(task.name), policy, os.sched_param(int(policy == os.SCHED_FIFO)))


def latencies(world, policy):
    """Seconds of some all-reduces under a policy, from when the last rank started each to when this one had it."""
    schedule(policy)
    own, *others = world.gather(all_reduces(EACH))
    return [ends[0][1] - max(start for start, _ in ends) for ends in zip(own, *others, strict=True)]


def allowed(world):
    """The policies that the system lets every rank choose."""
    names = []
    for name, policy in POLICIES.items():
        try:
            schedule(policy)
            names.append(name)
        except OSError as e:
            print(f"rank {world.rank} may not be scheduled as {name}: {e.strerror}", file=sys.stderr)
    by_rank = world.gather(names)
    return {name: policy for name, policy in POLICIES.items() if all(name in names for names in by_rank)}


def main(argv=None):
    p = cli.Parser(__doc__)
    p.add_argument("--rounds", type=count, default=10, metavar="N", help=f"turns of each policy, of {EACH} all-reduces")
    cli.add_json_flag(p, "a line for each policy")
    args = p.parse_args(argv)
    world = launch.join("cpu")
    if world.tp_size == 1:
        raise InputError("one rank has no all-reduce: start two or more with torchrun")
    ways = {name: lambda policy=policy: latencies(world, policy) for name, policy in allowed(world).items()}
    found, rows = in_turns(ways, args.rounds), []
    for name, turns in found.items() if world.rank == 0 else ():
        seconds = [*itertools.chain(*turns)]
        times = {
            "median_ms": 1e3 * statistics.median(seconds), "p90_ms": 1e3 * statistics.quantiles(seconds, n=10)[-1],
            "mean_ms": 1e3 * statistics.mean(seconds), "over_2ms": sum(s > 0.002 for s in seconds) / len(seconds),
        }  # fmt: skip
        line = {
            "policy": name, **times, "n": len(seconds), "tp": world.tp_size, "kernel": platform.release(),
            "torch": torch.__version__, "commit": git_commit(), "command": command("gloo_threads", argv, world),
        }  # fmt: skip
        if args.json:
            writing.append_line(args.json, line)
        median, p90, mean, over = times.values()
        rows.append([name, f"{median:.2f}", f"{p90:.2f}", f"{mean:.2f}", f"{100 * over:.0f} %"])
    if rows:
        print(markdown(["gloo's threads are", "median, ms", "90th percentile", "mean", "over 2 ms"], rows))


if __name__ == "__main__":
    launch.run(main)
