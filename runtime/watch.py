"""The ranks of a run watch one another: when one dies or hangs, all end, with one line that says which, where and why.

Every rank notes with at() where it is. A thread of each, its Watch, tells that to the others through the store that
torchrun (or rank 0) holds, and looks at them: at once when a process of this machine ends, and each second whether all
give signs of life and come further.
"""

import contextlib
import dataclasses
import json
import os
import select
import signal
import sys
import threading
import time

import torch

from kernels import shared_memory

# ---------------------------------------------------------------------------------------------------------------------
# Where this rank is


@dataclasses.dataclass
class Place:
    """Where a rank is. timed: it hangs if it comes no further within the timeout. beats: how many places it came to,
    which ranks do alike. busy: other signs that it comes further, of which some have more.

    awaited: the rank that it waits for, where shared memory tells. ticks: of its Watch.
    """

    phase: str = "start"
    step: object = None
    timed: bool = False
    beats: int = 0
    busy: int = 0
    awaited: int | None = None
    ticks: int = 0

    def __str__(self):
        return self.phase if self.step is None else f"{self.phase} {self.step}"


here = Place()
_held = False


def beat():
    """Note that this rank comes further, where it is."""
    here.busy += 1


def at(phase, step=None, timed=True):
    """Note where this rank is from now on, as in at("decode step", 57)."""
    here.beats += 1
    if not _held:
        here.phase, here.step, here.timed = phase, step, timed


@contextlib.contextmanager
def during(phase):
    """This rank is there, however long it takes, whatever is noted in this block."""
    global _held
    at(phase, timed=False)
    before, _held = _held, True
    try:
        yield
    finally:
        _held = before


# ---------------------------------------------------------------------------------------------------------------------
# Signals


class Terminated(KeyboardInterrupt):
    """A signal other than Ctrl-C's asks this process to end."""


def hear_no_more():
    """This process ends already: a launcher sends one signal behind another."""
    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
        signal.signal(number, signal.SIG_IGN)


def terminate(number, frame):
    while frame is not None:
        if frame.f_code.co_name in ("__del__", "_raise_again"):  # where Python would print what is raised, and go on
            return threading.Timer(0.01, os.kill, (os.getpid(), number)).start()
        frame = frame.f_back
    hear_no_more()
    raise Terminated(signal.Signals(number).name)


def heed_signals():
    """Let SIGTERM and SIGHUP end this process by way of what cleans up, as Ctrl-C does."""
    for number in signal.SIGTERM, signal.SIGHUP:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, terminate)
    sys.unraisablehook = _raise_again


def _raise_again(unraisable):
    """A signal that was raised in a destructor, where Python would only print it, comes once more."""
    number = signal.SIGINT
    if isinstance(unraisable.exc_value, Terminated):
        number = signal.Signals[str(unraisable.exc_value)]
        signal.signal(number, terminate)
    elif not isinstance(unraisable.exc_value, KeyboardInterrupt):
        return sys.__unraisablehook__(unraisable)
    threading.Timer(0.01, os.kill, (os.getpid(), number)).start()  # out of the destructor by then


# ---------------------------------------------------------------------------------------------------------------------
# Where the others are

TICK = 1  # seconds
GRACE = 3  # seconds for the main thread to end by itself
BUSY = 0.2  # of a tick: who has had so much of a core computes, and does not hang


@dataclasses.dataclass
class Peer:
    """What is known of another rank. silent: for so many ticks. process: its id, if it is on this machine."""

    place: Place | None = None
    silent: int = 0
    cpu: float = 0.0  # seconds that its process has had
    process: int | None = None
    descriptor: int | None = None


