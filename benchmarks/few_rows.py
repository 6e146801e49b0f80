"""Bandwidth of few_rows.cpp by rows of x, beside oneDNN's matmul and a plain sum of the same weights, in turns.

OMP_NUM_THREADS=1 python -m benchmarks.few_rows --json few_rows.jsonl

For int8 and int4 the other way is that of many rows: floats, a piece at a time, and then oneDNN. Each line is a matrix
shape of Llama 3.2 1B and a number of rows: GB/s of weights in their own bytes (median of 7 passes over 300 million
weights: 600 MB in bfloat16).
"""

import statistics

import torch
import torch.nn.functional as F

from benchmarks.lines import about
from kernels import cpu, int_linear
from measure.results import markdown
from measure.timing import in_turns, timed
from runtime import cli, launch, writing

SHAPES = [(8192, 2048), (2048, 8192), (128256, 2048)]  # of W
ROWS = [1, 2, 4, 8, 16, 24, 32, 64, 96, 128]
WEIGHTS = 300_000_000


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
    x, ops = torch.randn(rows, weights[0].shape[1]).bfloat16(), torch.ops.ladder
    ways = {
        "few_rows": (weights, lambda: [ops.few_rows(x, w) for w in weights]),
        "oneDNN": (weights, lambda: [F.linear(x, w) for w in weights]),
        "sum": (weights, lambda: [w.view(torch.float32).sum() for w in weights]),
    }
    for quant, packed in ints.items():
        tensors = [weight for weight, *_ in packed]
        ways[quant] = tensors, lambda packed=packed: [ops.few_rows_int(x, *parts) for parts in packed]
        ways[f"{quant} as floats"] = tensors, lambda packed=packed: [ops.many_rows_int(x, *parts) for parts in packed]
    seconds = in_turns({name: lambda way=way: timed("cpu", way) for name, (_, way) in ways.items()}, 7)
    return {name: sum(t.nbytes for t in ways[name][0]) / statistics.median(s) / 1e9 for name, s in seconds.items()}


def main(argv=None):
    p = cli.Parser(__doc__)
    cli.add_json_flag(p, "a line for each shape and number of rows")
    args = p.parse_args(argv)
    cpu.build()
    cpu.keep_freed_memory()
    made, rows = about("few_rows", argv), []
    for N, K in SHAPES:
        copies = max(1, WEIGHTS // (N * K))
        weights = [cpu.empty((N, K), torch.bfloat16).normal_(0, 0.02) for _ in range(copies)]
        ints = {quant: [integers(N, K, quant) for _ in range(copies)] for quant in ("int8", "int4")}
        for n in ROWS:
            line = {**made, "shape": [N, K], "rows": n, "gb_s": rates(weights, ints, n)}
            if args.json:
                writing.append_line(args.json, line)
            rows.append([f"{N} x {K}", str(n), *(f"{rate:.1f}" for rate in line["gb_s"].values())])
    print(f"{torch.get_num_threads()} threads, GB/s:\n\n" + markdown(["W", "rows of x", *line["gb_s"]], rows))


if __name__ == "__main__":
    launch.run(main)
