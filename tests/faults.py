"""Faults in runs of several ranks, one a run, and how each of them ends.

In each phase of a run one rank harms itself, or its launcher; or one rank is started unlike the others. Each run is one
of torchrun's, whose processes are found again by a mark in their environment. It ends well, `wrong` is empty, if

- all its processes are gone within 5 s of the fault, within LADDER_TIMEOUT + 10 s of a stall, and torchrun fails (of a
  stopped torchrun: all but that one; a rank that is stopped before it has joined: 30 s later, when torchrun kills it);
- one line gives the cause, the phase, the step and, where ranks share memory, the rank. Only an exception has a
  traceback. After a signal to all, or torchrun's death, the line may name another rank. adapt.py saves at a signal;
- of ranks that were not started alike a line names the difference, they leave with code 2, and print no text.
"""

import contextlib
import functools
import importlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from model import Config, Transformer
from runtime import launch, ranks

ROOT = Path(__file__).parent.parent
SOON, SLOW = 5, 10  # seconds in which a run should end after a fault, and after the LADDER_TIMEOUT of a stall
TIMEOUT, IMPORTS = 4, 4  # LADDER_TIMEOUT of the runs that stall, and ranks.IMPORTS
HANGS, STARTS = 60, 150  # seconds after a fault until a run counts as hanging; until the fault should have happened
STREAMS = "stdout", "stderr"
MARK = "LADDER_FAULT_RUN"

