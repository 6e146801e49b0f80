"""Write a checkpoint's matrices in 8 or 4 bits; ladder/kernels/quant_linear.py says how these are stored.

python quantize.py --checkpoint DIR --mode int8 --out DIR2
python quantize.py --checkpoint DIR --mode int8 --group-size 32 --out DIR2
python quantize.py --checkpoint DIR --mode int4 --group-size 64 --keep output --out DIR2

With int4, the errors of a matrix make up for one another where its inputs are alike (ladder/checkpoints/rounding.py).
The inputs are those of a text. The model reads it layer by layer, and each layer gets what the quantized ones before it
make of the text. An embedding table that is also the output head gets 8 bits.
"""

import dataclasses
import functools
import shlex
import sys

import ladder.openmp  # noqa: F401 (before torch loads)

import torch
import torch.nn as nn
from tqdm import tqdm

import generate
from ladder import outputs
from ladder.checkpoints import checkpoint, rounding, writing
from ladder.command_line import flags
from ladder.decoding.batch import Sampler, make_cache
from ladder.errors import InputError, naming
from ladder.kernels.quant_linear import QuantLinear, dequantize, nearest
from ladder.memory import release_freed_memory
from ladder.ranks import launch
from ladder.ranks.world import World
from ladder.text.tokenizer import load_tokenizer
from model import build
from tp import shard_plan

FILE_BYTES = 2**26  # of a written file, or a layer if it is larger: the tensors of a file are in memory at once
ROWS = 32  # of the text, each of LENGTH tokens
LENGTH = 256


def own_text(folder, config, length):
    """Return token ids (ROWS, length) that the model of a checkpoint folder writes. Raises InputError."""
    model = generate.load_model(config, folder, None, World(0, 1, torch.device("cpu")))
    first = [[config.bos_id]] * ROWS
    if config.bos_id is None:
        first = torch.randint(config.vocab_size, (ROWS, 1), generator=torch.Generator().manual_seed(0)).tolist()
    runner = generate.Runner(model, make_cache(model, ROWS, length))
    generation = generate.Generation(runner, first, length - 1, Sampler(1.0))
    with naming(folder):
        for _ in tqdm(generation, "writing a text", length - 1, leave=False, delay=1, disable=None):
            pass
    return torch.tensor(generation.sequences)


