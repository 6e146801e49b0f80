"""Write a checkpoint's matrices in 8 or 4 bits; ladder/kernels/quant_linear.py says how these are stored.

python quantize.py --checkpoint DIR --mode int8 --out DIR2
python quantize.py --checkpoint DIR --mode int4 --group-size 64 --keep output --out DIR2
"""

import dataclasses
import functools
import sys

import ladder.openmp  # noqa: F401 (before torch loads)

import torch
from tqdm import tqdm

from ladder import outputs
from ladder.checkpoints import checkpoint, writing
from ladder.command_line import flags
from ladder.errors import InputError
from ladder.kernels.quant_linear import FP8_MAX
from ladder.ranks import launch
from model import build
from tp import shard_plan

QUANTIZED_AT_ONCE = 2**18  # numbers that are quantized at a time; they fit a processor's cache
FILE_BYTES = 2**26  # of a written file, or a layer if it is larger: the tensors of a file are in memory at once


def to_int8(w):
    """Return integers (N, K) int8 and scales (N, 1) bfloat16 for w (N, K) float32; zero stays zero."""
    scales = (w.abs().amax(dim=1, keepdim=True) / 127).bfloat16()
    q = (w / _nonzero(scales.float())).round().clamp(-127, 127)
    return q.to(torch.int8), scales


def to_e4m3(w):
    """Return e4m3 (N, K) and scales (N, 1) bfloat16 for w (N, K) float32; the largest of a row becomes 448."""
    scales = (w.abs().amax(dim=1, keepdim=True) / FP8_MAX).bfloat16()
    q = (w / _nonzero(scales.float())).clamp(-FP8_MAX, FP8_MAX)
    return q.to(torch.float8_e4m3fn), scales


def to_int4(w, group_size, iterations=20):
    """Return integers (N, K / 2) uint8, scales and zeros (N, K / group_size) bfloat16 for w (N, K) float32.

    The first integers are 16 even steps over the range of each group. Each iteration takes the scale and the zero with
    the least squared error for the integers, then the nearest integers for these (Lloyd's algorithm on an even grid).
    Each group keeps its best result. Scales and zeros are rounded to bfloat16 before the integers are chosen, so that
    the integers make up for the rounding.
    """
    w = w.unflatten(1, (-1, group_size))  # (N, G, K / G)
    low, high = w.amin(-1, keepdim=True), w.amax(-1, keepdim=True)
    scales, zeros = ((high - low) / 15).bfloat16().float(), low.bfloat16().float()
    mean = w.mean(-1, keepdim=True)
    new = best = _round_int4(w, scales, zeros)
    for _ in range(iterations):
        q = new[0]
        centered = q - q.mean(-1, keepdim=True)
        scales = (centered * w).sum(-1, keepdim=True) / _nonzero(centered.square().sum(-1, keepdim=True))
        scales = scales.clamp_(min=0).bfloat16().float()
        zeros = (mean - scales * q.mean(-1, keepdim=True)).bfloat16().float()
        new = _round_int4(w, scales, zeros)
        better = new[-1] < best[-1]
        best = [torch.where(better, a, b) for a, b in zip(new, best, strict=True)]
    q, scales, zeros, _ = best
    q = q.flatten(1).to(torch.uint8)
    return q[:, ::2] | q[:, 1::2] << 4, scales.squeeze(-1).bfloat16(), zeros.squeeze(-1).bfloat16()


def _round_int4(w, scales, zeros):
    """Return the integers nearest to w, as floats, their scales and zeros, and the squared error of each group."""
    q = ((w - zeros) / _nonzero(scales)).round_().clamp_(0, 15)
    return q, scales, zeros, (torch.addcmul(zeros, q, scales) - w).square_().sum(-1, keepdim=True)


def _nonzero(x):
    """Return x with 1 in place of 0, so that it can be a divisor."""
    return torch.where(x == 0, 1.0, x)


