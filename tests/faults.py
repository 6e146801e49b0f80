"""Faults in runs of several ranks, one a run, and how each of them ends.

In each phase of a run one rank harms itself, or its launcher; or one rank is started otherwise than the others. Each
run is one of torchrun's, whose processes are found again by a mark in their environment. It ends well, `wrong` is
empty, if

- all its processes are gone within 5 s of the fault, within --timeout + 10 s of a stall, and torchrun fails;
- one line says why: with the phase, the step and the cause, and in shared memory the rank, too. Only an exception has a
  traceback. A signal to all, or a dead torchrun, may be told by a rank that names itself. adapt.py saves at a signal;
- of ranks that were not started alike a line names the difference, they leave with code 2, and print no text.
"""

import contextlib
import functools
import importlib
import io
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

import quantize
from extras.chat import chat
from formats import checkpoint
from model import Config, Transformer
from runtime import launch

ROOT = Path(__file__).parent.parent
SOON, SLOW = 5, 10  # seconds in which a run should end after a fault, and after the --timeout of a stall
TIMEOUT = 4  # --timeout of the runs that stall, in seconds
HANGS, STARTS = 45, 150  # seconds after a fault until a run counts as hanging; until the fault should have happened
MARK = "LADDER_FAULT_RUN"

GENERATE = "generate --checkpoint {a} --max-new-tokens 40 --temperature 0 --prompt Once"
CHAT = "generate --checkpoint {a} --max-new-tokens 4 --interactive"
ADAPT = (
    "adapt --text {text} --valid {text} --out {out} --dim 32 --n-layers 2 --n-heads 4 --n-kv-heads 2 "
    "--intermediate-size 64 --vocab-size 300 --seq-len 32 --steps 30 --batch 6"
)
PHASES = {  # name: (command, module and name of a function, the call of it that meets the fault, the phase in words)
    "join": (GENERATE, "runtime.launch", "join", 1, r"start|join"),
    "load": (GENERATE, "formats.checkpoint", "Weights.fill", 3, r"load of"),
    "prefill": (GENERATE, "generate", "Runner.prefill", 1, r"prefill"),
    "decode": (GENERATE, "generate", "Runner.decode", 7, r"decode step 7\b"),
    "chat": (CHAT, "runtime.launch", "World.tell", 2, r"the wait for the user|start"),
    "training": (ADAPT, "extras.training.adapt", "optimizer_step", 3, r"training step 3\b"),
}
CAUSES = {  # kind of fault: what the line says
    "SIGKILL": r"has died",
    "SIGTERM": r"SIGTERM|signal 15\b",
    "exception": r"RuntimeError: something broke",
    "SIGSTOP": r"--timeout",
    "hang": r"--timeout",  # of the main thread alone
    "launcher SIGKILL": r"torchrun|SIGTERM",
    "launcher SIGTERM": r"SIGTERM",
    "terminal SIGINT": r"interrupted|saved",
}
STALLS = "SIGSTOP", "hang"
UNLIKE = {  # name: (flags, or the script, of the last rank alone; what the line says)
    "--seed": ("--seed 2", r"--seed 2.*--seed 1"),
    "--wiring": ("--wiring standard", r"--wiring standard"),
    "--prompt": ("--prompt The", r"--prompt"),
    "--compile": ("--compile", r"--compile"),
    "other weights": ("--checkpoint {b}", r"contents of --checkpoint"),
    "other shapes": ("--checkpoint {wide}", r"contents of --checkpoint"),
    "other quantization": ("--checkpoint {int8}", r"contents of --checkpoint"),
    "another version of the code": ("{code}/generate.py", r"the code"),
}


def cases():
    """Return {name: a case}: faults in each phase of two ranks, in decode of three, and through gloo."""
    few = "SIGKILL", "exception", "launcher SIGKILL", "terminal SIGINT"
    found = [(phase, kind, 2, "") for phase in ("load", "prefill", "decode") for kind in CAUSES]
    found += [(phase, kind, 2, "") for phase in ("join", "chat", "training") for kind in few]
    most = "SIGKILL", "exception", "SIGSTOP", "hang", "launcher SIGKILL"
    found += [("decode", kind, ranks, through) for ranks, through in ((3, ""), (2, "gloo")) for kind in most]
    named = {}
    for i, (phase, kind, ranks, through) in enumerate(found):
        rank = 0 if " " in kind or (i % 2 and ranks == 2) else ranks - 1
        name = f"{phase}, {kind}, rank {rank} of {ranks}" + f", {through}" * bool(through)
        named[name] = {"phase": phase, "kind": kind, "rank": rank, "ranks": ranks, "through": through or "memory"}
    return named | {f"unlike {name}": {"unlike": name, "rank": 1, "ranks": 2} for name in UNLIKE}


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
        calls += chat.chat.__code__ is sys._getframe(1).f_code or case["phase"] != "chat"
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
    _, name, *flags = sys.argv
    sys.argv = [f"{name}.py", *flags, *(change if harmed else [])]
    script = importlib.import_module("extras.training.adapt" if name == "adapt" else name)
    if case.get("through") == "gloo":  # as ranks of several nodes
        os.environ.update(LOCAL_WORLD_SIZE="1", GLOO_SOCKET_IFNAME="lo")
    if harmed and "kind" in case:
        prepare(case, note)
    launch.run(script.main)


