"""What each wiring costs in quality: trainings by a plan, a raw line each, and the table and figure of quality.md.

python -m extras.research.corpus --out corpus
python -m extras.research.quality --corpus corpus --runs runs --json quality.jsonl  # goes on where it was killed
python -m extras.research.quality --show quality.jsonl --figure quality.png
"""

import dataclasses
import hashlib
import itertools
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import torch

from extras.measure import plot, results
from extras.measure.advise import Machine, decode_work, step_seconds, times_of
from extras.measure.clock import count_all_reduces
from extras.measure.link import Link
from extras.measure.results import lines_of, read
from extras.measure.sweep import SMALL
from extras.research.corpus import FILES
from formats.checkpoint import read_text
from model import rewired
from runtime import cli, launch, writing
from runtime.benchmarking import environment
from runtime.cli import number
from runtime.errors import InputError
from runtime.launch import World

# 1.7 M parameters besides the embedding, on one thread each.
SHAPE = "--vocab-size 4096 --dim 128 --n-heads 4 --n-kv-heads 4 --intermediate-size 384 --dropout 0"
TRAINING = "--seq-len 256 --batch 8 --valid-tokens 100000 --compute-dtype bfloat16 --dtype float32 --compile"
SCORING = "--max-tokens 100000 --stride 192 --batch 8"
SCRATCH = [
    "standard", "ladder", "parallel-ladder", "parallel", "spd/4", "pair", "delayed/4", "ladder:4", "delayed-4/4",
    "desync:2/4",
]  # fmt: skip
RETRAINED = ["standard", "ladder", "ladder:4", "pair:2-5", "spd:4/4", "spd/4", "parallel-ladder", "delayed/4"]
GROUPED = ["spd/4", "delayed/4"]  # with neurons in lanes by affinity, too
SEEDS = 0, 1
SHARES = 0.01, 0.05, 0.2, 1  # of the tokens from scratch, to retrain on: all wirings on SHARES[1:3]
RATES = {"scratch": 4e-3, "control": 1e-4, "distilled": 1e-3}  # learning rates, each the best of three
KEYS = "run", "kind", "wiring", "n_layers", "steps", "nats", "before"  # that a line needs
LATENCIES = (300, 1000, 3000)  # us of an all-reduce: of the three panels
MOST = 4  # nats in the figure: parallel wirings of standard weights are far above
SILENT = 25.5e-3  # seconds of a decode step of SMALL on two CPU ranks without all-reduces: results/overlap-memory.jsonl


def file_name(wiring):
    """Return a wiring's name for the name of a file."""
    return wiring.translate(str.maketrans(":/", "._"))


@dataclasses.dataclass(frozen=True)
class Run:
    """A training: from scratch, or of a standard model in another wiring."""

    kind: str  # scratch, retrained, or grouped: retrained with neurons in lanes by affinity
    wiring: str
    seed: int
    lr: float
    steps: int
    origin: str | None = None  # the run whose model is retrained
    n_layers: int = 8

    @property
    def name(self):
        name = f"{self.kind}-{file_name(self.wiring)}-{self.n_layers}x{self.steps}-lr{self.lr:g}-seed{self.seed}"
        return name + f"-of-{self.origin}" * bool(self.origin)

    @property
    def source(self):
        """The name of the folder that is retrained."""
        return self.origin + "-grouped" * (self.kind == "grouped")

    def flags(self, runs):
        """Return the flags of adapt.py; runs: the folder of all models."""
        flags = [*TRAINING.split(), *f"--wiring {self.wiring} --seed {self.seed} --lr {self.lr:g}".split()]
        between = self.steps if self.origin else self.steps // 10
        flags += f"--steps {self.steps} --eval-every {between} --save-every 250".split()
        if self.origin is None:
            return [*SHAPE.split(), "--n-layers", str(self.n_layers), *flags]
        return ["--checkpoint", str(runs / self.source), *["--distill"] * (self.wiring != "standard"), *flags]


