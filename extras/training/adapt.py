"""Make a ladder of a standard checkpoint by light retraining, or train a small model from scratch, in any wiring.

torchrun adapt.py --checkpoint DIR --wiring ladder:16 --text train.txt --valid valid.txt --out DIR2
python adapt.py --checkpoint demo --fresh --wiring ladder --text train.txt --valid valid.txt --out DIR2
"""

import contextlib
import functools
import json
import math
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as recomputed
from tqdm import tqdm

from extras.training import lanes, own_text, partials, runs, sharding
from ladder import outputs
from ladder.architectures import experts
from ladder.checkpoints import checkpoint
from ladder.command_line import flags
from ladder.command_line.flags import count, number
from ladder.errors import InputError
from ladder.layers.attention_inputs import attention_metadata
from ladder.memory import keep_freed_memory
from ladder.progress import progress
from ladder.ranks import launch
from ladder.scoring import SEPARATOR
from model import Transformer, interleave
from model import build as build_model

LOSS_TOKENS = 1024  # tokens whose logits are in memory at a time


def token_losses(head, x, targets, teacher_head=None, teacher_x=None):
    """Return sums over the n tokens: the KL divergence from the teacher (or 0), and the cross-entropy.

    x, teacher_x: normed streams (n, D), from which the heads compute logits.
    """
    student_logp = F.log_softmax(head(x).float(), -1)
    divergence = x.new_zeros(())
    if teacher_x is not None:
        teacher_logp = F.log_softmax(teacher_head(teacher_x).float(), -1)
        divergence = F.kl_div(student_logp, teacher_logp, reduction="sum", log_target=True)
    return divergence, F.nll_loss(student_logp, targets, reduction="sum")


class Trainee(Transformer):
    """A Transformer whose forward takes a Batch of packed windows."""

    token_losses = staticmethod(token_losses)
    first_sublayer = 0  # the first that is trained, if those below are the teacher's

    def forward(self, batch, known=(), records=False, align=False):
        """Return the normed stream (B, S, D), from which self.logits computes logits.

        known: the partials (B, S, D) of the first sublayers, which are then not computed. records: return (that
        stream, the partials of all sublayers). align: return, in place of the stream, the sum over the tokens that
        count and over the sublayers from self.first_sublayer on of |partial - known partial|^2 / |known partial|^2.
        Each of these reads what it would if all other partials were the known ones.
        """
        x = self.embed(batch.tokens)
        metadata = attention_metadata(self, batch.positions, mask=batch.mask)
        if self.config.named_wiring.fixed_shards:
            return self.norm(interleave(lanes.loops(self, x, metadata))[0])  # all lanes end with the same x
        recorded = []
        errors = []

        def compare(i, h, x):
            target = known[i][batch.counts].float()
            error = (h(x)[batch.counts].float() - target).square().sum(-1)
            errors.append((error / target.square().sum(-1)).sum())
            return known[i]

        around = (lambda i, h: functools.partial(compare, i, h)) if align else None
        known_first = known[: self.first_sublayer] if align else known
        (x,) = interleave([partials.loop(self, self.config, x, metadata, known_first, recorded, around)])
        if align:
            return sum(errors)
        return (self.norm(x), recorded) if records else self.norm(x)


def build(config, weights, world, args, is_teacher=False):
    """Return a sharded Trainee that computes in args.compute_dtype. Its weights are float32, but a teacher's are not.

    weights: a checkpoint.Weights, or None to start from fresh ones.
    """
    dtype = checkpoint.DTYPES[args.compute_dtype]
    model = build_model(config, Trainee)
    experts.make_differentiable(model, args.compile)
    if config.named_wiring.fixed_shards:
        lanes.split(model)
    if is_teacher:
        model = model.to(dtype).requires_grad_(False)

    def wrapped(function):
        function = torch.compile(function) if args.compile else function
        return functools.partial(recomputed, function, use_reentrant=False) if args.recompute else function

    model.token_losses = wrapped(token_losses)
    sublayers = [module for block in model.layers for module in (block.attention, block.feed_forward)]
    for module in sublayers:
        module.forward = wrapped(module.forward)
    sharding.shard(model, sublayers, world, dtype)
    sharding.fill(model, weights, args.seed, dither=dtype == torch.bfloat16 and not is_teacher)
    return model