def quantized(weights, config, iterations):
    """Return a function read(name) of the quantized tensors. weights: of the original. It raises InputError."""
    stored = dict(build(config).named_parameters())

    @functools.lru_cache(1)  # the weight, scales and zeros of a matrix are read one after another
    def integers(path):
        names = [f"{path}.{name}" for name in ("weight", "scales", "zeros") if f"{path}.{name}" in stored]
        tensors = {name: torch.empty_like(stored[name], device="cpu") for name in names}
        w = weights.read(f"{path}.weight").flatten(0, -2)  # the matrices of all experts become one
        step = max(1, QUANTIZED_AT_ONCE // w.shape[1])
        # a bar for each matrix, since an embedding table may take half of the time; only on a terminal
        for i in tqdm(range(0, len(w), step), path, leave=False, delay=1, disable=None):
            piece = w[i : i + step].float()
            quick = {"int8": to_int8, "fp8": to_e4m3}.get(config.quant)
            results = quick(piece) if quick else to_int4(piece, config.group_size, iterations)
            if not w.is_floating_point() or not all(map(checkpoint.all_finite, (piece, *results))):
                raise InputError(f"tensor {path}.weight holds integers, NaN, infinite or too large values")
            for tensor, result in zip(tensors.values(), results, strict=True):
                tensor.flatten(0, -2)[i : i + step] = result
        return tensors

    def read(name):
        path, _, last = name.rpartition(".")
        if last != "bias" and f"{path}.scales" in stored:
            return integers(path)[name]
        tensor = weights.read(name)
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise InputError(f"tensor {name} holds integers, NaN or infinite values")
        return tensor

    return read


def main(argv=None):
    p = flags.Parser(__doc__)
    p.add_argument("--checkpoint", required=True, metavar="DIR", help="the folder to quantize, e.g. demo")
    words = "int4 costs most: SmolLM2-135M lost 0.25 nats per token in groups of "
    words += "64, 0.05 in groups of 32, with 5 bits a weight instead of 4.5, and 0.005 in int8; fp8 is for Ada, Hopper "
    words += "and Blackwell GPUs, and lost 0.035"
    p.add_argument("--mode", required=True, choices=("int8", "int4", "fp8"), help=words)
    p.add_argument("--group-size", type=int, metavar="N", help="int4: columns of a scale: 32, 64 (default), 128")
    p.add_argument("--keep", default="", metavar="NAME,...", help="matrices to leave, e.g. output,tok_embeddings")
    rounds = "int4: rounds of the fit of scales; 0 rounds to nearest"
    p.add_argument("--iterations", type=flags.number(int, 0), default=20, metavar="N", help=rounds)
    p.add_argument("--out", required=True, metavar="DIR", help="the folder to write, e.g. checkpoints/demo-int4")
    args = p.parse_args(argv)
    outputs.check_absent_first(args.out)
    config, weights = writing.read_original(args.checkpoint), checkpoint.Weights(args.checkpoint)
    group_size = 64 if args.mode == "int4" and args.group_size is None else args.group_size
    not_quantized = tuple("output" if name == "lm_head" else name for name in args.keep.split(",") if name)
    new = dataclasses.replace(config, quant=args.mode, group_size=group_size, not_quantized=not_quantized)
    shard_plan(new, 0, (1,) * (new.fixed_lanes or 1))  # raises InputError for lanes that would cut groups
    for name, shape in writing.shapes(config).items():
        checkpoint.check_shape(weights, name, shape)
    sizes, before = {}, {name: weights.read(name).nbytes for name in weights.names()}
    for name, parameter in build(new).named_parameters():
        new_form = name.endswith(("scales", "zeros")) or parameter.itemsize == 1
        sizes[name] = parameter.nbytes if new_form else before[name]
    if not any(name.endswith("scales") for name in sizes):
        raise InputError(f"--keep {args.keep} leaves nothing to quantize")
    n, total = sum(name.endswith("scales") for name in sizes), sum(before.values())
    print(f"quantizing {n} matrices, of {total / 1e6:,.1f} MB in all, to {args.mode} ...", file=sys.stderr, flush=True)
    layer = sum(size for name, size in sizes.items() if name.startswith("layers.0."))
    with outputs.new_folder(args.out) as folder:
        writing.write_config(folder, new)
        writing.copy_tokenizer(args.checkpoint, folder)
        read = quantized(weights, new, args.iterations)
        writing.write_weights(folder, sizes, read, shard_bytes=max(layer, FILE_BYTES))
    small = sum(sizes.values())
    print(f"{args.out}: {small / 1e6:,.1f} MB, {total / small:.2f} times smaller than before ({total / 1e6:,.1f} MB)")
    print(f"what that costs: python eval.py --checkpoint {args.out} --compare {args.checkpoint} --text FILE")


if __name__ == "__main__":
    launch.run(main)