def plan(steps):
    """Return the Runs in order: from scratch, then what of a standard model is retrained.

    The control is the standard model, trained plainly on the same tokens; the others are distilled.
    """
    first = Run("scratch", "standard", 0, RATES["scratch"], steps)

    def retrained(wirings, share, *seeds, kind="retrained"):
        rates = {wiring: RATES["control" if wiring == "standard" else "distilled"] for wiring in wirings}
        n_steps = round(share * steps)
        return [Run(kind, wiring, seed, rates[wiring], n_steps, first.name) for wiring in wirings for seed in seeds]

    runs = [dataclasses.replace(first, wiring=wiring, seed=seed) for wiring in SCRATCH for seed in SEEDS]
    runs += [dataclasses.replace(first, n_layers=5, seed=seed) for seed in SEEDS]
    runs += retrained(RETRAINED, SHARES[1], 10, 11, 12) + retrained(GROUPED, SHARES[1], 10, 11, 12, kind="grouped")
    runs += retrained(RETRAINED, SHARES[2], 10, 11, 12)
    return runs + retrained(RETRAINED[:2], SHARES[0], 10) + retrained(RETRAINED[:2], SHARES[3], 10)


def commands(run, corpus, runs):
    """Return {output: the words of its command}, in order; the first scores are of the trained model.

    corpus, runs: the folders of the text and of all models.
    """

    def score(target, *flags):
        return {target: ["eval.py", *flags, "--text", corpus / "test.txt", *SCORING.split(), "--json", target]}

    out, steps = runs / run.name, {}
    if run.kind == "grouped":
        flags = ["--checkpoint", runs / run.origin, "--lanes", "4", "--text", corpus / "retrain.jsonl"]
        steps[runs / run.source] = ["-m", "extras.training.affinity", *flags, "--out", runs / run.source]
    files = [corpus / ("retrain.jsonl" if run.origin else "train.jsonl"), "--valid", corpus / "valid.jsonl"]
    steps[out] = ["adapt.py", *run.flags(runs), "--text", *files, "--out", out]
    steps |= score(runs / f"{run.name}.jsonl", "--checkpoint", out)
    if run.origin:
        target = runs / f"{run.source}-in-{file_name(run.wiring)}.jsonl"
        steps |= score(target, "--checkpoint", runs / run.source, "--wiring", run.wiring)
    return steps


def train(run, args, digests):
    """Train and score a run, unless that is done; return its line, of the weights that are best on validation."""
    steps = commands(run, args.corpus, args.runs)
    for target, words in steps.items():
        if not (target.exists() and target.stat().st_size):  # eval.py creates its file at the start
            with open(f"{target}.out", "w") as log:
                how = {"stdout": log, "stderr": log, "env": os.environ | {"OMP_NUM_THREADS": "1"}}
                code = subprocess.run([sys.executable, *map(str, words)], **how).returncode
            if code:
                raise InputError(f"{target} was not made (code {code}): {target}.out says why")
    scored = [target for target in steps if target.suffix == ".jsonl"]
    nats = [read(target, "nats_per_token")[-1]["nats_per_token"] for target in scored]
    log = [json.loads(line) for line in read_text(f"{args.runs / run.name}.run/log.jsonl").splitlines()]
    curve = [(line["tokens"], line["valid"]) for line in log if "valid" in line]
    anywhere = commands(run, Path(args.corpus.name), Path(args.runs.name)).values()
    words = [shlex.join(["OMP_NUM_THREADS=1", "python", *map(str, words)]) for words in anywhere]
    return {
        "run": run.name, **dataclasses.asdict(run), "valid": min(loss for _, loss in curve), "curve": curve,
        "nats": nats[0], "before": nats[1] if run.origin else None, "tokens": curve[-1][0],
        "tokens_per_s": statistics.median(x["tokens_per_s"] for x in log[2:]), "sha256": digests,
        **environment(World(0, 1, torch.device("cpu"))), "threads": 1, "command": " && ".join(words),
    }  # fmt: skip


