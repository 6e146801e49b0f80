"""How a process ends: at a signal, at an error or well, with which exit code, and with which line that says why."""

import contextlib
import ctypes
import errno
import functools
import json
import os
import signal
import sys
import time
import traceback

import torch

from ladder.errors import InputError, Verdict, first_line
from ladder.progress import progress
from ladder.ranks import store
from ladder.ranks.world import rank_and_size

at_end = []  # functions to call before this process ends, even if its main thread is stuck

# ---- Signals: whatever cleans up has its turn, as at Ctrl-C ----------------------------------------------------------

REMINDER = 2  # seconds after which an exception that was swallowed is raised again
received = None  # the Terminated of a signal that came: a library may swallow the exception that it raised
# USR1: a batch system's before its limit, or ladder/ranks/watch.py's
_ENDING = signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1


class Terminated(KeyboardInterrupt):
    """A signal other than Ctrl-C's asks this process to end."""


def ignore_signals():
    """Let nothing interrupt the end of this process: a launcher sends one signal after another."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number in signal.SIGINT, *_ENDING:
        signal.signal(number, lambda number, frame: None)  # of SIG_IGN Python reports a signal that comes right now


def terminate(number, frame):
    """End the main thread: a signal's handler."""
    global received
    ignore_signals()
    received = Terminated(signal.Signals(number).name)
    signal.signal(signal.SIGALRM, insist)
    signal.setitimer(signal.ITIMER_REAL, REMINDER, REMINDER)
    raise received


def insist(number, frame):
    """End the main thread again, unless it cleans up for this end already: a timer's handler.

    Python drops what is raised in a weakref's callback or in __del__, and a library may catch everything.
    """
    error = sys.exception()
    while error not in (None, received):
        error = error.__context__
    if error is None:
        raise received


def heed_signals():
    """Let each of these signals raise Terminated in the main thread."""
    for number in _ENDING:
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores one
            signal.signal(number, terminate)
            # a library's pool ends its workers with SIGTERM
            os.register_at_fork(after_in_child=functools.partial(signal.signal, number, signal.SIG_DFL))
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: torchrun's death


# ---- The end ---------------------------------------------------------------------------------------------------------


def printable(text):
    """Return a text in one line of at most 500 characters: what it quotes may come from a stranger's file."""
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return text if len(text) <= 500 else f"{text[:300]} ... {text[-190:]}"


def out_of_memory(error):
    """Return whether an exception says that memory is short; PyTorch's for CPUs is a plain RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


def leave(error):
    """End this process with the exit code of the first rank that leaves, which also says why."""
    folder, script = os.path.split(sys.argv[0])
    script = os.path.basename(folder) if script == "__main__.py" else script  # of python -m PACKAGE
    rank = 0
    tp_size = 1
    with contextlib.suppress(InputError):  # the error that is said here
        rank, tp_size = rank_and_size()
    who = f"{script}: rank {rank} of {tp_size}" if tp_size > 1 else f"{script}:"
    where = f" in {progress}" if tp_size > 1 or progress.phase != "start" else ""
    what = f"({type(error).__name__}: {printable(first_line(error))})"
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None
    endings = [
        (error is None, 0, ""),
        (isinstance(error, SystemExit), getattr(error, "code", 0) or 0, ""),
        (isinstance(error, InputError), 2, f"{script}: {printable(str(error))}"),
        # a progress bar may stand in the line before
        (isinstance(error, Verdict), 1, f"\n{script}: {printable(str(error))}"),
        (isinstance(error, Terminated), 143, f"{who} was stopped by {error}{where}"),
        (isinstance(error, KeyboardInterrupt), 130, str(error) or "interrupted"),
        (isinstance(error, BrokenPipeError), 1, ""),  # whoever read our output has gone
        (full, 1, f"{script}: the output cannot be written: {what}"),
        (out_of_memory(error), 1, f"{who} ran out of memory {what}{where}"),
        (True, 1, "".join(traceback.format_exception(error)) + f"{who} failed {what}{where}"),
    ]
    code, line = next((code, line) for matches, code, line in endings if matches)
    speaks = True
    if tp_size > 1:
        code, speaks = store.leave_first(code, rank, error)
    if line and speaks:
        print(line, file=sys.stderr, flush=True)
    if line and (path := os.environ.get("TORCHELASTIC_ERROR_FILE")):  # what torchrun's report then ends with
        # which is the earliest failure's, and those that torchrun then stops may be of the same second
        earlier = str(int(time.time()) - 1)
        cause = {"message": line.strip().splitlines()[-1], "extraInfo": {"timestamp": earlier}}
        with contextlib.suppress(OSError), open(path, "w") as f:
            json.dump({"message": cause}, f)
    for function in at_end:
        with contextlib.suppress(Exception):  # the terminal may have gone
            function()
    if isinstance(error, OSError):  # what is still to be written goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if tp_size > 1:
        os._exit(code)  # the destructors of a process group may wait for peers that are gone, or abort
    sys.exit(code)
