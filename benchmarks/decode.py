"""Decode and prefill of several engines on one CPU, the same shape and random bfloat16 weights, in turns.

python -m benchmarks.decode --threads 1 --engines ours,transformers --json decode.jsonl
python -m benchmarks.decode --threads 2 --gpt-fast DIR --llama-python VENV/bin/python --json decode.jsonl
python -m benchmarks.decode --threads 2 --engines ours:int8,ours:int4,llama.cpp:q8_0,llama.cpp:q4_0 ...
python -m benchmarks.decode --threads 2 --engines ours,ours@2,ours:int8,ours@2:int8,ours:int4,ours@2:int4 ...
python -m benchmarks.decode --show decode.jsonl

Each engine (engines.py) is a process of its own, which is idle while another one is timed. gpt-fast is a checkout of
its repository, llama.cpp a Python that has llama-cpp-python and gguf. The shape is Llama 3.2 1B with an output head of
its own: 2.47 GB of weights a step. A line of the result is one engine in one case: the median and the quartiles of its
times, and the bandwidth that the machine showed in the same run; mbu is the part of it that the decode steps reached.
ours@2 is two ranks with half of the threads each.
"""

import argparse
import importlib.util
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch

from bench import markdown
from benchmarks.engines import DIM, FILLED, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCABULARY
from extras.measure.results import about, add_show_flag
from runtime import cli, launch, writing
from runtime.benchmarking import in_turns, quartiles, read_bandwidth
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
ENGINES = ["ours", "transformers", "gpt-fast", "llama.cpp", "ours:int8", "gpt-fast:int8", "llama.cpp:q8_0", "ours:int4"]
ENGINES += ["llama.cpp:q4_0", "ours@2", "ours@2:int8", "ours@2:int4"]
CASES = "decode:1,decode:4,decode:16,decode:64,prefill:128,prefill:1024"
KINDS = {"decode": "decode, batch {}", "prefill": "prefill, {} tokens"}
KEYS = ["threads", "engine", "kind", "n", "ms", "quartiles_ms", "bandwidth"]


def cases(text):
    """Return [(kind, n)] of decode:4,prefill:128 (an argparse type)."""
    found = []
    for case in text.split(","):
        kind, _, n = case.partition(":")
        if kind not in KINDS or not n.isdecimal() or int(n) < 1:
            raise argparse.ArgumentTypeError(f"{case!r} is neither decode:BATCH nor prefill:TOKENS")
        found.append((kind, int(n)))
    return found