def speedups(wiring, n_layers=8):
    """Return how many times as fast as the standard wiring SMALL decodes on two ranks, at each of LATENCIES.

    The clock computes it, given that the sublayers of a step share SILENT in proportion to the bytes they read.
    """
    work = decode_work(SMALL, torch.bfloat16, 2, 1, 64)
    n_bytes = SMALL.n_layers * (work["attention"].n_bytes + work["feed_forward"].n_bytes) + work["rest"].n_bytes
    machine, result = Machine("measured", n_bytes / SILENT), []
    for us in LATENCIES:
        times = times_of(SMALL, torch.bfloat16, 2, 1, 64, machine, Link("", us, None))
        result.append(step_seconds(SMALL, times)[0] / step_seconds(small(wiring, n_layers), times)[0])
    return result


def small(wiring, n_layers=8):
    return dataclasses.replace(rewired(SMALL, wiring), n_layers=n_layers)


def by_model(lines):
    """Return ({(kind, wiring, layers, steps): lines of all seeds}, the number of steps from scratch)."""
    groups = defaultdict(list)
    for line in lines:
        groups[line["kind"], line["wiring"], line["n_layers"], line["steps"]].append(line)
    return groups, max((key[3] for key in groups if key[0] == "scratch"), default=0)


def tables(lines):
    """Return Markdown: a row for each wiring, then one for each share of the tokens that is retrained on.

    A percentage says how far a loss is above the standard wiring's, from scratch or retrained on as many tokens.
    """
    groups, steps = by_model(lines)

    def cell(kind, wiring, share, key="nats", n_layers=8):
        def losses(kind, *model):
            return [line[key] for line in groups.get((kind, *model, round(share * steps)), [])]

        if not (values := losses(kind, wiring, n_layers)):
            return ""
        nats, low, high = plot.middle(values)
        spread = f" ({low:.3f}-{high:.3f})" if high > low else ""
        standard = losses(kind.replace("grouped", "retrained"), "standard", 8)
        is_base = (wiring, n_layers) == ("standard", 8)
        above = f", {100 * (nats / statistics.median(standard) - 1):+.1f}%" if standard and not is_base else ""
        return f"{nats:.3f}{spread}{above}"

    head = ["wiring", "all-reduces", "from scratch", "standard weights in it"]
    head += [*(f"retrained on {share:.0%}" for share in SHARES[1:3]), f"speed at {LATENCIES[1] / 1e3:g} ms"]
    rows = []

    def add_row(label, wiring, scratch="scratch", again="retrained", n_layers=8):
        cells = [cell(scratch, wiring, 1, n_layers=n_layers), cell(again, wiring, SHARES[1], "before", n_layers)]
        cells += [cell(again, wiring, share, n_layers=n_layers) for share in SHARES[1:3]]
        if any(cells):
            n = count_all_reduces(small(wiring, n_layers))
            rows.append([label, str(n), *cells, f"{speedups(wiring, n_layers)[1]:.2f}"])

    for wiring in sorted({key[1] for key in groups}, key=results.wiring_order):
        add_row(wiring, wiring)
        add_row(f"{wiring}, grouped", wiring, scratch="", again="grouped")
    add_row("standard, 5 layers", "standard", n_layers=5)
    shares, gaps = [], {}
    for share in SHARES:
        both = [groups.get(("retrained", wiring, 8, round(share * steps))) for wiring in RETRAINED[:2]]
        if all(both):
            control, ladder = (statistics.median(line["nats"] for line in seeds) for seeds in both)
            gaps[share] = ladder - control
            cells = [cell("retrained", wiring, share) for wiring in RETRAINED[:2]]
            shares.append([f"{share:.0%}", *cells, f"{gaps[share]:.3f}"])
    both = results.markdown(head, rows), results.markdown(["retrained on", *RETRAINED[:2], "gap"], shares)
    return "\n\n".join([*both, *fitted(gaps)])


