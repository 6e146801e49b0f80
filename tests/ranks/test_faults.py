"""Faults in runs of several ranks, one a run, as faults.py makes them, and how each of them ends.

Each run is one of torchrun's, whose processes are found again by a mark in their environment. It ends well if

- all its processes are gone within 5 s of the fault, within LADDER_TIMEOUT + 10 s of a stall, and torchrun fails (of a
  stopped torchrun: all but that one; a rank that is stopped before it has joined: 30 s later, when torchrun kills it);
- one line gives the cause, the phase, the step and, where ranks share memory, the rank. Only an exception has a
  traceback. After a signal to all, or torchrun's death, the line may name another rank. adapt.py saves at a signal;
- of ranks that were not started alike a line names the difference, they leave with code 2, and print no text.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from cases import slow_case
from faults import IMPORTS, PHASES
from helpers import ROOT, random_model, train_tokenizer, write_model
from running import command

from ladder.ranks.collectives import PROCESS_GROUPS
from model import Config

SOON, SLOW = 5, 10  # seconds in which a run should end after a fault, and after the LADDER_TIMEOUT of a stall
TIMEOUT = 4  # LADDER_TIMEOUT of the runs that stall
HANGS, STARTS = 60, 150  # seconds after a fault until a run counts as hanging; until the fault should have happened
MARK = "LADDER_FAULT_RUN"

COMMANDS = {
    "generate": "generate --checkpoint {a} --max-new-tokens 40 --temperature 0 --prompt Once",
    "chat": "generate --checkpoint {a} --max-new-tokens 4 --chat",
    "adapt": "adapt --checkpoint {a} --fresh --text {text} --valid {valid} --out {out} --seq-len 8 --steps 9 --batch 6",
}
CAUSES = {  # kind of fault: what the line says
    "SIGKILL": r"has died",
    "SIGTERM": r"SIGTERM|signal 15\b",
    "exception": r"RuntimeError: something broke",
    "SIGSTOP": r"LADDER_TIMEOUT",
    "hang": r"LADDER_TIMEOUT",  # of the main thread alone
    "launcher SIGSTOP": r"store has not answered",
    "launcher SIGKILL": r"torchrun|SIGTERM",
    "launcher SIGTERM": r"SIGTERM",
    "terminal SIGINT": r"interrupted|saved",
}
STALLS = "SIGSTOP", "hang", "launcher SIGSTOP"


SLOW_ONES = [  # phase, kind, rank of how many, flags
    ("load", "hang", 1, 2, ""), ("load", "SIGTERM", 0, 2, ""), ("prefill", "exception", 2, 3, ""),
    ("decode", "hang", 1, 3, ""), ("join", "launcher SIGKILL", 0, 2, ""), ("join", "SIGSTOP", 1, 2, ""),
    ("decode", "launcher SIGTERM", 0, 2, ""), ("decode", "launcher SIGSTOP", 0, 2, ""),
    ("decode", "SIGSTOP", 0, 2, " --comm library"), ("chat", "SIGKILL", 0, 2, ""),
    ("training", "terminal SIGINT", 0, 2, ""), ("decode", "SIGSTOP", 0, 2, ""),
]  # fmt: skip
FAULTS = [("decode", "SIGKILL", 1, 2, ""), *(slow_case(*case) for case in SLOW_ONES)]
UNLIKE = [  # flags, or the script, of the last rank alone; what the line says
    ("--seed 2", r"--seed 2.*--seed 1"),
    slow_case("--checkpoint {b}", r"contents of --checkpoint"),
    slow_case("{code}/generate.py", r"the code"),  # another version of it
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What the runs take: {name: path}."""
    folder = tmp_path_factory.mktemp("faults")
    paths = {name: folder / name for name in ("a", "b", "text", "valid", "code")}
    text = "Once upon a time there was a little dog. The dog ran to the park. "
    for name in "text", "valid":
        paths[name].write_text(text * 40)
    for name in "a", "b":
        config = Config(2, 4, 2, 8, 32, 64, 300, 512, bos_id=1, eos_ids=(2,), wiring="ladder")
        write_model(paths[name], config, random_model(config, seed=ord(name)).state_dict())
        train_tokenizer([text] * 30, 300, paths[name] / "tokenizer.model")
    shutil.copytree(ROOT, paths["code"], ignore=shutil.ignore_patterns(".*", "__pycache__", "results", "tests"))
    with open(paths["code"] / "tp.py", "a") as f:
        f.write("# a line more\n")
    return paths


