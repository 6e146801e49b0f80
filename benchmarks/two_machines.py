"""Decode and prefill on two machines, by wiring and by how they sum, in turns, beside distributed-llama over the link.

benchmarks/two_machines.sh 100 --json two-machines.jsonl     # starts both ranks, over 100 Mbit/s
python -m benchmarks.two_machines --show two-machines.jsonl

The model has the layers of Llama 3.2 1B, 32,000 words and an output head of its own, all random and in 4 bits in groups
of 32. --peer: a folder with distributed-llama's dllama and, of this shape, model.m and tokenizer.t, as its converter
writes them. It is run once, since it first sends the weights over the link.
"""

import copy
import dataclasses
import functools
import itertools
import re
import statistics
import subprocess
import time
from pathlib import Path

import torch

import generate
from benchmarks.decode import step_of
from extras.measure import results
from ladder import outputs
from ladder.benchmarking import environment, in_turns, pivot, quartiles, timed
from ladder.command_line import flags
from ladder.command_line.flags import count
from ladder.decoding.batch import Sampler
from ladder.errors import InputError
from ladder.progress import progress
from ladder.ranks import launch
from ladder.ranks.collectives import collective
from ladder.sources.sizes import named_size
from model import rewired
from tp import TensorParallel

CASES = [("decode", 1), ("decode", 4), ("prefill", 256)]  # rows of a decode step, tokens of a prefill
WAYS = [*itertools.product(("library", "int8"), ("standard", "ladder")), ("none", "upper-bound")]
STEPS = {"decode": 5, "prefill": 1}  # that are timed together
TURNS = {"decode": 5, "prefill": 1}  # of a round: a decode step is short, so that a moment's disturbance hits one way
SENT = Path("/sys/class/net/link0/statistics/tx_bytes")  # of this rank's end of the link
PROMPT = ("abcdefghijklmnopqrstuvwxyz" * 10)[:256]  # a letter is a token


def make_ways(args, world):
    """Return {(comm, wiring, kind, n): a function that returns {"ms", "bytes"} of a step}."""
    config = dataclasses.replace(named_size(args.model), vocab_size=32000, tie_embeddings=False)
    # the World keeps them: a model only knows its group's name
    world.groups = {"library": world.group, "none": world.group, "int8": collective("int8")(world)}
    base = generate.load_model(config, None, "bfloat16", world)
    ways = {}
    for (comm, wiring), (kind, n) in itertools.product(WAYS, CASES):
        model = copy.copy(base)
        model.config = rewired(config, wiring)
        model.comm = TensorParallel(model.config, world.shares, world.groups[comm])
        model.comm.slow_link = base.comm.slow_link
        run, _ = step_of(model, kind, n)
        ways[comm, wiring, kind, n] = functools.partial(measure, world, model.comm, run, STEPS[kind])
    return ways


@torch.inference_mode()
def measure(world, comm, run, steps):
    """Return {"ms": of a step with its choice of a token, "bytes": that this rank sent for it}."""
    sampler = Sampler(0, device=world.device)

    def step():
        logits = run()
        generate.sample(logits[:, 0] if logits.dim() == 3 else logits, comm, sampler).tolist()

    world.gather(None)  # both ranks begin together
    before = int(SENT.read_text())
    seconds = timed(world.device, lambda: [step() for _ in range(steps)])
    return {"ms": 1e3 * seconds / steps, "bytes": (int(SENT.read_text()) - before) / steps}


