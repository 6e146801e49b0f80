"""Decode and prefill of ours and llama.cpp on one CPU, the same shape and random bfloat16 weights, in turns.

python -m benchmarks.decode --threads 2 --llama-python VENV/bin/python --json decode.jsonl
python -m benchmarks.decode --threads 2 --engines ours:int8 ours:int4 llama.cpp:q8_0 llama.cpp:q4_0 ...
python -m benchmarks.decode --show decode.jsonl

Each engine (engines.py) is a process of its own, which is idle while another one is timed; llama.cpp is a Python that
has llama-cpp-python and gguf. The shape is Llama 3.2 1B with an output head of its own: 2.47 GB of weights a step. A
line of the result is one engine in one case: the median and the quartiles of its times, and the bandwidth that the
machine showed in the same run; mbu is the part of it that the decode steps reached.
"""

import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch

from benchmarks.engines import DIM, FILLED, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCABULARY
from extras.measure.results import add_show_flag
from runtime import cli, launch, writing
from runtime.benchmarking import environment, in_turns, pivot, quartiles, read_bandwidth
from runtime.cli import count, number
from runtime.errors import InputError

WORKER = Path(__file__).with_name("engines.py")
QUANTS = {  # of an engine, behind a colon: (bytes of a weight, scales included, and ours of as many bits)
    "": (2, "ours"),
    "int8": (1, "ours:int8"),
    "q8_0": (34 / 32, "ours:int8"),  # each 32 with a scale of 16 bits
    "int4": (0.5 + 4 / 64, "ours:int4"),  # each 64 with a scale and a zero of 16 bits
    "q4_0": (18 / 32, "ours:int4"),
}
ENGINES = ["ours", "llama.cpp", "ours:int8", "llama.cpp:q8_0", "ours:int4", "llama.cpp:q4_0"]
CASES = ["decode:1", "decode:4", "decode:16", "decode:64", "prefill:128", "prefill:1024"]
KINDS = {"decode": "decode, batch {}", "prefill": "prefill, {} tokens"}
KEYS = ["threads", "engine", "kind", "n", "ms", "quartiles_ms", "bandwidth"]


def parse(argv):
    p = cli.Parser(__doc__)
    p.add_argument("--threads", type=count, default=1, metavar="N", help="of each engine")
    words = f"of {', '.join(ENGINES)} (default: those in bfloat16)"
    p.add_argument("--engines", nargs="+", metavar="NAME", help=words)
    p.add_argument("--llama-python", metavar="FILE", help="a Python that imports llama_cpp and gguf")
    p.add_argument("--cases", nargs="+", default=CASES, metavar="KIND:N", help="decode:BATCH or prefill:TOKENS")
    p.add_argument("--rounds", type=number(int, 3), default=9, metavar="N", help="turns of each engine in each case")
    cli.add_json_flag(p, "a line for each engine and case")
    add_show_flag(p, *KEYS)
    p.add_argument("--log", type=cli.appendable, metavar="FILE", default=os.devnull, help="what the engines print")
    args = p.parse_args(argv)
    if args.show:
        return args
    args.engines = args.engines or ENGINES[: 2 if args.llama_python else 1]
    if unknown := {*args.engines}.difference(ENGINES):
        raise InputError(f"--engines: unknown {unknown.pop()!r}; known: {', '.join(ENGINES)}")
    if any(name.startswith("llama") for name in args.engines) and not shutil.which(args.llama_python or ""):
        raise InputError(f"llama.cpp needs --llama-python, a program; {args.llama_python} is none")
    for case in args.cases:
        if not re.fullmatch("(decode|prefill):[1-9][0-9]*", case):
            raise InputError(f"--cases: {case!r} is neither decode:BATCH nor prefill:TOKENS")
    return args


# ---- Measuring -------------------------------------------------------------------------------------------------------


def start(name, args):
    """Start the process of an engine."""
    python = args.llama_python if name.startswith("llama.cpp") else sys.executable
    variables = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "PYTHONPATH": str(WORKER.parent.parent)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with open(args.log, "a") as log:
        return subprocess.Popen([python, WORKER, name, str(args.threads)], env=variables, stderr=log, **pipes)


