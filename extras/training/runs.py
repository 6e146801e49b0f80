"""The folder of a run: settings, tokens, log, states and the best weights so far, until its output is complete."""

import contextlib
import json
import math
import os
import shutil
import signal

from extras.training.data import Windows, documents, tokenize, train_tokenizer
from formats import checkpoint
from formats.compare import check_vocabulary
from formats.tokenizer import load_tokenizer
from model import Config
from runtime import cli, writing
from runtime.errors import InputError
from tp import shard_plan

TEMPORARY = "state-*", "best-*", "*.tmp", "*.tokens", "best.json"  # what finish() removes; best.json goes last
MACHINE_FLAGS = "out", "device", "micro_batch", "recompute", "compile", "save_every"  # may change in a run


def read_configs(args):
    """Return the Config to train, and the teacher's or None. Complete args.seq_len."""
    teacher = None
    if args.checkpoint:
        own = checkpoint.read_original(args.checkpoint)
    else:
        if args.dim % (2 * args.n_heads):
            raise InputError(f"--dim {args.dim} is not an even multiple of --n-heads {args.n_heads}")
        own = Config(
            args.n_layers, args.n_heads, args.n_kv_heads, args.dim // args.n_heads, args.dim, args.intermediate_size,
            args.vocab_size, args.seq_len or 256, tie_embeddings=True, bos_id=1, eos_ids=(2,),
        )  # fmt: skip
    args.seq_len = args.seq_len or min(2048, own.max_seq_len)
    if args.seq_len > own.max_seq_len:
        raise InputError(f"--seq-len {args.seq_len} is longer than the context of {own.max_seq_len}")
    config = cli.with_wiring(own, args)
    _check_trainable(config)
    if args.distill:
        teacher = checkpoint.read_original(args.distill)
        _check_trainable(teacher)
        if args.distill == args.checkpoint and own.function == config.function:
            raise InputError(f"{args.checkpoint} is {own.wiring} already: name its original, --distill DIR")
        check_vocabulary(config, args.checkpoint, teacher, args.distill, f"--distill {args.distill}")
    return config, teacher


def _check_trainable(config):
    name = config.parsed.name
    if name in ("laneformer", "upper-bound"):
        raise InputError(f"a model in the wiring {name} cannot be trained")
    if config.named_wiring.laned and config.lanes is None:
        raise InputError(f"{name} is another function in another number of lanes: name them, e.g. {config.wiring}/8")
    shard_plan(config, 0, config.lanes or 1)  # refuses more lanes than heads


@contextlib.contextmanager
def reserved(out, run):
    """Lock an output, which must not exist yet, and its run."""
    with writing.reserved(out):
        step = best(run)["step"]
        if step is not None and not (run / f"best-{step}").exists():
            _remove_temporary(run)  # it was killed after finish() had published its best weights
        writing.check_absent(out)
        yield


def prepare(run, args):
    """Make the folder with its tokenizer and tokens, or check that the run in it has these settings.

    Raises InputError; then no new folder stays.
    """
    settings = {f"--{name.replace('_', '-')}": v for name, v in vars(args).items() if name not in MACHINE_FLAGS}
    path, is_new = run / "settings.json", not run.exists()
    try:
        settings["bytes of --text and --valid"] = [os.path.getsize(file) for file in (*args.text, args.valid)]
        if (
            path.exists() and (run / "valid.tokens").exists()
        ):  # without tokens the run has ended, and its output is gone
            before = json.loads(path.read_text())
            for name, now in settings.items():
                if before.get(name) != now:
                    was = f"{run} holds a run with {name} {before.get(name)}, not {now}"
                    raise InputError(f"{was}: give that to resume it, or another --out")
            return
        run.mkdir(parents=True, exist_ok=True)
        if args.checkpoint:
            writing.copy_tokenizer(args.checkpoint, run)
            config = checkpoint.read_config(args.checkpoint)
            tokenizer, eos_ids = load_tokenizer(run, config.vocab_size), config.eos_ids
            if tokenizer is None:
                raise InputError(f"{args.checkpoint} has no tokenizer: convert it with --tokenizer FILE")
        else:
            texts = [document for file in args.text for document, _ in documents(file) if isinstance(document, str)]
            train_tokenizer(texts, args.vocab_size, run / "tokenizer.model")
            tokenizer, eos_ids = load_tokenizer(run), (2,)
        for name, files in ("train", args.text), ("valid", [args.valid]):
            tokenize(files, tokenizer, eos_ids[0] if eos_ids else None, run / f"{name}.tokens")
        windows(run, args)
        writing.write_text(path, json.dumps(settings, indent=2) + "\n")
    except OSError as e:
        raise InputError(f"{e.filename2 or e.filename}: {e.strerror}") from None
    finally:
        if is_new and not path.exists():
            shutil.rmtree(run, ignore_errors=True)


def windows(run, args):
    """Return the Windows to train on and those to validate on."""
    train = Windows(run / "train.tokens", args.seq_len, "--text", args.seed)
    return train, Windows(run / "valid.tokens", args.seq_len, "--valid", at_most=args.valid_tokens)


def finish(run, out):
    """Make the best weights the output, and remove from the run all but its log and settings."""
    writing.publish(run / f"best-{best(run)['step']}", out)
    _remove_temporary(run)


def best(run):
    """Return {"step", "nats"} of the best weights so far, which lie in run/best-STEP."""
    path = run / "best.json"
    return json.loads(path.read_text()) if path.exists() else {"step": None, "nats": math.inf}


def _remove_temporary(run):
    for path in (path for pattern in TEMPORARY for path in run.glob(pattern)):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def cut_log(path, step):
    """Remove the lines after a step, which the run will write again, and a line that was cut off."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    writing.write_text(path, "".join(x for x in lines if x.endswith("\n") and json.loads(x)["step"] <= step))


@contextlib.contextmanager
def interruptions():
    """Yield a list to which the first Ctrl-C or SIGTERM is added; a second one acts as before."""
    received, before = [], {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore(*arguments):
        received.extend(arguments[:1])
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        signal.signal(number, restore)
    try:
        yield received
    finally:
        restore()
