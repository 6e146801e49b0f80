"""The ranks of a run watch one another: when one dies or hangs, all end, and one of them says which, why and where.

Each rank calls at() to note its place. A thread in each rank, its Watch, publishes that place in torchrun's store and
reads the places of the others, and whether their processes live, once a second.
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

import torch

TICK = 1  # seconds
GRACE = 3  # seconds that the main thread has to end by itself
BUSY = 0.05  # share of a core above which a process computes, and does not hang; one that waits takes about 0.01


@dataclasses.dataclass
class Place:
    """Where a rank is. step: the number of a step that all ranks take together, or the name of its own work."""

    phase: str = "start"
    step: object = None
    timed: bool = False  # whether the rank hangs if it makes no progress within the timeout
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
_publish = None  # publishes `here`, once there is a Watch
_fixed = False  # whether the place stays as it is


def beat():
    """Note that this rank makes progress where it is."""
    here.busy += 1


def at(phase, step=None, timed=True):
    """Note where this rank is from now on, as in at("decode step", 57)."""
    here.beats += 1
    if not _fixed:
        changed, here.phase, here.step, here.timed = phase != here.phase, phase, step, timed
        if changed and _publish:
            _publish()


@contextlib.contextmanager
def during(phase):
    """Stay in a phase that may take any time, whatever the block notes."""
    global _fixed
    at(phase, timed=False)
    before, _fixed = _fixed, True
    try:
        yield
    finally:
        _fixed = before


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


def ended(store):
    """Return the exit code of the first rank that has left, or None."""
    return int(store.get("ended").split()[0]) if store.check(["ended"]) else None


class Watch(threading.Thread):
    """Watches all ranks until the process ends, or ends it.

    processes: {rank: process id} of this node. timeout: seconds, or 0 for ever; it counts ticks, which stand still
    while the whole run is suspended. leave(error): says why unless another rank does, and ends the process.
    """

    def __init__(self, store, rank, tp_size, processes, timeout, leave):
        super().__init__(daemon=True, name="watch")
        self.store, self.rank, self.tp_size, self.processes = store.clone(), rank, tp_size, processes
        self.timeout, self.leave = timeout and max(timeout, 2 * TICK), leave
        self.limit = f"{self.timeout:g} s (LADDER_TIMEOUT)"
        self.verdict, self.known, self.wake = None, threading.Event(), threading.Event()  # known: there is a verdict
        self.ticks = self.still = 0  # still: for so many ticks no rank made progress
        self.silent, self.cpu = [0] * tp_size, [0.0] * tp_size  # ticks without a sign of life; seconds
        self.places = [Place()] * tp_size

    def run(self):
        global _publish
        _publish = self.publish
        threading.Thread(target=self._watch_store, daemon=True).start()
        try:
            while True:
                self.wake.clear()
                self._tick()
                self.wake.wait(TICK)
        except Exception as e:  # torchrun's death takes it
            self._end(StoreLost(f"rank {self.rank} of {self.tp_size} has lost torchrun's store in {here}: {e}"))

    def _watch_store(self):
        """End the run if the store, whose process may be stopped, does not answer for longer than the timeout."""
        seen = silent = 0
        while True:
            time.sleep(TICK)
            seen, silent = self.ticks, silent + 1 if self.ticks == seen else 0
            if silent > self.timeout > 0:
                self._end(StoreLost(f"torchrun's store has not answered for {self.limit}, in {here}"))

    def publish(self):
        """Let the other ranks see where this one is."""
        place = dataclasses.replace(here, cpu=time.process_time(), ticks=self.ticks)
        for monitor in monitors:
            pieces, awaited = monitor.progress()
            place.beats, place.awaited = place.beats + pieces, awaited
        self.store.set(f"place {self.rank}", json.dumps(dataclasses.asdict(place)))

    def _place(self, rank):
        """Return where a rank is that may have gone: where this one waits for it, if they take that step together."""
        key = f"place {rank}"
        place = Place(**json.loads(self.store.get(key))) if self.store.check([key]) else Place()
        return here if place.phase == here.phase and isinstance(here.step, int) else place

    def _tick(self):
        self.ticks += 1
        self.publish()
        code = ended(self.store)
        if code:
            self._end(SystemExit(code))
        processes = {rank: read_process(process) for rank, process in self.processes.items()}
        for rank in [rank for rank, (alive, _) in processes.items() if not alive and code is None]:
            self._end(Verdict(f"rank {rank} of {self.tp_size} has died in {self._place(rank)}"))
        texts = self.store.multi_get([f"place {rank}" for rank in range(self.tp_size)])
        self._judge([Place(**json.loads(text)) for text in texts], processes)

    def _judge(self, places, processes):
        """End the run if a rank gave no sign of life for longer than the timeout, or no rank made progress for as long
        and each should. processes: what read_process says of those of this node."""
        self.still += 1
        for rank, (old, new) in enumerate(zip(self.places, places, strict=True)):
            # a library may let no other thread run, not even the one that publishes
            before, self.cpu[rank] = self.cpu[rank], max(new.cpu, processes.get(rank, (True, 0))[1])
            computes = self.cpu[rank] - before > BUSY * TICK
            self.silent[rank] = 0 if computes or new.ticks != old.ticks else self.silent[rank] + 1
            computes &= not torch.cuda.is_initialized()  # else a thread that only waits may be busy
            if computes or (new.beats, new.busy) != (old.beats, old.busy):
                self.still = 0
        self.places, late = places, [rank for rank, ticks in enumerate(self.silent) if ticks > self.timeout > 0]
        if late:
            self._end_hung(late, "no sign of life")
        if self.still > self.timeout > 0 and all(place.timed for place in places):
            waiting = {rank for rank, place in enumerate(places) if place.awaited is not None}
            furthest = max(place.beats for place in places)
            late = {places[rank].awaited for rank in waiting} - waiting
            late = late or {rank for rank, place in enumerate(places) if place.beats < furthest} or range(self.tp_size)
            self._end_hung(sorted(late), "no progress")

    def _end_hung(self, ranks, why):
        words, hang = " and ".join(f"rank {rank}" for rank in ranks), "hangs" if len(ranks) == 1 else "hang"
        verdict = Verdict(f"{words} of {self.tp_size} {hang} in {self._place(ranks[0])}: {why} for {self.limit}")
        verdict.stopped = [self.processes[r] for r in ranks if r in self.processes and why == "no sign of life"]
        self._end(verdict)

    def _end(self, why):
        """End this process by way of its main thread, or else from here."""
        self.verdict = why
        self.known.set()
        for monitor in monitors:
            monitor.abandon()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        self.leave(why)


def read_process(process):
    """Return (whether a process of this machine lives, the seconds that it has computed), as far as the system says."""
    try:
        with open(f"/proc/{process}/stat") as f:
            state, *fields = f.read().rpartition(")")[2].split()  # see proc(5)
    except OSError:
        return not os.path.isdir("/proc/self"), 0.0
    return state not in "ZX", sum(map(int, fields[10:12])) / os.sysconf("SC_CLK_TCK")
