"""The folder of a run: settings, tokens, log, states and the best weights so far, until its output is complete."""

import contextlib
import hashlib
import json
import shutil
import signal

import checkpoint
from checkpoint import read_json
from model import InputError
from tokenizer import load_tokenizer
from training.data import Windows, documents, tokenize, train_tokenizer

# flags that may change when a run goes on
MACHINE = ["out", "device", "micro_batch", "recompute", "compile", "save_every"]


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
                raise InputError(f"{args.checkpoint} has no tokenizer")
        else:
            if not (run / "tokenizer.model").exists():
                texts = [d for path in args.text for d, _ in documents(path) if isinstance(d, str)]
                train_tokenizer(texts, args.vocab_size, run / "tokenizer.model")
            tokenizer = load_tokenizer(run)
            ends = (tokenizer.special["</s>"],)
        for name, paths in ("train", args.text), ("valid", [args.valid]):
            if not (run / f"{name}.tokens").exists():
                tokenize(paths, tokenizer, ends[0] if ends else None, run / f"{name}.tokens")
            Windows(run / f"{name}.tokens", args.seq_len)
        new = False
    except OSError as e:
        raise InputError(f"{e.filename}: {e.strerror}") from None
    finally:
        if new:
            shutil.rmtree(run, ignore_errors=True)


def _digest(path):
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _compare(run, settings):
    path = run / "settings.json"
    if not path.exists():
        path.write_text(json.dumps(settings, indent=2) + "\n")
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
    (run / f"best-{step}").rename(out)
    for path in run.glob("state-*"):
        shutil.rmtree(path)
    for path in run.glob("*.tokens"):
        path.unlink()


class Log:
    """The lines of log.jsonl, one a step, in memory too; a run that goes on from a step forgets later ones."""

    def __init__(self, path, step, writes):
        self.path, self.writes, self.lines = path, writes, []
        if step is not None and path.exists():
            self.lines = [line for line in map(json.loads, _complete_lines(path)) if line["step"] <= step]
        if writes:
            path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))

    def append(self, line):
        self.lines.append(line)
        if self.writes:
            with open(self.path, "a") as f:
                f.write(json.dumps(line) + "\n")


def _complete_lines(path):
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


@contextlib.contextmanager
def interruption():
    """A list that is empty until a first Ctrl-C or SIGTERM, which the block may then heed; a second one ends it."""
    asked, before = [], {}

    def restore():
        for number, handler in before.items():
            signal.signal(number, handler)

    def ask(number, frame):
        asked.append(number)
        restore()

    before |= {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        restore()