def of_run(mark):
    """Return the ids of the processes that live and have the mark in their environment."""
    ids = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}\0".encode() in (folder / "environ").read_bytes():  # a zombie has none
                ids.add(int(folder.name))
    return ids


class End(NamedTuple):
    """Of a run. seconds: from the fault until all its processes were gone. codes: of the ranks. lines: on stderr."""

    seconds: float
    code: int
    codes: set
    lines: list
    tracebacks: int
    printed: str


def run(words, ranks, rank, folder, fault=None, change=""):
    """Return the End of a command on ranks, of which one meets a fault (phase, kind), or is started with a change."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    note = folder / "note"
    logs = folder / "logs"
    phase, kind = fault or (None, None)
    environment = os.environ | {
        MARK: mark, "LADDER_TIMEOUT": str(TIMEOUT if kind in STALLS else 60), "PYTHONPATH": str(ROOT),
        "FAULT": json.dumps([rank, fault and [phase, kind, str(note)], change.split()]), "TMPDIR": str(folder),
    }  # fmt: skip
    launcher = command("tests/faults.py", *words.split(), ranks=ranks)
    launcher[3:3] = ["--redirects=3", f"--log-dir={logs}"]
    start = time.time()
    with open(folder / "report", "w") as report:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": report}
        process = subprocess.Popen(launcher, cwd=ROOT, env=environment, start_new_session=True, **pipes)
    try:
        process.stdin.write(b"Once\n" * 2)
        process.stdin.flush()
        while fault and not note.exists() and process.poll() is None and time.time() - start < STARTS:
            time.sleep(0.02)
        time.sleep(0.1)
        assert not fault or note.exists(), "the fault did not happen"
        since = float(note.read_text()) if fault else start
        spared = {process.pid} if kind == "launcher SIGSTOP" else set()
        while of_run(mark) - spared and time.time() - since < HANGS:
            time.sleep(0.05)
        seconds = time.time() - since
    finally:
        for pid in of_run(mark):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    process.stdin.close()
    code = process.wait()
    out, err = ("".join(p.read_text(errors="replace") for p in logs.rglob(f"{n}.log")) for n in ("stdout", "stderr"))
    codes = {int(code) for code in re.findall(r"exitcode *: (-?\d+)", (folder / "report").read_text())}
    lines = re.findall(r"(?:(?:generate|adapt)\.py: |interrupted|step \d+ is saved).*", err)
    return End(seconds, code, codes, lines, len(re.findall(r"^(?:\[rank\d+\]: )?Traceback \(", err, re.M)), out[:200])


@pytest.mark.parametrize("phase, kind, rank, ranks, flags", FAULTS)
def test_a_fault_ends_all_soon_with_one_line_that_names_it(phase, kind, rank, ranks, flags, files, tmp_path):
    script, module, *_, in_words = PHASES[phase]
    pytest.importorskip(module)
    end = run(COMMANDS[script].format(**files, out=tmp_path / "out") + flags, ranks, rank, tmp_path, (phase, kind))
    to_all = " " in kind
    stopped_in_join = (phase, kind) == ("join", "SIGSTOP")
    assert len(end.lines) == 1 and end.code != 0, end
    assert end.seconds <= (TIMEOUT + SLOW if kind in STALLS else SOON) + (IMPORTS + 30) * stopped_in_join, end
    assert end.tracebacks == (kind == "exception") or (phase, to_all) == ("join", True), end
    assert re.search(CAUSES[kind], end.lines[0])
    if kind != "terminal SIGINT" and not stopped_in_join:
        assert re.search(in_words, end.lines[0])
    if not to_all and not flags and "shared-memory" in PROCESS_GROUPS:  # gloo does not tell who waits for whom
        assert re.search(rf"\brank {rank} of {ranks}\b", end.lines[0])


@pytest.mark.parametrize("change, difference", UNLIKE)
def test_ranks_that_were_not_started_alike_are_told_the_difference(change, difference, files, tmp_path):
    words = f"{COMMANDS['generate']} --seed 1".format(**files)
    end = run(words, 2, 1, tmp_path, change=change.format(**files))
    assert (end.codes, end.printed, end.tracebacks, len(end.lines)) == ({2}, "", 0, 1) and end.code != 0, end
    assert end.seconds < HANGS and re.search(difference, end.lines[0])
