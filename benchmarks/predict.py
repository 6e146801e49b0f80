"""A step of a whole model from a few of its layers: overlap.py's lines of one rank alone, put on the clock.

python -m benchmarks.predict predict-layers.jsonl --json predict.jsonl

Measured are the step without all-reduces (silent_ms) for two numbers of layers, and an all-reduce on its own over each
link. A layer takes the difference over their number; its attention and its MLP share that by the bytes that they read.
The loop of model.py, run on the clock of measure/clock.py, makes a step of the whole model of these. The results, next
to the paper's (results/paper.csv), are two tables, and lines as bench.sh writes them, for measure/plot.py.
"""

import dataclasses
import itertools
import statistics
from pathlib import Path

import torch

from benchmarks.lines import written_by
from formats.checkpoint import SIZES
from measure.advise import attention_share, decode_work
from measure.clock import run_layers, variants
from measure.results import markdown, published
from model import InputError
from runtime import cli, launch, writing

PAPER_LINKS = {"nvlink": "NVLink", "pcie": "no P2P"}  # what they stand for
KEPT = ["model", "tp", "simulated", "batch", "dtype", "device", "threads", "link", "torch", "commit"]
KEYS = [*KEPT, "kind", "n_layers", "tokens", "wiring", "silent_ms", "all_reduce_ms"]


def step_ms(config, layer, attention, all_reduce):
    """What a step takes in the config's wiring, if a layer takes so long, its attention so long of it, and nothing else
    takes time but the all-reduces."""
    return run_layers(config, attention, layer - attention, all_reduce).now


def predictions(lines):
    """{(model, batch, link, wiring): a line of the whole model}. Raises InputError for lines that are not enough."""
    for line in lines:
        if line["kind"] != "decode" or not line["simulated"] or line["model"] not in SIZES:
            raise InputError(f"{line['model']}, {line['kind']}, is no decode step of a named size by --simulate-tp")
    found = {}
    for model, batch in dict.fromkeys((line["model"], line["batch"]) for line in lines):
        own = [line for line in lines if (line["model"], line["batch"]) == (model, batch)]
        counts = sorted({line["n_layers"] for line in own})
        if len(counts) != 2:
            raise InputError(f"{model}, batch {batch} has not two numbers of layers, but {counts}")
        # the all-reduces apart, all wirings over all links do about the same: their median is the surer one
        fewer, more = (statistics.median(x["silent_ms"] for x in own if x["n_layers"] == n) for n in counts)
        layer = (more - fewer) / (counts[1] - counts[0])
        rest = more - layer * counts[1]
        known = variants(SIZES[model].n_layers)
        for line in own:
            key = model, batch, line["link"]["name"], line["wiring"]
            if key[3] not in known:
                raise InputError(f"unknown wiring {key[3]!r}; known: {', '.join(known)}")
            config = dataclasses.replace(SIZES[model], **known[key[3]])
            alone = statistics.median(x["all_reduce_ms"] for x in own if x["link"]["name"] == key[2])
            work = decode_work(config, torch.bfloat16, line["tp"], batch, line["tokens"])
            attention = layer * attention_share(work)
            found[key] = whole(line, known[key[3]], config.n_layers, step_ms(config, layer, attention, alone) + rest)
    for key in found:
        if (*key[:3], "standard") not in found:
            raise InputError(f"{', '.join(map(str, key))} has no standard wiring to be compared with")
    return found


def whole(line, wired, n_layers, step_ms):
    """A line of the whole model, in the form of bench.sh's. wired: its wiring, as changes of a Config."""
    return {
        **{key: line[key] for key in KEPT}, **wired, "n_layers": n_layers, "quant": None, "settings": {},
        "hardware": line.get("hardware", "hardware not recorded"), "prompt_tokens": line["tokens"], "new_tokens": 1,
        "tpot_ms": step_ms, "tok_s": 1e3 * line["batch"] / step_ms, "tok_s_user": 1e3 / step_ms, "ttft_ms": None,
        "prefill_s": None, "decode_s": None, "mbu": None, "exposed": None,
    }  # fmt: skip


def tables(found):
    """Both tables, as one text; what the paper measured is in parentheses."""
    rates, speedups = (
        {(r["model"], r["link"], r["wiring"], r["batch"]): r[kind] for r in published() if r[kind]}
        for kind in ("tok_s", "speedup")
    )
    models, links = (list(dict.fromkeys(key[i] for key in found)) for i in (0, 2))
    wirings = [name for name in variants(2) if any(key[3] == name for key in found)]

    def ratio(key):
        return found[key]["tok_s"] / found[*key[:3], "standard"]["tok_s"]

    by_size = []
    for model, wiring in itertools.product(models, [w for w in wirings if w != "standard"]):
        cells = []
        for link in links:
            key, paper = (model, 4, link, wiring), speedups.get((model, PAPER_LINKS.get(link), wiring, 4))
            text = f"{ratio(key):.2f}" if key in found else ""
            cells.append(f"{text} ({paper:.2f})" if text and paper else text)
        tp_size = next(line["tp"] for key, line in found.items() if key[0] == model)
        by_size.append([model, str(tp_size), wiring, *cells])
    batches, by_batch = sorted({key[1] for key in found if key[0] == "70b"}), []
    for link, wiring in itertools.product(links, wirings):
        cells = []
        for batch in batches:
            key = "70b", batch, link, wiring
            paper = [rates.get(("70b", PAPER_LINKS.get(link), w, batch)) for w in (wiring, "standard")]
            text = f"{found[key]['tok_s']:.2f}, {ratio(key):.2f}" if key in found else ""
            cells.append(text + f" ({paper[0]:.2f}, {paper[0] / paper[1]:.2f})" if all(paper) else text)
        by_batch.append([link, wiring, *cells])
    by_batch = [row for row in by_batch if any(row[2:])]
    parts = {
        "tok/s over standard's, batch 4": (["model", "ranks", "wiring", *links], by_size),
        "70b, 8 ranks, tok/s, and over standard's": (["link", "wiring", *(f"batch {b}" for b in batches)], by_batch),
    }
    return "\n\n".join(f"{title}:\n\n{markdown(*table)}" for title, table in parts.items() if table[1])


def main(argv=None):
    p = cli.Parser(__doc__)
    layers = written_by("benchmarks/overlap.py", *KEYS)
    p.add_argument("files", type=layers, metavar="FILE", nargs="+", help="lines of overlap.py --simulate-tp")
    p.add_argument("--json", type=cli.appendable, metavar="FILE", help="write the lines of whole models")
    args = p.parse_args(argv)
    found = predictions([*itertools.chain(*args.files)])
    if args.json:
        Path(args.json).write_text("")  # the lines are worked out anew: those of before would be there twice
        for line in found.values():
            writing.append_line(args.json, line)
    print(tables(found))


if __name__ == "__main__":
    launch.run(main)
