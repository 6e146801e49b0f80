"""How long an all-reduce of gloo's takes when its threads are scheduled in different ways (see tp._let_preempt).

torchrun --standalone --nproc_per_node=2 benchmarks/gloo_threads.py --json benchmarks/gloo_threads.jsonl

Each rank computes for 2 ms and then waits for an all-reduce of 4 KB. The time of one counts from when the last rank
started it. The policies take turns; real-time ones need root or CAP_SYS_NICE.
"""

import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))
import overlap

import checkpoint
import generate
import tp

POLICIES = {"other (the default)": os.SCHED_OTHER, "batch": os.SCHED_BATCH, "fifo (real-time)": os.SCHED_FIFO}


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


def main():
    p = tp.Parser(__doc__)
    p.add_argument("--json", help="append the lines to this file")
    args = p.parse_args()
    if args.json is not None:
        checkpoint.check_appendable(args.json, "--json")
    world = tp.join("cpu")
    latencies = {name: [] for name in POLICIES}
    for _ in range(10):
        for name, policy in POLICIES.items():
            for thread in world.threads:
                os.sched_setscheduler(thread, policy, os.sched_param(int(policy == os.SCHED_FIFO)))
            ranks = world.gather(all_reduces(50))
            for times in zip(*ranks, strict=True):
                latencies[name].append(times[0][1] - max(start for start, _ in times))
    if world.rank > 0:
        return
    for name, seconds in latencies.items():
        line = {
            "policy": name, "median_ms": 1e3 * statistics.median(seconds),
            "p90_ms": 1e3 * statistics.quantiles(seconds, n=10)[-1], "mean_ms": 1e3 * statistics.mean(seconds),
            "over_2ms": sum(s > 0.002 for s in seconds) / len(seconds), "n": len(seconds), "tp": world.tp_size,
            "kernel": platform.release(), "torch": torch.__version__, "commit": generate.git_commit(),
            "command": overlap.command(world),
        }  # fmt: skip
        print(", ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in list(line.items())[:6]))
        if args.json:
            with open(args.json, "a") as f:
                f.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    tp.run(main)