def fitted(gaps):
    """Return [a line that says how the gap falls], for {share of the tokens: nats above the control}."""
    points = [(math.log(share), math.log(gap)) for share, gap in gaps.items() if gap > 0]
    if len(points) < 2:
        return []
    slope, at_one = statistics.linear_regression(*zip(*points, strict=True))
    return [f"The gap is near {math.exp(at_one):.3f} x share^{slope:.2f}."]


def figure(lines):
    """Return the figure: loss over decoding speed, a panel for each of LATENCIES."""
    groups, steps = by_model(lines)
    wirings = sorted({key[1] for key in groups if key[0] in ("scratch", "retrained")}, key=results.wiring_order)
    title = "Loss over decoding speed, by the clock from a measured step of 8 layers of dim 2560 on two CPU ranks"
    chart, axes = plot.panels(len(LATENCIES), 3.6, 3.8, title, sharey=True)
    states = [
        ("scratch", 1, "nats", {}),
        ("retrained", SHARES[1], "before", {"marker": "x"}),
        ("retrained", SHARES[1], "nats", {"mfc": "white"}),
    ]
    models = [*((wiring, 8, wiring) for wiring in wirings), ("standard", 5, "standard, 5 layers")]
    for i, (axis, us) in enumerate(zip(axes, LATENCIES, strict=True)):
        for (wiring, n_layers, label), (kind, share, key, marked) in itertools.product(models, states):
            if seeds := groups.get((kind, wiring, n_layers, round(share * steps))):
                y, low, high = plot.middle([line[key] for line in seeds])
                if y > MOST:
                    continue
                style = plot.look(wiring, wirings) | {"linestyle": "", "capsize": 2, "label": label} | marked
                size = 4 if ":" in wiring or n_layers < 8 else 7  # a part of the layers
                axis.errorbar(speedups(wiring, n_layers)[i], y, [[y - low], [high - y]], markersize=size, **style)
        axis.set(title=f"an all-reduce of {us / 1e3:g} ms", xlabel="tokens/s over standard's")
    axes[0].set_ylabel(
        "nats per token; full: from scratch;\ncross and open: standard weights in it,\nbefore and after retraining"
    )
    plot.labelled(chart, axes)
    return chart


def parse(argv):
    p = cli.Parser(__doc__)
    p.add_argument("--corpus", type=Path, metavar="DIR", help="what extras.research.corpus wrote")
    p.add_argument("--runs", type=Path, metavar="DIR", help="the folder for the models")
    p.add_argument("--json", type=cli.appendable, metavar="FILE", help="append a line for each run that has none there")
    words = "of a run from scratch, 2,048 tokens each"
    p.add_argument("--steps", type=number(int, 200), default=2000, metavar="N", help=words)
    words = "train nothing: print the tables of such lines"
    p.add_argument("--show", type=lines_of(*KEYS), metavar="FILE", help=words)
    p.add_argument("--figure", metavar="PNG", help="... and draw their figure")
    args = p.parse_args(argv)
    if not args.show and not (args.corpus and args.runs and args.json and not args.figure):
        raise InputError("give --corpus, --runs and --json to train, or --show FILE, perhaps with --figure PNG")
    for name in FILES if not args.show else ():
        if not (args.corpus / name).is_file():
            raise InputError(f"--corpus {args.corpus} has no {name}: python -m extras.research.corpus writes it")
    return args


def main(argv=None):
    args = parse(argv)
    if args.show:
        print(tables(args.show))
        if args.figure:
            plot.save(args.figure, figure(args.show))
        return
    digests = {name: hashlib.sha256((args.corpus / name).read_bytes()).hexdigest() for name in FILES}
    done = {line["run"] for line in read(args.json, *KEYS)} if os.path.exists(args.json) else ()
    try:
        args.runs.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise InputError(f"--runs {args.runs}: {e.strerror}") from None
    for run in plan(args.steps):
        if run.name not in done:
            line = train(run, args, digests)
            writing.append_line(args.json, line)
            print(f"{run.name}: {line['nats']:.4f} nats per token", flush=True)


if __name__ == "__main__":
    launch.run(main)
