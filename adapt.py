"""Train a small model from scratch, in any wiring, on plain text; what comes out is a checkpoint for generate.py.

python adapt.py --ladder --text train.txt --valid valid.txt --out DIR
"""

import copy
import math
import time

import torch
import torch.nn.functional as F
from tqdm import trange

import checkpoint
import launch
from launch import count, number
from model import Config, InputError, Transformer
from tokenizer import load_tokenizer

SEPARATOR = "<|endoftext|>"


def read_documents(paths):
    """The documents of text files, in which SEPARATOR stands between two."""
    documents = []
    for path in paths:
        documents += [d.strip() for d in checkpoint.read_text(path).split(SEPARATOR) if d.strip()]
    if not documents:
        raise InputError(f"{', '.join(paths)}: no text")
    return documents


def train_tokenizer(documents, vocab_size, path):
    """A SentencePiece BPE vocabulary in Llama 2's style: BOS 1, EOS 2, unknown characters as bytes."""
    from sentencepiece import SentencePieceTrainer

    try:
        with open(path, "wb") as f:
            SentencePieceTrainer.train(
                sentence_iterator=iter(documents), model_writer=f, vocab_size=vocab_size, model_type="bpe",
                byte_fallback=True, character_coverage=0.9999, normalization_rule_name="identity", split_digits=True,
                remove_extra_whitespaces=False, max_sentence_length=1 << 20, num_threads=1, minloglevel=2,
            )  # fmt: skip
    except RuntimeError as e:  # too little text for so many pieces, or too few pieces for its characters
        raise InputError(f"--vocab-size {vocab_size} does not suit the text: {str(e).rpartition('] ')[2]}") from None


def encode(tokenizer, documents):
    """All documents as one row of ids, each BOS text EOS."""
    eos = tokenizer.special["</s>"]
    return torch.tensor([i for d in documents for i in [*tokenizer.encode(d), eos]])


def loss(model, windows):
    """Mean negative log-likelihood, in nats per token, of windows (B, S + 1)."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


@torch.no_grad()
def validation_loss(model, ids, seq_len, batch):
    windows = ids[: (len(ids) - 1) // seq_len * seq_len + 1].unfold(0, seq_len + 1, seq_len)
    total = sum(loss(model, part).item() * len(part) for part in windows.split(batch))
    return total / len(windows)


@torch.no_grad()
def init_weights(model, seed):
    """Matrices from N(0, 0.02); the norms are 1 already."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.normal_(0, 0.02, generator=generator)


def train(model, ids, valid_ids, args):
    """AdamW with warm-up and cosine decay; returns the weights with the lowest validation loss."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    for module in (m for block in model.layers for m in (block.attention, block.feed_forward)):
        module.register_forward_hook(lambda m, inputs, h: F.dropout(h, args.dropout, m.training))
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(args.seed)
    best, best_weights = math.inf, None
    bar = trange(1, args.steps + 1, desc="training")
    for step in bar:
        progress = step / args.steps
        warm = min(1.0, step / args.warmup)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * warm * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
        starts = torch.randint(len(ids) - args.seq_len, (args.batch,), generator=generator)
        windows = ids[starts[:, None] + torch.arange(args.seq_len + 1)]
        nats = loss(model, windows)
        nats.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % args.eval_every == 0 or step == args.steps:
            valid = validation_loss(model.eval(), valid_ids, args.seq_len, args.batch)
            model.train()
            bar.write(f"step {step}: train {nats.item():.4f}, valid {valid:.4f} nats per token")
            if not math.isfinite(valid):
                raise InputError(f"the loss is {valid} after {step} steps: try a smaller --lr than {args.lr}")
            if valid < best:
                best, best_weights = valid, copy.deepcopy(model.state_dict())
    return best, best_weights


def parse(argv):
    p = launch.Parser(__doc__)
    p.add_argument("--text", nargs="+", required=True, metavar="FILE", help=f"training text, {SEPARATOR} between texts")
    p.add_argument("--valid", required=True, metavar="FILE", help="text to validate on, in the same form")
    p.add_argument("--out", required=True, metavar="DIR", help="the checkpoint folder to write")
    p.add_argument("--vocab-size", type=count, default=1024, help="pieces of the SentencePiece vocabulary")
    p.add_argument("--dim", type=count, default=128, help="width of the residual stream")
    p.add_argument("--n-layers", type=count, default=8, help="layers")
    p.add_argument("--n-heads", type=count, default=8, help="attention heads, each of dim / n-heads")
    p.add_argument("--n-kv-heads", type=count, default=4, help="key and value heads")
    p.add_argument("--intermediate-size", type=count, default=384, help="width of the MLP")
    p.add_argument("--seq-len", type=count, default=256, help="tokens of a training window, and the model's context")
    p.add_argument("--steps", type=count, default=3000, help="optimizer steps")
    p.add_argument("--batch", type=count, default=16, help="windows a step")
    p.add_argument("--lr", type=number(float, 0, above=True), default=3e-3, help="peak learning rate")
    share = number(float, 0, 0.99)
    p.add_argument("--dropout", type=share, default=0.1, help="of each sublayer's output, while training")
    p.add_argument("--warmup", type=count, default=100, help="steps of linear warm-up")
    p.add_argument("--eval-every", type=count, default=200, help="steps between validations")
    p.add_argument(
        "--seed", type=number(int, 0, 2**63 - 1), default=0, help="of the weights and of the order of the windows"
    )
    p.add_argument("--dtype", choices=checkpoint.DTYPES, default="bfloat16", help="of the written weights")
    launch.add_wiring_flags(p, otherwise="standard")
    return p.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    if launch.rank_and_size()[1] > 1:
        raise InputError("training runs in one process: start it with python, not with several ranks of torchrun")
    if args.dim % args.n_heads:
        raise InputError(f"--dim {args.dim} is not a multiple of --n-heads {args.n_heads}")
    documents, valid_documents = read_documents(args.text), read_documents([args.valid])
    with checkpoint.new_folder(args.out) as folder:
        train_tokenizer(documents, args.vocab_size, folder / "tokenizer.model")
        tokenizer = load_tokenizer(folder)
        config = Config(
            args.n_layers, args.n_heads, args.n_kv_heads, args.dim // args.n_heads, args.dim, args.intermediate_size,
            tokenizer.vocab_size, args.seq_len, tie_embeddings=True, bos_id=1, eos_ids=(2,),
        )  # fmt: skip
        config = launch.with_wiring(config, args)
        ids, valid_ids = encode(tokenizer, documents), encode(tokenizer, valid_documents)
        if min(len(ids), len(valid_ids)) <= args.seq_len:
            raise InputError(f"--text and --valid need more than --seq-len {args.seq_len} tokens each")
        model = Transformer(config)
        init_weights(model, args.seed)
        n = sum(p.numel() for p in model.parameters())
        print(
            f"{n / 1e6:.2f} M parameters, {config.wiring}, {len(ids)} training and {len(valid_ids)} validation tokens"
        )
        started = time.perf_counter()
        best, weights = train(model, ids, valid_ids, args)
        print(
            f"best validation loss {best:.4f} nats per token after {(time.perf_counter() - started) / 60:.1f} minutes"
        )
        checkpoint.write_model(folder, config, weights, checkpoint.DTYPES[args.dtype])


if __name__ == "__main__":
    launch.run(main)
