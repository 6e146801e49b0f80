"""Bandwidth of few_rows.cpp by rows of x, beside oneDNN's matmul and a plain sum of the same weights, in turns.

For int8 and int4 the other way is that of many rows: floats, a piece at a time, and then oneDNN.

OMP_NUM_THREADS=1 python benchmarks/few_rows.py --json benchmarks/few_rows.jsonl

Each line is a matrix shape of Llama 3.2 1B and a number of rows: GB/s of weights in their own bytes (median of 7 passes
over 300 million weights: 600 MB in bfloat16).
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
import int_linear
import report
import tp

CPU = torch.device("cpu")
SHAPES = [(8192, 2048), (2048, 8192), (128256, 2048)]


def integers(N, K, quant):
    """Random integers as the products take them."""
    linear = int_linear.IntLinear(N, K, quant, 64, bias=False)
    weight = cpu.empty(linear.weight.shape, linear.weight.dtype).random_(0, 128)
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    linear.scales.fill_(0.01)
    if quant == "int4":
        linear.zeros.fill_(-0.08)
    return cpu.pack(linear.weight, linear.scales, linear.zeros), N, K, 4 if quant == "int4" else 8


@torch.inference_mode()
def rates(weights, ints, rows):
    """GB/s of each way to read the weights: the median of 7 passes, in turns. ints: {quant: [integers, ...]}."""
    x = torch.randn(rows, weights[0].shape[1]).bfloat16()
    ops = torch.ops.ladder
    ways = {
        "few_rows": (weights, lambda: [ops.few_rows(x, w) for w in weights]),
        "oneDNN": (weights, lambda: [F.linear(x, w) for w in weights]),
        "sum": (weights, lambda: [w.view(torch.float32).sum() for w in weights]),
    }
    for quant, packed in ints.items():
        tensors = [weight for weight, *_ in packed]
        ways[quant] = tensors, lambda packed=packed: [ops.few_rows_int(x, *parts) for parts in packed]
        ways[f"{quant} as floats"] = tensors, lambda packed=packed: [ops.many_rows_int(x, *parts) for parts in packed]
    seconds = {name: [] for name in ways}
    for _ in range(7):
        for name, (_, way) in ways.items():
            seconds[name].append(exposed.timed(CPU, way))
    return {name: sum(t.nbytes for t in ways[name][0]) / statistics.median(s) / 1e9 for name, s in seconds.items()}


def main():
    p = tp.Parser(__doc__)
    p.add_argument("--json", metavar="FILE", help="append the lines to this file")
    args = p.parse_args()
    if args.json is not None:
        checkpoint.check_appendable(args.json, "--json")
    cpu.build()
    cpu.keep_freed_memory()
    about = {"threads": torch.get_num_threads(), "torch": torch.__version__, "commit": report.git_commit()}
    about["processor"] = report.processor()
    print(f"{about['threads']} threads, GB/s | rows | few_rows | oneDNN | sum | int8 | as floats | int4 | as floats")
    for N, K in SHAPES:
        count = max(1, 300_000_000 // (N * K))
        weights = [cpu.empty((N, K), torch.bfloat16).normal_(0, 0.02) for _ in range(count)]
        ints = {quant: [integers(N, K, quant) for _ in range(count)] for quant in ("int8", "int4")}
        for rows in (1, 2, 4, 8, 16, 24, 32, 64, 96, 128):
            line = {**about, "shape": [N, K], "rows": rows, "gb_s": rates(weights, ints, rows)}
            print(f"{N} x {K} | {rows} | " + " | ".join(f"{rate:.1f}" for rate in line["gb_s"].values()), flush=True)
            if args.json:
                with open(args.json, "a") as f:
                    f.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    tp.run(main)
