"""Make a ladder of a standard checkpoint by light retraining, or train a small model from scratch, in any wiring.

torchrun adapt.py --checkpoint DIR --wiring ladder:16 --distill --text train.txt --valid valid.txt --out DIR2
python adapt.py --ladder --text train.txt --valid valid.txt --out DIR2
"""

import contextlib
import json
import math
import os
import time
from pathlib import Path

if __name__ == "__main__":  # before torch loads OpenMP, whose spinning threads stall a busy machine
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as recomputed
from tqdm import tqdm

from evaluation import score
from extras.training import lanes, runs, sharding
from extras.training.data import SEPARATOR
from formats import checkpoint
from formats.wiring_text import wiring_name
from model import Attention, FeedForward, Transformer, interleave, rewired
from runtime import cli, launch, watch, writing
from runtime.cli import count, number
from runtime.errors import InputError

CHUNK = 1024  # tokens whose logits are made at a time
KEPT = 1 << 26  # logits that a pass may keep for its backward pass; beyond that, this makes each chunk's again
BAND = 128  # queries whose scores are made at a time


def banded_attention(q, k, v, mask):
    """Return the attention (B, K, G, S, H) of scaled q of that shape to k and v (B, K, S, H), by mask (B, S, S).

    In matrix products: on CPUs the backward pass of PyTorch's kernel takes two to three times as long. The scores are
    in the dtype of q.
    """
    G, end, ys = q.shape[2], 0, []
    bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -math.inf)[:, None, None]
    for band in q.split(BAND, dim=3):
        start, end = end, end + band.shape[3]  # and no query reads a later key
        scores = (band.flatten(2, 3) @ k[:, :, :end].mT).unflatten(2, (G, -1)) + bias[..., start:end, :end]
        ys.append((scores.softmax(-1).flatten(2, 3) @ v[:, :, :end]).unflatten(2, (G, -1)))
    return torch.cat(ys, dim=3)


class BandedAttention(Attention):
    banded = staticmethod(banded_attention)

    def attend(self, q, k, v, metadata):
        return self.banded(q * self.head_dim**-0.5, k, v, metadata.mask).flatten(2, 3)


class Norm(torch.nn.RMSNorm):
    """An RMSNorm that torch.compile takes: it leaves modules of torch.nn alone unless other code calls them."""

    def forward(self, x):
        return super().forward(x)


def token_losses(head, x, targets, taught_head=None, taught=None):
    """Return sums over tokens, of x (n, D): the KL divergence from the teacher, or 0, and the cross-entropy."""
    told, divergence = F.log_softmax(head(x).float(), -1), x.new_zeros(())
    if taught is not None:
        wanted = F.log_softmax(taught_head(taught).float(), -1)
        divergence = F.kl_div(told, wanted, reduction="sum", log_target=True)
    return divergence, F.nll_loss(told, targets, reduction="sum")


class Trainee(Transformer):
    """The Transformer on packed windows."""

    token_losses = staticmethod(token_losses)
    dropout, recompute = 0.0, False  # of sublayers' outputs; whether the backward pass computes sublayers again
    parts = None  # the lanes of its whole weights

    @property
    def lanes(self):
        return self.parts or [self]

    def sublayers(self, metadata, cache=None, lane=0):
        def in_training(h):
            again = (lambda x: recomputed(h, x, use_reentrant=False)) if self.recompute else h
            return lambda x: F.dropout(again(x), self.dropout)

        found = super().sublayers(metadata, cache, lane)
        return [(in_training(h), stale) for h, stale in found] if self.training else found

    def forward(self, batch):
        """Return the normed stream (B, S, D), of which self.output makes logits."""
        mask, positions = batch.mask, batch.positions
        if mask is None and positions.device.type == "cpu":
            mask = positions[:, None] <= positions[..., None]  # of BandedAttention
        metadata = self.metadata(positions, mask)
        x, *_ = interleave(self.streams(self.tok_embeddings(batch.tokens), metadata))  # in all lanes the same
        return self.norm(x)


def build(config, weights, world, dtype, args=None, compiled=False):
    """Return a sharded Trainee that computes in dtype or, without args, a teacher, which needs no float32 masters."""
    with torch.device("meta"):
        model = Trainee(config)
        for module in model.modules():
            if type(module) is Attention and world.device.type == "cpu":
                module.__class__ = BandedAttention
                if compiled:  # Inductor's softmax is slower
                    module.banded = torch.compiler.disable(banded_attention)
            if type(module) is torch.nn.RMSNorm and compiled:
                module.__class__ = Norm
        if config.lanes:
            model.parts = lanes.split(model)
    if args is None:
        model = model.to(dtype).requires_grad_(False).eval()
    else:
        model.dropout, model.recompute = args.dropout, args.recompute
    if compiled:
        if world.device.type == "cpu":
            from runtime import compiling

            compiling.prepare()
        model.token_losses = torch.compile(token_losses, dynamic=True)
        for module in model.modules():
            if isinstance(module, (Attention, FeedForward, Norm)):
                module.compile()
    sharding.shard(model, world, dtype)
    if weights:
        sharding.fill(model, weights, world)
    else:
        sharding.fill_afresh(model, args.seed, world)
    return model


