"""Kills each writer at many moments: is its output then complete or absent, and is anything left after the next run?

OMP_NUM_THREADS=1 python -m benchmarks.kills --moments 240 --json kills.jsonl

A writer runs in a fork of this process, which has imported everything. Half of the moments are before a system call
that names what it writes (Python's audit events: open, mkdir, rename, remove, chmod, ...), evenly over all of them; the
others are spread evenly over the time that it takes undisturbed. Then it is run again, to its end. Complete is a folder
that is bit for bit that of an undisturbed run, and a file of lines that holds the first of them, all whole. A sweep's
commands only pretend to measure, and adapt keeps a folder beside its output to go on from. A line is a writer and a
signal, and counts moments:

complete, absent, incomplete   as the output was found
torn      its last line lacked its end, and so its line break: the next line takes its place
left      something else lay beside it, until the next run
differ    after the next run there was anything else than after an undisturbed one
"""

import contextlib
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

import adapt
import convert_hf_checkpoint
import quantize
from benchmarks.lines import command
from measure import report, sweep
from measure.results import markdown
from model import InputError
from runtime import cli, launch, writing

ROOT = Path(__file__).parent.parent
DEMO = str(ROOT / "demo")
TEXT = "Once upon a time there was a little dog. The dog ran to the park and saw a big tree.\n"
SMALL = "--dim 16 --n-layers 1 --n-heads 2 --n-kv-heads 1 --intermediate-size 16 --vocab-size 300 --seq-len 16"
TRAINED = "--batch 2 --steps 2 --warmup 1 --eval-every 1 --save-every 1 --valid-tokens 64"
SWEEP = {
    "CHECKPOINT": DEMO, "TPS": "2", "BATCHES": "1 2", "WIRINGS": "standard ladder", "REPEATS": "1", "EXPOSED": "0",
    "LINKS": "real", "DEVICE": "cpu", "PROMPT": "5", "NEW_TOKENS": "3",
}  # fmt: skip
PRETEND = """#!/bin/bash
words="$*"
case $words in
    *generate.py*)
        wiring=${words#*--wiring } batch=${words#*--batch }
        kind='"wiring": "'${wiring%% *}'", "batch": '${batch%% *}
        ;;
    *) kind='"probe": {"bandwidth": [1e10, 1e10], "all_reduce": []}' ;;
esac
for file; do :; done
echo '{'"$kind"', RESULT}' >> "$file"
"""
RESULT = {
    "model": "demo", "n_layers": 8, "ladder_layers": None, "desync_period": None, "dtype": "bfloat16", "quant": None,
    "link": None, "tp": 2, "simulated": False, "device": "cpu", "hardware": "pretended", "torch": "2", "commit": "c",
    "threads": 1, "settings": {}, "prompt_tokens": 5, "new_tokens": 3, "prefill_s": 0.5, "ttft_ms": 500.0,
    "decode_s": 1.0, "tpot_ms": 500.0, "tok_s": 2.0, "tok_s_user": 2.0, "mbu": 0.9, "exposed": None,
}  # fmt: skip


class Writer(NamedTuple):
    """main: of a script. argv: from the folder to write in, where the output is called "out", to its arguments.

    varies: names of what depends on the clock.
    """

    main: Callable
    argv: Callable
    varies: tuple = ()


def append_lines(argv):
    """What scripts with --json do, if they had much to say: lines of 1 to 300 kB; goes on with those that lack."""
    path = Path(argv[0])
    for i in range(path.read_bytes().count(b"\n") if path.exists() else 0, 20):
        writing.append_line(path, {"i": i, "text": "x" * (1000 + 15000 * i)})


def writers(sources):
    """{name: Writer}. sources: a folder for what they read."""
    text, python, hf = sources / "text", sources / "python", sources / "hf"
    text.write_text(TEXT * 40)
    python.write_text(PRETEND.replace("RESULT", json.dumps(RESULT)[1:-1]))
    python.chmod(0o755)
    with contextlib.redirect_stdout(sys.stderr):
        convert_hf_checkpoint.main([DEMO, "--to-hf", str(hf)])
    quantized = ["--checkpoint", DEMO, "--mode"]
    adapted = ["--text", str(text), "--valid", str(text), *SMALL.split(), *TRAINED.split()]
    swept = [f"{name}={value}" for name, value in (SWEEP | {"PYTHON": python}).items()]
    return {
        "convert": Writer(convert_hf_checkpoint.main, lambda d: [str(hf), "--shard-gb", "0.001", "--out", f"{d}/out"]),
        "convert --to-hf": Writer(convert_hf_checkpoint.main, lambda d: [DEMO, "--to-hf", f"{d}/out"]),
        "quantize int8": Writer(quantize.main, lambda d: [*quantized, "int8", "--out", f"{d}/out"]),
        "quantize int4": Writer(
            quantize.main, lambda d: [*quantized, "int4", "--iterations", "1", "--out", f"{d}/out"]
        ),
        "adapt": Writer(adapt.main, lambda d: [*adapted, "--out", f"{d}/out"], ("log.jsonl", "settings.json")),
        "append": Writer(append_lines, lambda d: [f"{d}/out"]),
        "sweep": Writer(sweep.main, lambda d: [*swept, f"OUT={d}/out"]),
    }


# ---------------------------------------------------------------------------------------------------------------------
# One run


