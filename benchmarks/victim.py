"""A script of the project, one rank of which harms itself at a given point: benchmarks/faults.py starts it.

FAULT='{"phase": "decode", "step": 3, "rank": 1, "kind": "SIGKILL", "note": FILE}' \
    torchrun --standalone --nproc_per_node=2 -m benchmarks.victim generate --checkpoint demo --prompt "Once upon a time"

The script itself knows nothing of it: the function in which the phase happens is wrapped from here.
"""

import functools
import importlib
import json
import os
import signal
import sys
import time

import torch

import generate
from formats import checkpoint
from runtime import launch, terminal

FOR_EVER, BUSY = 3600, 2  # seconds


def harm(kind):
    """Do to this process, or to its launcher, what the kind says; for the latter, be busy while it takes effect."""
    launcher = os.getppid()
    if kind == "exception":
        raise RuntimeError("something broke")
    if kind == "no memory":
        torch.empty(2**60, dtype=torch.uint8)
    elif kind == "hang":
        time.sleep(FOR_EVER)
    elif kind.startswith("launcher "):
        os.kill(launcher, signal.Signals[kind.removeprefix("launcher ")])
        time.sleep(FOR_EVER if kind == "launcher SIGKILL" else BUSY)
    elif kind.startswith("terminal "):  # to all that a terminal would reach: the launcher's process group
        os.killpg(os.getpgid(launcher), signal.Signals[kind.removeprefix("terminal ")])
        time.sleep(BUSY)
    else:
        os.kill(os.getpid(), signal.Signals[kind])


def in_call(owner, name, number, fault):
    """Wrap owner.name so that the fault happens as its call of this number begins."""
    inner, calls = getattr(owner, name), 0

    @functools.wraps(inner)
    def wrapped(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == number:
            time.sleep(2 * (fault["phase"] == "join"))  # until the others have imported, too
            with open(fault["note"], "w") as f:
                json.dump({"time": time.time(), "port": int(os.environ["MASTER_PORT"])}, f)
            harm(fault["kind"])
        return inner(*args, **kwargs)

    setattr(owner, name, wrapped)


def in_chat(fault):
    """The step-th wait for the user: rank 0 reads the terminal, the others wait for what it tells them."""
    inner = terminal.chat

    def chat(*args):
        if fault["rank"] == 0:
            terminal.input = input
            in_call(terminal, "input", fault["step"], fault)
        else:
            in_call(launch.World, "tell", fault["step"], fault)
        return inner(*args)

    terminal.chat = chat


def prepare(script, fault):
    """Wrap the function in which the fault's phase happens."""
    phase, step = fault["phase"], fault["step"]
    if phase == "chat":
        return in_chat(fault)
    owner, name = {
        "join": (launch, "join"),
        "load": (checkpoint.Weights, "fill"),  # of a tensor
        "compile": (generate.Runner, "decode"),  # the first call of a compiled one
        "prefill": (generate.Runner, "prefill"),
        "decode": (generate.Runner, "decode"),
        "window": (generate, "pad"),
        "step": (script, "optimizer_step"),
    }[phase]
    in_call(owner, name, step, fault)


def main():
    _, name, *flags = sys.argv
    sys.argv = [f"{name}.py", *flags]
    script, fault = importlib.import_module(name), json.loads(os.environ["FAULT"])
    if int(os.environ["RANK"]) == fault["rank"]:
        prepare(script, fault)
    launch.run(script.main)


if __name__ == "__main__":
    main()