def freeze(model, original, train):
    """Freeze what --train leaves out, and the routers of a model whose wiring changes; set model.first_sublayer.

    A router's expert_bias is frozen in any case: it decides alone which experts are chosen, which has no gradient.
    original: the Config of the weights' own wiring. train: "all", "above" or "outputs".
    """
    first = partials.first_rewired(original, model.config)
    if train != "all":
        model.first_sublayer = partials.sublayers_below(model.config, first)
    for name, parameter in model.named_parameters():
        layer = int(name.split(".")[1]) if name.startswith("layers.") else model.config.n_layers
        below = layer < first or name.startswith("tok_embeddings")  # a tied head is the embedding's
        other = "norm" not in name and not name.removesuffix(".bias").removesuffix(".weight").endswith(("wo", "w2"))
        chooses = ".router." in name and first < model.config.n_layers or name.endswith("expert_bias")
        if (train != "all" and below) or (train == "outputs" and other) or chooses:
            parameter.requires_grad_(False)


def losses(model, batch, teacher=None, align=False, text_weight=0.0):
    """Return (the loss to minimize, the cross-entropy), sums in nats over the tokens of a batch that count.

    The loss is the cross-entropy or, with a teacher, the KL divergence from it + text_weight * cross-entropy. What lies
    below the first sublayer that is trained is the teacher's. align: the loss is Trainee.forward's, and the
    cross-entropy 0.
    """
    known = ()
    with torch.no_grad():
        if teacher and (align or model.first_sublayer):
            teacher_x, known = teacher(batch, records=True)
        else:
            teacher_x = teacher and teacher(batch)
    if align:
        return model(batch, known, align=True), known[0].new_zeros(())
    x = model(batch, known[: model.first_sublayer])
    divergence = nats = 0.0
    for i in zip(*(index.split(LOSS_TOKENS) for index in batch.counts.nonzero(as_tuple=True)), strict=True):
        of_teacher = (teacher.logits, teacher_x[i]) if teacher else ()
        kl, ce = model.token_losses(model.logits, x[i], batch.targets[i], *of_teacher)
        divergence = divergence + kl
        nats = nats + ce
    return divergence + (text_weight * nats if teacher else nats), nats.detach()


@torch.no_grad()
def validation_loss(model, windows, rows, world, teacher=None):
    """Return (the cross-entropy, the KL divergence from a teacher or else 0), in nats per token over all windows.

    rows: windows at a time on each rank.
    """
    kl = nats = tokens = 0.0
    for batch in windows.batches(range(windows.n), rows, world):
        loss, ce = losses(model, batch, teacher)
        kl += loss.item() if teacher else 0
        nats += ce.item()
        tokens += batch.counts.sum().item()
    model.reshard()  # FSDP2 leaves some weights whole, for a backward pass
    nats, kl, tokens = sharding.summed([nats, kl, tokens], world)
    return nats / max(tokens, 1), kl / max(tokens, 1)


def learning_rate(step, args):
    """Return the learning rate of a step: a linear warm-up, then a cosine down to a tenth."""
    warmup = max(1, min(200, args.steps // 10))
    if step < warmup:
        return args.lr * step / warmup
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, args.steps - warmup)))


def optimizer_step(step, model, teacher, optimizer, windows, args, world):
    """Take a step of the optimizer and return its line for the log.

    If the loss or its gradient is not finite, this raises InputError before anything changes.
    """
    start = time.perf_counter()
    indices = windows.indices((step - 1) * args.batch, args.batch)
    nats = total_loss = tokens = 0.0
    for batch in windows.batches(indices, args.micro_batch, world):
        loss, ce = losses(model, batch, teacher, step <= args.align_steps, args.text_weight)
        loss.backward()
        nats += ce.item()
        total_loss += loss.item()
        tokens += batch.counts.sum().item()
        progress.beat()
    nats, total_loss, tokens = sharding.summed([nats, total_loss, tokens], world)
    for parameter in model.parameters():
        if parameter.grad is not None:  # it is frozen, or alignment takes no notice of it
            parameter.grad.mul_(world.tp_size / max(tokens, 1))  # FSDP2 has taken the mean over the ranks
    nats /= max(tokens, 1)
    total_loss /= max(tokens, 1)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()
    if not math.isfinite(total_loss + norm):
        raise InputError(
            f"at step {step} the loss is {total_loss:g} and the norm of its gradient {norm:g}: try a smaller --lr than "
            f"{args.lr:g} and another --out; {args.out}.run/best-* holds the best weights so far"
        )
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, args)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    n_trained = args.batch * args.seq_len
    return {
        "step": step, "tokens": step * n_trained, "train": nats, "loss": total_loss, "lr": learning_rate(step, args),
        "gradient_norm": norm, "tokens_per_s": n_trained / (time.perf_counter() - start),
    }  # fmt: skip