def run_peer(world, folder):
    """Return distributed-llama's {(kind, n): [{"ms", "bytes"}]}, or {} on rank 1, which runs its worker."""
    world.gather(None)
    program = f"{folder}/dllama"
    if world.rank == 1:
        words = "worker --host 10.77.0.2 --port 19990 --nthreads 1"
        worker = subprocess.Popen([program, *words.split()], stdout=subprocess.DEVNULL)
        world.gather(None)  # rank 0 is done
        worker.kill()
        worker.wait()
        return {}
    time.sleep(2)  # until the worker listens
    words = "inference --workers 10.77.0.2:19990 --nthreads 1 --model model.m --tokenizer tokenizer.t "
    words += f"--buffer-float-type q80 --prompt {PROMPT} --steps 320 --max-seq-len 1024 --temperature 0 --seed 1"
    how = {"cwd": folder, "capture_output": True, "text": True, "errors": "replace", "timeout": 600}
    run = subprocess.run([program, *words.split()], **how)

    def times(name):
        line = name + r" *(\d+) ms Sync *(\d+) ms \| Sent *(\d+) kB"  # Sync comes on top
        some = re.findall(line, run.stdout)
        return [{"ms": int(ms) + int(sync), "bytes": 1024 * int(kb)} for ms, sync, kb in some]

    tokens = times("Pred")
    chunks = times("Eval")
    if run.returncode or not tokens or not chunks:
        raise InputError(f"--peer {folder}: {program} failed: {(run.stderr or run.stdout)[-300:]}")
    world.gather(None)
    prompt = {key: sum(chunk[key] for chunk in chunks) for key in chunks[0]}
    return {("decode", 1): tokens, ("prefill", 256): [prompt]}


def lines_of(args, world):
    """Measure all ways in turns, and return a dict of results for each."""
    ways = make_ways(args, world)
    progress.at("measurement", timed=False)
    in_turns(ways, 1)  # not measured: it allocates memory
    runs = {key: [] for key in ways}
    made = environment(world)
    for round_number in range(args.rounds):
        for kind, repeats in TURNS.items():
            some = {key: way for key, way in ways.items() if kind in key}
            for key, timings in in_turns(some, repeats).items():
                runs[key].extend(timings)
        if args.peer and round_number == args.rounds // 2:
            for case, some in run_peer(world, args.peer).items():
                runs.setdefault(("q80", "distributed-llama", *case), []).extend(some)
        world.say(f"{args.link}: round {round_number + 1} of {args.rounds}")
    lines = []
    for (comm, wiring, kind, n), some in runs.items():
        low, ms, high = quartiles([one["ms"] for one in some])
        sent = statistics.median(one["bytes"] for one in some)
        lines.append({
            "model": args.model, "words": 32000, "kind": kind, "n": n, **made, "link": {"name": args.link},
            "comm": comm, "wiring": wiring, "step_ms": ms, "quartiles_ms": [low, high],
            "least_ms": min(one["ms"] for one in some), "sent_bytes": sent, "rounds": len(some),
        })  # fmt: skip
    return lines


def show(lines):
    """Print tables of milliseconds and of sent kilobytes: a row for each case and link, a column for each way."""

    def case(line):
        return f"{line['kind']} {line['n']}", line["link"]["name"]

    def way(line):
        return line["wiring"] + (f", {line['comm']}" if line["comm"] in ("library", "int8") else "")

    def ms(line, _):
        return f"{line['step_ms']:.1f} ({line['quartiles_ms'][0]:.1f}-{line['quartiles_ms'][1]:.1f})"

    def sent(line, _):
        return f"{line['sent_bytes'] / 1000:.1f}"

    tables = (pivot(["case", "link"], lines, case, way, cell) for cell in (ms, sent))
    print("\n\n".join(tables))


def main(argv=None):
    p = flags.Parser(__doc__)
    p.add_argument("--model", default="1b:8:int4:32", metavar="NAME", help="a named size (default: 1b:8:int4:32)")
    p.add_argument("--link", default="a link", metavar="TEXT", help="what to call the link")
    p.add_argument("--rounds", type=count, default=5, metavar="N", help="rounds of all ways (default: 5)")
    p.add_argument("--peer", metavar="DIR", help="where distributed-llama and its model are")
    p.add_argument("--show", nargs="+", metavar="FILE", help="measure nothing: print the tables of such files")
    flags.add_json_flag(p, "a line for each way")
    args = p.parse_args(argv)
    if args.show:
        return show(results.read(args.show, "sent_bytes"))
    world = launch.join("cpu", {"comm": "library"})
    lines = lines_of(args, world)
    if world.rank == 0:
        for line in lines if args.json else ():
            outputs.append_line(args.json, line)
        show(lines)


if __name__ == "__main__":
    launch.run(main)
