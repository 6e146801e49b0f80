"""What one GPU does within nine minutes: decode, integers, and what eight ranks would take over the named links.

python -m benchmarks.gpu --json gpu.jsonl                 # make gpu runs the GPU's tests before it
python -m benchmarks.gpu --device cpu --json tiny.jsonl   # the same in small, to try the script: its times mean nothing

Each case is a process of its own, so that one which runs out of memory ends no other. The most telling cases come
first. A case appends its lines to the file and prints its tables; one that fails leaves a line that says so.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from extras.measure.link import LINKS
from runtime import cli, launch, writing
from runtime.cli import number
from runtime.errors import InputError

ROOT = Path(__file__).parent.parent
SHORTEST = 20  # seconds: with less time left, no case starts


def cases(device, traces):
    """Return the commands of all cases. Compiling takes most of the time, so only the first is a whole model."""
    on_gpu = device != "cpu"
    small = [] if on_gpu else ["--prompt-length", "16", "--new-tokens", "4", "--repeats", "1", "--compile", "none"]
    whole, some, batches = ("8b", "8b:8", ["1", "4", "16", "64"]) if on_gpu else ("1b:1", "1b:1", ["1", "2"])

    def decode(model, *flags):
        return ["bench.py", "--model", model, "--tp", "1", "--device", device, *small, *flags]

    def predict(model):
        links = [name for name in LINKS if name != "free"] if on_gpu else ["pcie"]
        how = ["--rounds", "30", "--seconds", "40"] if on_gpu else ["--rounds", "3", "--seconds", "1", "--eager"]
        names = ["standard", "ladder", "parallel-ladder", "upper-bound"]
        flags = ["--model", model, "--simulate-tp", "8", "--prompt-length", "128", "--device", device, *how]
        traced = ["--profile", str(Path(traces) / model.partition(":")[0])]
        return ["-m", "extras.measure.sweep", *flags, *traced, "--wiring", *names, "--link", *links]

    quants = [decode(some + quant, "--batch", *batches) for quant in ("", ":int8", ":int4")]
    return [decode(whole, "--batch", "1"), *quants, *map(predict, ["8b:4", "70b:4"] if on_gpu else ["1b:2"])]


def run(command, seconds):
    """Run a command for at most so many seconds; returns why it failed, or None."""
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        code = process.wait(seconds)
        return f"it ended with code {code}" if code else None
    except subprocess.TimeoutExpired:
        return "no time left"
    finally:  # a compiler's helpers too
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main(argv=None):
    p = cli.Parser(__doc__)
    cli.add_rank_flags(p)
    p.add_argument("--seconds", type=number(float, 0), default=540, metavar="S", help="skip what is left after so many")
    p.add_argument("--json", type=cli.appendable, required=True, metavar="FILE", help="append the lines to this file")
    p.add_argument("--traces", default="gpu-traces", metavar="DIR", help="traces of simulated steps")
    args = p.parse_args(argv)
    device = str(launch.choose_device(args.device))
    if device == "cpu" and args.device != "cpu":
        raise InputError("there is no GPU: --device cpu tries the script")
    end, path = time.monotonic() + args.seconds, os.path.abspath(args.json)
    for command in cases(device, os.path.abspath(args.traces)):
        left, case = end - time.monotonic(), shlex.join(["python", *command])
        print(f"[{left:.0f} s left] {case}", file=sys.stderr, flush=True)
        error = run([*command, "--json", path], left) if left > SHORTEST else "no time left"
        if error:
            print(f"failed: {error}", file=sys.stderr)
            writing.append_line(path, {"case": case, "error": error, "torch": torch.__version__})


if __name__ == "__main__":
    launch.run(main)
