"""How ranks meet, and watch one another: when one dies or hangs, all end, and one of them says which, why and where.

docs/reliability.md says how. A run of one process does not import this file.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from formats.checkpoint import first_line
from kernels import gloo
from runtime import watch
from runtime.errors import InputError
from runtime.watch import Place, StoreLost, Verdict

IMPORTS = 60  # seconds that a rank may start later than another, on top of the timeout
_gathers = collections.Counter()  # of each number of ranks: the Worlds of a process share the store

# ---- Meeting ---------------------------------------------------------------------------------------------------------


@functools.cache
def store():
    """Return the key-value store that torchrun's environment describes."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun holds it already, or has died
    try:
        result = next(dist.rendezvous("env://", timeout=timedelta(seconds=10 if agent else 300)))[0]
    except (dist.DistError, ValueError, OSError) as e:
        raise InputError(f"WORLD_SIZE is set, but there is no store to meet at: {first_line(e)}") from None
    result.set_timeout(timedelta(seconds=300))
    return result


def gather(world, value, patience=math.inf):
    """Return the values of all ranks; see World.gather."""
    values, start = [], time.monotonic()
    _gathers[world.tp_size] += 1
    key = f"gathered {world.tp_size} {_gathers[world.tp_size]}"
    store().set(f"{key} {world.rank}", json.dumps(value))
    for rank in range(world.tp_size):
        while not store().check([f"{key} {rank}"]):
            if code := ended(store()):
                raise SystemExit(code)  # another rank says why
            if time.monotonic() - start > patience:
                words = f"rank {rank} of {world.tp_size} has not started"
                raise Verdict(f"{words} within {patience:g} s (LADDER_TIMEOUT + {IMPORTS})")
            time.sleep(0.005)
        values.append(json.loads(store().get(f"{key} {rank}")))
    return values


