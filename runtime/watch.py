"""Where this process is, noted for messages and for other ranks; and the signals that end it."""

import contextlib
import ctypes
import dataclasses
import functools
import os
import signal
import sys


@dataclasses.dataclass
class Place:
    """Where a rank is. step: the number of a step that all ranks take together, or the name of its own work."""

    phase: str = "start"
    step: object = None
    timed: bool = False  # whether no progress within the timeout counts as a hang
    beats: int = 0  # how often at() was called: equal on all ranks that have come equally far
    busy: int = 0  # other signs of progress, of which some ranks have more
    cpu: float = 0.0  # seconds that the process has computed
    awaited: int | None = None  # the rank that this one waits for, where its collectives can tell
    ticks: int = 0  # of its Watch

    def __str__(self):
        return self.phase if self.step is None else f"{self.phase} {self.step}"


here = Place()
signalled = None  # the Terminated of a signal that came: a library may swallow the exception that it raised
at_end = []  # functions to call before this process ends, even if its main thread is stuck
monitors = set()  # collectives that wait in C++: objects with progress(), lost_peer() and abandon()
on_change = None  # a function that is called when the phase changes, once there is a Watch
_fixed = False  # whether the place stays as it is


def beat():
    """Note that this rank makes progress where it is."""
    here.busy += 1


def at(phase, step=None, timed=True):
    """Note where this rank is from now on, as in at("decode step", 57)."""
    here.beats += 1
    if not _fixed:
        changed, here.phase, here.step, here.timed = phase != here.phase, phase, step, timed
        if changed and on_change:
            on_change()


@contextlib.contextmanager
def during(phase):
    """Stay in a phase that may take any time, whatever the block notes, and then return to where this rank was."""
    global _fixed
    before, place = _fixed, (here.phase, here.step, here.timed)
    at(phase, timed=False)
    _fixed = True
    try:
        yield
    finally:
        _fixed = before
        at(*place)


class Terminated(KeyboardInterrupt):
    """A signal other than Ctrl-C's asks this process to end."""


def ignore_signals():
    """Let nothing interrupt the end of this process: a launcher sends one signal after another."""
    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
        signal.signal(number, signal.SIG_IGN)


def terminate(number, frame):
    global signalled
    ignore_signals()
    signalled = Terminated(signal.Signals(number).name)
    raise signalled


def heed_signals():
    """Let SIGTERM and SIGHUP end this process as Ctrl-C does, so that whatever cleans up has its turn."""
    for number in signal.SIGTERM, signal.SIGHUP:
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores one
            signal.signal(number, terminate)
            # a library's pool ends its workers with SIGTERM
            os.register_at_fork(after_in_child=functools.partial(signal.signal, number, signal.SIG_DFL))
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: torchrun's death


class Verdict(Exception):
    """Why a run is ended, in words."""

    stopped = ()  # the ids of processes that hear no signal


class StoreLost(Verdict):
    """torchrun's store does not answer."""
