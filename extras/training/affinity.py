"""Move each neuron of a model's MLPs to the lane whose own attention serves it best, and write the model anew.

python -m extras.training.affinity --checkpoint DIR --lanes 8 --text train.txt --out DIR2

In spd the MLP of a lane reads x + y, where y is the lane's own partial of the attention. To a standard model the order
of its neurons makes no difference, so which lane has which may be chosen.
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

WINDOW = 256  # tokens


@torch.inference_mode()
def costs(model, tokens):
    """Return (n_layers, I, L): the squared error of an MLP's output if neuron i reads the attention of lane l alone.

    The squares are summed over the tokens (B, S). model: a Lanes in spd, with all L lanes.
    """
    first, result = model.lanes[0], []
    x = first.tok_embeddings(tokens)
    metadata = first.metadata(torch.arange(tokens.shape[1], device=x.device).expand(tokens.shape))
    for i in range(model.config.n_layers):
        blocks = [lane.layers[i] for lane in model.lanes]
        ys = [block.attention(block.attention_norm(x), metadata, None) for block in blocks]
        settled, layer_costs = x + sum(ys), []
        for block in blocks:
            mlp = block.feed_forward
            inputs = [block.ffn_norm(z) for z in (settled, *(x + y for y in ys))]
            exact, *alone = (F.silu(mlp.w1(z)) * mlp.w3(z) for z in inputs)  # (B, S, I of this lane)
            errors = torch.stack([(exact - each).float().square().sum((0, 1)) for each in alone], dim=1)
            layer_costs.append(errors * mlp.w2.weight.float().square().sum(0)[:, None])
        x = settled + sum(block.feed_forward(block.ffn_norm(settled)) for block in blocks)
        result.append(torch.cat(layer_costs))
    return torch.stack(result)


def assign(cost, sizes):
    """Return a lane for each neuron (I,), sizes[l] times l, of a low total cost (I, L).

    Neurons choose in the order of what their second-best lane would cost them more.
    """
    best, left, lanes = cost.sort(dim=1).values, list(sizes), []
    order = (best[:, 1] - best[:, 0]).argsort(descending=True)
    for row in cost[order].tolist():
        lanes.append(min((lane for lane in range(len(sizes)) if left[lane]), key=row.__getitem__))
        left[lanes[-1]] -= 1
    return torch.tensor(lanes)[order.argsort()]


def read_windows(args, tokenizer, config):
    """Return the first tokens of the texts, (n, WINDOW)."""
    ids, end = [], config.eos_ids[0] if config.eos_ids else None
    for document, _ in (record for path in args.text for record in documents(path)):
        ids += encode(tokenizer, document, end)[0]
        if len(ids) >= args.tokens:
            break
    n = min(len(ids), args.tokens) // WINDOW
    if n < 1:
        raise InputError(f"--text holds {len(ids)} tokens: at least {WINDOW} are needed")
    return torch.tensor(ids[: n * WINDOW]).view(n, WINDOW)


def parse(argv):
    p = cli.Parser(__doc__)
    p.add_argument("--checkpoint", required=True, metavar="DIR", help="a standard model")
    p.add_argument("--lanes", required=True, type=number(int, 2), metavar="N", help="for spd/N and delayed/N")
    p.add_argument("--text", nargs="+", required=True, metavar="FILE", help="such as it is to run on, as for adapt.py")
    p.add_argument("--tokens", type=number(int, WINDOW), default=16384, metavar="N", help="of the text to look at")
    p.add_argument("--batch", type=count, default=8, metavar="N", help=f"windows of {WINDOW} tokens at a time")
    p.add_argument("--out", required=True, metavar="DIR", help="the folder to write")
    return p.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    config = checkpoint.read_original(args.checkpoint)
    if config.wiring != "standard":
        raise InputError(f"{args.checkpoint} is {config.wiring}: give a standard model")
    tokenizer = load_tokenizer(args.checkpoint, config.vocab_size)
    if tokenizer is None:
        raise InputError(f"{args.checkpoint} has no tokenizer: convert it with --tokenizer FILE")
    tokens = read_windows(args, tokenizer, config)
    with writing.new_folder(args.out) as folder:
        model, _ = load(args.checkpoint, wiring=f"spd/{args.lanes}")
        cost = sum(costs(model, batch) for batch in tokens.to(model.device).split(args.batch)).cpu()
        sizes = [lane.layers[0].feed_forward.w2.in_features for lane in model.lanes]
        before = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).expand(cost.shape[:2])
        lanes = torch.stack([assign(layer_costs, sizes) for layer_costs in cost])
        order, weights = lanes.argsort(dim=1, stable=True), checkpoint.Weights(args.checkpoint)

        def read(name):
            match = re.fullmatch(r"layers\.(\d+)\.feed_forward\.(w[13]\.(?:weight|bias)|w2\.weight)", name)
            if match is None:
                return weights.read(name)
            return weights.read(name).index_select(int(match[2] == "w2.weight"), order[int(match[1])])

        writing.write_config(folder, config)
        writing.copy_tokenizer(args.checkpoint, folder)
        writing.write_weights(folder, {name: weights.read(name).nbytes for name in weights.names()}, read)
    was, now = (cost.gather(2, chosen[..., None]).sum().item() for chosen in (before, lanes))
    print(f"wrote {args.out}: in {args.lanes} lanes of spd the squared error of its MLPs: {was:.3g}, now {now:.3g}")


if __name__ == "__main__":
    launch.run(main)
