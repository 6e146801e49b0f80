"""What a standard model loses, without retraining, in the wirings that run its weights: a line of JSON each.

torchrun --standalone --nproc_per_node=2 -m benchmarks.zeroshot --checkpoint DIR --valid FILE --select SELECT \
    --json zeroshot.jsonl
python -m benchmarks.zeroshot --show zeroshot.jsonl

One rank runs the wirings that are one function on any number of ranks, several those that are another on each. Each is
in all layers, and in that half of them which alone, one by one, cost the least on SELECT, another text than the one
that is reported. Lines that the file has already are skipped.
"""

import itertools
import os
import tempfile
import time
from pathlib import Path

import generate
from benchmarks.lines import about, add_show_flag, written_by
from formats import checkpoint
from formats.tokenizer import load_tokenizer
from measure import score
from measure.results import markdown
from model import WIRINGS, InputError, rewired, wiring_name
from runtime import cli, launch, writing
from runtime.cli import count
from training.data import Windows, tokenize

WINDOW = 256  # tokens, as in benchmarks/adapt.py
HALF = "least sensitive half"
KEYS = "model", "tp", "wiring", "layers", "nats", "wired_layers"


def cases(tp):
    """(wiring, which layers) of each run on so many ranks."""
    yield "standard", "all"
    for name, known in WIRINGS.items():
        if known.parameter and known.tp_bound == (tp > 1):
            yield (name if known.parameter == "layers" else f"{name}:2"), "all"
            if known.parameter == "layers":
                yield name, HALF


def documents(path, flag, at_most, tokenizer, end):
    """What adapt.py's validation windows hold of each document, as lists of ids: alone, it is scored as it is there."""
    checkpoint.read_text(path, flag=f"{flag} ")  # or an InputError that names the flag
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens"
        tokenize([path], tokenizer, end, tokens, show=False)
        windows, found = Windows(tokens, WINDOW, flag, at_most=at_most), []
        for first in range(0, windows.n * WINDOW, WINDOW):
            rows = windows.tokens[first : first + WINDOW + 1].tolist()
            found += [[row[0] for row in same] for _, same in itertools.groupby(rows, key=lambda row: row[1])]
    return sorted((ids for ids in found if len(ids) > 1), key=len)  # so that a batch has little padding


def nats_per_token(model, documents, batch):
    """Over all tokens but the first of each; every rank has the same."""
    total = score.total_nats(model, documents, WINDOW + 1, WINDOW, batch)
    return total / sum(len(ids) - 1 for ids in documents)


def tables(lines):
    """A table for each model: a row a wiring and its layers, with those of a half, a column a number of ranks."""
    parts = []
    for model in dict.fromkeys(line["model"] for line in lines):
        own = [line for line in lines if line["model"] == model]
        base = {line["tp"]: line["nats"] for line in own if line["wiring"] == "standard"}
        tps, cells = sorted(base), {}
        for line in own:
            excess = f", {100 * (line['nats'] / base[line['tp']] - 1):+.1f}%" * (line["wiring"] != "standard")
            chosen = f" ({', '.join(map(str, line['wired_layers']))})" * (line["layers"] == HALF)
            cells.setdefault((line["wiring"], line["layers"]), {})[line["tp"]] = f"{line['nats']:.3f}{excess}{chosen}"
        head = ["wiring", "layers", *("any ranks" if tp == 1 else f"{tp} ranks" for tp in tps)]
        rows = [[*key, *(row.get(tp, "") for tp in tps)] for key, row in cells.items()]
        parts.append(f"{model}:\n\n{markdown(head, rows)}")
    return "\n\n".join(parts)


def parse(argv):
    p = cli.Parser(__doc__)
    p.add_argument("--checkpoint", required=True, metavar="DIR", help="a standard model")
    p.add_argument("--valid", required=True, metavar="FILE", help="the text that is reported")
    p.add_argument("--select", required=True, metavar="FILE", help="the text that the layers are chosen on")
    p.add_argument("--valid-tokens", type=count, default=40000, metavar="N", help="use so many of the one")
    p.add_argument("--select-tokens", type=count, default=10000, metavar="N", help="and so many of the other")
    p.add_argument("--batch", type=count, default=32, metavar="B", help="rows at a time")
    cli.add_rank_flags(p)
    p.add_argument("--json", type=cli.appendable, required=True, metavar="FILE", help="append a line for each run")
    add_show_flag(p, tables, *KEYS)
    return p.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    world = launch.join(args.device, vars(args))
    with world.together():
        own = checkpoint.read_config(args.checkpoint)
        if own.wiring != "standard":
            raise InputError(f"--checkpoint {args.checkpoint} is {own.wiring}, but must be standard")
        tokenizer = load_tokenizer(args.checkpoint, own.vocab_size)
        if tokenizer is None or not own.eos_ids:
            raise InputError(f"--checkpoint {args.checkpoint} has no {'eos_ids' if tokenizer else 'tokenizer'}")
        valid = documents(args.valid, "--valid", args.valid_tokens, tokenizer, own.eos_ids[0])
        select = documents(args.select, "--select", args.select_tokens, tokenizer, own.eos_ids[0])
        started = os.path.exists(args.json) and os.path.getsize(args.json)
        done = written_by("this script", *KEYS)(args.json) if started else []
    model, made = generate.load_model(own, args.checkpoint, None, world), about("zeroshot", argv, world)
    for wiring, layers in cases(world.tp_size):
        key = {"model": checkpoint.name(args.checkpoint), "tp": world.tp_size, "wiring": wiring, "layers": layers}
        if any(key.items() <= line.items() for line in done):
            continue
        start, found, half = time.perf_counter(), None, None
        if layers == HALF:
            found = score.sensitivity(model, lambda m: nats_per_token(m, select, args.batch), wiring)
            half = score.least_sensitive(world.gather(found)[0], own.n_layers // 2)  # the same on all ranks
        model.config = rewired(own, wiring_name(wiring, half) if half else wiring)
        line = {
            **made, **key, "nats": nats_per_token(model, valid, args.batch),
            "tokens": sum(len(ids) - 1 for ids in valid), "wired_layers": half or [*range(own.n_layers)],
            "sensitivity": found, "n_layers": own.n_layers,
        }  # fmt: skip
        if wiring == "standard":
            line["select_nats"] = nats_per_token(model, select, args.batch)
        model.config = own
        line["seconds"] = time.perf_counter() - start
        if world.rank == 0:
            writing.append_line(args.json, line)
            print(", ".join(map(str, key.values())), f"{line['nats']:.4f}", flush=True)


if __name__ == "__main__":
    launch.run(main)
