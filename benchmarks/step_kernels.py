"""Where the time of a decode step goes: a table of its kernels with their calls and microseconds, and of what is left.

python -m benchmarks.step_kernels --json kernels.jsonl                                     # the whole 8b on a GPU
python -m benchmarks.step_kernels --device cpu --model 1b:1 --prompt-length 16 --json kernels.jsonl  # operators

A step is the difference between a long and a short generation, so it has all that a step of generate.py has. The shares
are of its time without the profiler, and the rest is when nothing ran.
"""

import functools
import statistics
from collections import Counter

import torch

import bench
import generate
from ladder import outputs
from ladder.benchmarking import environment, in_turns, markdown
from ladder.command_line import flags
from ladder.decoding.batch import Sampler
from ladder.errors import InputError
from ladder.progress import progress
from ladder.ranks import launch

FIRST = 2  # tokens of the short run
STEPS = 16  # how many more the long run has
ROUNDS = 5
SHOWN = 20  # rows of the table


def traced(run, device):
    """Return ({kernel: its calls}, {kernel: microseconds}) of run() on a GPU, or of the operators of a CPU."""
    with torch.profiler.profile() as trace:  # of all kinds of devices
        run()  # and reads its last token, so a GPU is done
    kind, time = ("CUDA", "self_device_time_total") if device.type == "cuda" else ("CPU", "self_cpu_time_total")
    rows = [row for row in trace.key_averages() if row.device_type.name == kind]
    return Counter({row.key: row.count for row in rows}), Counter({row.key: getattr(row, time) for row in rows})


def step_of(short, long):
    """Return {kernel: (calls, microseconds)} of a step, the longest first, from what traced() returned of two runs."""
    calls, us = (more - some for some, more in zip(short, long, strict=True))  # without those of no call more
    return {name: (calls[name] / STEPS, us[name] / STEPS) for name in sorted(calls, key=lambda name: -us[name])}


def table(kernels, step_us):
    """Return a Markdown table of step_of()'s result for a step that takes step_us."""
    first = list(kernels.items())[:SHOWN]
    last = list(kernels.values())[SHOWN:]
    rest = {f"{len(last)} others": tuple(map(sum, zip(*last, strict=True)))} if last else {}
    idle = step_us - sum(us for _, us in kernels.values())
    rows = [*first, *rest.items(), ("between kernels", (0, idle)), ("the step", (0, step_us))]
    rows = [[n[:90].replace("|", "/"), f"{c:.0f}", f"{us:.1f}", f"{us / step_us:.1%}"] for n, (c, us) in rows]
    return markdown(["kernel", "calls", "us", "share"], rows)


def main(argv=None):
    p = flags.Parser(__doc__)
    bench.add_flags(p)
    p.set_defaults(model="8b", batch=[1], wiring=["standard"], prompt_length=1024, json="kernels.jsonl")
    args = p.parse_args(argv)
    # as bench.py, whose compiled code then serves
    args.eager = bench.is_eager(args)
    args.new_tokens = 512
    world = launch.join(args.device, vars(args))
    name, config = flags.read_config(args)
    cells = bench.make_cells(bench.load_models(config, args.wiring, args, world), args, world)
    sample = Sampler(0, device=world.device)
    progress.at("measurement", timed=False)
    for (wiring, batch), cell in cells.items():
        short, long = (functools.partial(generate.generate, *cell, n, sample) for n in (FIRST, FIRST + STEPS))
        long()  # not measured: it allocates memory
        runs = in_turns({"": long}, ROUNDS)[""]
        us = statistics.median(1e6 * run.decode_s / (run.new_tokens - 1) for run in runs)
        kernels = step_of(traced(short, world.device), traced(long, world.device))
        if not kernels:
            raise InputError("PyTorch's profiler recorded no kernels: it needs CUPTI, and the right to use it")
        print(f"{name}, {wiring}, batch {batch}: a decode step\n\n{table(kernels, us)}\n", flush=True)
        line = {"case": "kernels of a step", "model": name, "n_layers": config.n_layers, "quant": config.quant}
        line |= {"wiring": wiring, "batch": batch, "prompt_tokens": args.prompt_length, "compiled": not args.eager}
        outputs.append_line(args.json, line | {"step_us": us, "kernels": kernels, **environment(world)})


if __name__ == "__main__":
    launch.run(main)
