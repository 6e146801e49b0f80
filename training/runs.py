"""The folder of a run: settings, tokens, log, states and the best weights so far, until its output is complete."""

import argparse
import contextlib
import hashlib
import json
import shutil
import signal

from formats import checkpoint
from formats.checkpoint import read_json
from formats.tokenizer import load_tokenizer
from measure import score
from model import WIRINGS, Config, InputError
from runtime import cli, writing
from training.data import Windows, documents, tokenize, train_tokenizer

SAMPLE = "Once upon a time there were 12 (twelve) little dogs.\n\tZwölf? 十二! def f(x): return x**2"  # to compare with
NEEDED = ["state-*", "best-*", "*.tmp", "*.tokens", "end"]  # by a run that has not ended; the mark of its end goes last
# flags that may change when a run goes on
MACHINE = ["out", "device", "micro_batch", "recompute", "compile", "save_every", "timeout"]


def is_auto(args):
    return (args.wiring or "").startswith("ladder:auto")


def teacher(args):
    """The folder of the teacher."""
    return args.distill or args.checkpoint


def describe(args):
    """(the Config to train, that of the checkpoint or None, that of the teacher or None); auto:N is the last N here.

    Completes args.seq_len. Raises InputError for what does not go together.
    """
    own = taught = None
    if args.checkpoint:
        config = own = _unquantized(args.checkpoint)
    else:
        if args.dim % args.n_heads:
            raise InputError(f"--dim {args.dim} is not a multiple of --n-heads {args.n_heads}")
        config = Config(
            args.n_layers, args.n_heads, args.n_kv_heads, args.dim // args.n_heads, args.dim, args.intermediate_size,
            args.vocab_size, args.seq_len or 256, tie_embeddings=True, bos_id=1, eos_ids=(2,),
        )  # fmt: skip
    args.seq_len = args.seq_len or min(2048, config.max_seq_len)
    if args.seq_len > config.max_seq_len:
        raise InputError(f"--seq-len {args.seq_len} is longer than the context of {config.max_seq_len}")
    if args.valid_tokens is not None and args.valid_tokens < args.seq_len:
        raise InputError(f"--valid-tokens {args.valid_tokens} is less than a window of --seq-len {args.seq_len}")
    wiring = args.wiring
    if is_auto(args):
        wiring = wiring.replace("auto", "", 1)
        if own is None:
            raise InputError(f"--wiring {args.wiring} needs --checkpoint, the model to retrain")
        score.alone(own, "ladder", 0)  # or an InputError
    config = cli.with_wiring(config, argparse.Namespace(**vars(args) | {"wiring": wiring}))
    _check_trainable(config.wiring)
    if not config.stale_layers and (args.blend_steps or args.match_streams):
        raise InputError(f"--blend-steps and --match-streams are for ladder layers, and {config.wiring} has none")
    if args.blend_steps > args.steps:
        raise InputError(f"--blend-steps {args.blend_steps} is more than --steps {args.steps}: it would end half way")
    if args.blend_steps and own.stale_layers:
        raise InputError(f"--blend-steps goes from a standard model, but {args.checkpoint} is {own.wiring}")
    if args.distill is not None:
        taught = _unquantized(teacher(args))
        _check_teacher(args, config, own, taught)
    return config, own, taught


def _unquantized(folder):
    config = checkpoint.read_config(folder)
    if config.quant:
        raise InputError(f"{folder} is quantized ({config.quant}): give the original")
    return config


def _check_trainable(wiring):
    if WIRINGS[wiring].tp_bound:
        known = ", ".join(name for name in WIRINGS if not WIRINGS[name].tp_bound)
        raise InputError(f"{wiring} is another function on another number of ranks: take one of {known}")


def _check_teacher(args, config, own, taught):
    _check_trainable(taught.wiring)
    if not args.distill and own.stale_layers and own.stale_layers == config.stale_layers:
        raise InputError(
            f"{args.checkpoint} is {own.wiring} already and would be its own teacher: --distill DIR names its original"
        )
    if taught.vocab_size != config.vocab_size:
        raise InputError(f"--distill {args.distill} has {taught.vocab_size} tokens, the model {config.vocab_size}")
    if taught.max_seq_len < args.seq_len:
        raise InputError(f"--distill {args.distill} has a context of {taught.max_seq_len}, less than --seq-len")
    if args.match_streams and (taught.n_layers, taught.dim) != (config.n_layers, config.dim):
        raise InputError(f"--match-streams needs a teacher of {config.n_layers} layers of width {config.dim}")
    theirs, ours = (load_tokenizer(folder, config.vocab_size) for folder in (teacher(args), args.checkpoint))
    if theirs and ours and theirs.encode_plain(SAMPLE) != ours.encode_plain(SAMPLE):
        raise InputError(f"the tokenizers of {args.checkpoint} and --distill {args.distill} cut text differently")