def meet(world, flags, leave):
    """Meet the other ranks, watch them, be compared with them, and make the default process group; raise InputError."""
    global _watch
    rank, tp_size = world.rank, world.tp_size
    seconds, local = timeout(), int(os.environ.get("LOCAL_WORLD_SIZE", tp_size))
    node = os.environ.get("GROUP_RANK", str(rank // local))  # torchrun's number of the node, or what comes close
    started = world.gather([node, os.getpid()], patience())
    world.nodes, processes = zip(*started, strict=True)
    near = {r: processes[r] for r in range(tp_size) if world.nodes[r] == node and "GROUP_RANK" in os.environ}
    _watch = Watch(store(), rank, tp_size, near, seconds, leave)
    _watch.on_gpu = world.device.type == "cuda"
    _watch.start()
    world.agree(_start(flags, world.device) | {"LADDER_TIMEOUT": seconds})
    _init_process_group(world)
    world.group = dist.group.WORLD


def timeout():
    """Return after how many seconds without progress a run ends, or 0 for never. Raises InputError."""
    text = os.environ.get("LADDER_TIMEOUT", "60")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1
    if not 0 <= seconds < math.inf:
        raise InputError(f"LADDER_TIMEOUT={text!r} is no number of seconds: give one, or 0 to wait for ever")
    return seconds


def patience():
    """Return the seconds that a rank may take to start."""
    return timeout() + IMPORTS if timeout() else math.inf


def _init_process_group(world):
    """Make torch.distributed's default group: NCCL on GPUs, else gloo."""
    backend, on_gpu, last_resort = "gloo", {}, timedelta(minutes=30)  # hangs are reported sooner
    if world.device.type == "cuda":  # its kernels run first: the sum of a sublayer is waited for before other work
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = last_resort  # else each rank warns that this one is the default
        backend, on_gpu = "nccl", {"device_id": world.device, "pg_options": options}
    elif len({*world.nodes}) > 1:
        gloo.choose_interface(store(), world.rank, world.tp_size)
    before, ranks = gloo.threads(), {"rank": world.rank, "world_size": world.tp_size}
    dist.init_process_group(backend, store=store(), timeout=last_resort, **ranks, **on_gpu)
    if backend == "gloo":
        gloo.let_preempt(gloo.threads() - before)
    dist.barrier()  # so that no rank finds bad input and leaves while another still connects to it


# of each rank alone: where its files lie (their contents are compared), and what only rank 0 writes
OWN = {"device", "checkpoint", "draft", "compare", "distill", "text", "valid", "json"}
CODE = "*.py", "*/*.py", "*/*.cpp", "extras/*/*.py", "extras/*/*.cpp"


def _start(flags, device):
    """Return what all ranks are to be started with alike, by name."""
    files = sorted(path for pattern in CODE for path in Path(__file__).parents[1].glob(pattern))
    code = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]
    start = {"the script": os.path.basename(sys.argv[0]), "the code": code}
    start |= {"torch": torch.__version__, "device": device.type}
    flags = {f"--{name.replace('_', '-')}": value for name, value in flags.items() if name not in OWN}
    return start | {name: value for name, value in flags.items() if value is not None and value is not False}


# ---- Watching --------------------------------------------------------------------------------------------------------

TICK = 1  # seconds
GRACE = 3  # seconds that the main thread has to end by itself
BUSY = 0.05  # share of a core above which a process computes, and does not hang; one that waits takes about 0.01
_watch = None  # of this process, once it has met others


def ended(store):
    """Return the exit code of the first rank that has left, or None."""
    return int(store.get("ended").split()[0]) if store.check(["ended"]) else None


class Watch(threading.Thread):
    """Watches all ranks until the process ends, or ends it by leave(why).

    processes: {rank: process id} of this node. timeout: seconds, or 0 for ever; it counts ticks, which stand still
    while the whole run is suspended.
    """

    on_gpu = False

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
        watch.on_change = self.publish
        threading.Thread(target=self._watch_store, daemon=True).start()
        try:
            while True:
                self.wake.clear()
                self._tick()
                self.wake.wait(TICK)
        except Exception as e:  # torchrun's death takes it
            self._end(StoreLost(f"rank {self.rank} of {self.tp_size} has lost torchrun's store in {watch.here}: {e}"))

    def _watch_store(self):
        """End the run if the store, whose process may be stopped, does not answer for longer than the timeout."""
        seen = silent = 0
        while True:
            time.sleep(TICK)
            seen, silent = self.ticks, silent + 1 if self.ticks == seen else 0
            if silent > self.timeout > 0:
                self._end(StoreLost(f"torchrun's store has not answered for {self.limit}, in {watch.here}"))

    def publish(self):
        """Let the other ranks see where this one is."""
        place = dataclasses.replace(watch.here, cpu=time.process_time(), ticks=self.ticks)
        for monitor in watch.monitors:
            pieces, awaited = monitor.progress()
            place.beats, place.awaited = place.beats + pieces, awaited
        self.store.set(f"place {self.rank}", json.dumps(dataclasses.asdict(place)))

    def _place(self, rank):
        """Return where a rank is that may have gone: where this one waits for it, if they take that step together."""
        key = f"place {rank}"
        place = Place(**json.loads(self.store.get(key))) if self.store.check([key]) else Place()
        here = watch.here
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
            computes &= not self.on_gpu  # where a thread that only waits may be busy
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
        for monitor in watch.monitors:
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


# ---- Leaving ---------------------------------------------------------------------------------------------------------


def explain(error):
    """Return why this rank ends: what its Watch says, where error, of its main thread, may follow from that."""
    # a Watch knows better than a collective that has lost a peer, or a signal that followed from that
    lost = isinstance(error, dist.DistError) or "gloo" in str(error) or any(m.lost_peer() for m in watch.monitors)
    if _watch and (isinstance(error, watch.Terminated) or (lost and isinstance(error, Exception))):
        _watch.wake.set()
        _watch.known.wait(GRACE if lost else 0.5)
        return _watch.verdict or error
    return error


def leave_first(code, rank, error):
    """Return (the exit code, that of the first rank that leaves, whether that is this one, which leaves with `code`).

    On the first one's node of torchrun the others leave with 0: of each that fails torchrun prints seven lines.
    """
    if store.cache_info().currsize and not isinstance(error, StoreLost):
        with contextlib.suppress(Exception):
            node = os.environ.get("GROUP_RANK")  # None without torchrun
            code, first, its_node = store().compare_set("ended", "", f"{code} {rank} {node}").decode().split()
            speaks = int(first) == rank
            return int(code) if speaks or node is None or node != its_node else 0, speaks
    return code, os.environ.get("LOCAL_RANK", "0") == "0"  # without a store, which goes with torchrun
