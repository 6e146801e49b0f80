"""Make a ladder of a standard checkpoint by light retraining, or train a small model from scratch, in any wiring.

torchrun adapt.py --checkpoint DIR --wiring ladder:16 --distill --text train.txt --valid valid.txt --out DIR2
python adapt.py --ladder --text train.txt --valid valid.txt --out DIR2
"""

import contextlib
import functools
import math
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as recomputed
from tqdm import tqdm

from evaluation.score import SEPARATOR
from extras.training import lanes, runs, sharding
from formats import checkpoint
from formats.compare import digest
from kernels import cxx
from model import Attention, FeedForward, Transformer, interleave
from runtime import cli, launch, watch, writing
from runtime.cli import count, number
from runtime.errors import InputError

CHUNK = 1024  # tokens whose logits are computed at a time
KEPT_LOGITS = 1 << 26  # a pass with more of them computes each chunk again for its backward pass, to save memory
BAND = 128  # queries whose scores are computed at a time
SHAPE = {  # flag: (default, words) of a model from scratch
    "--vocab-size": (1024, "pieces of the vocabulary"),
    "--dim": (128, "width of the residual stream"),
    "--n-layers": (8, "layers"),
    "--n-heads": (8, "attention heads, each of dim / n-heads"),
    "--n-kv-heads": (4, "key and value heads"),
    "--intermediate-size": (384, "width of the MLP"),
}


def banded_attention(q, k, v, mask):
    """Return the attention (B, K, G, S, H) of scaled q of that shape to k and v (B, K, S, H), by mask (B, S, S).

    The scores are in the dtype of q. On CPUs the backward pass of PyTorch's own kernel takes two to three times as
    long as that of these matrix products.
    """
    G, end, ys = q.shape[2], 0, []
    bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -math.inf)[:, None, None]
    for band in q.split(BAND, dim=3):
        start, end = end, end + band.shape[3]  # causal: these queries read only the keys before `end`
        scores = (band.flatten(2, 3) @ k[:, :, :end].mT).unflatten(2, (G, -1)) + bias[..., start:end, :end]
        ys.append((scores.softmax(-1).flatten(2, 3) @ v[:, :, :end]).unflatten(2, (G, -1)))
    return torch.cat(ys, dim=3)


class BandedAttention(Attention):
    def attend(self, q, k, v, metadata):
        return banded_attention(q * self.head_dim**-0.5, k, v, metadata.mask).flatten(2, 3)


class Norm(torch.nn.RMSNorm):
    """An RMSNorm that torch.compile compiles: it skips the forward of torch.nn's own modules."""

    def forward(self, x):
        return super().forward(x)


def token_losses(head, x, targets, teacher_head=None, teacher_x=None):
    """Return sums over the n tokens: the KL divergence from the teacher (or 0), and the cross-entropy.

    x, teacher_x: normed streams (n, D), from which the heads compute logits.
    """
    student_logp, divergence = F.log_softmax(head(x).float(), -1), x.new_zeros(())
    if teacher_x is not None:
        teacher_logp = F.log_softmax(teacher_head(teacher_x).float(), -1)
        divergence = F.kl_div(student_logp, teacher_logp, reduction="sum", log_target=True)
    return divergence, F.nll_loss(student_logp, targets, reduction="sum")


class Trainee(Transformer):
    """A Transformer that reads packed windows."""

    token_losses = staticmethod(token_losses)
    dropout, recompute = 0.0, False  # of sublayers' outputs; whether the backward pass computes sublayers again
    lanes = None  # those of lanes.split, which compute with slices of these weights

    def sublayers(self, metadata, cache=None, lane=None):
        """Return [(h, stale)] of the model, or of one of its lanes."""

        def in_training(h):
            again = (lambda x: recomputed(h, x, use_reentrant=False)) if self.recompute else h
            return lambda x: F.dropout(again(x), self.dropout)

        sublayers = Transformer.sublayers(lane or self, metadata, cache)
        return [(in_training(h), stale) for h, stale in sublayers] if self.training else sublayers

    def forward(self, batch):
        """Return the normed stream (B, S, D), from which self.output computes logits."""
        mask, positions = batch.mask, batch.positions
        if mask is None and positions.device.type == "cpu":  # BandedAttention always takes one
            mask = positions[:, None] <= positions[..., None]
        x, metadata = self.tok_embeddings(batch.tokens), self.metadata(positions, mask)
        streams = lanes.streams(self, x, metadata) if self.lanes else [self.stream(x, metadata)]
        return self.norm(interleave(streams)[0])  # all lanes end with the same x


