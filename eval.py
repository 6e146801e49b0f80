"""How well a model predicts a text, and how far it is from another model.

python eval.py --checkpoint DIR --text FILE                          # nats per token, perplexity, bits per byte
python eval.py --checkpoint DIR --text FILE --compare OTHER          # KL divergence and top-1 agreement per token

Each works in any wiring and with any number of ranks: torchrun --standalone --nproc_per_node=2 eval.py ...
"""

import json
import math
import time
import zlib
from pathlib import Path

import ladder.openmp  # noqa: F401 (before torch loads)

import generate
from ladder import benchmarking, outputs
from ladder.checkpoints import checkpoint
from ladder.checkpoints.compare import check_vocabulary
from ladder.command_line import flags
from ladder.command_line.flags import count, number
from ladder.command_line.shares import choose_shares
from ladder.errors import InputError
from ladder.ranks import launch
from ladder.scoring import SEPARATOR, divergence, total_nats
from ladder.text.tokenizer import load_tokenizer


def parse(argv):
    p = flags.Parser(__doc__)
    from_two = number(int, 2)
    p.add_argument("--checkpoint", required=True, metavar="DIR", help="a folder of weights, e.g. demo")
    p.add_argument("--text", required=True, metavar="FILE", help="UTF-8 text to score, e.g. demo/story.txt")
    p.add_argument("--batch", type=count, metavar="B", help="rows at a time, e.g. 4; default: 256 MB of logits")
    p.add_argument("--dtype", **flags.one_of(checkpoint.DTYPES), help="default: the checkpoint's own")
    flags.add_rank_flags(p, sharded=True)
    flags.add_json_flag(p, "the line")
    p.add_argument("--compare", metavar="DIR", help="another checkpoint, in its own wiring, as the reference")
    p.add_argument("--window", type=from_two, metavar="N", help="tokens of a window; default: the context, up to 2048")
    p.add_argument("--stride", type=count, metavar="N", help="tokens between windows; default: half a window")
    p.add_argument("--max-tokens", type=from_two, metavar="N", help="score only so many tokens, e.g. 100000")
    flags.add_wiring_flags(p)
    return p.parse_args(argv)


def read_documents(args, tokenizer):
    """Return (the token ids of each document, BOS included, and the number of bytes without each first token's)."""
    text = checkpoint.read_text(args.text, flag="--text ")
    texts = [part.strip() for part in text.split(SEPARATOR) if part.strip()] if SEPARATOR in text else [text]
    documents = []
    n_bytes = 0
    left = args.max_tokens or math.inf
    for part in texts:
        ids = tokenizer.encode(part)
        if len(ids) > left:
            ids = ids[:left]
            while len(ids) > 2 and tokenizer.decode(ids[-16:]).endswith("\ufffd"):
                ids.pop()  # it is part of a character that was cut
            part = tokenizer.decode(ids)
        left -= len(ids)
        if len(ids) > 1:
            documents.append(ids)
            n_bytes += len(part.encode()) - len(tokenizer.decode(ids[:1]).encode())  # BOS has no bytes
    if not documents:
        raise InputError(f"--text {args.text} has no text: scoring takes two tokens or more, BOS included")
    return documents, n_bytes


