"""What each wiring costs in quality: trainings, a raw line of each, and the tables of quality.md.

python -m extras.research.quality --train runs  # goes on where it was killed
python -m extras.research.quality --show runs/quality.jsonl

The text is one that every machine has: the Python files of the standard library and of PyTorch, a document each.
"""

import dataclasses
import hashlib
import itertools
import os
import shlex
import statistics
import subprocess
import sys
import sysconfig
from collections import defaultdict
from pathlib import Path

import torch

from evaluation.score import SEPARATOR
from extras.measure import results
from extras.measure.clock import run_layers
from formats.checkpoint import read_config
from model import rewired
from runtime import cli, launch, writing
from runtime.benchmarking import environment, markdown
from runtime.cli import number
from runtime.errors import InputError

ROOTS = {"python": Path(sysconfig.get_path("stdlib")), "torch": Path(torch.__file__).parent}
DEMO = Path(__file__).parents[2] / "demo"
TRAINING = "--seq-len 256 --batch 8 --valid-tokens 100000 --compute-dtype bfloat16 --dtype float32 --compile"
SCORING = "--max-tokens 100000 --stride 192 --batch 8"
SCRATCH = ["standard", "ladder", "parallel-ladder", "parallel", "spd/4", "pair", "delayed/4", "ladder:4"]
RETRAINED = ["standard", "ladder", "ladder:4", "pair:2-5", "spd:4/4", "spd/4", "parallel-ladder", "delayed/4"]
PLAN = [  # kind, share of --steps, wirings, seeds
    ("scratch", 1, SCRATCH, (0, 1)),
    ("retrained", 0.05, RETRAINED, (10, 11, 12)),
    ("retrained", 0.2, RETRAINED, (10, 11, 12)),
    ("retrained", 0.01, RETRAINED[:2], (10,)),
    ("retrained", 1, RETRAINED[:2], (10,)),
]
# Seconds of a sublayer and of the rest of a decode step of 8 layers of dim 2560 on two CPU ranks without all-reduces:
# 25.5 ms (results/overlap-memory.jsonl) in proportion to the bytes that they read. And of an all-reduce.
SUBLAYER, REST, ALL_REDUCE = 1.555e-3, 0.615e-3, 1e-3


def digest(name):
    return hashlib.sha256(name.encode()).digest()


def part_of(name):
    """Return the part of a file "python/..." or "torch/...", by its hash: one in 20 is held out, four are retrain."""
    drawn = digest(name)[0] % 20
    if drawn == 0:
        return "test" if name.startswith("torch/") else "valid"
    return "retrain" if drawn < 5 else "train"


def write_corpus(folder):
    """Write train.txt, retrain.txt, valid.txt and test.txt, unless they are there; return {name: SHA-256}."""
    texts = defaultdict(list)
    for source, root in ROOTS.items():
        for path in root.rglob("*.py"):
            name = f"{source}/{path.relative_to(root).as_posix()}"
            text = path.read_bytes().decode(errors="ignore").strip()  # some test other encodings
            if text and "site-packages/" not in name:
                texts[part_of(name)].append((digest(name), text))
    for part, files in texts.items():
        if not (path := folder / f"{part}.txt").exists():
            with writing.new_file(path) as unfinished:
                unfinished.write_text(f"\n{SEPARATOR}\n".join(text for _, text in sorted(files)), encoding="utf-8")
    return {f"{part}.txt": hashlib.sha256((folder / f"{part}.txt").read_bytes()).hexdigest() for part in texts}


def run_once(script, target, *words):
    """Run a script, unless its output is there, with what it prints in TARGET.out; return its command."""
    command = [script, *map(str, words)]
    if not (target.exists() and target.stat().st_size):  # eval.py creates its file at the start
        with open(f"{target}.out", "w") as log:
            how = {"stdout": log, "stderr": log, "env": os.environ | {"OMP_NUM_THREADS": "1"}}
            code = subprocess.run([sys.executable, *command], **how).returncode
        if code:
            raise InputError(f"{target} was not made (code {code}): {target}.out says why")
    return shlex.join(["OMP_NUM_THREADS=1", "python", *command])