def build(config, weights, world, dtype, args=None, compiled=False):
    """Return a sharded Trainee that computes in dtype, with float32 masters; without args a teacher, which has none.

    weights: as tp.load_shard takes them, or None for fresh ones.
    """
    on_cpu = world.device.type == "cpu"
    with torch.device("meta"):
        model = Trainee(config)
    if config.tie_embeddings:
        model.output.weight = model.tok_embeddings.weight
    for module in model.modules():
        if type(module) is Attention and on_cpu:
            module.__class__ = BandedAttention
            if compiled:  # Inductor's softmax is slower
                module.attend = torch.compiler.disable(module.attend)
        if type(module) is torch.nn.RMSNorm and compiled:
            module.__class__ = Norm
    if config.lanes:
        model.lanes = lanes.split(model)
    if args is None:
        model = model.to(dtype).requires_grad_(False).eval()
    else:
        model.dropout, model.recompute = args.dropout, args.recompute
    if compiled:
        if on_cpu:
            try:
                cxx.prepare_compile()
            except cxx.CompilerError as e:
                raise InputError(str(e)) from None
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
    """Return sums over the tokens of a batch that count, in nats: (the loss to minimize, the cross-entropy).

    The loss is the cross-entropy or, with a teacher, the KL divergence from it + 0.1 cross-entropy.
    """
    with torch.no_grad():
        teacher_x = teacher and teacher(batch)
    x, recompute = model(batch), batch.tokens.numel() * model.config.vocab_size > KEPT_LOGITS
    divergence, nats = 0 * x.float().sum(), torch.zeros((), device=x.device)
    for i in zip(*(index.split(CHUNK) for index in batch.counts.nonzero(as_tuple=True)), strict=True):
        inputs = [model.output, x[i], batch.targets[i]] + ([teacher.output, teacher_x[i]] if teacher else [])
        compute = functools.partial(recomputed, model.token_losses, use_reentrant=False)
        kl, ce = (compute if recompute else model.token_losses)(*inputs)
        divergence, nats = divergence + kl, nats + ce
    return divergence + (0.1 * nats if teacher else nats), nats.detach()


@torch.no_grad()
def validation_loss(model, windows, rows, world):
    """Return nats per token over all windows, `rows` at a time on each rank."""
    was_training, nats, tokens = model.training, 0.0, 0
    model.eval()
    for first in range(world.rank * rows, windows.n + world.rank * rows, rows * world.tp_size):  # as many on each rank
        batch = windows.batch([i if i < windows.n else None for i in range(first, first + rows)]).to(world.device)
        nats, tokens = nats + losses(model, batch)[1].item(), tokens + batch.counts.sum().item()
    model.train(was_training)
    model.reshard()  # FSDP2 leaves some weights whole, for a backward pass
    nats, tokens = sharding.summed([nats, tokens], world)
    if not math.isfinite(nats):
        raise InputError(f"the loss on --valid is {nats / tokens:g} nats per token")
    return nats / tokens


def learning_rate(step, args):
    """Return the learning rate of a step: a linear warm-up, then a cosine down to a tenth."""
    if step < args.warmup:
        return args.lr * step / args.warmup
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * (step - args.warmup) / max(1, args.steps - args.warmup)))


