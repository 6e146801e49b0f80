"""Write a checkpoint's matrices as integers of 8 or 4 bits (int_linear.py says how they are stored).

python quantize.py --checkpoint DIR --mode int8 --out DIR2
python quantize.py --checkpoint DIR --mode int4 --group-size 64 --keep lm_head --out DIR2
"""

import dataclasses
import functools

import torch

import checkpoint
import int_linear
import tp
from model import InputError

PIECE = 2**18  # numbers that are quantized at a time: they fit the cache, and little memory is needed


def to_int8(w):
    """Integers (N, K) int8 and scales (N, 1) bfloat16 for the numbers w (N, K) float32; zero stays zero."""
    scales = (w.abs().amax(dim=1, keepdim=True) / 127).bfloat16()
    q = (w / _nonzero(scales.float())).round().clamp(-127, 127)
    return q.to(torch.int8), scales


def to_int4(w, group_size, iterations=20):
    """Integers (N, K / 2) uint8, scales and zeros (N, K / group_size) bfloat16 for the numbers w (N, K) float32.

    It starts with the range of each group in 16 even steps, rounded to nearest. Each iteration then takes the scale and
    the zero with the least squared error for these integers, and the nearest integers for those (Lloyd's algorithm, on
    an even grid); each group keeps the best that it has had. Scales and zeros are rounded to bfloat16 before the
    integers are chosen, so that these make up for it.
    """
    w = w.unflatten(1, (-1, group_size))  # (N, G, K / G)
    low, high = w.amin(-1, keepdim=True), w.amax(-1, keepdim=True)
    scales, zeros = ((high - low) / 15).bfloat16().float(), low.bfloat16().float()
    mean = w.mean(-1, keepdim=True)
    best = torch.full_like(scales, torch.inf)
    for _ in range(iterations + 1):
        q = ((w - zeros) / _nonzero(scales)).round_().clamp_(0, 15)
        error = (torch.addcmul(zeros, q, scales) - w).square_().sum(-1, keepdim=True)
        better = error < best
        if best.isinf().all():
            best, kept = error, (q, scales, zeros)
        else:
            best = torch.where(better, error, best)
            kept = tuple(torch.where(better, new, old) for new, old in zip((q, scales, zeros), kept, strict=True))
        centered = q - q.mean(-1, keepdim=True)
        fit = (centered * w).sum(-1, keepdim=True) / _nonzero(centered.square().sum(-1, keepdim=True))
        scales = fit.clamp_(min=0).bfloat16().float()
        zeros = (mean - scales * q.mean(-1, keepdim=True)).bfloat16().float()
    q, scales, zeros = kept
    q = q.flatten(1).to(torch.uint8)
    return q[:, ::2] | q[:, 1::2] << 4, scales.squeeze(-1).bfloat16(), zeros.squeeze(-1).bfloat16()


def _nonzero(x):
    """1 in place of 0, to divide by."""
    return torch.where(x == 0, 1.0, x)


def quantized(weights, config, iterations):
    """A function from the name of a tensor of the quantized checkpoint to that tensor; weights are the original's."""

    @functools.lru_cache(maxsize=1)  # weight, scales and zeros of a matrix are asked for one after the other
    def integers(path):
        w = weights.read(f"{path}.weight")
        step = max(1, PIECE // w.shape[1])
        parts = []
        for piece in w.split(step):
            piece = piece.float()
            if not piece.isfinite().all():
                raise InputError(f"tensor {path}.weight holds NaN or infinite values")
            parts.append(to_int8(piece) if config.quant == "int8" else to_int4(piece, config.group_size, iterations))
        return dict(zip(("weight", "scales", "zeros"), map(torch.cat, zip(*parts, strict=True)), strict=False))

    def read(name):
        path, _, kind = name.rpartition(".")
        return integers(path)[kind] if kind != "bias" and f"{path}.scales" in names else weights.read(name)

    names = dict(int_linear.skeleton(config).named_parameters())
    return read


def quantize(args):
    """Write the folder; returns the bytes of the tensors before and after."""
    config, weights = checkpoint.read_config(args.checkpoint), checkpoint.Weights(args.checkpoint)
    if config.quant is not None:
        raise InputError(f"{args.checkpoint} is quantized already ({config.quant}): give the original")
    size = args.group_size or (64 if args.mode == "int4" else None)
    kept = tuple("output" if name == "lm_head" else name for name in args.keep.split(",") if name)
    new = dataclasses.replace(config, quant=args.mode, group_size=size, kept=kept)
    for name, shape in checkpoint.shapes(config).items():
        if weights.shape(name) != shape:
            raise InputError(f"tensor {name} is {weights.shape(name)}, but the config says {shape}")
    sizes = {}
    for name, parameter in int_linear.skeleton(new).named_parameters():
        integers = "scales" in name or "zeros" in name or not parameter.is_floating_point()
        sizes[name] = parameter.nbytes if integers else weights.read(name).nbytes
    layer = sum(size for name, size in sizes.items() if name.startswith("layers.0."))
    with checkpoint.new_folder(args.out) as folder:
        checkpoint.write_config(folder, new)
        checkpoint.copy_tokenizer(args.checkpoint, folder)
        read = quantized(weights, new, args.iterations)
        checkpoint.write_weights(folder, sizes, read, shard_bytes=max(layer, 2**28))  # what a file holds is in memory
    return sum(weights.read(name).nbytes for name in weights.names()), sum(sizes.values())


def parse(argv):
    p = tp.Parser(__doc__)
    p.add_argument("--checkpoint", required=True, metavar="DIR", help="a folder that convert_hf_checkpoint.py wrote")
    p.add_argument("--mode", required=True, choices=("int8", "int4"), help="bits of an integer")
    p.add_argument(
        "--group-size", type=int, metavar="N", help="int4: columns that share a scale, 32, 64 (default) or 128"
    )
    p.add_argument(
        "--keep",
        default="",
        metavar="NAME,...",
        help="matrices to leave as they are, such as lm_head or tok_embeddings",
    )
    p.add_argument(
        "--iterations", type=int, default=20, metavar="N", help="int4: of the fit of scales; 0 rounds to nearest"
    )
    p.add_argument("--out", required=True, metavar="DIR", help="the checkpoint folder to write")
    args = p.parse_args(argv)
    if args.iterations < 0:
        raise InputError(f"--iterations is {args.iterations} but must be at least 0")
    return args


def main(argv=None):
    args = parse(argv)
    if tp.rank_and_size()[1] > 1:
        raise InputError("quantizing runs in one process: start it with python, not with several ranks of torchrun")
    before, after = quantize(args)
    print(f"{args.out}: {after / 1e6:,.1f} MB, {before / after:.2f} times fewer than {before / 1e6:,.1f} MB")


if __name__ == "__main__":
    tp.run(main)
