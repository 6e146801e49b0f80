"""Bandwidth of few_rows.cpp by rows of x, beside oneDNN's matmul and a plain sum of the same weights, in turns.

OMP_NUM_THREADS=1 python benchmarks/few_rows.py --json benchmarks/few_rows.jsonl

Each line is a matrix shape of Llama 3.2 1B and a number of rows: GB/s of weights (median of 7 passes over 600 MB).
"""

import json
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))
import checkpoint
import cpu
import exposed
import tp
from report import git_commit

CPU = torch.device("cpu")
SHAPES = [(8192, 2048), (2048, 8192), (128256, 2048)]


def rates(weights, rows):
    """GB/s of each way to read the weights: the median of 7 passes, in turns."""
    x, size = torch.randn(rows, weights[0].shape[1]).bfloat16(), sum(w.nbytes for w in weights)
    ways = {
        "few_rows": lambda: [torch.ops.ladder.few_rows(x, w) for w in weights],
        "oneDNN": lambda: [F.linear(x, w) for w in weights],
        "sum": lambda: [w.view(torch.float32).sum() for w in weights],
    }
    seconds = {name: [] for name in ways}
    for _ in range(7):
        for name, way in ways.items():
            seconds[name].append(exposed.timed(CPU, way))
    return {name: size / statistics.median(s) / 1e9 for name, s in seconds.items()}


def main():
    p = tp.Parser(__doc__)
    p.add_argument("--json", metavar="FILE", help="append the lines to this file")
    args = p.parse_args()
    if args.json is not None:
        checkpoint.check_appendable(args.json, "--json")
    cpu.build()
    about = {"threads": torch.get_num_threads(), "torch": torch.__version__, "commit": git_commit()}
    print(f"{about['threads']} threads, GB/s | rows | few_rows | oneDNN | sum")
    for N, K in SHAPES:
        count = max(1, 300_000_000 // (N * K))
        weights = [cpu.empty((N, K), torch.bfloat16).normal_(0, 0.02) for _ in range(count)]
        for rows in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64):
            line = {**about, "shape": [N, K], "rows": rows, "gb_s": rates(weights, rows)}
            print(f"{N} x {K} | {rows} | " + " | ".join(f"{rate:.1f}" for rate in line["gb_s"].values()), flush=True)
            if args.json:
                with open(args.json, "a") as f:
                    f.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    tp.run(main)