def losses(model, batch, teacher=None):
    """Return sums over the tokens of a batch that count: (the quantity to minimise, the cross-entropy), in nats.

    The first is the cross-entropy or, with a teacher, KL + 0.1 cross-entropy.
    """
    with torch.no_grad():
        taught = teacher and teacher(batch)
    x, again = model(batch), batch.tokens.numel() * model.config.vocab_size > KEPT
    divergence, nats = 0 * x.float().sum(), torch.zeros((), device=x.device)
    for i in zip(*(indices.split(CHUNK) for indices in batch.counts.nonzero(as_tuple=True)), strict=True):
        given = [model.output, x[i], batch.targets[i]] + ([] if teacher is None else [teacher.output, taught[i]])
        kl, ce = recomputed(model.token_losses, *given, use_reentrant=False) if again else model.token_losses(*given)
        divergence, nats = divergence + kl, nats + ce
    return divergence + (nats if teacher is None else 0.1 * nats), nats.detach()


@torch.no_grad()
def validation_loss(model, windows, rows, world):
    """Return nats per token over all windows, `rows` at a time on each rank."""
    was, total = model.training, [0.0, 0]
    model.eval()
    for first in range(world.rank * rows, windows.n + world.rank * rows, rows * world.tp_size):
        batch = windows.batch([i if i < windows.n else None for i in range(first, first + rows)]).to(world.device)
        total = [total[0] + losses(model, batch)[1].item(), total[1] + batch.counts.sum().item()]
    model.train(was)
    model.reshard()  # FSDP2 leaves some weights whole, for a backward pass
    nats, tokens = sharding.summed(total, world)
    if not math.isfinite(nats):
        raise InputError(f"the loss on --valid is {nats / tokens:g} nats per token")
    return nats / tokens


def learning_rate(step, args):
    """Return the learning rate of a step: a linear warm-up, then a cosine down to a tenth."""
    if step < args.warmup:
        return args.lr * step / args.warmup
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * (step - args.warmup) / max(1, args.steps - args.warmup)))


