r"""What a ladder costs: runs of adapt.py, a line of JSON each, and the tables of benchmarks/adapt.md.

python -m benchmarks.adapt --plan rates --checkpoint DIR --text FILE --valid SELECT --json rates.jsonl
python -m benchmarks.adapt --plan retrain --checkpoint DIR --text FILE --valid FILE --rates rates.jsonl \
    --json adapt.jsonl
python -m benchmarks.adapt --plan scratch --text FILE --valid FILE --json scratch.jsonl
python -m benchmarks.adapt --show adapt.jsonl scratch.jsonl

A plan skips the runs whose lines the file has already. Learning rates are chosen on another validation text (SELECT)
than the one that is reported, for each number of tokens; every second layer and the automatic half take those of the
last half, blended runs those of distilled ones. What auto:N chooses, it chooses on the text that is reported.
"""

import contextlib
import io
import itertools
import json
import os
import shlex
import tempfile
import time
from pathlib import Path

import torch

import adapt
from benchmarks.lines import add_show_flag, grouped, written_by
from formats import checkpoint
from formats.tokenizer import load_tokenizer
from measure import report
from measure.results import markdown
from model import InputError
from runtime import cli, launch, writing
from training.data import tokenize

SHARES = 0.01, 0.05, 0.2  # of the tokens at hand
SEEDS = 0, 1, 2
RATES = 3e-5, 1e-4, 3e-4, 1e-3, 3e-3
WINDOW = ["--seq-len", "256", "--batch", "4", "--dtype", "float32"]
STEP = 1024  # its tokens
METHODS = {  # its flags, of a number of steps
    "plain": lambda steps: [],
    "distilled": lambda steps: ["--distill"],
    "blended and distilled": lambda steps: ["--distill", "--blend-steps", str(steps // 4)],
}
SHAPE = shlex.split("--dim 96 --n-heads 6 --n-kv-heads 3 --intermediate-size 256 --vocab-size 512 --seq-len 256")
SCRATCH = {  # a third more layers in the time of a step where ladder is 1.3 times as fast
    "standard, 6 layers": ["--n-layers", "6"],
    "parallel, 6 layers": ["--n-layers", "6", "--wiring", "parallel"],
    "ladder:3, 6 layers": ["--n-layers", "6", "--wiring", "ladder:3"],
    "ladder, 6 layers": ["--n-layers", "6", "--wiring", "ladder"],
    "ladder, 8 layers": ["--n-layers", "8", "--wiring", "ladder"],
}


def layers_of(n):
    """{which layers become ladder: adapt.py's flags}, of a model of n layers."""
    half, second = n // 2, ",".join(map(str, range(1, n, 2)))
    return {
        "none": [], "last half": ["--wiring", f"ladder:{half}"], "every second": ["--wiring", f"ladder:{second},"],
        "auto half": ["--wiring", f"ladder:auto{half}"], "all": ["--wiring", "ladder"],
    }  # fmt: skip


def run(flags, files, key):
    """The line of one run of adapt.py: its key, losses in nats per token, and how it was made."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "model"
        start = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            adapt.main([*flags, *files, "--out", str(out)])
        lines = [json.loads(line) for line in (Path(folder) / "model.run" / "log.jsonl").read_text().splitlines()]
        config = checkpoint.read_config(out)
    curve = [[line["tokens"], line["valid"]] for line in lines if "valid" in line]
    return key | {
        "nats": curve[-1][1], "before": curve[0][1], "curve": curve, "tokens": curve[-1][0], "wiring": config.wiring,
        "seconds": time.perf_counter() - start,
        "command": shlex.join(["python", "adapt.py", *flags, *(Path(f).name if f[0] != "-" else f for f in files)]),
        "threads": torch.get_num_threads(), "processor": report.processor(), "torch": torch.__version__,
        "commit": report.git_commit(),
    }  # fmt: skip


def chosen_rate(lines, key):
    """The learning rate with the lowest loss among lines of another plan, for this method, layers and share."""
    layers = "last half" if key["layers"] in ("every second", "auto half") else key["layers"]
    method = "distilled" if "distilled" in key["method"] else key["method"]
    same = [x for x in lines if (x["layers"], x["method"], x["share"]) == (layers, method, key["share"])]
    if not same:
        raise InputError(f"--rates has no line of {method}, {layers}, {key['share']}")
    return min(same, key=lambda line: line["nats"])["lr"]


def retraining(args, rates):
    """(key, flags) of each run of the plans rates, retrain and long."""
    config = checkpoint.read_config(args.checkpoint)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(args.checkpoint, config.vocab_size)
        at_hand = tokenize(args.text, tokenizer, config.eos_ids[0], Path(folder) / "tokens", show=False)
    shares = (1.0,) if args.plan == "long" else SHARES
    for share, (layers, wired) in itertools.product(shares, layers_of(config.n_layers).items()):
        steps = max(2, round(share * at_hand / STEP))
        for method, flags in METHODS.items():
            if layers == "none" and method != "plain":
                continue  # the control
            fixed = ["--checkpoint", args.checkpoint, *wired, *flags(steps), *WINDOW, "--steps", str(steps)]
            each = steps if args.plan == "rates" else -(-steps // 4)
            fixed += ["--warmup", str(max(1, steps // 10)), "--eval-every", str(each), "--valid-tokens", "40000"]
            key = {"plan": args.plan, "layers": layers, "method": method, "share": share}
            basic = layers in ("none", "last half", "all") and method in ("plain", "distilled")
            if args.plan == "rates" and basic:
                for rate in RATES:
                    yield key | {"seed": 0, "lr": rate}, [*fixed, "--lr", str(rate)]
            elif args.plan == "retrain" or (args.plan == "long" and basic):
                rate = chosen_rate(rates, key | {"share": min(share, max(SHARES))})
                for seed in SEEDS if args.plan == "retrain" else SEEDS[:1]:
                    yield key | {"seed": seed, "lr": rate}, [*fixed, "--lr", str(rate), "--seed", str(seed)]


def from_scratch():
    """(key, flags) of each run of the plan scratch."""
    for seed, (name, flags) in itertools.product(SEEDS, SCRATCH.items()):
        schedule = shlex.split("--steps 300 --batch 16 --dropout 0.1 --warmup 50 --eval-every 60 --dtype float32")
        yield {"plan": "scratch", "model": name, "seed": seed}, [*SHAPE, *flags, *schedule, "--seed", str(seed)]


def spread(values):
    """A mean, and where there are several values the least and the greatest."""
    mean = sum(values) / len(values)
    return f"{mean:.3f}" + (f" ({min(values):.3f}-{max(values):.3f})" if len(values) > 1 else "")


def tables(lines):
    """Losses by share of the tokens, and their excess over the control's; and losses of models from scratch."""
    retrained, parts = [line for line in lines if line["plan"] in ("retrain", "long")], []
    groups = grouped(retrained, "layers", "method", "share")
    shares, rows = sorted({share for _, _, share in groups}), []
    mean = {key: sum(x["nats"] for x in same) / len(same) for key, same in groups.items()}
    for layers, method in dict.fromkeys(key[:2] for key in groups):
        row = [layers, method, f"{groups[layers, method, shares[0]][0]['before']:.3f}"]
        for share in shares:
            key = layers, method, share
            excess = f", {100 * (mean.get(key, 0) / mean['none', 'plain', share] - 1):+.1f}%" * (layers != "none")
            row.append(spread([x["nats"] for x in groups[key]]) + excess if key in groups else "")
        rows.append(row)
    if rows:
        parts.append(markdown(["ladder layers", "how", "before", *(f"{100 * share:g} %" for share in shares)], rows))
    scratch = grouped([line for line in lines if line["plan"] == "scratch"], "model")
    if scratch:
        rows = [[model, spread([x["nats"] for x in same])] for (model,), same in scratch.items()]
        parts.append(markdown(["model", "nats per token"], rows))
    return "\n\n".join(parts)


def parse(argv):
    p = cli.Parser(__doc__)
    p.add_argument("--plan", choices=("rates", "retrain", "long", "scratch"), required=True, help="which runs")
    p.add_argument("--checkpoint", metavar="DIR", help="the standard model to retrain")
    p.add_argument("--text", nargs="+", required=True, metavar="FILE", help="to train on")
    p.add_argument("--valid", required=True, metavar="FILE", help="to validate on")
    rates = written_by("the plan rates", "layers", "method", "share", "lr", "nats")
    p.add_argument("--rates", type=rates, metavar="FILE", help="the lines of the plan rates, to choose from")
    p.add_argument("--json", type=cli.appendable, required=True, metavar="FILE", help="append a line for each run")
    add_show_flag(p, tables, "plan", "nats", "before")
    return p.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    if args.plan != "scratch" and not args.checkpoint or args.plan in ("retrain", "long") and not args.rates:
        raise InputError(f"--plan {args.plan} needs --checkpoint" + ", --rates" * (args.plan != "rates"))
    files = ["--text", *args.text, "--valid", args.valid]
    done = []
    if os.path.exists(args.json):
        done = [json.loads(line) for line in Path(args.json).read_text().splitlines()]
    for key, flags in from_scratch() if args.plan == "scratch" else retraining(args, args.rates):
        if not any(key.items() <= line.items() for line in done):
            line = run(flags, files, key)
            writing.append_line(args.json, line)
            print(", ".join(map(str, key.values())), f"{line['before']:.4f} -> {line['nats']:.4f}", flush=True)


if __name__ == "__main__":
    launch.run(main)