class Watch(threading.Thread):
    """Watches for one rank of several, until done(), or until it ends the process.

    store: what the ranks share. stop(store, line): prints the line unless another rank has, and ends the process.
    timeout: seconds, or 0 for ever. It counts ticks of this thread, which stand still while the whole run is suspended.
    """

    def __init__(self, store, rank, tp_size, stop, timeout=60):
        super().__init__(daemon=True, name="watch")
        self.store, self.rank, self.tp_size, self.stop, self.timeout = store.clone(), rank, tp_size, stop, timeout
        self.peers = {r: Peer() for r in range(tp_size) if r != rank}
        self.ticks = self.still = self.longest = 0  # still: since when no rank came further; longest: in this phase
        self.found = None  # where the ranks were at the last tick
        self.over, self.orphan, self.line = False, False, None
        self.met, self.known = threading.Event(), threading.Event()  # all the others; why the run ends
        self.clock = time.pthread_getcpuclockid(threading.main_thread().ident)
        self.cpu, self.busy = time.clock_gettime(self.clock), 0  # seconds of the main thread; ticks that it computed
        self.lock = threading.Lock()
        self.woken, wake = os.pipe()  # by signals, which the main thread may not hear
        for end in self.woken, wake:
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self.poll = select.poll()
        self.poll.register(self.woken, select.POLLIN)
        self.parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self.launcher = self.parent and self._open(self.parent)
        self.store.set(f"process {rank}", json.dumps([os.getpid(), _machine()]))
        self._publish()

    def run(self):
        next_tick = time.monotonic()
        try:
            while not self.over:
                for descriptor, _ in self.poll.poll(1e3 * max(0, next_tick - time.monotonic())):
                    if descriptor == self.woken:
                        self._hear(os.read(descriptor, 64))
                    else:
                        self._look_at_dead(descriptor)
                if time.monotonic() >= next_tick:
                    self._tick()
                    next_tick = time.monotonic() + (TICK if self.met.is_set() else TICK / 20)
        except Exception as e:  # the store's
            if not self.over:
                self._end(f"rank {self.rank} of {self.tp_size} has lost the other ranks in {here}: {e}")

    def done(self):
        """This rank needs no other any more."""
        at("end", timed=False)
        self.over = True
        with contextlib.suppress(Exception):  # who holds the store may have left
            self._publish()

    def why(self, patience=0):
        """(whether the Watch ends the run, its line or None if another rank has one), known within so many seconds."""
        return self.known.wait(patience), self.line

    def _publish(self):
        with self.lock:  # of the main thread's last words and this thread's
            self.ticks += 1
            pieces, awaited = shared_memory.progress()
            changes = {
                "beats": here.beats + pieces,
                "busy": here.busy + self.busy,
                "awaited": awaited,
                "ticks": self.ticks,
            }
            place = dataclasses.replace(here, **changes)
            place.step = None if place.step is None else str(place.step)
            self.store.set(f"place {self.rank}", json.dumps(dataclasses.asdict(place)))
            return place

    def _notice_computing(self):
        """A main thread that computes comes further; on a GPU it may be busy waiting."""
        if not torch.cuda.is_initialized():
            before, self.cpu = self.cpu, time.clock_gettime(self.clock)
            self.busy += self.cpu - before > BUSY * TICK

    def _tick(self):
        if self.parent not in (None, os.getppid()):
            self._judge_orphaned()
        if self.met.is_set():
            self._notice_computing()
        places = {self.rank: self._publish()}
        if self.store.check(["stopped"]):
            return self._end(None)
        for r, peer in self.peers.items():
            if peer.place is None and not self.store.check([f"place {r}"]):
                continue
            place = Place(**json.loads(self.store.get(f"place {r}")))
            before, peer.cpu = peer.cpu, cpu_seconds(peer.process) if peer.descriptor is not None else 0.0
            computes = peer.cpu - before > BUSY * TICK  # in a library that lets no other thread run
            peer.silent = peer.silent + 1 if place == peer.place and not computes and self.met.is_set() else 0
            places[r] = peer.place = place
            if peer.process is None:
                self._meet(r, peer)
        if len(places) == self.tp_size:
            self.met.set()
            self._judge(places)

    def _judge(self, places):
        """End the run if a rank gives no sign of life, or no rank comes further, for longer than the timeout.

        The second is beyond the longest time in which none came further in the phase so far.
        """
        if self.timeout == 0:
            return
        silent = {r for r, peer in self.peers.items() if peer.silent > self.timeout and places[r].phase != "end"}
        if silent:
            words = " and ".join(f"rank {r}" for r in sorted(silent))
            words = f"{words} of {self.tp_size} hangs in {here}"
            self._end(f"{words}: no sign of life for {self.timeout:g} s (--timeout)", silent)
        found = {r: (place.phase, place.beats, place.busy) for r, place in places.items()}
        if found == self.found:
            self.still += 1
        else:
            phases = [{r: phase for r, (phase, *_) in f.items()} for f in (found, self.found or {})]
            self.longest = max(self.longest, self.still) if phases[0] == phases[1] else 0
            self.still, self.found = 0, found
        if self.still > self.timeout + self.longest and all(place.timed for place in places.values()):
            behind = late(places)
            words = " and ".join(f"rank {r} of {self.tp_size} hangs in {places[r]}" for r in behind)
            words = words or f"all {self.tp_size} ranks hang in {here}"
            self._end(f"{words}: no rank has come further for {self.still} s (--timeout {self.timeout:g})")

    def _meet(self, rank, peer):
        """Be woken when the process of a rank of this machine ends."""
        peer.process, machine = json.loads(self.store.get(f"process {rank}"))
        if machine == _machine() is not None:
            try:
                peer.descriptor = self._open(peer.process)
            except ProcessLookupError:
                self._judge_dead(rank, "has died")

    def _open(self, process):
        """A descriptor by which the end of a process wakes this thread; None where the system has no such thing."""
        try:
            descriptor = os.pidfd_open(process)
        except ProcessLookupError:
            raise
        except (OSError, AttributeError):  # not Linux, an old one, or a container that forbids it
            return None
        self.poll.register(descriptor, select.POLLIN)
        return descriptor

    def _look_at_dead(self, descriptor):
        self.poll.unregister(descriptor)
        if descriptor == self.launcher:
            self._judge_orphaned()
        [(rank, process)] = [(r, peer.process) for r, peer in self.peers.items() if peer.descriptor == descriptor]
        self._judge_dead(rank, how_it_ended(process))  # before its parent asks, and it is gone for good

    def _judge_orphaned(self):
        self.orphan = True  # and torchrun's store has gone
        self._end(f"torchrun has died in {here}")

    def _judge_dead(self, rank, how):
        if self.store.check(["stopped"]):
            self._end(None)
        elif json.loads(self.store.get(f"place {rank}"))["phase"] != "end":
            self._end(f"rank {rank} of {self.tp_size} {how} in {here}")

    def _hear(self, numbers):
        """Of signals that end the script, let the main thread hear, too."""
        if any(signal.getsignal(number) in (signal.default_int_handler, terminate) for number in numbers):
            shared_memory.abandon()

    def _end(self, line, hung=()):
        """End this process by way of its main thread, or else from here; does not return."""
        if line and not self.orphan:
            with contextlib.suppress(Exception):  # without a store each rank says what it has found
                line = self.store.compare_set("verdict", "", line).decode()
        self.over, self.line = True, line
        self.known.set()
        for rank in hung:  # a stopped process does not hear torchrun's SIGTERM
            with contextlib.suppress(OSError, TypeError, AttributeError):
                signal.pidfd_send_signal(self.peers[rank].descriptor, signal.SIGKILL)
        shared_memory.abandon()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        self.stop(self.store, line)