def train(kind, wiring, steps, seed, source, out):
    """Train and score a model at `out`, unless that is done; return its line, of the weights best on validation.

    source: the folder that is retrained. adapt.py distills a wiring other than standard from it; standard, trained
    plainly on the same tokens, is the control. Each learning rate was the best of three.
    """
    retrained = kind == "retrained"
    lr = 4e-3 if not retrained else 1e-4 if wiring == "standard" else 1e-3
    how = ["--fresh"] * (not retrained) + f"--wiring {wiring} --steps {steps} --seed {seed} --lr {lr:g}".split()
    how += ["--eval-every", steps if retrained else steps // 10, *TRAINING.split()]
    text = "--text", out.with_name("retrain.txt" if retrained else "train.txt"), "--valid", out.with_name("valid.txt")
    made = [run_once("adapt.py", out, "--checkpoint", source, *how, *text, "--out", out)]

    def score(target, *flags):
        words = *flags, "--text", out.with_name("test.txt"), *SCORING.split(), "--json", target
        made.append(run_once("eval.py", target, *words))
        return results.read(target, "nats_per_token")[-1]["nats_per_token"]

    nats = score(Path(f"{out}.jsonl"), "--checkpoint", out)
    before = score(Path(f"{out}-before.jsonl"), "--checkpoint", source, "--wiring", wiring) if retrained else None
    log = results.read(out / "log.jsonl", "tokens")
    curve = [(line["tokens"], line["valid"]) for line in log if "valid" in line]
    return {
        "run": out.name, "kind": kind, "wiring": wiring, "seed": seed, "lr": lr, "steps": steps,
        "valid": min(loss for _, loss in curve), "curve": curve, "nats": nats, "before": before,
        "tokens": log[-1]["tokens"], "tokens_per_s": statistics.median(line["tokens_per_s"] for line in log[2:]),
        **environment(launch.World(0, 1, torch.device("cpu"))), "threads": 1, "command": " && ".join(made),
    }  # fmt: skip


def tables(lines):
    """Return Markdown of a model's lines: a row for each wiring, then one for each share of the tokens of a retraining.

    A percentage says how far a loss is above the standard wiring's, from scratch or retrained on as many tokens.
    """
    steps = max((line["steps"] for line in lines if line["kind"] == "scratch"), default=0)
    shape = dataclasses.replace(rewired(read_config(DEMO), "standard"), n_layers=max(x["n_layers"] for x in lines))

    def losses(kind, wiring, share, key="nats", n_layers=shape.n_layers):
        model = kind, wiring, n_layers, round(share * steps)
        return [x[key] for x in lines if (x["kind"], x["wiring"], x["n_layers"], x["steps"]) == model]

    def cell(kind, wiring, share, key="nats", n_layers=shape.n_layers):
        values, standard = losses(kind, wiring, share, key, n_layers), losses(kind, "standard", share, key)
        if not values:
            return ""
        nats, low, high = statistics.median(values), min(values), max(values)
        spread = f" ({low:.3f}-{high:.3f})" if high > low else ""
        above = f", {100 * (nats / statistics.median(standard) - 1):+.1f}%" if values != standard else ""
        return f"{nats:.3f}{spread}{above}"

    def step_seconds(config):
        return run_layers(config, SUBLAYER, SUBLAYER, ALL_REDUCE).now + REST + ALL_REDUCE  # the last gathers logits

    rows, shares = [], []
    models = dict.fromkeys((x["wiring"], x["n_layers"]) for x in lines if x["kind"] in ("scratch", "retrained"))
    for wiring, n_layers in models:
        cells = [cell("scratch", wiring, 1, n_layers=n_layers), cell("retrained", wiring, 0.05, "before", n_layers)]
        cells += [cell("retrained", wiring, share, n_layers=n_layers) for share in (0.05, 0.2)]
        config = dataclasses.replace(shape, wiring=wiring, n_layers=n_layers)
        speed, all_reduces = step_seconds(shape) / step_seconds(config), run_layers(config, 0.0, 0.0, 0.0).started
        label = wiring if n_layers == shape.n_layers else f"{wiring}, {n_layers} layers"
        rows.append([label, str(all_reduces), *cells, f"{speed:.2f}"])
    for share in 0.01, 0.05, 0.2, 1:
        if all(both := [losses("retrained", wiring, share) for wiring in RETRAINED[:2]]):
            control, ladder = map(statistics.median, both)
            cells = [cell("retrained", wiring, share) for wiring in RETRAINED[:2]]
            shares.append([f"{share:.0%}", *cells, f"{ladder - control:.3f}"])
    head = ["wiring", "all-reduces", "from scratch", "standard weights in it", "retrained on 5%", "retrained on 20%"]
    wirings = markdown([*head, f"speed at {1e3 * ALL_REDUCE:g} ms"], rows)
    return wirings + "\n\n" + markdown(["retrained on", *RETRAINED[:2], "gap"], shares)


def main(argv=None):
    p = cli.Parser(__doc__)
    what = p.add_mutually_exclusive_group(required=True)
    words = "run the plan in this folder, and append a line for each training to its quality.jsonl"
    what.add_argument("--train", type=Path, metavar="DIR", help=words)
    what.add_argument("--show", metavar="FILE", help="print the tables of such lines")
    words = "of a training from scratch, 2,048 tokens each"
    p.add_argument("--steps", type=number(int, 200), default=2000, metavar="N", help=words)
    p.add_argument("--wirings", nargs="+", metavar="WIRING", help="train only these of the plan")
    words = "whose shape and tokenizer the models have"
    p.add_argument("--model", type=Path, default=DEMO, metavar="DIR", help=words)
    args = p.parse_args(argv)
    if args.show:
        models = defaultdict(list)
        for line in results.read(args.show, "run"):
            models[line.get("n_experts")].append(line)
        return print("\n\n".join(map(tables, models.values())))
    path = args.train / "quality.jsonl"
    done = {line["run"] for line in results.read(path, "run")} if path.exists() else ()
    args.train.mkdir(parents=True, exist_ok=True)
    model = read_config(args.model)
    more = {"sha256": write_corpus(args.train), "n_layers": model.n_layers, "n_experts": model.n_experts}
    for kind, share, wirings, seeds in PLAN:
        for wiring, seed in itertools.product([w for w in wirings if w in (args.wirings or wirings)], seeds):
            steps = round(share * args.steps)
            name = f"{kind}-{wiring.translate(str.maketrans(':/', '._'))}-{steps}-seed{seed}"
            source = args.model if kind == "scratch" else args.train / f"scratch-standard-{args.steps}-seed0"
            if name not in done:
                line = train(kind, wiring, steps, seed, source, args.train / name)
                writing.append_line(path, line | more)
                print(f"{name}: {line['nats']:.4f} nats per token", flush=True)


if __name__ == "__main__":
    launch.run(main)