def plan_windows(args, *configs):
    """Return (window, stride, batch) by the flags, such that they fit all of these configs. Raises InputError."""
    context = min(config.max_seq_len for config in configs)
    size = args.window or min(2048, context)
    if size > context:
        raise InputError(f"--window {size} is longer than the context of {context}")
    stride = args.stride or max(1, size // 2)
    if stride >= size:
        raise InputError(f"--stride is {stride} but must be smaller than the window of {size} tokens")
    return size, stride, args.batch or max(1, 2**28 // (4 * size * configs[0].vocab_size))


def check_finite(nats, folder, model):
    """Return nats. Raises InputError if they are not finite."""
    if not math.isfinite(nats):
        dtype = checkpoint.dtype_name(model.dtype)
        raise InputError(f"{folder} gives a loss of {nats} nats per token in {dtype}: try another --dtype")
    return nats


def score_text(args, world, model, reference_config, documents, n_bytes, plan):
    """Return (the results for a text as a dict, the results in words). reference_config: of --compare, or None."""
    n = sum(len(ids) - 1 for ids in documents)
    comparison = {}
    words = ""
    if reference_config is None:
        nats = total_nats(model, documents, *plan, world.rank == 0) / n
    else:
        nats, comparison, words = compare(args, world, model, reference_config, documents, plan)
    bits = check_finite(nats, args.checkpoint, model) * n / math.log(2) / n_bytes if n_bytes else None
    result = {
        "text": Path(args.text).name, "documents": len(documents), "tokens": n, "nats_per_token": nats,
        "perplexity": math.exp(nats) if nats < 700 else None, "bytes": n_bytes, "bits_per_byte": bits,
        "window": plan[0], "stride": plan[1], **comparison,
    }  # fmt: skip
    return result, f"{nats:.4f} nats per token" + (f", {bits:.4f} bits per byte" if n_bytes else "") + words


def compare(args, world, model, reference_config, documents, plan):
    """Return (nats per token, the comparison with the reference as a dict, the comparison in words)."""
    reference = generate.load_model(reference_config, args.compare, args.dtype, world)
    kl, agree, nats, reference_nats = divergence(model, reference, documents, *plan, world.rank == 0)
    nats = nats.mean().item()
    base = check_finite(reference_nats.mean().item(), args.compare, reference)
    same = agree.double().mean().item()
    p99 = kl.kthvalue(math.ceil(0.99 * len(kl))).values.item() if len(kl) >= 100 else None  # of fewer, the maximum
    words = f", {nats - base:+.4f} against {args.compare} ({reference_config.wiring})\n"
    words += f"KL divergence from it, in nats per token: mean {kl.mean():.3g}, "
    words += f"99 % of them below {p99:.3g}, " if p99 is not None else ""
    words += f"at most {kl.max():.3g}; the likeliest token is the same in {same:.2%}"
    return nats, {
        "reference": Path(args.compare).resolve().name, "reference_wiring": reference_config.wiring,
        "reference_quant": reference_config.quant, "reference_nats_per_token": base, "nats_difference": nats - base,
        "kl_mean": kl.mean().item(), "kl_p99": p99, "kl_max": kl.max().item(), "top1_agreement": same,
    }, words  # fmt: skip


def main(argv=None):
    args = parse(argv)
    world = launch.join(args.device, vars(args))
    with world.together():
        stored_config = checkpoint.read_config(args.checkpoint)
        config = flags.with_wiring(stored_config, args)
    choose_shares(args, world, config)
    with world.together():
        if world.rank == 0:
            flags.warn_of_wiring(stored_config, config, world.shares)
        tokenizer = load_tokenizer(args.checkpoint, config.vocab_size)
        if tokenizer is None:
            raise InputError(f"{args.checkpoint} has no tokenizer")
        reference_config = args.compare and checkpoint.read_config(args.compare)
        if args.compare:
            check_vocabulary(config, args.checkpoint, reference_config, args.compare, f"--compare {args.compare}")
        documents, n_bytes = read_documents(args, tokenizer)
        plan = plan_windows(args, config, reference_config or config)
    text = {"contents of --text": zlib.crc32(str(documents).encode())}
    world.agree(text, checkpoint=args.checkpoint, compare=args.compare)
    model = generate.load_model(config, args.checkpoint, args.dtype, world)
    start = time.perf_counter()
    result, words = score_text(args, world, model, reference_config, documents, n_bytes, plan)
    if world.rank > 0:
        return
    line = {
        "model": Path(args.checkpoint).resolve().name, "wiring": config.wiring, "comm": args.comm,
        "quant": config.quant, "group_size": config.group_size, "dtype": checkpoint.dtype_name(model.dtype), **result,
        "seconds": time.perf_counter() - start, **benchmarking.environment(world),
    }  # fmt: skip
    print(json.dumps(line))
    if args.json:
        outputs.append_line(args.json, line)
    world.say(words)


if __name__ == "__main__":
    launch.run(main)
