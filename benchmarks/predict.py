"""A step of a whole model from a few of its layers: overlap.py's lines of one rank alone, put on the clock.

python benchmarks/predict.py benchmarks/predict-layers.jsonl --json benchmarks/predict.jsonl

Measured are the step without all-reduces (silent_ms) for two numbers of layers, and an all-reduce on its own over each
link. A layer takes the difference over their number; its attention and its MLP share that by the bytes that they read.
The loop of model.py, run on the clock of exposed.py, makes a step of the whole model of these. The results, beside the
paper's (paper.csv), are two tables, and lines as bench.sh writes them, for plot.py.
"""

import dataclasses
import itertools
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from overlap import read_lines

import checkpoint
import plot
import tp
from exposed import count_all_reduces, run_clock
from model import SIZES, InputError

PAPER_LINKS = {"nvlink": "NVLink", "pcie": "no P2P"}  # what they stand for


def attention_share(config, tp_size, batch, tokens):
    """The part of a layer's bytes that attention reads in a decode step: weights, and so many filled cache slots."""
    cache = batch * tokens * 2 * max(config.n_kv_heads, tp_size) * config.head_dim
    qkv = (config.n_heads + 2 * max(config.n_kv_heads, tp_size)) * config.head_dim
    attention = config.dim * (qkv + config.n_heads * config.head_dim) + cache
    return attention / (attention + 3 * config.dim * config.intermediate_size)


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
        for line in own:
            key = model, batch, line["link"]["name"], line["wiring"]
            alone = statistics.median(x["all_reduce_ms"] for x in own if x["link"]["name"] == key[2])
            config = dataclasses.replace(SIZES[model], wiring=key[3])
            attention = layer * attention_share(config, line["tp"], batch, line["tokens"])
            compute = [layer] if key[3] == "parallel" else [attention, layer - attention]
            step_ms = run_clock(config, compute * config.n_layers, alone).now + rest
            if count_all_reduces(config) == 0:  # what the clock goes by
                step_ms += layer * config.n_layers
            found[key] = whole(line, config.n_layers, step_ms)
    for key in found:
        if (*key[:3], "standard") not in found:
            raise InputError(f"{', '.join(map(str, key))} has no standard wiring to be compared with")
    return found


def whole(line, n_layers, step_ms):
    """A line of the whole model, in the form of bench.sh's."""
    keys = ["model", "wiring", "tp", "simulated", "batch", "dtype", "device", "threads", "link", "torch", "commit"]
    return {
        **{key: line[key] for key in keys}, "n_layers": n_layers, "quant": None, "settings": {},
        "hardware": line.get("hardware", "hardware not recorded"), "prompt_tokens": line["tokens"], "new_tokens": 1,
        "tpot_ms": step_ms, "tok_s": 1e3 * line["batch"] / step_ms, "tok_s_user": 1e3 / step_ms, "ttft_ms": None,
        "prefill_s": None, "decode_s": None, "mbu": None, "exposed": None,
    }  # fmt: skip


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
            text = f"{ratio(key):.2f}" if key in found else ""
            cells.append(f"{text} ({paper:.2f})" if text and paper else text)
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
    found = predictions([line for file in args.files for line in read_lines(file, flag="", writer="overlap.py")])
    if args.json:
        checkpoint.check_appendable(args.json, "--json")
        Path(args.json).write_text("".join(json.dumps(line) + "\n" for line in found.values()))
    print(tables(found))


if __name__ == "__main__":
    tp.run(main)
