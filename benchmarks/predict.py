"""The whole model's step from a few of its layers: overlap.py's lines of one rank alone, at two numbers of layers.

python benchmarks/predict.py benchmarks/predict-layers.jsonl --json benchmarks/predict.jsonl

A layer takes a step what the lines of more layers take longer than those of fewer. The results, beside the paper's
(paper.csv), are two tables, and lines as bench.sh writes them, for plot.py.
"""

import itertools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from overlap import read_lines

import checkpoint
import plot
import report
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
        "hardware": report.processor(), "settings": {},
        "prompt_tokens": more["tokens"], "new_tokens": 1, "tpot_ms": step_ms, "tok_s": 1e3 * more["batch"] / step_ms,
        "tok_s_user": 1e3 / step_ms, "ttft_ms": None, "prefill_s": None, "decode_s": None, "mbu": None, "exposed": None,
    }  # fmt: skip


def predictions(lines):
    """{(model, batch, link, wiring): extrapolated line}; InputError unless each has two lines, and a standard one."""
    pairs = {}
    for line in lines:
        if line["kind"] != "decode" or not line["simulated"] or line["model"] not in SIZES:
            raise InputError(f"{line['model']}, {line['kind']}, is no decode step of a named size by --simulate-tp")
        key = line["model"], line["batch"], line["link"]["name"], line["wiring"]
        pairs.setdefault(key, []).append(line)
    for key, pair in pairs.items():
        if len(pair) != 2 or pair[0]["n_layers"] == pair[1]["n_layers"]:
            raise InputError(f"{', '.join(map(str, key))} has not two numbers of layers")
        if (*key[:3], "standard") not in pairs:
            raise InputError(f"{', '.join(map(str, key))} has no standard wiring to be compared with")
    return {key: extrapolate(*sorted(pair, key=lambda line: line["n_layers"])) for key, pair in pairs.items()}


def tables(found):
    """Both tables, as one text; what the paper measured is in parentheses."""
    rates, speedups = (
        {(r["model"], r["link"], r["wiring"], r["batch"]): r[kind] for r in plot.published() if r[kind]}
        for kind in ("tok_s", "speedup")
    )
    models, links = (list(dict.fromkeys(key[i] for key in found)) for i in (0, 2))

    def ratio(key):
        return found[key]["tok_s"] / found[*key[:3], "standard"]["tok_s"]

    by_size = []
    for model, wiring in itertools.product(models, ("ladder", "parallel", "upper-bound")):
        cells = []
        for link in links:
            key, paper = (model, 4, link, wiring), speedups.get((model, PAPER_LINKS.get(link), wiring, 4))
            cells.append(f"{ratio(key):.2f}" + f" ({paper:.2f})" * bool(paper) if key in found else "")
        tp_size = next(line["tp"] for key, line in found.items() if key[0] == model)
        by_size.append([model, str(tp_size), wiring, *cells])
    batches, by_batch = sorted({key[1] for key in found if key[0] == "70b"}), []
    for link, wiring in itertools.product(links, ("standard", "parallel", "ladder", "upper-bound")):
        cells = []
        for batch in batches:
            key = "70b", batch, link, wiring
            paper = [rates.get(("70b", PAPER_LINKS.get(link), w, batch)) for w in (wiring, "standard")]
            text = f"{found[key]['tok_s']:.2f}, {ratio(key):.2f}" if key in found else ""
            cells.append(text + f" ({paper[0]:.2f}, {paper[0] / paper[1]:.2f})" if all(paper) else text)
        by_batch.append([link, wiring, *cells])
    by_batch = [row for row in by_batch if any(row[2:])]
    return (
        "tok/s over standard's, batch 4:\n\n"
        + plot.markdown(["model", "ranks", "wiring", *links], by_size)
        + "\n\n70b, 8 ranks, tok/s, and over standard's:\n\n"
        + plot.markdown(["link", "wiring", *(f"batch {b}" for b in batches)], by_batch)
    )


def main():
    p = tp.Parser(__doc__)
    p.add_argument("files", metavar="FILE", nargs="+", help="lines of overlap.py --simulate-tp")
    p.add_argument("--json", metavar="FILE", help="write the lines of whole models")
    args = p.parse_args()
    found = predictions([line for file in args.files for line in read_lines(file, flag="")])
    if args.json:
        checkpoint.check_appendable(args.json, "--json")
        Path(args.json).write_text("".join(json.dumps(line) + "\n" for line in found.values()))
    print(tables(found))


if __name__ == "__main__":
    tp.run(main)
