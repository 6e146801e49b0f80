"""The whole model's step from a few of its layers: overlap.py's lines of one rank alone, at two numbers of layers.

python benchmarks/predict.py benchmarks/predict-layers.jsonl --json benchmarks/predict.jsonl

A layer takes a step what the lines of more layers take longer than those of fewer. The results, beside the paper's
(paper.csv), are two tables, and lines as bench.sh writes them, for plot.py.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from overlap import read_lines

import checkpoint
import plot
import tp
from model import SIZES, InputError

PAPER_LINKS = {"nvlink": "NVLink", "pcie": "no P2P"}  # what they stand for


def extrapolate(fewer, more):
    """The line of the whole model, from those of two numbers of layers."""
    n_layers = SIZES[more["model"]].n_layers
    layer = (more["step_ms"] - fewer["step_ms"]) / (more["n_layers"] - fewer["n_layers"])
    step_ms = more["step_ms"] + (n_layers - more["n_layers"]) * layer
    keys = ["model", "wiring", "tp", "simulated", "batch", "dtype", "device", "threads", "link", "torch", "commit"]
    return {
        **{key: more[key] for key in keys},
        "n_layers": n_layers, "measured_layers": [fewer["n_layers"], more["n_layers"]], "quant": None,
        "hardware": "a step of the whole, from a few of its layers", "settings": {},
        "prompt_tokens": more["tokens"], "new_tokens": 1, "tpot_ms": step_ms, "tok_s": 1e3 * more["batch"] / step_ms,
        "tok_s_user": 1e3 / step_ms, "ttft_ms": None, "prefill_s": None, "mbu": None, "exposed": None,
    }  # fmt: skip


def predictions(lines):
    """The extrapolated line of each (model, batch, link, wiring)."""
    pairs = {}
    for line in lines:
        key = line["model"], line["batch"], line["link"]["name"], line["wiring"]
        pairs.setdefault(key, []).append(line)
    for key, pair in pairs.items():
        if len(pair) != 2 or pair[0]["n_layers"] == pair[1]["n_layers"]:
            raise InputError(f"{', '.join(map(str, key))} has not two numbers of layers")
    return {key: extrapolate(*sorted(pair, key=lambda line: line["n_layers"])) for key, pair in pairs.items()}


def tables(found):
    rates, speedups = (
        {(r["model"], r["link"], r["wiring"], r["batch"]): r[kind] for r in plot.published() if r[kind]}
        for kind in ("tok_s", "speedup")
    )
    links = list(dict.fromkeys(key[2] for key in found))

    def ratio(model, batch, link, wiring):
        both = [found.get((model, batch, link, w)) for w in (wiring, "standard")]
        return both[0]["tok_s"] / both[1]["tok_s"] if all(both) else None

    def cell(model, batch, link, wiring):
        mine = ratio(model, batch, link, wiring)
        speedup = speedups.get((model, PAPER_LINKS.get(link), wiring, batch))
        return "" if mine is None else f"{mine:.2f}" + (f" ({speedup:.2f})" if speedup else "")

    by_size = [
        [model, str(next(v["tp"] for k, v in found.items() if k[0] == model)), wiring,
         *(cell(model, 4, link, wiring) for link in links)]
        for model in SIZES for wiring in ("ladder", "parallel", "upper-bound") if (model, 4, links[0], wiring) in found
    ]  # fmt: skip
    batches = sorted({key[1] for key in found if key[0] == "70b"})
    by_batch = []
    for link in links:
        for wiring in ("standard", "parallel", "ladder", "upper-bound"):
            cells = []
            for batch in batches:
                line = found.get(("70b", batch, link, wiring))
                text = f"{line['tok_s']:.2f}, {ratio('70b', batch, link, wiring):.2f}" if line else ""
                both = [rates.get(("70b", PAPER_LINKS.get(link), w, batch)) for w in (wiring, "standard")]
                cells.append(text + (f" ({both[0]:.2f}, {both[0] / both[1]:.2f})" if all(both) else ""))
            by_batch.append([link, wiring, *cells])
    return (
        "tok/s over standard's, batch 4 (the paper's):\n\n"
        + plot.markdown(["model", "ranks", "wiring", *links], by_size)
        + "\n\n70b, 8 ranks, tok/s and over standard's (the paper's):\n\n"
        + plot.markdown(["link", "wiring", *(f"batch {b}" for b in batches)], by_batch)
    )


def main():
    p = tp.Parser(__doc__)
    p.add_argument("files", metavar="FILE", nargs="+", help="lines of overlap.py --simulate-tp")
    p.add_argument("--json", metavar="FILE", help="write the lines of whole models")
    args = p.parse_args()
    found = predictions([line for file in args.files for line in read_lines(file)])
    if args.json:
        checkpoint.check_appendable(args.json, "--json")
        Path(args.json).write_text("".join(json.dumps(line) + "\n" for line in found.values()))
    print(tables(found))


if __name__ == "__main__":
    tp.run(main)