def distance(line):
    """Return what the weights of a validation are judged by: the divergence from the teacher, or else the loss."""
    return line.get("kl", line["valid"])


def train(model, teacher, windows, valid, run, args, world):
    """Train from the newest state of the run up to args.steps; return {"step", "valid"} of the best weights.

    Each validation, the first at step 0, saves a state and, if the weights are the best so far, these as run/best-STEP.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = ([p for p in trained if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    first = sharding.restore(run, model, optimizer, world) + 1
    is_rank_0 = world.rank == 0
    lines = runs.read_log(run, first - 1)
    valid_lines = [{"step": 0, "valid": math.inf}, *(line for line in lines if "valid" in line)]
    best = min(valid_lines, key=distance)
    if is_rank_0:
        with outputs.new_file(run / "log.jsonl") as log:
            log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    steps = range(first, args.steps + 1)
    bar = tqdm(steps, "training", args.steps, initial=first, unit="step", disable=None if is_rank_0 else True)
    for step in bar:
        progress.at("training step", step, timed=step > max(first, 1))  # the first may compile
        line = {"step": 0, "tokens": 0}
        if step:
            line = optimizer_step(step, model, teacher, optimizer, windows, args, world)
            bar.set_postfix_str(f"{line['train']:.4f} nats, {line['tokens_per_s']:,.0f} tokens/s")
        validates = step % args.eval_every == 0 or step == args.steps
        if validates:
            progress.at("validation", timed=False)
            if teacher and not step:  # with which the student's losses are compared
                line["teacher"], _ = validation_loss(teacher, valid, args.micro_batch, world)
            line["valid"], kl = validation_loss(model, valid, args.micro_batch, world, teacher)
            line |= {"kl": kl} if teacher else {}
            if distance(line) < distance(best):
                best = line
                sharding.write(run, step, model, checkpoint.DTYPES[args.dtype], world)
        if is_rank_0:
            outputs.append_line(run / "log.jsonl", line)
            if validates:
                nats = ", ".join(
                    f"{name} {line[name]:.4f}" for name in ("train", "teacher", "valid", "kl") if name in line
                )
                bar.write(f"step {step}: {nats} nats per token")
        if validates:
            sharding.save(run, step, best["step"], model, optimizer, world)
    return best


def parse(argv):
    p = flags.Parser(__doc__)
    p.add_argument("--checkpoint", required=True, metavar="DIR", help="the folder to retrain")
    p.add_argument("--fresh", action="store_true", help="take only config.json and tokenizer from DIR, no weights")
    files = f"plain text with {SEPARATOR} between documents, or .jsonl with text or chat messages"
    p.add_argument("--text", nargs="+", default=[], metavar="FILE", help=f"to train on: {files}")
    words = "train on N tokens that the teacher writes itself, too"
    p.add_argument("--own-text", type=count, metavar="N", help=words)
    p.add_argument("--valid", required=True, metavar="FILE", help="to validate on, in the same form")
    p.add_argument("--out", required=True, metavar="DIR", help="the folder to write; until then all lies in DIR.run")
    flags.add_wiring_flags(p)
    g = p.add_argument_group("training")
    teacher = g.add_mutually_exclusive_group()
    words = "the teacher to learn from (default: CHECKPOINT itself, if its wiring changes)"
    teacher.add_argument("--distill", metavar="DIR", help=words)
    teacher.add_argument("--plain", action="store_true", help="learn from the text alone, without a teacher")
    g.add_argument("--seq-len", type=count, metavar="N", help="tokens of a window (default: the context, up to 2048)")
    g.add_argument("--steps", type=count, metavar="N", default=3000, help="optimizer steps")
    g.add_argument("--batch", type=count, metavar="N", default=16, help="windows a step, on all ranks together")
    usual = "default: 3e-3 with --fresh, 5e-5 with a teacher, else 5e-6"
    g.add_argument("--lr", type=number(float, 0, above=True), metavar="X", help=f"peak learning rate ({usual})")
    g.add_argument("--eval-every", type=count, metavar="N", default=200, help="steps between validations and saves")
    g.add_argument("--valid-tokens", type=count, metavar="N", help="validate on so many (default: all)")
    words = "above: not what lies below the first rewired layer; outputs: of the rest only norms and the projections to"
    g.add_argument("--train", **flags.one_of(("all", "above", "outputs")), default="all", help=f"{words} the stream")
    words = "so many steps first pull each rewired sublayer to the original's, without the head (default: 0)"
    g.add_argument("--align-steps", type=number(int, 0), metavar="N", default=0, help=words)
    words = "of the text's cross-entropy beside the KL divergence from the teacher (default: 0.1)"
    g.add_argument("--text-weight", type=number(float, 0), metavar="X", default=0.1, help=words)
    g.add_argument("--seed", type=number(int, 0, 2**63 - 1), default=0, metavar="S", help="of all that is random")
    g.add_argument("--dtype", **flags.one_of(checkpoint.DTYPES), default="bfloat16", help="of the written weights")
    g.add_argument(
        "--compute-dtype", **flags.one_of(("float32", "bfloat16")), help="default: bfloat16 on a GPU, else float32"
    )
    g = p.add_argument_group("machine")
    g.add_argument("--micro-batch", type=count, metavar="N", help="windows at once on a rank (default: all its share)")
    g.add_argument("--recompute", action="store_true", help="the backward pass computes layers again: less memory")
    g.add_argument("--compile", action="store_true", help="torch.compile attentions, MLPs and losses")
    flags.add_rank_flags(g, comm=False)
    args = p.parse_args(argv)
    args.micro_batch = args.micro_batch or args.batch
    return args


def main(argv=None):
    args = parse(argv)
    world = launch.join(args.device, vars(args))
    if world.device.type == "cpu":
        keep_freed_memory()
    out = Path(os.path.realpath(args.out))
    run = Path(f"{out}.run")
    with world.together():
        config, teacher_config = runs.read_configs(args)
        folders = {"checkpoint": None if args.fresh else args.checkpoint, "distill": args.distill}
        weights, teacher_weights = (folder and checkpoint.Weights(folder) for folder in folders.values())
    world.agree({}, **folders)
    args.compute_dtype = args.compute_dtype or ("bfloat16" if world.device.type == "cuda" else "float32")
    with contextlib.ExitStack() as stack:
        with world.together():
            if world.rank == 0:
                temporary = stack.enter_context(outputs.reserved(out))
                runs.remove_finished(run, out)
                outputs.check_absent(out)
                runs.prepare(run, args)
        if world.alone:
            dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)  # FSDP2 needs one
            stack.callback(dist.destroy_process_group)
        if args.own_text:
            own_text.write(run / "own.tokens", teacher_config, args, world)
        with world.together():
            windows, valid = runs.windows(run, args)
            world.say(f"{windows.n:,} windows to train on, {valid.n:,} to validate on")
            if args.compile:
                from ladder.kernels import compiling

                compiling.prepare(world.device)
            model = build(config, weights, world, args)
            if not args.fresh:
                freeze(model, checkpoint.read_config(args.checkpoint), args.train)
            teacher = teacher_config and build(teacher_config, teacher_weights, world, args, is_teacher=True)
        best = train(model, teacher, windows, valid, run, args, world)
        if world.rank == 0:
            runs.finish(run, best["step"], out, temporary)
            reached = f"{best['valid']:.4f} nats per token at step {best['step']}"
            print(f"wrote {out}: wiring {model.config.wiring}, {args.dtype}, {reached}")
