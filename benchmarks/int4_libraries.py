"""int4 at 1, 4, 16 and 64 rows on a GPU: our kernel, bfloat16, and the libraries that are installed, in turns.

python -m benchmarks.int4_libraries --json int4.jsonl                # pip install gemlite torchao
python -m benchmarks.int4_libraries --device cpu --json int4.jsonl   # to try the script: its times mean nothing

The four matrices of a layer of the 8b (in small on a CPU), groups of 64. A library that is not installed, or fails, is
skipped with a line. No GPU has run this yet.
"""

import functools
import statistics

import torch
import torch.nn.functional as F

from ladder import outputs
from ladder.benchmarking import environment, in_turns, pivot, timed
from ladder.command_line import flags
from ladder.errors import first_line
from ladder.kernels import quant_kernels
from ladder.kernels.quant_linear import QuantLinear, dequantize, unpack
from ladder.ranks import launch

SHAPES = {"cuda": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)], "cpu": [(256, 128), (128, 256)]}
GROUP = 64
ROWS = (1, 4, 16, 64)
ROUNDS = 5


def make_matrix(N, K, device):
    """Return a QuantLinear of random int4 in bfloat16, as the checkpoint stores it."""
    linear = QuantLinear((N, K), "int4", GROUP).to(device)
    linear.weight.random_(0, 256)
    linear.scales.fill_(0.02 / 4.6)
    linear.zeros.fill_(-7.5 * 0.02 / 4.6)
    return linear


def ours(linear):
    if linear.weight.is_cuda:
        quant_kernels.KERNELS["int4", "cuda"]([linear])
    return linear


def floats(linear):
    return dequantize(linear.weight, linear.scales, linear.zeros, torch.bfloat16)


def bfloat16(linear):
    w = floats(linear)
    return lambda x: F.linear(x, w)


def dequantized(linear):
    """All weights are turned into floats at each product."""
    return lambda x: F.linear(x, floats(linear))


def gemlite(linear):
    from gemlite.helper import A16W4_HQQ_INT

    zeros = -linear.zeros.float() / linear.scales.float()  # W = (q - zero) scale
    pack = A16W4_HQQ_INT(device=str(linear.weight.device), dtype=torch.bfloat16)
    return pack.from_weights(unpack(linear.weight), linear.scales.bfloat16(), zeros.bfloat16())


def torchao(packing, linear):
    from torchao.quantization import Int4WeightOnlyConfig, quantize_

    K = linear.in_features
    N = linear.out_features
    plain = torch.nn.Linear(K, N, bias=False, device=linear.weight.device, dtype=torch.bfloat16)
    plain.weight.data.copy_(floats(linear))
    quantize_(plain, Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format=packing))
    return plain


WAYS = {
    "ours": ours, "bfloat16": bfloat16, "floats each time": dequantized, "gemlite": gemlite,
    "torchao, plain": functools.partial(torchao, "plain"),
    "torchao, tiles": functools.partial(torchao, "tile_packed_to_4d"),
}  # fmt: skip


def layer_step(make, rows, device):
    """Return a function that multiplies by a layer's matrices, on a GPU by a graph. Raises what a library raises."""
    generator = torch.Generator(device).manual_seed(0)
    xs = []
    linears = []
    products = []
    for N, K in SHAPES[device.type]:
        linear = make_matrix(N, K, device)
        exact = bfloat16(linear)
        xs.append(torch.randn(rows, K, device=device, generator=generator).bfloat16())
        expected = exact(xs[-1]).float()
        linears.append(make(linear))
        error = (linears[-1](xs[-1]).float() - expected).norm() / expected.norm()
        if not error < 0.1:
            raise RuntimeError(f"its products are off by {error:.0%}")

    def step():
        products[:] = [linear(x) for linear, x in zip(linears, xs, strict=True)]

    if device.type == "cuda":
        from ladder.kernels.cuda_graphs import captured

        return captured(step)[0]
    return step


@torch.inference_mode()
def main(argv=None):
    p = flags.Parser(__doc__)
    flags.add_rank_flags(p, comm=False)
    flags.add_json_flag(p, "a line for each way and number of rows")
    args = p.parse_args(argv)
    world = launch.join(args.device)
    lines = []
    names = list(WAYS)
    for rows in ROWS:
        steps = {}
        for name in list(names):
            try:
                steps[name] = layer_step(WAYS[name], rows, world.device)
            except Exception as e:  # a library may raise anything
                world.say(f"{name} is skipped from {rows} rows on: {type(e).__name__}: {first_line(e)}")
                names.remove(name)
        ways = {name: functools.partial(timed, world.device, step) for name, step in steps.items()}
        for name, seconds in in_turns(ways, ROUNDS).items():
            us = 1e6 * statistics.median(seconds)
            lines.append({"case": "int4 layer", "way": name, "rows": rows, "us": us, **environment(world)})
    if args.json:
        for line in lines:
            outputs.append_line(args.json, line)
    table = pivot(["way"], lines, lambda x: (x["way"],), lambda x: f"{x['rows']} rows", lambda x, _: f"{x['us']:.0f}")
    print(f"us of a layer's products\n\n{table}")


if __name__ == "__main__":
    launch.run(main)