def optimizer_step(step, model, teacher, optimizer, windows, args, world, interruptions):
    """Take a step of the optimizer; return its line of the log, and whether any rank was asked to stop.

    Raises InputError, before anything changes, if the loss or its gradient is not finite.
    """
    start = time.perf_counter()
    torch.manual_seed(args.seed * 1_000_003 + step * world.tp_size + world.rank)  # of dropout
    rows = -(-args.batch // world.tp_size)  # on each rank
    indices = windows.indices((step - 1) * args.batch, args.batch) + [None] * (rows * world.tp_size - args.batch)
    indices = indices[world.rank * rows : (world.rank + 1) * rows]
    batches = [windows.batch(indices[i : i + args.micro_batch]) for i in range(0, rows, args.micro_batch)]
    tokens, stop = sharding.summed([sum(batch.counts.sum().item() for batch in batches), len(interruptions)], world)
    nats = total_loss = 0.0
    for batch in batches:
        loss, ce = losses(model, batch.to(world.device), teacher)
        (loss * world.tp_size / max(tokens, 1)).backward()  # FSDP2 takes the mean over the ranks
        nats, total_loss = nats + ce.item(), total_loss + loss.item()
        watch.beat()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()
    nats, total_loss = (total / max(tokens, 1) for total in sharding.summed([nats, total_loss], world))
    if not math.isfinite(total_loss + norm):
        raise InputError(
            f"at step {step} the loss is {total_loss:g} and the norm of its gradient {norm:g}: try a smaller --lr than "
            f"{args.lr:g} and another --out; {args.out}.run/best-* holds the best weights so far"
        )
    rate = learning_rate(step, args)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    n_trained = args.batch * args.seq_len
    line = {
        "step": step, "tokens": step * n_trained, "train": nats, "loss": total_loss, "lr": rate,
        "gradient_norm": norm, "tokens_per_s": n_trained / (time.perf_counter() - start),
    }  # fmt: skip
    return line, stop > 0


def train(model, teacher, windows, valid, run, args, world):
    """Train to args.steps, from the newest state of the run on; return {"step", "nats"} of the best weights.

    run/best-STEP holds the weights of the lowest validation loss, from step 0 on. The first Ctrl-C saves a state.
    """
    matrices, vectors = ([p for p in model.parameters() if (p.dim() == 2) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    resumed, best = sharding.restore(run, model, optimizer, world), runs.best(run)
    step, show = resumed or 0, world.rank == 0
    bar = tqdm(total=args.steps, initial=step, desc="training", unit="step", disable=None if show else True)

    def log(line, validate):
        nonlocal best
        if validate:
            watch.at("validation", timed=False)
            line["valid"] = validation_loss(model, valid, args.micro_batch, world)
            if line["valid"] < best["nats"]:
                best = {"step": line["step"], "nats": line["valid"]}
                sharding.write(run, best, model, checkpoint.DTYPES[args.dtype], world)
        if show:
            if validate:
                nats = ", ".join(f"{name} {line[name]:.4f}" for name in ("train", "valid") if name in line)
                bar.write(f"step {step}: {nats} nats per token")
            writing.append_line(run / "log.jsonl", line)

    if show:
        runs.cut_log(run / "log.jsonl", -1 if resumed is None else step)
    if resumed is None:
        log({"step": 0, "tokens": 0}, validate=True)
    elif show:
        bar.write(f"going on from step {step} of {args.steps}")
    with runs.interruptions() as interruptions:
        first = step + 1
        while step < args.steps:
            step += 1
            watch.at("training step", step, timed=step > first)  # the first may compile
            line, stop = optimizer_step(step, model, teacher, optimizer, windows, args, world, interruptions)
            log(line, validate=step % args.eval_every == 0 or step == args.steps)
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
    g = p.add_argument_group("training")
    g.add_argument("--distill", nargs="?", const="", metavar="DIR", help="learn from this teacher, or the original")
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
    for flag, (default, words) in SHAPE.items():
        g.add_argument(flag, type=count, default=default, metavar="N", help=words)
    args = p.parse_args(argv)
    for flag, (default, _) in SHAPE.items():
        if args.checkpoint and vars(args)[flag[2:].replace("-", "_")] != default:
            raise InputError(f"{flag} is for a model from scratch: it does not go with --checkpoint")
    if not args.checkpoint and args.distill is not None:
        raise InputError("--distill needs --checkpoint, the model to retrain")
    args.distill = args.checkpoint if args.distill == "" else args.distill
    args.lr = args.lr or (3e-3 if not args.checkpoint else 5e-5 if args.distill else 5e-6)
    args.warmup = args.warmup or max(1, min(200, args.steps // 10))
    args.dropout = args.dropout if args.dropout is not None else 0.0 if args.checkpoint else 0.1
    return args


def main(argv=None):
    args = parse(argv)
    world = launch.join(args.device, vars(args))
    out = Path(os.path.realpath(args.out))
    run = out.parent / f"{out.name}.run"
    folders = {"checkpoint": args.checkpoint, "distill": args.distill}
    with world.together():
        config, teacher_config = runs.read_configs(args)
        weights, teacher_weights = (folder and checkpoint.Weights(folder) for folder in folders.values())
    if not world.alone:
        world.agree({f"contents of --{flag}": path and digest(path) for flag, path in folders.items()})
    rows = -(-args.batch // world.tp_size)
    args.micro_batch = min(args.micro_batch or rows, rows)
    args.compute_dtype = args.compute_dtype or ("bfloat16" if world.device.type == "cuda" else "float32")
    dtype = checkpoint.DTYPES[args.compute_dtype]
    with contextlib.ExitStack() as stack:
        with world.together():
            if world.rank == 0:
                stack.enter_context(runs.reserved(out, run))
                runs.prepare(run, args)
        stack.enter_context(sharding.process_group(world))
        with world.together():
            windows, valid = runs.windows(run, args)
            if world.rank == 0:
                print(f"{windows.n:,} windows to train on, {valid.n:,} to validate on", flush=True)
            model = build(config, weights, world, dtype, args, args.compile)
            teacher = args.distill and build(teacher_config, teacher_weights, world, dtype, compiled=args.compile)
        best = train(model, teacher, windows, valid, run, args, world)
        if world.rank == 0:
            runs.finish(run, out)
            reached = f"{best['nats']:.4f} nats per token at step {best['step']}"
            print(f"wrote {out}: wiring {model.config.wiring}, {args.dtype}, {reached}")
