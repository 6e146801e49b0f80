"""Run a script of the project as one rank, which harms itself or its launcher at a given moment; see test_faults.py."""

import functools
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path

from ladder.ranks import launch, store, watch

IMPORTS = 4  # store.IMPORTS of these runs
PHASES = {  # name: (script, module and name of a function, the call of it that meets the fault, the phase in words)
    "join": ("generate", "ladder.ranks.launch", "join", 1, r"start|join"),
    "load": ("generate", "ladder.checkpoints.checkpoint", "Weights.fill", 3, r"load of"),
    "prefill": ("generate", "generate", "Runner.prefill", 1, r"prefill"),
    "decode": ("generate", "generate", "Runner.decode", 7, r"decode step 7\b"),
    "chat": ("chat", "ladder.text.terminal", "read_line", 2, r"the wait for the user|start"),
    "training": ("adapt", "extras.training.adapt", "optimizer_step", 3, r"training step 3\b"),
}


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


def prepare(phase, kind, note):
    """Let the fault happen in this process, at the call of the function that the phase names."""
    _, module, names, number, _ = PHASES[phase]
    *owners, name = names.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    inner = getattr(owner, name)
    calls = 0

    @functools.wraps(inner)
    def wrapped(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == number:
            time.sleep(2 * (phase == "join"))  # until the others have imported, too
            Path(note).write_text(str(time.time()))
            harm(kind)
        return inner(*args, **kwargs)

    setattr(owner, name, wrapped)


def main():
    rank, fault, change = json.loads(os.environ["FAULT"])
    harmed = int(os.environ["RANK"]) == rank
    if harmed and change[:1] and change[0].endswith(".py"):
        os.environ["PYTHONPATH"] = ""
        os.execv(sys.executable, [sys.executable, change[0], *sys.argv[2:]])
    watch.IMPORTS = store.IMPORTS = IMPORTS
    _, name, *flags = sys.argv
    sys.argv = [f"{name}.py", *flags, *(change if harmed else [])]
    script = importlib.import_module("extras.training.adapt" if name == "adapt" else name)
    if harmed and fault:
        prepare(*fault)
    launch.run(script.main)


if __name__ == "__main__":
    main()