def late(places):
    """The ranks that others wait for: as shared memory tells, or those that came less far than others."""
    waiting = {r for r, place in places.items() if place.awaited is not None}
    awaited = {places[r].awaited for r in waiting} - waiting
    furthest = max(place.beats for place in places.values())
    return sorted(awaited or {r for r, place in places.items() if place.beats < furthest})


def _stat(process):
    """What Linux tells of a process, from its state on, or None: see proc(5)."""
    with contextlib.suppress(OSError), open(f"/proc/{process}/stat") as f:
        return f.read().rpartition(")")[2].split()


def cpu_seconds(process):
    """The seconds of CPU time that a process of this machine has had; 0 where there is no telling."""
    found = _stat(process)
    return sum(map(int, found[11:13])) / os.sysconf("SC_CLK_TCK") if found else 0.0


def how_it_ended(process):
    """How a process of this machine ended, in words: what a parent that has not asked yet would be told."""
    found = _stat(process)
    if not found:
        return "has died"
    status = int(found[-1])
    if not os.WIFSIGNALED(status):
        return f"has left (exit code {os.WEXITSTATUS(status)})"
    number = os.WTERMSIG(status)
    memory = ", which the system also sends when memory runs out" if number == signal.SIGKILL else ""
    return f"was killed (signal {number}{memory})"


def _machine():
    """What processes have in common that see one another's ids; None where there is no telling."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            return f.read() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
