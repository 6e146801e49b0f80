"""The ranks of a run watch one another: when one dies or hangs, all end, and one of them says which, why and where.

Every rank notes with at() where it is. A thread of each, its Watch, tells the others through the store that they share,
and looks at them: at once when a process of its node ends, each second whether all are alive and make progress.
"""

import contextlib
import ctypes
import dataclasses
import functools
import json
import os
import signal
import sys
import threading
import time
from multiprocessing import connection

import torch

TICK = 1  # seconds
GRACE = 3  # seconds for the main thread to end by itself
BUSY = 0.2  # of a tick: a process that had that much of a core computes, and does not hang


@dataclasses.dataclass
class Place:
    """Where a rank is."""

    phase: str = "start"
    step: object = None
    timed: bool = False  # whether it hangs if it makes no progress within the timeout
    beats: int = 0  # how many places it came to, which all ranks do alike
    busy: int = 0  # other signs of progress, of which some ranks have more
    awaited: int | None = None  # the rank that it waits for, where shared memory tells
    ticks: int = 0  # of its Watch

    def __str__(self):
        return self.phase if self.step is None else f"{self.phase} {self.step}"


here = Place()
at_end = []  # what to call before this process ends, even if its main thread is stuck
_held = False


def beat():
    """Note that this rank makes progress where it is."""
    here.busy += 1


def at(phase, step=None, timed=True):
    """Note where this rank is from now on, as in at("decode step", 57)."""
    here.beats += 1
    if not _held:
        here.phase, here.step, here.timed = phase, step, timed


@contextlib.contextmanager
def during(phase):
    """Stay in a phase that may take any time, whatever is noted in this block."""
    global _held
    at(phase, timed=False)
    before, _held = _held, True
    try:
        yield
    finally:
        _held = before


class Terminated(KeyboardInterrupt):
    """A signal other than Ctrl-C's asks this process to end."""


def ignore_signals():
    """Let nothing interrupt the end of this process: a launcher sends one signal after another."""
    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
        signal.signal(number, signal.SIG_IGN)


def terminate(number, frame):
    ignore_signals()
    raise Terminated(signal.Signals(number).name)


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
    """Why a Watch ends the run, in words."""

    hung = ()  # the ids of processes that hear no signal


def ended(store):
    """Return the exit code of the first rank that has left, or None."""
    return int(store.get("ended").split()[0]) if store.check(["ended"]) else None


class Watch(threading.Thread):
    """Watches all ranks until the process ends, or ends it.

    processes: {rank: process id} of this node. timeout: seconds, or 0 for ever; it counts ticks, which stand still
    while the whole run is suspended. leave(error): says why unless another rank does, and ends the process.
    """

    def __init__(self, store, rank, tp_size, processes, timeout, leave):
        from kernels import shared_memory  # a single process does without it

        super().__init__(daemon=True, name="watch")
        self.memory = shared_memory
        self.store, self.rank, self.tp_size, self.processes = store.clone(), rank, tp_size, processes
        self.timeout, self.leave = timeout and max(timeout, 2 * TICK), leave
        self.found, self.known = None, threading.Event()  # why the run ends, and that it does
        self.ticks = self.still = 0  # still: for so many ticks no rank made progress
        self.silent, self.cpu = [0] * tp_size, [0.0] * tp_size  # ticks without a sign of life; seconds
        self.places = [Place()] * tp_size
        self.descriptors = {}
        for other, process in processes.items():
            with contextlib.suppress(OSError, AttributeError):  # not Linux: then torchrun is the one that notices
                self.descriptors[os.pidfd_open(process)] = other

    def run(self):
        next_tick = time.monotonic()
        try:
            while True:
                for descriptor in connection.wait([*self.descriptors], max(0, next_tick - time.monotonic())):
                    self._judge_dead(self.descriptors.pop(descriptor))
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + TICK
                    self._tick()
        except Exception as e:  # torchrun's death takes it
            self._end(Verdict(f"rank {self.rank} of {self.tp_size} has lost torchrun's store in {here}: {e}"))

    def _judge_dead(self, rank):
        code = ended(self.store)
        if code != 0:  # torchrun says how it died
            self._end(SystemExit(code) if code else Verdict(f"rank {rank} of {self.tp_size} has died in {here}"))

    def _tick(self):
        self.ticks += 1
        pieces, awaited = self.memory.progress()
        place = dataclasses.replace(here, beats=here.beats + pieces, awaited=awaited, ticks=self.ticks)
        self.store.set(f"place {self.rank}", json.dumps(dataclasses.asdict(place)))
        if code := ended(self.store):
            self._end(SystemExit(code))
        texts = self.store.multi_get([f"place {rank}" for rank in range(self.tp_size)])
        self._judge([Place(**json.loads(text)) for text in texts])

    def _judge(self, places):
        """End the run if a rank gave no sign of life for longer than the timeout, or no rank made progress for as long
        and each should."""
        self.still += 1
        for rank, (old, new) in enumerate(zip(self.places, places, strict=True)):
            before, self.cpu[rank] = self.cpu[rank], cpu_seconds(self.processes.get(rank))
            computes = self.cpu[rank] - before > BUSY * TICK  # perhaps in a library that lets no other thread run
            self.silent[rank] = 0 if computes or new.ticks != old.ticks else self.silent[rank] + 1
            computes &= not torch.cuda.is_initialized()  # else a thread that only waits may be busy
            if computes or (new.beats, new.busy) != (old.beats, old.busy):
                self.still = 0
        self.places, late = places, [rank for rank, ticks in enumerate(self.silent) if ticks > self.timeout > 0]
        if late:
            self._end_hung(late, here, "no sign of life", [self.processes[r] for r in late if r in self.processes])
        if self.still > self.timeout > 0 and all(place.timed for place in places):
            waiting = {rank for rank, place in enumerate(places) if place.awaited is not None}  # as shared memory tells
            furthest = max(place.beats for place in places)
            late = {places[rank].awaited for rank in waiting} - waiting
            late = late or {rank for rank, place in enumerate(places) if place.beats < furthest} or range(self.tp_size)
            self._end_hung(sorted(late), places[min(late)], "no progress")

    def _end_hung(self, ranks, place, why, processes=()):
        words = " and ".join(f"rank {rank}" for rank in ranks)
        hang = "hangs" if len(ranks) == 1 else "hang"
        verdict = Verdict(f"{words} of {self.tp_size} {hang} in {place}: {why} for {self.timeout:g} s (--timeout)")
        verdict.hung = processes
        self._end(verdict)

    def _end(self, why):
        """End this process by way of its main thread, or else from here."""
        self.found = why
        self.known.set()
        self.memory.abandon()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        self.leave(why)


def cpu_seconds(process):
    """Return how long a process of this machine has computed, or 0."""
    try:
        with open(f"/proc/{process}/stat") as f:
            found = f.read().rpartition(")")[2].split()  # from its state on, see proc(5)
    except OSError:
        return 0.0
    return sum(map(int, found[11:13])) / os.sysconf("SC_CLK_TCK")