def parse(argv):
    p = cli.Parser(__doc__)
    p.add_argument("--threads", type=count, default=1, metavar="N", help="of each engine")
    about_engines = f"of {', '.join(ENGINES)} (default: all there are in bfloat16)"
    p.add_argument("--engines", type=lambda text: text.split(","), metavar="A,B,...", help=about_engines)
    p.add_argument("--gpt-fast", metavar="DIR", help="a checkout of gpt-fast")
    p.add_argument("--llama-python", metavar="FILE", help="a Python that imports llama_cpp and gguf")
    p.add_argument("--cases", type=cases, default=CASES, metavar="KIND:N,...", help="decode:BATCH or prefill:TOKENS")
    p.add_argument("--rounds", type=number(int, 3), default=9, metavar="N", help="turns of each engine in each case")
    cli.add_json_flag(p, "a line for each engine and case")
    add_show_flag(p, *KEYS)
    p.add_argument("--log", type=cli.appendable, metavar="FILE", default=os.devnull, help="what the engines print")
    args = p.parse_args(argv)
    if args.show:
        return args
    if args.llama_python and not shutil.which(args.llama_python):
        raise InputError(f"--llama-python {args.llama_python} is no program")
    has_transformers = importlib.util.find_spec("transformers") is not None
    available = {"ours": 1, "transformers": has_transformers, "gpt-fast": args.gpt_fast, "llama.cpp": args.llama_python}
    args.engines = args.engines or [name for name, there in available.items() if there]
    for name in args.engines:
        if name not in ENGINES:
            raise InputError(f"--engines: unknown {name!r}; known: {', '.join(ENGINES)}")
        if not available[name.partition(":")[0].partition("@")[0]]:
            raise InputError(f"--engines {name} needs --gpt-fast, --llama-python, or pip install transformers")
    return args


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def start(name, args):
    """Start the process of an engine. gpt-fast's modules have the names of ours: each finds only its own."""
    python = args.llama_python if name.startswith("llama.cpp") else sys.executable
    modules = args.gpt_fast if name.startswith("gpt-fast") else str(WORKER.parent.parent)
    launcher, threads = [], str(args.threads)
    if "@2" in name:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        threads = str(args.threads // 2)
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": modules}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with open(args.log, "a") as log:
        return subprocess.Popen([python, *launcher, WORKER, name, threads], env=environment, stderr=log, **pipes)


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


def measure(args, argv):
    """Yield the line of each engine in each case."""
    torch.set_num_threads(args.threads)
    workers = {name: start(name, args) for name in args.engines}
    made = about("benchmarks.decode", argv)
    for kind, n in args.cases:
        for name, worker in workers.items():
            ask(name, worker, kind, n, 1)  # prepares the case
        times = 3 if kind != "prefill" and n < 64 else 1
        ways = {name: partial(ask, name, worker, kind, n, times) for name, worker in workers.items()}
        rounds = in_turns({"": lambda: read_bandwidth(torch.device("cpu"), repeats=3), **ways}, args.rounds)
        bandwidth = rounds.pop("")
        for name, seconds in rounds.items():
            low, median, high = (1e3 * s for s in quartiles([*itertools.chain(*seconds)]))
            line = {"engine": name, "kind": kind, "n": n, "ms": median, "quartiles_ms": [low, high]}
            line |= {"rounds": args.rounds, "bandwidth": statistics.median(bandwidth)}
            if kind == "decode":  # round by round, since the bandwidth of a shared machine varies
                rates = (step_bytes(n, name) / statistics.median(s) for s in seconds)
                line["mbu"] = statistics.median(rate / b for rate, b in zip(rates, bandwidth, strict=True))
            yield {**made, **line}


def step_bytes(batch, engine):
    """Return the bytes that a decode step of an engine has to read: matrices, norms, filled slots of the cache."""
    head = DIM // HEADS
    layer = DIM * (DIM + 2 * KV_HEADS * head) + DIM * DIM + 3 * DIM * HIDDEN
    matrices = (LAYERS * layer + DIM * VOCABULARY) * QUANTS[engine.partition(":")[2]][0]
    return matrices + 2 * ((2 * LAYERS + 1) * DIM + batch * LAYERS * 2 * KV_HEADS * head * (FILLED + 1))


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def tables(lines):
    """Markdown, a table for each number of threads: a row a case, a column an engine."""
    parts = []
    for threads in sorted({line["threads"] for line in lines}):
        mine = [line for line in lines if line["threads"] == threads]
        engines, rows = list(dict.fromkeys(line["engine"] for line in mine)), []
        for kind, n in dict.fromkeys((line["kind"], line["n"]) for line in mine):
            found = {line["engine"]: line for line in mine if (line["kind"], line["n"]) == (kind, n)}
            bandwidth = next(iter(found.values()))["bandwidth"]
            cells = [cell(found[e], found) if e in found else "" for e in engines]
            rows.append([KINDS.get(kind, f"{kind} {{}}").format(n), f"{bandwidth / 1e9:.1f}", *cells])
        parts.append(markdown([f"threads: {threads}", "GB/s", *engines], rows))
    return "\n\n".join(parts)


def cell(line, found):
    """Milliseconds, their quartiles, how many times ours of as many bits; for our decode, the part of the bandwidth."""
    ours = found.get(QUANTS[line["engine"].partition(":")[2]][1])
    low, high = line["quartiles_ms"]
    text = f"{line['ms']:.1f} ({low:.1f}-{high:.1f}"
    if line is ours or ours is None:
        return text + (f"; {100 * line['mbu']:.0f}%)" if line["n"] == 1 and "mbu" in line else ")")
    return text + f"; {line['ms'] / ours['ms']:.2f}x)"


def main(argv=None):
    args = parse(argv)
    if args.show:
        lines = [line for lines in args.show for line in lines]
        return print(tables([line for line in lines if not args.engines or line["engine"] in args.engines]))
    lines = []
    for line in measure(args, argv):
        print(json.dumps(line), file=sys.stderr)
        lines.append(line)
        if args.json:
            writing.append_line(args.json, line)
    print(tables(lines))


if __name__ == "__main__":
    launch.run(main)