GENERATE = "generate --checkpoint {a} --max-new-tokens 40 --temperature 0 --prompt Once"
CHAT = "generate --checkpoint {a} --max-new-tokens 4 --chat"
ADAPT = "adapt --checkpoint {a} --fresh --text {text} --valid {text} --out {out} --seq-len 32 --steps 30 --batch 6"
PHASES = {  # name: (command, module and name of a function, the call of it that meets the fault, the phase in words)
    "join": (GENERATE, "runtime.launch", "join", 1, r"start|join"),
    "load": (GENERATE, "formats.checkpoint", "Weights.fill", 3, r"load of"),
    "prefill": (GENERATE, "generate", "Runner.prefill", 1, r"prefill"),
    "decode": (GENERATE, "generate", "Runner.decode", 7, r"decode step 7\b"),
    "chat": (CHAT, "extras.chat.chat", "Keyboard.line", 2, r"the wait for the user|start"),
    "training": (ADAPT, "extras.training.adapt", "optimizer_step", 3, r"training step 3\b"),
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
UNLIKE = {  # name: (flags, or the script, of the last rank alone; what the line says)
    "--seed": ("--seed 2", r"--seed 2.*--seed 1"),
    "other weights": ("--checkpoint {b}", r"contents of --checkpoint"),
    "another version of the code": ("{code}/generate.py", r"the code"),
}


def has_extra(name):
    """Return whether this copy of the project has the folder extras/NAME."""
    return all(importlib.util.find_spec(module) for module in ("extras", f"extras.{name}"))


def fault(phase, kind, rank=1, ranks=2, comm="auto"):
    name = f"{phase}, {kind}, rank {rank} of {ranks}" + f", {comm}" * (comm != "auto")
    return name, {"phase": phase, "kind": kind, "rank": rank, "ranks": ranks, "comm": comm}


CASES = dict([
    fault("decode", "SIGKILL"), fault("decode", "SIGSTOP", 0), fault("load", "hang"), fault("load", "SIGTERM", 0),
    fault("prefill", "exception", 2, 3), fault("join", "launcher SIGKILL", 0), fault("join", "SIGSTOP"),
    fault("decode", "launcher SIGTERM", 0), fault("decode", "launcher SIGSTOP", 0),
    fault("decode", "SIGSTOP", 0, comm="library"),
    *((f"unlike {name}", {"unlike": name, "rank": 1, "ranks": 2, "comm": "auto"}) for name in UNLIKE),
    *[fault("chat", "SIGKILL", 0)] * has_extra("chat"),
    *[fault("training", "terminal SIGINT", 0)] * has_extra("training"),
])  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# In the ranks


def harm(kind):
    """Do to this process, or to its launcher, what the kind says; in the latter case wait while that takes effect."""
    launcher = os.getppid()
    if kind == "exception":
        raise RuntimeError("something broke")
    if kind.startswith("launcher "):
        os.kill(launcher, signal.Signals[kind.removeprefix("launcher ")])
    elif kind.startswith("terminal "):  # which reaches the launcher's process group
        os.killpg(os.getpgid(launcher), signal.Signals[kind.removeprefix("terminal ")])
    elif kind != "hang":
        os.kill(os.getpid(), signal.Signals[kind])
    time.sleep(2 if kind in ("launcher SIGTERM", "terminal SIGINT") else 3600)  # adapt.py ends its step first


def prepare(case, note):
    """Let the fault happen in this process, at the call of the function that the phase names."""
    _, module, names, number, _ = PHASES[case["phase"]]
    *owners, name = names.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    inner, calls = getattr(owner, name), 0

    @functools.wraps(inner)
    def wrapped(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == number:
            time.sleep(2 * (case["phase"] == "join"))  # until the others have imported, too
            Path(note).write_text(str(time.time()))
            harm(case["kind"])
        return inner(*args, **kwargs)

    setattr(owner, name, wrapped)


def victim():
    """Run a script of the project, as one rank of a run that meets a fault."""
    case, note, change = json.loads(os.environ["FAULT"])
    harmed = int(os.environ["RANK"]) == case["rank"]
    if harmed and change[:1] and change[0].endswith(".py"):
        os.environ["PYTHONPATH"] = ""
        os.execv(sys.executable, [sys.executable, change[0], *sys.argv[2:]])
    ranks.IMPORTS = IMPORTS
    _, name, *flags = sys.argv
    sys.argv = [f"{name}.py", *flags, *(change if harmed else [])]
    script = importlib.import_module("extras.training.adapt" if name == "adapt" else name)
    if harmed and "kind" in case:
        prepare(case, note)
    launch.run(script.main)


# ---------------------------------------------------------------------------------------------------------------------
# Running one


def write_files(folder):
    """Write what the runs take into a folder; returns {name: path}."""
    from helpers import train_tokenizer, write_model  # only here: the ranks need no pytest

    paths = {name: folder / name for name in ("a", "b", "text", "out", "code")}
    text = "Once upon a time there was a little dog. The dog ran to the park. "
    paths["text"].write_text(text * 40)
    for name in "a", "b":
        paths[name].mkdir()
        config = Config(2, 4, 2, 8, 32, 64, 300, 512, bos_id=1, eos_ids=(2,), wiring="ladder")
        generator = torch.Generator().manual_seed(int(name == "b"))
        shapes = {key: tensor.shape for key, tensor in Transformer(config).state_dict().items()}
        state = {key: torch.rand(shape, generator=generator) - 0.5 for key, shape in shapes.items()}
        write_model(paths[name], config, state, torch.float32)
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


def run(case, paths):
    """Run a case; returns its line."""
    mark, unlike = f"{os.getpid()}-{time.monotonic_ns()}", "unlike" in case
    words = f"{GENERATE} --seed 1" if unlike else PHASES[case["phase"]][0]
    words += f" --comm {case['comm']}" if case["comm"] != "auto" else ""
    change = UNLIKE[case["unlike"]][0].format(**paths).split() if unlike else []
    with tempfile.TemporaryDirectory(prefix="ladder-faults-") as folder:
        note, logs = Path(folder) / "note", Path(folder) / "logs"
        environment = os.environ | {
            MARK: mark, "LADDER_TIMEOUT": str(TIMEOUT if case.get("kind") in STALLS else 60),
            "FAULT": json.dumps([case, str(note), change]), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "", "TMPDIR": folder,
        }  # fmt: skip
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={case['ranks']}"]
        launcher += ["--redirects=3", f"--log-dir={logs}", __file__, *words.format(**paths).split()]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": open(f"{folder}/report", "w")}  # noqa: SIM115
        start = time.time()
        process = subprocess.Popen(launcher, cwd=ROOT, env=environment, start_new_session=True, **pipes)
        try:
            process.stdin.write(b"Once\n" * 2)
            process.stdin.flush()
            while not unlike and not note.exists() and process.poll() is None and time.time() - start < STARTS:
                time.sleep(0.02)
            time.sleep(0.1)
            since = start if unlike else float(note.read_text()) if note.exists() else None
            spared = {process.pid} if case.get("kind") == "launcher SIGSTOP" else set()
            while since and of_run(mark) - spared and time.time() - since < HANGS:
                time.sleep(0.05)
            seconds = time.time() - since if since and not of_run(mark) - spared else None
        finally:
            for pid in of_run(mark):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        process.stdin.close()
        code = process.wait()
        out, err = (
            "".join(p.read_text(errors="replace") for p in sorted(logs.rglob(f"{name}.log"))) for name in STREAMS
        )
        codes = re.findall(r"exitcode *: (-?\d+)", Path(folder, "report").read_text())
        for path in paths["out"].parent.glob("out*"):  # what an interrupted adapt.py goes on from
            shutil.rmtree(path)
    lines = re.findall(r"(?:(?:generate|adapt)\.py: |interrupted|step \d+ is saved).*", err)
    line = {
        **case, "happened": since is not None, "seconds": seconds, "code": code, "codes": sorted(set(map(int, codes))),
        "lines": [text.replace(str(paths["out"].parent), "DIR") for text in lines],
        "tracebacks": len(re.findall(r"^(?:\[rank\d+\]: )?Traceback \(", err, re.MULTILINE)), "printed": out[:200],
    }  # fmt: skip
    return line | {"wrong": wrong(line)}


def wrong(line):
    """Return what is not as it should be with the end of a run, as this file's head says: a list of words."""
    text, traced = "\n".join(line["lines"]), line["tracebacks"]
    checks = {f"{len(line['lines'])} lines": len(line["lines"]) == 1, "exit code 0": line["code"] != 0}
    if "unlike" in line:
        checks |= {"never gone": line["seconds"] is not None, f"codes {line['codes']}": line["codes"] == [2]}
        checks |= {"a text was printed": not line["printed"], "tracebacks": not traced}
        checks["the difference is not named"] = re.search(UNLIKE[line["unlike"]][1], text)
        return [words for words, good in checks.items() if not good]
    phase, kind = line["phase"], line["kind"]
    to_all, stopped_in_join = " " in kind, (phase, kind) == ("join", "SIGSTOP")
    limit = (TIMEOUT + SLOW if kind in STALLS else SOON) + (IMPORTS + 30) * stopped_in_join
    checks["the fault did not happen"] = line["happened"]
    checks[f"not gone in {limit} s"] = line["seconds"] is not None and line["seconds"] <= limit
    checks[f"{traced} tracebacks"] = traced == (kind == "exception") or (phase, to_all) == ("join", True)
    checks["the cause is not named"] = re.search(CAUSES[kind], text)
    if kind != "terminal SIGINT" and not stopped_in_join:
        checks["the phase is not named"] = re.search(PHASES[phase][4], text)
    if not to_all and line["comm"] == "auto" and has_extra("collectives"):  # gloo does not tell who waits for whom
        checks["the rank is not named"] = re.search(rf"\brank {line['rank']} of {line['ranks']}\b", text)
    return [words for words, good in checks.items() if not good]


if __name__ == "__main__":
    victim()