def read_tokens(args, config):
    """Return token ids (rows, LENGTH) of the text that the flags ask for, or None for none. Raises InputError."""
    wiring = config.named_wiring
    length = min(LENGTH, config.max_seq_len)
    if args.mode != "int4" or args.text == "none":
        return None
    if wiring.reads_partials or wiring.loop is not wiring.usual_loop:
        print(f"wiring {config.wiring}: quantized without a text", file=sys.stderr)
        return None
    text = args.text or "a text that the model now writes"
    words = f"its errors are measured on {text}: 10 to 15 minutes for 10^9 weights (--text none takes less)"
    print(words, file=sys.stderr)
    if not args.text:
        return own_text(args.checkpoint, config, length)
    tokenizer = load_tokenizer(args.checkpoint, config.vocab_size)
    if tokenizer is None:
        raise InputError(f"{args.checkpoint} has no tokenizer, which --text {args.text} needs")
    ids = tokenizer.encode(checkpoint.read_text(args.text, flag="--text "))
    if len(ids) < length:
        raise InputError(f"--text {args.text} has {len(ids)} tokens: give {ROWS * length}, or at least {length}")
    return torch.tensor(ids[: min(ROWS, len(ids) // length) * length]).view(-1, length)


def scales_dtype(w):
    """Return the dtype for the scales and zeros of w (N, K): as nearest() says, by the ranges of its rows."""
    low = w.amin(1).float()
    high = w.amax(1).float()
    return nearest((high - low) / 15, low)


def check_finite(name, w, *results):
    if not w.is_floating_point() or not all(map(checkpoint.all_finite, (w, *results))):
        raise InputError(f"tensor {name} holds integers, NaN, infinite or too large values")


@torch.no_grad()
def compensated(weights, config, linears, tokens):
    """Yield {name: tensor} of each of the int4 linears, in the order in which a model computes with them.

    weights: of the original; one sublayer at a time is in memory, in float32. config: of the quantized model. linears:
    their paths. tokens (B, S): the text.
    """
    model = build(dataclasses.replace(config, quant=None, group_size=None, not_quantized=(), int8=()))
    results = []
    last = [None, None]  # inputs and their second moments: w3 has those of w1

    def quantize(path, linear, x):
        w = weights.read(f"{path}.weight")
        check_finite(f"{path}.weight", w)
        if last[0] is not x:
            if not x.isfinite().all():
                raise InputError(f"the inputs of {path} are NaN or infinite in float32")
            last[:] = x, rounding.second_moments(x)
        three = rounding.to_compensated_int4(w, last[1], config.group_size, scales_dtype(w))
        check_finite(f"{path}.weight", *three[1:])
        results.append({f"{path}.{part}": t for part, t in zip(("weight", "scales", "zeros"), three, strict=True)})
        if path != "output":
            linear.weight = nn.Parameter(dequantize(*three, torch.float32), requires_grad=False)

    def load(path, module):  # all but what quantize() sets
        for name, _ in [*module.named_parameters()]:
            owner, _, last_part = f"{path}.{name}".rpartition(".")
            if owner not in linears or last_part == "bias":
                tensor = weights.read(f"{path}.{name}")
                check_finite(f"{path}.{name}", tensor)
                setattr(model.get_submodule(owner), last_part, nn.Parameter(tensor.float(), requires_grad=False))

    def free(module, args, result):
        module.to("meta")
        release_freed_memory()

    for path in linears:
        model.get_submodule(path).register_forward_pre_hook(
            lambda module, args, path=path: quantize(path, module, args[0])
        )
    sublayers = {f"layers.{i}.{name}": m for i, block in enumerate(model.layers) for name, m in block.named_children()}
    for path, module in {**sublayers, "norm": model.norm}.items():
        module.register_forward_pre_hook(lambda module, args, path=path: load(path, module))
        module.register_forward_hook(free)
    model.tok_embeddings.weight = nn.Parameter(weights.read("tok_embeddings.weight"), requires_grad=False)
    (loop,) = model.split_loops(tokens, None, None, None, None, 1)
    x = None
    for x in loop:  # noqa: B007
        while results:
            yield results.pop()
    if "output" in linears:
        quantize("output", model.output, model.norm(x))
        yield results.pop()


def quantized(weights, config, tokens=None):
    """Return a function read(name) of the quantized tensors. weights: of the original. It raises InputError.

    tokens: as compensated() takes them, None: none.
    """
    model = build(config)
    ready = {}
    stored = dict(model.named_parameters())
    linears = {path for path, m in model.named_modules() if type(m) is QuantLinear and m.bits == 4}
    linears = {path for path in linears if f"{path}.scales" in stored and stored[f"{path}.scales"].dim() == 2}
    run = None if tokens is None else compensated(weights, config, linears, tokens)  # not experts, whose scales have 3

    @functools.lru_cache(1)  # the weight, scales and zeros of a matrix are read one after another
    def integers(path):
        names = [f"{path}.{name}" for name in ("weight", "scales", "zeros") if f"{path}.{name}" in stored]
        w = weights.read(f"{path}.weight").flatten(0, -2)  # the matrices of all experts become one
        dtype = scales_dtype(w)
        step = max(1, rounding.PIECE // w.shape[1])
        dtypes = {name: dtype for name in names[1:] if len(names) == 3}
        tensors = {name: torch.empty_like(stored[name], device="cpu", dtype=dtypes.get(name)) for name in names}
        # a bar for each matrix, since an embedding table may take half of the time; only on a terminal
        for i in tqdm(range(0, len(w), step), path, leave=False, delay=1, disable=None):
            piece = w[i : i + step].float()
            if len(names) == 3:
                in_groups = rounding.to_int4 if tensors[names[0]].dtype == torch.uint8 else rounding.to_int8_in_groups
                results = in_groups(piece, w.shape[1] // tensors[names[1]].shape[-1], dtype)
            else:
                results = (rounding.to_e4m3 if config.quant == "fp8" else rounding.to_int8)(piece)
            check_finite(f"{path}.weight", w[i : i + step], *results)
            for tensor, result in zip(tensors.values(), results, strict=True):
                tensor.flatten(0, -2)[i : i + step] = result
        return tensors

    def read(name):
        path, _, last = name.rpartition(".")
        if last == "bias" or f"{path}.scales" not in stored:
            tensor = weights.read(name)
            check_finite(name, tensor)
            return tensor
        if run is None or path not in linears:
            return integers(path)[name]
        while name not in ready:
            ready.update(next(run))
        return ready.pop(name)

    return read


def parse(argv=None):
    """Return the values of the flags. Raises InputError for an --out that exists, and for --text without int4."""
    p = flags.Parser(__doc__)
    p.add_argument("--checkpoint", required=True, metavar="DIR", help="the folder to quantize, e.g. demo")
    words = "4 bits cost quality; fp8 is for Ada, Hopper and Blackwell GPUs, and costs more than int8"
    p.add_argument("--mode", required=True, **flags.one_of(("int8", "int4", "fp8")), help=words)
    sizes = "columns of a scale. int4: 32, 64 (default) or 128; int8: 16, 32, 64 or 128, default: the whole row"
    p.add_argument("--group-size", type=int, metavar="N", help=sizes)
    p.add_argument("--keep", default="", metavar="NAME,...", help="matrices to leave, e.g. output,tok_embeddings")
    text = "int4: a text like what the model will read; default: one that it writes; none: no text, for less memory"
    p.add_argument("--text", metavar="FILE", help=text)
    p.add_argument("--out", required=True, metavar="DIR", help="the folder to write, e.g. checkpoints/demo-int4")
    args = p.parse_args(argv)
    outputs.check_absent_first(args.out)
    if args.text and args.mode != "int4":
        raise InputError(f"--text is for int4, not for --mode {args.mode}")
    return args


def quantized_config(config, args):
    """Return the Config of the quantized model. Raises InputError, also for lanes that would cut groups."""
    group_size = 64 if args.mode == "int4" and args.group_size is None else args.group_size
    not_quantized = tuple("output" if name == "lm_head" else name for name in args.keep.split(",") if name)
    tied = args.mode == "int4" and config.tie_embeddings and "tok_embeddings" not in not_quantized
    form = {"quant": args.mode, "group_size": group_size, "not_quantized": not_quantized}
    new = dataclasses.replace(config, **form, int8=("tok_embeddings",) if tied else ())
    shard_plan(new, 0, new.named_wiring.shards())
    return new


def main(argv=None):
    args = parse(argv)
    config = writing.read_original(args.checkpoint)
    new = quantized_config(config, args)
    weights = checkpoint.Weights(args.checkpoint)
    for name, shape in writing.shapes(config).items():
        checkpoint.check_shape(weights, name, shape)
    sizes = {}
    before = {name: weights.read(name).nbytes for name in weights.names()}
    for name, parameter in build(new).named_parameters():
        new_form = name.endswith(("scales", "zeros")) or parameter.itemsize == 1
        sizes[name] = parameter.nbytes if new_form else before[name]
    n = sum(name.endswith("scales") for name in sizes)
    total = sum(before.values())
    if not n:
        raise InputError(f"--keep {args.keep} leaves nothing to quantize")
    print(f"quantizing {n} matrices, of {total / 1e6:,.1f} MB in all, to {args.mode} ...", file=sys.stderr, flush=True)
    layer = sum(size for name, size in sizes.items() if name.startswith("layers.0."))
    with outputs.new_folder(args.out) as folder:
        writing.write_config(folder, new)
        writing.copy_tokenizer(args.checkpoint, folder)
        read = quantized(weights, new, read_tokens(args, config))
        writing.write_weights(folder, sizes, read, shard_bytes=max(layer, FILE_BYTES))
    small = sum(sizes.values())
    print(f"{args.out}: {small / 1e6:,.1f} MB, {total / small:.2f} times smaller than before ({total / 1e6:,.1f} MB)")
    words = ["python", "eval.py", "--checkpoint", args.out, "--compare", args.checkpoint, "--text", "FILE"]
    print(f"what that costs: {shlex.join(words)}")


if __name__ == "__main__":
    launch.run(main)