@contextlib.contextmanager
def reserved(out, run):
    """Have an output, which must not be there yet, and its run for this process alone; what a killed one left goes."""
    with writing.reserved(out):
        end = run / "end"
        has_ended = end.exists() and not (run / end.read_text()).exists()
        _remove(run, NEEDED if has_ended else ["*.tmp", "end"])
        writing.check_absent(out)
        yield


def prepare(run, args):
    """Make the folder, or check that what it holds is this very run; then its tokenizer and its tokens lie in it.

    Raises InputError, naming the first flag that is another, and for files that cannot be used; then no new folder
    stays.
    """
    new = not run.exists()
    settings = {name: value for name, value in vars(args).items() if name not in MACHINE}
    try:
        settings["files"] = [_digest(path) for path in (*args.text, args.valid)]
        run.mkdir(parents=True, exist_ok=True)
        _compare(run, settings)
        if args.checkpoint:
            checkpoint.copy_tokenizer(args.checkpoint, run)
            config = checkpoint.read_config(args.checkpoint)
            tokenizer, ends = load_tokenizer(run, config.vocab_size), config.eos_ids
            if tokenizer is None:
                raise InputError(f"{args.checkpoint} has no tokenizer: convert it with --tokenizer FILE")
        else:
            if not (run / "tokenizer.model").exists():
                texts = [d for path in args.text for d, _ in documents(path) if isinstance(d, str)]
                train_tokenizer(texts, args.vocab_size, run / "tokenizer.model")
            tokenizer = load_tokenizer(run)
            ends = (tokenizer.special["</s>"],)
        for name, paths in ("train", args.text), ("valid", [args.valid]):
            if not (run / f"{name}.tokens").exists():
                tokenize(paths, tokenizer, ends[0] if ends else None, run / f"{name}.tokens")
            Windows(run / f"{name}.tokens", args.seq_len, "--text" if name == "train" else "--valid")
        new = False
    except OSError as e:
        raise InputError(f"{e.filename2 or e.filename}: {e.strerror}") from None
    finally:
        if new:
            _remove(run, ["[!s]*", "*"])  # settings.json later than what was made by those settings
            shutil.rmtree(run, ignore_errors=True)


def _digest(path):
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _compare(run, settings):
    path = run / "settings.json"
    if not path.exists():
        writing.write_text(path, json.dumps(settings, indent=2) + "\n")
    before = read_json(path)
    for name, now in json.loads(json.dumps(settings)).items():
        if before.get(name) == now:
            continue
        if name == "files":
            raise InputError(f"{run} holds a run on other contents of --text or --valid: give another --out")
        flag = f"--{name.replace('_', '-')}"
        raise InputError(
            f"{run} holds a run with {flag} {before.get(name)}, not {now}: give that to go on with it, or another --out"
        )


def finish(run, step, out):
    """The best weights, those of a step, become the output; log and figure stay, what only a run needs goes."""
    best = run / f"best-{step}"
    writing.write_text(run / "end", best.name)  # once this is not there any more, the rest can go, now or later
    writing.publish(best, out)
    _remove(run, NEEDED)


def _remove(run, patterns):
    for pattern in patterns:
        for path in run.glob(pattern):
            writing.remove(path)


class Log:
    """The lines of log.jsonl, one a step, in memory too; a run that goes on from a step forgets later ones."""

    def __init__(self, path, step, writes):
        self.path, self.writes, self.lines = path, writes, []
        if step is not None and path.exists():
            self.lines = [line for line in map(json.loads, _complete_lines(path)) if line["step"] <= step]
        if writes:
            writing.write_text(path, "".join(json.dumps(line) + "\n" for line in self.lines))

    def append(self, line):
        self.lines.append(line)
        if self.writes:
            writing.append_line(self.path, line)


def _complete_lines(path):
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


@contextlib.contextmanager
def interruption():
    """A list that is empty until a first Ctrl-C or SIGTERM, which the block may then heed; a second one ends it."""
    asked, before = [], {}

    def restore():
        for number, handler in before.items():
            if signal.getsignal(number) == ask:
                signal.signal(number, handler)

    def ask(number, frame):
        asked.append(number)
        restore()

    before |= {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        restore()
