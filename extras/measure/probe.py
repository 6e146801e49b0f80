"""What this machine reaches: bytes per second from memory and, between ranks, the time of an all-reduce by its size.

python -m extras.measure.probe
torchrun --standalone --nproc_per_node=2 -m extras.measure.probe --json bench.jsonl

All ranks read at the same time, since ranks of one machine share its memory. All-reduces run one after another, as in
a standard model, and are called from Python: on a GPU small ones take longer than in the CUDA graph of a compiled
decode step. Where neither gloo nor NCCL carries the model's all-reduces, theirs are timed too.
"""

import statistics

import torch
import torch.distributed as dist

from extras.measure import link
from runtime import benchmarking, cli, launch, writing
from runtime.benchmarking import QUEUED, timed

MESSAGES = [2**n for n in range(10, 27, 2)]  # bytes: 1 KB to 64 MB


def all_reduce_seconds(world, group, n_bytes, seconds=0.5):
    """Return the seconds of one all-reduce: the median of 9 runs, which together take about `seconds`."""
    group, ops = group.group_name, torch.ops._c10d_functional
    x = torch.zeros(n_bytes // 2, dtype=torch.bfloat16, device=world.device)

    def run(count):
        for _ in range(count):
            ops.wait_tensor(ops.all_reduce_(x, "sum", group))

    timed(world.device, lambda: run(3))
    once = max(world.gather(timed(world.device, lambda: run(3)) / 3))  # of the slowest rank: all count alike
    calls = 9 * (QUEUED + 1) if world.device.type == "cuda" else 9
    count = max(1, min(200, int(seconds / calls / once)))
    return statistics.median(timed(world.device, lambda: run(count)) / count for _ in range(9))


def all_reduces(world, group):
    """Return [{bytes, us, gbps}] of a process group; gbps: the rate on the wire."""
    lines = []
    for n_bytes in MESSAGES:
        seconds = all_reduce_seconds(world, group, n_bytes)
        wire = 8 * n_bytes * 2 * (world.tp_size - 1) / world.tp_size
        lines.append({"bytes": n_bytes, "us": 1e6 * seconds, "gbps": 1e-9 * wire / seconds})
    return lines


def probe(world):
    """Return {"bandwidth": bytes per second of each rank, "all_reduce": all_reduces(), and perhaps "library": of gloo's
    or NCCL's group, where the model uses another one}."""
    bandwidth = world.gather(benchmarking.read_bandwidth(world.device, world))
    result = {"bandwidth": bandwidth, "all_reduce": all_reduces(world, world.group) if world.group is not None else []}
    if world.group not in (None, dist.group.WORLD):
        result["library"] = all_reduces(world, dist.group.WORLD)
    return result


def fitting_shares(rates):
    """Return the --shares, each from 1 to 8, with which ranks of such bandwidths read a model soonest.

    None where the bandwidths differ by a quarter at most, or no shares are better than equal ones.
    """
    shares = [tuple(max(1, round(most * rate / max(rates))) for rate in rates) for most in range(1, 9)]
    best = min(shares, key=lambda shares: max(x / sum(shares) / rate for x, rate in zip(shares, rates, strict=True)))
    return best if max(rates) > 1.25 * min(rates) and len(set(best)) > 1 else None


def main():
    p = cli.Parser(__doc__)
    cli.add_rank_flags(p)
    cli.add_comm_flag(p)
    cli.add_json_flag(p)
    args = p.parse_args()
    world = launch.join(args.device, vars(args))
    with torch.inference_mode():
        result = probe(world)
    if world.rank > 0:
        return
    environment = benchmarking.environment(world)
    print(f"{environment['hardware']}; {world.device.type}, {environment['threads']} threads a rank")
    for rank, rate in enumerate(result["bandwidth"]):
        print(f"rank {rank}: {rate / 1e9:.1f} GB/s read from memory")
    for name, lines in (("all-reduce", result["all_reduce"]), ("by the library", result.get("library", []))):
        for line in lines:
            print(f"{name} of {line['bytes']:>10,} bytes: {line['us']:>10,.1f} us, {line['gbps']:>8.2f} Gbit/s")
    if lines := result["all_reduce"]:
        measured = link.custom(round(lines[0]["us"], 1), round(lines[-1]["gbps"], 3))
        rate = min(result["bandwidth"]) / 1e9
        print(f"for extras.measure.advise: --tp {world.tp_size} --bandwidth-gbs {rate:.1f} --link {measured.name}")
    if shares := fitting_shares(result["bandwidth"]):
        print(f"for ranks so unlike, if this machine is idle: --shares {','.join(map(str, shares))}")
    if args.json:
        writing.append_line(args.json, {**environment, "probe": result})


if __name__ == "__main__":
    launch.run(main)
