"""Measure what this machine reaches: bytes per second from memory and, between ranks, the time of all-reduces by size.

python -m extras.measure.probe
torchrun --standalone --nproc_per_node=2 -m extras.measure.probe --json bench.jsonl

All ranks read at the same time, since ranks of one machine share its memory. All-reduces run one after another, as in
a standard model, and are called from Python: on a GPU small ones take longer than in the CUDA graph of a compiled
decode step. --comm library times those of gloo or NCCL, where others sum by default.
"""

import functools
import statistics

import torch

from ladder import benchmarking, outputs
from ladder.benchmarking import QUEUED, timed
from ladder.command_line import flags
from ladder.ranks import launch

MESSAGE_BYTES = [2**n for n in range(10, 27, 2)]  # bytes: 1 KB to 64 MB


def run(group, x, count):
    ops = torch.ops._c10d_functional
    for _ in range(count):
        ops.wait_tensor(ops.all_reduce_(x, "sum", group.group_name))


def all_reduces(world):
    """Return [{bytes, us, gbps on the wire}], medians of 9 runs, which together take about 0.5 s for each size."""
    lines = []
    calls = 9 * (QUEUED + 1) if world.device.type == "cuda" else 9
    for n_bytes in MESSAGE_BYTES:
        x = torch.zeros(n_bytes // 2, dtype=torch.bfloat16, device=world.device)
        three = functools.partial(run, world.group, x, 3)
        timed(world.device, three)
        once = max(world.gather(timed(world.device, three) / 3))  # the slowest rank's, so that all count alike
        count = max(1, min(200, int(0.5 / calls / once)))
        many = functools.partial(run, world.group, x, count)
        median = statistics.median(timed(world.device, many) for _ in range(9)) / count
        wire = 8 * n_bytes * 2 * (world.tp_size - 1) / world.tp_size
        lines.append({"bytes": n_bytes, "us": 1e6 * median, "gbps": 1e-9 * wire / median})
    return lines


@torch.inference_mode()
def main(argv=None):
    p = flags.Parser(__doc__)
    flags.add_rank_flags(p)
    flags.add_json_flag(p)
    args = p.parse_args(argv)
    world = launch.join(args.device, vars(args))
    result = {"bandwidth": world.gather(benchmarking.read_bandwidth(world.device, world))}
    result["all_reduce"] = all_reduces(world) if world.group else []
    if world.rank > 0:
        return
    environment = benchmarking.environment(world)
    print(f"{environment['hardware']}; {world.device.type}, {environment['threads']} threads a rank")
    for rank, rate in enumerate(result["bandwidth"]):
        print(f"rank {rank}: {rate / 1e9:.1f} GB/s read from memory")
    lines = result["all_reduce"]
    for line in lines:
        print(f"all-reduce of {line['bytes']:>10,} bytes: {line['us']:>10,.1f} us, {line['gbps']:>8.2f} Gbit/s")
    if lines:
        rate = min(result["bandwidth"]) / 1e9
        numbers = f"{lines[0]['us']:.1f}us+{lines[-1]['gbps']:.3f}gbps"
        print(f"for extras.measure.advise: --tp {world.tp_size} --bandwidth-gbs {rate:.1f} --link {numbers}")
    if args.json:
        outputs.append_line(args.json, {**environment, "probe": result})


if __name__ == "__main__":
    launch.run(main)