def ask(name, worker, kind, n, times):
    """Return the seconds of so many runs of a case."""
    try:
        worker.stdin.write(f"{kind} {n} {times}\n")
        worker.stdin.flush()
    except BrokenPipeError:
        pass
    for line in worker.stdout:
        if line.startswith("times"):
            return json.loads(line[5:])
    raise InputError(f"engine {name} ended: give a file to --log, and see there")


def measure(args):
    """Yield the line of each engine in each case."""
    torch.set_num_threads(args.threads)
    workers = {name: start(name, args) for name in args.engines}
    made = environment(launch.World(0, 1, torch.device("cpu")))
    for kind, n in (case.split(":") for case in args.cases):
        for name, worker in workers.items():
            ask(name, worker, kind, n, 1)  # prepares the case
        times = 3 if kind != "prefill" and int(n) < 64 else 1
        ways = {name: partial(ask, name, worker, kind, n, times) for name, worker in workers.items()}
        rounds = in_turns({"": lambda: read_bandwidth(torch.device("cpu"), repeats=3), **ways}, args.rounds)
        bandwidth = rounds.pop("")
        for name, seconds in rounds.items():
            low, median, high = (1e3 * s for s in quartiles([*itertools.chain(*seconds)]))
            line = {"engine": name, "kind": kind, "n": int(n), "ms": median, "quartiles_ms": [low, high]}
            line |= {"rounds": args.rounds, "bandwidth": statistics.median(bandwidth)}
            if kind == "decode":  # round by round, since the bandwidth of a shared machine varies
                rates = (step_bytes(int(n), name) / statistics.median(s) for s in seconds)
                line["mbu"] = statistics.median(rate / b for rate, b in zip(rates, bandwidth, strict=True))
            yield {**made, **line}


def step_bytes(batch, engine):
    """Return the bytes that a decode step of an engine has to read: matrices, norms, filled slots of the cache."""
    head = DIM // HEADS
    layer = DIM * (DIM + 2 * KV_HEADS * head) + DIM * DIM + 3 * DIM * HIDDEN
    matrices = (LAYERS * layer + DIM * VOCABULARY) * QUANTS[engine.partition(":")[2]][0]
    return matrices + 2 * ((2 * LAYERS + 1) * DIM + batch * LAYERS * 2 * KV_HEADS * head * (FILLED + 1))


# ---- Tables ----------------------------------------------------------------------------------------------------------


def tables(lines):
    """Return Markdown, a table for each number of threads: a row a case, a column an engine."""

    rates = {(line["threads"], line["kind"], line["n"]): f"{line['bandwidth'] / 1e9:.1f}" for line in lines}

    def row(line):
        return KINDS.get(line["kind"], "{}").format(line["n"]), rates[line["threads"], line["kind"], line["n"]]

    return "\n\n".join(
        pivot([f"threads: {n}", "GB/s"], [x for x in lines if x["threads"] == n], row, lambda x: x["engine"], cell)
        for n in sorted({line["threads"] for line in lines})
    )


def cell(line, row):
    """Return milliseconds, their quartiles, how many times ours of as many bits; for our decode, the part of the
    bandwidth. row: {engine: line} of the same case."""
    ours = row.get(QUANTS[line["engine"].partition(":")[2]][1])
    low, high = line["quartiles_ms"]
    text = f"{line['ms']:.1f} ({low:.1f}-{high:.1f}"
    if line is ours or ours is None:
        return text + (f"; {100 * line['mbu']:.0f}%)" if line["n"] == 1 and "mbu" in line else ")")
    return text + f"; {line['ms'] / ours['ms']:.2f}x)"


def main(argv=None):
    args = parse(argv)
    if args.show:
        lines = itertools.chain(*args.show)
        return print(tables([line for line in lines if not args.engines or line["engine"] in args.engines]))
    lines = []
    for line in measure(args):
        print(json.dumps(line), file=sys.stderr)
        lines.append(line)
        if args.json:
            writing.append_line(args.json, line)
    print(tables(lines))


if __name__ == "__main__":
    launch.run(main)
