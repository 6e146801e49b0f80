"""Give each neuron of a model's MLPs to the lane whose own attention serves it best, and write the model anew.

python -m extras.training.affinity --checkpoint DIR --lanes 8 --text train.txt --out DIR2

In spd a lane's MLP reads x + y, where y is this lane's partial of the attention alone. Which neurons a lane has does
not matter to a standard model, which stays the same function: so they may be chosen.
"""

import re

import torch
import torch.nn.functional as F

from complete import load
from extras.training.data import documents, encode
from formats import checkpoint
from formats.tokenizer import load_tokenizer
from runtime import cli, launch, writing
from runtime.cli import count, number
from runtime.errors import InputError

S = 256  # tokens of a window


@torch.inference_mode()
def costs(model, tokens):
    """Return (I, L) for each layer: how far an MLP's output is off if a neuron reads one lane's attention alone.

    That is the sum of squares over the tokens (B, S). model: in spd, with all of its L lanes.
    """
    x, found = model.tok_embeddings(tokens), []
    metadata = model.metadata(torch.arange(tokens.shape[1], device=x.device).expand(tokens.shape))
    for i in range(model.config.n_layers):
        blocks = [lane.layers[i] for lane in model.lanes]
        ys = [block.attention(block.attention_norm(x), metadata, None) for block in blocks]
        settled, of_layer = x + sum(ys), []
        for block in blocks:
            mlp = block.feed_forward
            whole, *alone = (
                F.silu(mlp.w1(n)) * mlp.w3(n) for n in (block.ffn_norm(z) for z in (settled, *(x + y for y in ys)))
            )
            off = torch.stack([(whole - each).float().square().sum((0, 1)) for each in alone], dim=1)
            of_layer.append(off * mlp.w2.weight.float().square().sum(0)[:, None])
        x = settled + sum(block.feed_forward(block.ffn_norm(settled)) for block in blocks)
        found.append(torch.cat(of_layer))
    return torch.stack(found)


def grouped(cost, sizes):
    """Return each neuron's lane (I,), sizes[l] of them l, at a low sum of cost (I, L): who loses most chooses first."""
    best, left, lanes = cost.sort(dim=1).values, list(sizes), []
    order = (best[:, 1] - best[:, 0]).argsort(descending=True)
    for row in cost[order].tolist():
        lanes.append(min((lane for lane in range(len(sizes)) if left[lane]), key=row.__getitem__))
        left[lanes[-1]] -= 1
    return torch.tensor(lanes)[order.argsort()]


def windows(args, tokenizer, config):
    """Return the first tokens of the texts, (n, S)."""
    ids, end = [], config.eos_ids[0] if config.eos_ids else None
    for document, _ in (found for path in args.text for found in documents(path)):
        ids += encode(tokenizer, document, end)[0]
        if len(ids) >= args.tokens:
            break
    if len(ids) < S:
        raise InputError(f"--text holds {len(ids)} tokens: at least {S} are needed")
    n = min(len(ids), args.tokens) // S
    return torch.tensor(ids[: n * S]).view(n, S)


def parse(argv):
    p = cli.Parser(__doc__)
    p.add_argument("--checkpoint", required=True, metavar="DIR", help="a standard model")
    p.add_argument("--lanes", required=True, type=number(int, 2), metavar="N", help="for spd/N and delayed/N")
    p.add_argument("--text", nargs="+", required=True, metavar="FILE", help="such as it is to run on, as for adapt.py")
    p.add_argument("--tokens", type=number(int, S), default=16384, metavar="N", help="of the text to look at")
    p.add_argument("--batch", type=count, default=8, metavar="N", help=f"windows of {S} tokens at a time")
    p.add_argument("--out", required=True, metavar="DIR", help="the folder to write")
    return p.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    launch.check_one_process("grouping")
    config = checkpoint.read_original(args.checkpoint)
    if config.wiring != "standard":
        raise InputError(f"{args.checkpoint} is {config.wiring}: give a standard model")
    tokenizer = load_tokenizer(args.checkpoint, config.vocab_size)
    if tokenizer is None:
        raise InputError(f"{args.checkpoint} has no tokenizer: convert it with --tokenizer FILE")
    tokens = windows(args, tokenizer, config)
    with writing.new_folder(args.out) as folder:
        model = load(args.checkpoint, wiring=f"spd/{args.lanes}")[0]
        cost = sum(costs(model, part) for part in tokens.to(model.device).split(args.batch)).cpu()
        sizes = [lane.layers[0].feed_forward.w2.in_features for lane in model.lanes]
        before = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).expand(cost.shape[:2])
        lanes = torch.stack([grouped(of_layer, sizes) for of_layer in cost])
        order, weights = lanes.argsort(dim=1, stable=True), checkpoint.Weights(args.checkpoint)

        def read(name):
            found = re.fullmatch(r"layers\.(\d+)\.feed_forward\.(w[13]\.(?:weight|bias)|w2\.weight)", name)
            if not found:
                return weights.read(name)
            return weights.read(name).index_select(int(found[2] == "w2.weight"), order[int(found[1])])

        checkpoint.write_config(folder, config)
        checkpoint.copy_tokenizer(args.checkpoint, folder)
        checkpoint.write_weights(folder, {name: weights.read(name).nbytes for name in weights.names()}, read)
    was, now = (cost.gather(2, at[..., None]).sum().item() for at in (before, lanes))
    print(
        f"wrote {args.out}: in {args.lanes} lanes of spd the squared error of its MLPs fell from {was:.3g} to {now:.3g}"
    )


if __name__ == "__main__":
    launch.run(main)
