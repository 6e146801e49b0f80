"""What one GPU does within nine minutes: FP8 and integers, the whole 8b, what eight ranks would take over named links.

python -m benchmarks.gpu --json gpu.jsonl                 # make gpu runs the GPU's tests before it
python -m benchmarks.gpu --device cpu --json tiny.jsonl   # the same in small, to try the script: its times mean nothing

Each case is a process of its own, so that one which runs out of memory ends no other; the most telling ones come first.
A case appends its lines to the file and prints its tables; one that fails leaves a line that says so.
"""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from ladder import outputs
from ladder.command_line import flags
from ladder.command_line.flags import number
from ladder.errors import InputError
from ladder.ranks import launch
from ladder.ranks.world import choose_device


def cases(device, traces):
    """Return the commands of all cases. Compiling takes most of the time, longest for a single row: it is tuned."""
    whole = "8b"
    some = "8b:4"
    shards = ["instella:4", "8b:4", "70b:4", "30b-a3b:2"]
    batches = "1 16"
    small = ""
    step = ""
    links = "nvlink roce ib pcie pcie-host ethernet-100g"
    how = "--seconds 10 --prompt-length 1024"
    if device == "cpu":
        whole = "1b:1"
        some = "1b:1"
        shards = ["1b:2"]
        batches = "1 2"
        small = " --prompt-length 16 --new-tokens 4 --repeats 1 --eager"
        links = "pcie"
        how = "--seconds 1 --eager"
        step = " --prompt-length 16 --eager"
    decode = f"bench.py --tp 1 --device {device}{small} --batch"
    predict = f"-m extras.measure.sweep --simulate-tp 8 --batch 4 --device {device} {how}"
    predict += f" --link {links} --wiring standard ladder"
    kernels = {"fp8": ":fp8", "int4": ":int4", "int8": ":int8", "bfloat16": ""}
    fp8, *others = (f"{decode} {batches} --model {some}{quant}" for quant in kernels.values())
    return [
        fp8,
        f"-m benchmarks.int4_libraries --device {device}",
        f"{decode.removesuffix(' --batch')} --eager --batch {batches} --model {some}",  # captured, not compiled
        f"{decode} 1 --model {whole}",
        f"-m benchmarks.step_kernels --device {device}{step} --model {whole}",
        *others,
        *(
            f"{predict} {'farskip' if model.startswith('instella') else 'parallel-ladder'} upper-bound --model {model} "
            f"--profile {shlex.quote(traces)}/{model[:-2]}"
            for model in shards
        ),
    ]


def run(command, seconds):
    """Run a command for at most so many seconds; returns why it failed, or None."""
    limit = ["timeout", "-s", "KILL", f"{seconds:.0f}"]  # its group: a compiler's helpers, too
    done = subprocess.run([*limit, sys.executable, *shlex.split(command)], cwd=Path(__file__).parent.parent)
    code = abs(done.returncode)
    return "killed, for want of time or memory" if code in (9, 137) else f"it ended with code {code}" if code else None


def main(argv=None):
    p = flags.Parser(__doc__)
    flags.add_rank_flags(p, comm=False)
    p.add_argument("--seconds", type=number(float, 0), default=540, metavar="S", help="skip what is left after so many")
    p.add_argument("--json", type=flags.appendable, required=True, metavar="FILE", help="append the lines to this file")
    p.add_argument("--traces", default="gpu-traces", metavar="DIR", help="traces of simulated steps")
    args = p.parse_args(argv)
    device = str(choose_device(args.device))
    end = time.monotonic() + args.seconds
    if device == "cpu" and args.device != "cpu":
        raise InputError("there is no GPU: --device cpu tries the script")
    for command in cases(device, os.path.abspath(args.traces)):
        command = f"{command} --json {shlex.quote(os.path.abspath(args.json))}"
        left = end - time.monotonic()
        print(f"[{left:.0f} s left] python {command}", file=sys.stderr, flush=True)
        if error := run(command, left) if left > 20 else "no time left":  # seconds, as any case needs
            print(f"failed: {error}", file=sys.stderr)
            outputs.append_line(args.json, {"case": command, "error": error})


if __name__ == "__main__":
    launch.run(main)
