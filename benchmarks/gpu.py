"""What one GPU does within nine minutes: decode, integers, and what eight ranks would take over the named links.

python -m benchmarks.gpu                                       # make gpu runs the GPU's tests before it
python -m benchmarks.gpu --device cpu --tiny --json tiny.jsonl  # the same code in small: its times mean nothing
python -m benchmarks.gpu --show benchmarks/results/gpu.jsonl

Each case is a process of its own, so that one which runs out of memory takes no other with it. Its results are
appended as soon as it ends, with its command; a case that failed, or for which no time was left, is a line that says
so. What the processes print goes to FILE.log. The most telling cases come first.
"""

import contextlib
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks import overlap
from benchmarks.lines import add_show_flag
from extras.measure.link import LINKS
from extras.measure.results import markdown
from runtime import cli, launch, writing
from runtime.cli import number
from runtime.errors import InputError
from runtime.report import environment, free_bytes
from runtime.timing import timed

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
RANKS = 8  # of which one is simulated
SHORTEST = 20  # seconds: what is left at the end is not enough for a case


# ---------------------------------------------------------------------------------------------------------------------
# The cases


def cases(device, tiny, traces):
    """Return {name: command} of all cases, the most telling ones first.

    Compiling takes most of the time, so only the first is a whole model. Of the simulated ones each wiring is compiled
    twice, with and without its all-reduces. tiny: small shapes, nothing compiled and one link.
    """
    short = ["--prompt-length", "16", "--max-new-tokens", "4"]
    how = short if tiny else ["--prompt-length", "128", "--max-new-tokens", "129", "--compile"]

    def decode(model, batch, quant=None):
        flags = ["--model", model, "--batch", str(batch), "--ignore-eos", "--temperature", "0", "--device", device]
        flags += ["--quant", quant] if quant else []
        return ", ".join(filter(None, (f"decode {model}", quant, f"batch {batch}"))), ["generate.py", *flags, *how]

    def predict(model, n_layers, links):
        flags = ["--model", model, "--n-layers", n_layers, "--simulate-tp", str(RANKS), "--links", ",".join(links)]
        flags += ["--prompt-length", "128", "--rounds", "3" if tiny else "30", "--seconds", "1" if tiny else "40"]
        flags += ["--wirings", "standard", "ladder", "parallel-ladder", "upper-bound"]
        flags += ["--eager"] if tiny else []
        flags += ["--device", device, "--profile", str(Path(traces) / model)]
        return f"{model}, {RANKS} ranks", ["-m", "benchmarks.overlap", *flags]

    whole, some, links = "8b", "8b:8", [link for link in LINKS if link != "free"]
    predictions = [predict("8b", "4", links), predict("70b", "4", links)]
    if tiny:
        whole = some = "1b:1"
        predictions = [predict("1b", "2", ["pcie"])]
    quants = None, "int8", "int4"
    first = [decode(whole, 1), *(decode(some, 1, quant) for quant in quants)]
    others = [*(decode(some, 16, quant) for quant in quants), decode(some, 4), decode(some, 64)]
    return dict([*first, *predictions, *others])


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def copy_rate(device, size=2**32):
    """Return the bytes per second that a copy of `size` bytes reads and writes: the median of 9 copies."""
    size = min(size, free_bytes(device) // 16)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = [timed(device, lambda: target.copy_(source)) for _ in range(12)]
    return 2 * size / statistics.median(seconds[3:])


def run(command, log, seconds):
    """Return (a command's lines of --json, why it failed or None); it is stopped after so many seconds."""
    with tempfile.TemporaryDirectory() as folder, open(log, "ab") as output:
        part = Path(folder) / "lines"
        output.write(f"$ {shlex.join(command)}\n".encode())
        output.flush()
        begin = output.tell()
        process = subprocess.Popen(
            [sys.executable, *command, "--json", part], cwd=ROOT, stdout=output, stderr=output,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            error = process.wait(seconds) and reason(Path(log).read_bytes()[begin:].decode(errors="replace"))
        except subprocess.TimeoutExpired:
            error = "no time left"
        finally:  # a compiler's helpers too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        lines = [json.loads(line) for line in part.read_text().splitlines()] if part.exists() else []
    return lines, error or None


def reason(output):
    """Return the line of a failed command's output that says why."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "out of memory" in line.lower()), (lines or ["no word"])[-1])[:300]


def measure(world, args):
    """Yield the lines of all cases, and of those that end without one, until the time is over."""
    end = time.monotonic() + args.seconds
    yield {"case": "copy", "copy": copy_rate(world.device), **environment(world)}
    if world.device.type == "cuda":
        torch.cuda.empty_cache()  # for the processes
    for name, command in cases(str(world.device), args.tiny, args.traces).items():
        left = end - time.monotonic()
        if left < SHORTEST:
            yield {"case": name, "error": "no time left"}
            continue
        print(f"[{left:.0f} s left] {name}", file=sys.stderr, flush=True)
        lines, error = run(command, f"{args.json}.log", left)
        for line in lines:
            yield {"case": name, **line, "command": shlex.join(["python", *command])}
        if error is not None:
            yield {"case": name, "error": error}


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def tables(lines):
    """Markdown: decode beside the copy, the simulated ranks, what there is no result of."""
    copies = [line for line in lines if "copy" in line]
    parts = [
        f"{line['hardware']}, torch {line['torch']}, commit {line['commit']}: copies at {line['copy'] / 1e9:.0f} GB/s."
        for line in copies
    ]
    decodes = [line for line in lines if "tpot_ms" in line and line["tpot_ms"]]
    head = "model, layers, weights, batch, ms per token, tok/s, GB a step, GB/s, of a copy's, of a sum's"
    rows = []
    for line in decodes:
        rate = 1e3 * line["step_bytes"] / line["tpot_ms"]
        share = f"{100 * rate / copies[-1]['copy']:.0f} %" if copies else ""
        what = [line["model"], str(line["n_layers"]), line["quant"] or line["dtype"], str(line["batch"])]
        times = [f"{line['tpot_ms']:.2f}", f"{line['tok_s']:.0f}", f"{line['step_bytes'] / 1e9:.2f}"]
        rows.append([*what, *times, f"{rate / 1e9:.0f}", share, f"{100 * line['mbu']:.0f} %"])
    if rows:
        parts.append("Decode:\n\n" + markdown(head.split(", "), rows))
    simulated = [line for line in lines if line.keys() >= {*overlap.KEYS}]
    if simulated:
        parts.append(overlap.tables(simulated))
    if missing := [[line["case"], line["error"]] for line in lines if "error" in line]:
        parts.append("Without a result, or with a part of it:\n\n" + markdown(["case", "why"], missing))
    return "\n\n".join(parts)


def parse(argv):
    p = cli.Parser(__doc__)
    cli.add_rank_flags(p)
    p.add_argument("--tiny", action="store_true", help="small shapes, eager, one link: to try the script, not the GPU")
    p.add_argument("--seconds", type=number(float, 0), default=540, metavar="S", help="skip what is left after so many")
    out = str(RESULTS / "gpu.jsonl")
    p.add_argument("--json", type=cli.appendable, default=out, metavar="FILE", help="append the lines to this file")
    p.add_argument("--traces", default=str(RESULTS / "gpu-traces"), metavar="DIR", help="traces of simulated steps")
    add_show_flag(p, tables, "case")
    return p.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    world = launch.join(args.device, vars(args))
    if world.device.type != "cuda" and not args.tiny:
        raise InputError("there is no GPU: --device cpu takes --tiny")
    lines = []
    for line in measure(world, args):
        lines.append(line)
        writing.append_line(args.json, line)
        if "error" in line:
            print(f"{line['case']}: {line['error']}", file=sys.stderr)
    print(tables(lines))


if __name__ == "__main__":
    launch.run(main)
