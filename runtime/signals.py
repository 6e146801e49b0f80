"""The signals that end a process: whatever cleans up has its turn, as at Ctrl-C."""

import ctypes
import functools
import os
import signal
import sys

received = None  # the Terminated of a signal that came: a library may swallow the exception that it raised
_ENDING = signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1  # USR1: a batch system's before its limit, or extras/watch's


class Terminated(KeyboardInterrupt):
    """A signal other than Ctrl-C's asks this process to end."""


def ignore():
    """Let nothing interrupt the end of this process: a launcher sends one signal after another."""
    for number in signal.SIGINT, *_ENDING:
        signal.signal(number, signal.SIG_IGN)


def terminate(number, frame):
    """End the main thread: a signal's handler."""
    global received
    ignore()
    received = Terminated(signal.Signals(number).name)
    raise received


def heed():
    """Let each of these signals raise Terminated in the main thread."""
    for number in _ENDING:
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores one
            signal.signal(number, terminate)
            # a library's pool ends its workers with SIGTERM
            os.register_at_fork(after_in_child=functools.partial(signal.signal, number, signal.SIG_DFL))
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: torchrun's death
