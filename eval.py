"""How well a model predicts a text: nats per token and perplexity, in any wiring, with any number of ranks.

python eval.py --checkpoint DIR --text FILE
torchrun --standalone --nproc_per_node=2 eval.py --checkpoint DIR --text FILE --ladder --json results.jsonl
"""

import json
import math
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

import checkpoint
import generate
import launch
from checkpoint import dtype_name
from launch import count, number
from measure import report
from model import InputError
from tokenizer import load_tokenizer


def windows(n, size, stride):
    """Windows over n tokens as (start, stop, first): those from `first` to `stop` count, each token but 0 just once.

    They advance by stride < size, so that all but those of the first have at least size - stride tokens before them.
    """
    stop, out = 1, []
    while stop < n:
        start = max(0, min(n - size, stop - (size - stride))) if out else 0
        first, stop = stop, min(start + size, n)
        out.append((start, stop, first))
    return out


@torch.inference_mode()
def total_nats(model, ids, size, stride, batch, show=False):
    """The sum of -log p(token | those before it in its window) over all tokens but the first."""
    total, device = 0.0, model.norm.weight.device
    plan = windows(len(ids), size, stride)
    for i in tqdm(range(0, len(plan), batch), desc="scoring", unit="batch", delay=1, disable=not show):
        part = plan[i : i + batch]
        tokens, _ = generate.pad([ids[start:stop] for start, stop, _ in part], device)
        logits = model(tokens[:, :-1])
        for row, given, (start, stop, first) in zip(logits, tokens, part, strict=True):
            for begin in range(first - start, stop - start, 256):  # a large vocabulary's logits in float32 are large
                wanted = given[begin : min(begin + 256, stop - start)]
                nats = F.cross_entropy(row[begin - 1 :][: len(wanted)].float(), wanted, reduction="none")
                total += nats.double().sum().item()
    return total


def sensitivity(model, score):
    """[score(model) with layer i alone as a ladder]; its own."""
    own, found = model.config, []
    for i in range(own.n_layers):
        model.config = launch.rewired(own, "hybrid", ladder_layers=(i,))
        found.append(score(model))
    model.config = own
    return found


def parse(argv):
    p = launch.Parser(__doc__)
    p.add_argument(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="a folder of convert_hf_checkpoint.py or quantize.py, e.g. demo",
    )
    p.add_argument(
        "--text", required=True, metavar="FILE", help="UTF-8 text, scored as one sequence of tokens, e.g. valid.txt"
    )
    two = number(int, 2)
    p.add_argument(
        "--window", type=two, metavar="N", help="tokens of a window, e.g. 1024; without it 2048 or the model's context"
    )
    p.add_argument(
        "--stride",
        type=count,
        metavar="N",
        help="tokens from one window to the next, e.g. 256; without it half a window",
    )
    p.add_argument("--batch", type=count, metavar="B", help="windows at a time, e.g. 4; without it 256 MB of logits")
    p.add_argument("--max-tokens", type=two, metavar="N", help="score only so many tokens of the text, e.g. 100000")
    p.add_argument("--dtype", choices=checkpoint.DTYPES, help="without it the checkpoint's own")
    launch.add_device_flag(p)
    launch.add_json_flag(p, "the line")
    launch.add_wiring_flags(p)
    return p.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    world = launch.join(args.device)
    with world.together():
        own = checkpoint.read_config(args.checkpoint)
        config = launch.with_wiring(own, args)
        if world.rank == 0:
            launch.warn_of_wiring(own, config)
        tokenizer = load_tokenizer(args.checkpoint, config.vocab_size)
        if tokenizer is None:
            raise InputError(f"{args.checkpoint} has no tokenizer")
        ids = tokenizer.encode(checkpoint.read_text(args.text, flag="--text "))[: args.max_tokens]
        if len(ids) < 2:
            raise InputError(f"--text {args.text} has {len(ids)} tokens with BOS, but scoring takes two or more")
        size = args.window or min(2048, config.max_seq_len)
        if size > config.max_seq_len:
            raise InputError(f"--window {size} is longer than the context of {config.max_seq_len}")
        stride = args.stride or max(1, size // 2)
        if stride >= size:
            raise InputError(f"--stride is {stride} but must be smaller than the window of {size} tokens")
    batch = args.batch or max(1, 2**28 // (4 * size * config.vocab_size))
    model = generate.load_model(config, args.checkpoint, args.dtype, world)
    start = time.perf_counter()
    total = total_nats(model, ids, size, stride, batch, show=world.rank == 0)
    if world.rank > 0:
        return
    nats = total / (len(ids) - 1)
    if not math.isfinite(nats):
        raise InputError(f"{args.checkpoint} gives a loss of {nats} nats per token")
    line = {
        "model": checkpoint.name(args.checkpoint), "wiring": config.wiring, "tp": world.tp_size,
        "quant": config.quant, "group_size": config.group_size, "dtype": dtype_name(model.norm.weight.dtype),
        "text": Path(args.text).name, "tokens": len(ids) - 1, "nats_per_token": nats,
        "perplexity": math.exp(nats) if nats < 700 else None,
        "window": size, "stride": stride, "seconds": time.perf_counter() - start, "torch": torch.__version__,
        "commit": report.git_commit(),
    }  # fmt: skip
    print(json.dumps(line))
    if args.json:
        launch.append_line(args.json, line)
    print(f"{nats:.4f} nats per token", file=sys.stderr)


if __name__ == "__main__":
    launch.run(main)