def run(writer, folder, number=None, event=None, after=None):
    """Run a writer in a fork, and send it a signal: before its event-th system call, or so many seconds after it began.

    Returns (its exit code, or minus the signal that ended it; its seconds; its number of events, if it ended itself).
    """
    receiver, sender = os.pipe()
    start = time.perf_counter()
    child = os.fork()
    if child == 0:
        os.close(receiver)
        tqdm.set_lock(threading.RLock())  # its own is shared with forks, of which one may be killed while it holds it
        with open(folder.with_name("log"), "wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.stdout = sys.stderr = open(2, "w", buffering=1)  # noqa: SIM115
        sys.argv = ["writer"]
        seen = events(str(folder), number, event)
        code = 1
        try:
            launch.run(lambda: writer.main(writer.argv(folder)))
        except SystemExit as e:
            code = e.code
            os.write(sender, str(len(seen)).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(sender)
    if after is not None:
        time.sleep(after)
        os.kill(child, number)
    with open(receiver) as pipe:
        told = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, time.perf_counter() - start, int(told or 0)


def events(folder, number, event):
    """The system calls that change something in a folder, in a list that grows; at the event-th comes the signal."""
    seen = []

    def hook(name, args):
        named = any(isinstance(a, str | bytes | os.PathLike) and os.fsdecode(a).startswith(folder) for a in args)
        if named or name in ("os.remove", "os.rmdir"):  # which may name it by a descriptor
            seen.append(name)
            if len(seen) - 1 == event:
                os.kill(os.getpid(), number)

    sys.addaudithook(hook)
    return seen


def contents(folder, varies=()):
    """{name: bytes} of all below a folder; None of folders and of what varies."""
    return {
        str(path.relative_to(folder)): None if path.is_dir() or path.name in varies else path.read_bytes()
        for path in folder.rglob("*")
    }


def state(found, expected):
    """Whether the output is complete, absent, torn or incomplete, of contents as found and as expected."""
    ours, whole = ({n: data for n, data in c.items() if n == "out" or n.startswith("out/")} for c in (found, expected))
    if not ours:
        return "absent"
    if ours["out"] is not None:  # a file of lines
        text = ours["out"]
        return "incomplete" if not whole["out"].startswith(text) else "complete" if text[-1:] in b"\n" else "torn"
    return "complete" if ours == whole else "incomplete"


def killed(writer, number, moments, work):
    """The counts of a line, of so many moments; work: a folder for all this."""

    def fresh(n):
        (folder := work / str(n) / "outputs").mkdir(parents=True)
        return folder

    folder = fresh("undisturbed")
    code, seconds, n_events = run(writer, folder)
    if code != 0:
        raise InputError(f"it ends with code {code}: {folder.with_name('log').read_text()}")
    expected = contents(folder, writer.varies)
    half = min(moments // 2, n_events)
    plan = [{"event": i * n_events // half} for i in range(half)]
    plan += [{"after": seconds * (i + 0.5) / (moments - half)} for i in range(moments - half)]
    counts = dict.fromkeys(("complete", "absent", "torn", "incomplete", "left", "differ"), 0)
    for i, moment in enumerate(plan):
        folder = fresh(i)
        run(writer, folder, number, **moment)
        found = contents(folder, writer.varies)
        counts[state(found, expected)] += 1
        counts["left"] += any(not n.startswith("out/") for n in found.keys() - expected.keys())
        run(writer, folder)
        after = contents(folder, writer.varies)
        if after == expected:
            shutil.rmtree(folder.parent)  # else it stays, to be looked at
        else:
            counts["differ"] += 1
            print(f"{moment}: {sorted(after.keys() ^ expected.keys())}", file=sys.stderr)
    return {"moments": len(plan), "events": half, **counts, "seconds": round(seconds, 3)}


def main(argv=None):
    p = cli.Parser(__doc__)
    p.add_argument("--moments", type=cli.count, metavar="N", default=240, help="of each writer, of SIGKILL")
    p.add_argument("--writers", metavar="NAME,...", help="only these, e.g. adapt,sweep")
    cli.add_json_flag(p, "a line for each writer and signal")
    args = p.parse_args(argv)
    tqdm.monitor_interval = 0  # this process forks: no thread beside it
    for name in "matplotlib.pyplot", "sentencepiece", "torch._dynamo":  # which writers import when they need them
        importlib.import_module(name)
    about = {
        "torch": torch.__version__, "commit": report.git_commit(), "hardware": report.processor(),
        "command": command("kills", argv),
    }  # fmt: skip
    rows = []
    with tempfile.TemporaryDirectory() as work:
        (sources := Path(work) / "sources").mkdir()
        for name, writer in writers(sources).items():
            if args.writers and name not in args.writers.split(","):
                continue
            for number, moments in (signal.SIGKILL, args.moments), (signal.SIGTERM, -(-args.moments // 4)):
                found = {"writer": name, "signal": number.name}
                found |= killed(writer, number, moments, Path(work) / f"{name} {number.name}")
                if args.json:
                    writing.append_line(args.json, {**about, **found})
                rows.append([str(value) for value in found.values()])
                print(*rows[-1], sep="\t", file=sys.stderr, flush=True)
    print(markdown(list(found), rows))


if __name__ == "__main__":
    launch.run(main)