def optimizer_step(step, model, teacher, optimizer, windows, args, world, asked):
    """Take a step of the optimizer; return its line of the log, and whether a rank was asked to stop.

    Raises InputError, before anything changes, where the loss or its gradient is not finite.
    """
    start = time.perf_counter()
    torch.manual_seed(args.seed * 1_000_003 + step * world.tp_size + world.rank)  # of dropout
    rows = -(-args.batch // world.tp_size)  # on each rank
    drawn = windows.indices((step - 1) * args.batch, args.batch) + [None] * (rows * world.tp_size - args.batch)
    mine = drawn[world.rank * rows : (world.rank + 1) * rows]
    parts = [windows.batch(mine[i : i + args.micro_batch]) for i in range(0, rows, args.micro_batch)]
    tokens, stop = sharding.summed([sum(part.counts.sum().item() for part in parts), len(asked)], world)
    nats = whole = 0.0
    for part in parts:
        loss, ce = losses(model, part.to(world.device), teacher)
        (loss * world.tp_size / max(tokens, 1)).backward()  # FSDP2 takes the mean over the ranks
        nats, whole = nats + ce.item(), whole + loss.item()
        watch.beat()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()
    nats, whole = (total / max(tokens, 1) for total in sharding.summed([nats, whole], world))
    if not math.isfinite(whole + norm):
        kept = f"{args.out}.run/best-* holds the best weights so far"
        what = f"at step {step} the loss is {whole:g} and the norm of its gradient {norm:g}"
        raise InputError(f"{what}: try a smaller --lr than {args.lr:g} and another --out; {kept}")
    rate = learning_rate(step, args)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    trained = args.batch * args.seq_len
    line = {
        "step": step, "tokens": step * trained, "train": nats, "loss": whole, "lr": rate,
        "gradient_norm": norm, "tokens_per_s": trained / (time.perf_counter() - start),
    }  # fmt: skip
    return line, stop > 0


def train(model, teacher, windows, valid, run, args, world, original):
    """Train until args.steps, from the newest state of the run on; return the best, {"step", "nats"} of its weights.

    run/best-STEP holds the weights of the lowest validation loss, from step 0 on. A first Ctrl-C saves before it ends.
    original: the Config of the standard model that it was, with whose loss the log then begins, or None.
    """
    matrices, vectors = ([p for p in model.parameters() if (p.dim() == 2) == two] for two in (True, False))
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    step, log, best = sharding.restore(run, model, optimizer, world), run / "log.jsonl", runs.best(run)
    bar = tqdm(total=args.steps, initial=step or 0, desc="training", unit="step", disable=True if world.rank else None)

    def note(line, validate):
        nonlocal best
        if validate:
            watch.at("validation", timed=False)
            line["valid"] = validation_loss(model, valid, args.micro_batch, world)
            if line["valid"] < best["nats"]:
                best = {"step": line["step"], "nats": line["valid"]}
                sharding.write(run, best, model, checkpoint.DTYPES[args.dtype], world)
            if world.rank == 0:
                said = ", ".join(f"{k} {line[k]:.4f}" for k in ("original", "train", "valid") if k in line)
                bar.write(f"step {line['step']}: {said} nats per token")
        if world.rank == 0:
            writing.append_line(log, line)

    if world.rank == 0:
        runs.cut_log(log, -1 if step is None else step)
    if step is None:
        step, line = 0, {"step": 0, "tokens": 0}
        if original:
            wired, model.config = model.config, original
            line["original"] = validation_loss(model, valid, args.micro_batch, world)
            model.config = wired
        note(line, validate=True)
    elif world.rank == 0:
        bar.write(f"going on from step {step} of {args.steps}")
    with runs.interruption() as asked:
        first = step + 1  # which may compile
        while step < args.steps:
            step += 1
            watch.at("training step", step, timed=step > first)
            line, stop = optimizer_step(step, model, teacher, optimizer, windows, args, world, asked)
            note(line, validate=step % args.eval_every == 0 or step == args.steps)
            bar.update()
            bar.set_postfix_str(f"{line['train']:.4f} nats, {line['tokens_per_s']:,.0f} tokens/s")
            if step % args.save_every == 0 or stop:
                watch.at("saving", timed=False)
                sharding.save(run, step, model, optimizer, world)
            if stop:
                raise KeyboardInterrupt(f"step {step} is saved in {run}: the same command resumes it")
    watch.at("saving", timed=False)
    bar.close()
    return best


def parse(argv):
    p = cli.Parser(__doc__)
    p.add_argument("--checkpoint", metavar="DIR", help="the folder to retrain; default: a new small model")
    files = f"plain text with {SEPARATOR} between documents, or .jsonl with text or chat messages"
    p.add_argument("--text", nargs="+", required=True, metavar="FILE", help=f"to train on: {files}")
    p.add_argument("--valid", required=True, metavar="FILE", help="to validate on, in the same form")
    p.add_argument("--out", required=True, metavar="DIR", help="the folder to write; until then all lies in DIR.run")
    cli.add_wiring_flags(p, default="the checkpoint's own, or standard")
    g = p.add_argument_group("retraining", "--wiring ladder:autoN takes the N layers that alone raise the loss least")
    g.add_argument("--distill", nargs="?", const="", metavar="DIR", help="learn from this teacher, or the original")
    g = p.add_argument_group("training")
    g.add_argument("--seq-len", type=count, metavar="N", help="tokens of a window (default: the context, up to 2048)")
    g.add_argument("--steps", type=count, metavar="N", default=3000, help="optimizer steps")
    g.add_argument("--batch", type=count, metavar="N", default=16, help="windows a step, on all ranks together")
    usual = "default: 3e-3 from scratch, 5e-5 with --distill, else 5e-6"
    g.add_argument("--lr", type=number(float, 0, above=True), metavar="X", help=f"peak learning rate ({usual})")
    g.add_argument("--warmup", type=count, metavar="N", help="steps to it (default: a tenth of all, up to 200)")
    g.add_argument("--weight-decay", type=number(float, 0), metavar="X", default=0.1, help="of matrices")
    g.add_argument("--dropout", type=number(float, 0, 0.99), metavar="P", help="default: 0.1 from scratch, else 0")
    g.add_argument("--eval-every", type=count, metavar="N", default=200, help="steps between validations")
    g.add_argument("--valid-tokens", type=count, metavar="N", help="validate on so many (default: all)")
    g.add_argument("--seed", type=number(int, 0, 2**31 - 1), default=0, metavar="S", help="of all that is random")
    g.add_argument("--dtype", choices=checkpoint.DTYPES, default="bfloat16", help="of the written weights")
    g.add_argument("--compute-dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU, else float32")
    g = p.add_argument_group("machine")
    g.add_argument("--micro-batch", type=count, metavar="N", help="windows at once on a rank (default: all its share)")
    g.add_argument("--recompute", action="store_true", help="the backward pass computes sublayers again: less memory")
    g.add_argument("--compile", action="store_true", help="torch.compile sublayers, norms and losses")
    g.add_argument("--save-every", type=count, metavar="N", default=200, help="steps between states to resume from")
    cli.add_rank_flags(g)
    g = p.add_argument_group("a model from scratch")
    shape = [
        g.add_argument("--vocab-size", type=count, default=1024, metavar="N", help="pieces of the vocabulary"),
        g.add_argument("--dim", type=count, default=128, metavar="N", help="width of the residual stream"),
        g.add_argument("--n-layers", type=count, default=8, metavar="N", help="layers"),
        g.add_argument("--n-heads", type=count, default=8, metavar="N", help="attention heads, each of dim / n-heads"),
        g.add_argument("--n-kv-heads", type=count, default=4, metavar="N", help="key and value heads"),
        g.add_argument("--intermediate-size", type=count, default=384, metavar="N", help="width of the MLP"),
    ]
    args = p.parse_args(argv)
    for flag in shape:
        if args.checkpoint and getattr(args, flag.dest) != flag.default:
            raise InputError(f"{flag.option_strings[0]} is for a model from scratch: it does not go with --checkpoint")
    if not args.checkpoint and args.distill is not None:
        raise InputError("--distill needs --checkpoint, the model to retrain")
    args.distill = args.checkpoint if args.distill == "" else args.distill
    args.lr = args.lr or (3e-3 if not args.checkpoint else 5e-5 if args.distill else 5e-6)
    args.warmup = args.warmup or max(1, min(200, args.steps // 10))
    args.dropout = args.dropout if args.dropout is not None else 0.0 if args.checkpoint else 0.1
    return args


def least_sensitive(model, own, valid, run, args, world):
    """Return the Config with those layers wired that alone raise the validation loss least; found once in a run."""
    path, wired = run / "layers.json", model.config
    if not path.exists():
        named = wired.parsed
        model.config, name = own, wiring_name(*named._replace(parameter=None))
        found = score.sensitivity(model, lambda m: validation_loss(m, valid, args.micro_batch, world), name)
        layers = score.least_sensitive(found, wired.wirings.count(wired.named_wiring), wired.named_wiring.blocks)
        if world.rank == 0:
            print("auto:", ", ".join(f"layer {i} {nats:.4f}" for i, nats in enumerate(found)), f"nats: {[*layers]}")
        world.first(writing.write_text, path, json.dumps(wiring_name(*named._replace(parameter=layers))))
    return rewired(own, json.loads(path.read_text()))


def main(argv=None):
    args = parse(argv)
    world = launch.join(args.device, vars(args))
    out = Path(os.path.realpath(args.out))
    run = out.parent / f"{out.name}.run"
    with world.together():
        config, own, taught = runs.describe(args)
        weights, teachers = (folder and checkpoint.Weights(folder) for folder in (args.checkpoint, args.distill))
    if not world.alone:
        read = {f"contents of --{name}": getattr(args, name) for name in ("checkpoint", "distill")}
        world.agree({name: folder and checkpoint.digest(folder) for name, folder in read.items()})
    share = -(-args.batch // world.tp_size)
    args.micro_batch = min(args.micro_batch or share, share)
    args.compute_dtype = args.compute_dtype or ("bfloat16" if world.device.type == "cuda" else "float32")
    dtype = checkpoint.DTYPES[args.compute_dtype]
    with contextlib.ExitStack() as held:
        world.first(lambda: held.enter_context(runs.reserved(out, run)))
        world.first(runs.prepare, run, args)
        held.enter_context(sharding.process_group(world))
        with world.together():
            windows, valid = runs.windows(run, args)
            if world.rank == 0:
                print(f"{windows.n:,} windows to train on, {valid.n:,} to validate on", flush=True)
            model = build(config, weights, world, dtype, args, args.compile)
            teacher = taught and build(taught, teachers, world, dtype, compiled=args.compile)
        if runs.is_auto(args):
            model.config = least_sensitive(model, own, valid, run, args, world)
        original = own if own and own.wiring == "standard" != config.wiring and runs.keeps_norms(config) else None
        best = train(model, teacher, windows, valid, run, args, world, original)
        if world.rank == 0:
            runs.finish(run, out)
            reached = f"{best['nats']:.4f} nats per token at step {best['step']}"
            print(f"wrote {out}: wiring {model.config.wiring}, {args.dtype}, {reached}")


if __name__ == "__main__":
    launch.run(main)