# ---------------------------------------------------------------------------------------------------------------------
# Running one


def write_files(folder):
    """Write what the runs take into a folder; returns {name: path}."""
    from helpers import train_tokenizer  # only here: the ranks need no pytest

    paths = {name: folder / name for name in ("a", "b", "wide", "int8", "text", "out", "code")}
    text = "Once upon a time there was a little dog. The dog ran to the park. "
    paths["text"].write_text(text * 40)
    for name in "a", "b", "wide":
        paths[name].mkdir()
        width = 64 if name == "wide" else 32
        config = Config(2, 4, 2, width // 4, width, 64, 300, 512, bos_id=1, eos_ids=(2,), wiring="ladder")
        generator = torch.Generator().manual_seed(int(name == "b"))
        shapes = {key: tensor.shape for key, tensor in Transformer(config).state_dict().items()}
        state = {key: torch.rand(shape, generator=generator) - 0.5 for key, shape in shapes.items()}
        checkpoint.write_model(paths[name], config, state, torch.float32)
        train_tokenizer([text] * 30, 300, paths[name] / "tokenizer.model")
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        quantize.main(["--checkpoint", str(paths["a"]), "--mode", "int8", "--out", str(paths["int8"])])
    shutil.copytree(ROOT, paths["code"], ignore=shutil.ignore_patterns(".*", "__pycache__", "results", "tests"))
    with open(paths["code"] / "tp.py", "a") as f:
        f.write("# a line more\n")
    return paths


def of_run(mark):
    """Return {pid: name} of the processes that live and have the mark in their environment."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}\0".encode() in (folder / "environ").read_bytes():  # a zombie has none
                found[int(folder.name)] = (folder / "comm").read_text().strip()
    return found


def run(case, paths):
    """Run a case; returns its line."""
    mark, unlike = f"{os.getpid()}-{time.monotonic_ns()}", "unlike" in case
    words = f"{GENERATE} --seed 1" if unlike else PHASES[case["phase"]][0]
    words += f" --timeout {TIMEOUT if case.get('kind') in STALLS else 60}"
    change = UNLIKE[case["unlike"]][0].format(**paths).split() if unlike else []
    with tempfile.TemporaryDirectory(prefix="ladder-faults-") as folder:
        note, logs = Path(folder) / "note", Path(folder) / "logs"
        environment = os.environ | {
            MARK: mark, "FAULT": json.dumps([case, str(note), change]), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
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
            while since and of_run(mark) and time.time() - since < HANGS:
                time.sleep(0.05)
            seconds = time.time() - since if since and not of_run(mark) else None
        finally:
            for pid in of_run(mark):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        process.stdin.close()
        code, said = process.wait(), {}
        for kind in "stdout", "stderr":
            said[kind] = "".join(path.read_text(errors="replace") for path in sorted(logs.rglob(f"{kind}.log")))
        codes = re.findall(r"exitcode *: (-?\d+)", Path(folder, "report").read_text())
        for path in paths["out"].parent.glob("out*"):  # what an interrupted adapt.py goes on from
            shutil.rmtree(path)
    lines = re.findall(r"(?:(?:generate|adapt)\.py: |interrupted|step \d+ is saved).*", said["stderr"])
    line = {
        **case, "happened": since is not None, "seconds": seconds, "code": code, "codes": sorted(set(map(int, codes))),
        "lines": [text.replace(str(paths["out"].parent), "DIR") for text in lines],
        "tracebacks": len(re.findall(r"^(?:\[rank\d+\]: )?Traceback \(", said["stderr"], re.MULTILINE)),
        "printed": said["stdout"][:200],
    }  # fmt: skip
    return line | {"wrong": wrong(line)}


def wrong(line):
    """Return what is not as it should be with the end of a run, as this file's head says: a list of words."""
    kind, text, traced, sent = line.get("kind", ""), "\n".join(line["lines"]), line["tracebacks"], "unlike" in line
    checks = {"the fault did not happen": line["happened"], "exit code 0": line["code"] != 0}
    if sent:
        checks |= {"never gone": line["seconds"] is not None, f"codes {line['codes']}": line["codes"] == [2]}
        checks |= {"a text was printed": not line["printed"], "tracebacks": not traced}
        checks["the difference is not named"] = re.search(UNLIKE[line["unlike"]][1], text)
    else:
        limit = TIMEOUT + SLOW if kind in STALLS else SOON
        checks[f"not gone in {limit} s"] = line["seconds"] is not None and line["seconds"] <= limit
        checks[f"{traced} tracebacks"] = traced == (kind == "exception") or (line["phase"], " " in kind) == ("join", 1)
        met = (line["phase"], kind) != ("join", "SIGKILL")  # before ranks know one another torchrun names the dead one
        checks["the cause is not named"] = re.search(CAUSES[kind], text) or not met
        if kind != "terminal SIGINT" and not (line["phase"] == "training" and "SIGTERM" in kind):
            checks["the phase is not named"] = re.search(PHASES[line["phase"]][4], text)
        if " " not in kind and line["through"] == "memory" and met:
            checks["the rank is not named"] = re.search(rf"\brank {line['rank']} of {line['ranks']}\b|saved", text)
    checks[f"{len(line['lines'])} lines"] = len(line["lines"]) == 1
    return [words for words, good in checks.items() if not good]


if __name__ == "__main__":
    victim()
