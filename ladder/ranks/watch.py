"""Ranks watch one another: when one dies or hangs, all end, and one says which, why and where. docs/reliability.md."""

import dataclasses
import functools
import json
import os
import signal
import threading
import time

import torch
import torch.distributed as dist

from ladder.errors import StoreLost, Verdict
from ladder.progress import Progress, progress
from ladder.ranks import ending, store
from ladder.ranks.store import IMPORTS, TICK, timeout

GRACE = 3  # seconds that the main thread has to end by itself
BUSY = 0.05  # share of a core above which a process computes, and does not hang; one that waits takes about 0.01
_watch = None  # this process's Watch, once its ranks meet


def start(rank, tp_size):
    """Start the Watch of this rank. Raises InputError as timeout() does."""
    global _watch
    _watch = Watch(store.torchrun_store(), rank, tp_size)
    _watch.start()


def explain(error):
    """Return why this rank ends: `error`, which its main thread raised, or what the Watch, if any, has found."""
    return _watch.explain(error) if _watch else error


@dataclasses.dataclass
class Seen(Progress):
    """The Progress of a rank, whose beats also count pieces written to shared memory, and what else it publishes."""

    ticks: int = 0  # of its Watch
    cpu: float = 0.0  # seconds that the process has computed
    process: int = 0  # its id
    node: str | None = None  # torchrun's number of the node


class Watch(threading.Thread):
    """Watches all ranks, and ends this process if they cannot go on. Ticks are its clock: a suspended run has none."""

    def __init__(self, store, rank, tp_size):
        super().__init__(daemon=True, name="watch")
        self.store = store.clone()
        self.rank = rank
        self.tp_size = tp_size
        self.timeout = timeout()
        self.limit = f"{self.timeout:g} s (LADDER_TIMEOUT)"
        self.verdict = None
        self.known = threading.Event()  # set: there is a verdict
        self.wake = threading.Event()
        self.ticks = self.still = 0  # still: for so many ticks no rank made progress
        self.silent = [-IMPORTS] * tp_size  # ticks without a sign of life, of which a rank may take more to start
        self.cpu = [0.0] * tp_size  # seconds
        self.seen = [Seen()] * tp_size
        self.keys = [f"place {rank}" for rank in range(tp_size)]
        self.node = os.environ.get("GROUP_RANK")
        self.processes = {}  # {rank: process id} of this node's torchrun
        self.torchrun = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    def run(self):
        threading.Thread(target=self._watch_store, daemon=True).start()
        try:
            while True:
                self.wake.clear()
                self._tick()
                self.wake.wait(TICK)
        except Exception as e:  # torchrun's death takes it
            self._end(StoreLost(f"rank {self.rank} of {self.tp_size} has lost torchrun's store in {progress}: {e}"))

    def explain(self, error):
        """Return why this rank ends: the verdict, if `error`, which its main thread raised, may be a consequence."""
        # a collective that has lost a peer, or a signal that torchrun then sends, says less than the verdict
        lost = isinstance(error, dist.DistError) or "gloo" in str(error)
        lost = isinstance(error, Exception) and (lost or ask_memory("lost_peer"))
        if lost or isinstance(error, ending.Terminated):
            self.wake.set()
            self.known.wait(GRACE if lost else 0.5)
            silent = [rank for rank, ticks in enumerate(self.silent) if ticks > 1]
            if lost and silent and not self.verdict:  # on another node, where this one sees no death
                return Verdict(f"{self._subject(silent, 'is', 'are')} lost in {progress}")
            return self.verdict or error
        return error

    def _subject(self, numbers, one, several):
        """Return the beginning of a sentence on the ranks of these numbers; one, several: its verb."""
        return f"{' and '.join(f'rank {n}' for n in numbers)} of {self.tp_size} {several if numbers[1:] else one}"

    def _watch_store(self):
        """End the run if the store, whose process may be stopped, does not answer for longer than the timeout."""
        seen = silent = 0
        while True:
            time.sleep(TICK)
            seen, silent = self.ticks, silent + 1 if self.ticks == seen else 0
            if silent > self.timeout > 0:
                self._end(StoreLost(f"torchrun's store has not answered for {self.limit}, in {progress}"))

    def _tick(self):
        self.ticks += 1
        own = dataclasses.asdict(progress) | {"ticks": self.ticks, "cpu": time.process_time()}
        own |= {"process": os.getpid(), "node": self.node}
        own["beats"] += ask_memory("progress")  # a rank that others wait for has come less far
        self.store.set(self.keys[self.rank], json.dumps(own))
        code = store.ended(self.store)
        if code:
            self._end(SystemExit(code))
        if self.torchrun not in (None, os.getppid()):  # that of another node than the store's
            self._end(Verdict(f"the torchrun of rank {self.rank} of {self.tp_size} has died in {progress}"))
        texts = [self.store.get(key) if self.store.check([key]) else "{}" for key in self.keys]
        seen = [read_seen(text) or old for text, old in zip(texts, self.seen, strict=True)]
        for rank, each in enumerate(seen):
            if self.torchrun and each.node == self.node and may_be_rank(each.process, self.torchrun):
                self.processes.setdefault(rank, each.process)  # its first: strangers may write to the store
        processes = {rank: read_process(process) for rank, process in self.processes.items()}
        for rank in [rank for rank, (parent, _) in processes.items() if parent is None and code is None]:
            self._end(Verdict(f"rank {rank} of {self.tp_size} has died in {self._place(seen[rank])}"))
        self._judge(seen, processes)

    def _place(self, seen):
        """Return the Progress to report for a rank that published `seen`: its own, or ours where all step alike."""
        return seen if isinstance(progress.step, str) else progress

    def _judge(self, seen, processes):
        """End the run if for longer than the timeout a rank gave no sign of life, or no rank made progress while all
        should. processes: {rank: the result of read_process} of this node."""
        self.still += 1
        on_gpus = torch.cuda.is_initialized()
        for rank, (old, new) in enumerate(zip(self.seen, seen, strict=True)):
            # a library that holds the GIL keeps even the publishing thread from running
            before = self.cpu[rank]
            self.cpu[rank] = max(new.cpu, processes.get(rank, (True, 0))[1])
            computes = self.cpu[rank] - before > BUSY * TICK
            self.silent[rank] = 0 if computes or new.ticks != old.ticks else self.silent[rank] + 1
            computes &= not on_gpus  # a thread that waits for a GPU may be busy
            if computes or (new.beats, new.busy) != (old.beats, old.busy):
                self.still = 0
        self.seen, late = seen, [rank for rank, ticks in enumerate(self.silent) if ticks > self.timeout > 0]
        if late:
            stopped = [self.processes[rank] for rank in late if rank in self.processes]  # which hear no other signal
            ending.at_end.extend(functools.partial(kill, process, self.torchrun) for process in stopped)
            self._end_hung(late, "no sign of life")
        if self.still > self.timeout > 0 and all(each.timed for each in seen):
            furthest = max(each.beats for each in seen)
            late = [rank for rank, each in enumerate(seen) if each.beats < furthest]
            self._end_hung(late or range(self.tp_size), "no progress")

    def _end_hung(self, late, why):
        what = f"{self._subject(late, 'hangs', 'hang')} in {self._place(self.seen[late[0]])}: {why} for {self.limit}"
        if not self.seen[late[0]].ticks:
            limit = f"{self.timeout + IMPORTS:g} s (LADDER_TIMEOUT + {IMPORTS})"
            what = f"{self._subject(late, 'did', 'did')} not start within {limit}"
        self._end(Verdict(what))

    def _end(self, why):
        """End this process by way of its main thread, or else from here."""
        self.verdict = why
        self.known.set()
        ask_memory("abandon")
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(GRACE)
        ending.leave(why)


def ask_memory(what):
    """Call memory_`what` of ladder/ranks/shared_memory.cpp; returns 0 if this process has not loaded it."""
    operator = getattr(torch.ops.ladder, f"memory_{what}", None)
    return operator() if operator else 0


def read_seen(text):
    """Return the Seen that a rank has published, or None where a stranger has written something else."""
    try:
        seen = Seen(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return None
    return seen if all(isinstance(getattr(seen, each.name), each.type) for each in dataclasses.fields(seen)) else None


def may_be_rank(process, torchrun):
    """Return whether a process that a rank has named is a child of this torchrun, or has ended already."""
    has_proc = read_process(os.getpid())[0] is not None  # Linux has, unless a container lacks it
    return has_proc and process > 1 and read_process(process)[0] in (torchrun, None)


def kill(process, torchrun):
    """Kill a process if it is a child of this torchrun: any other one is none of this run's ranks."""
    if process > 1 and read_process(process)[0] == torchrun:
        os.kill(process, signal.SIGKILL)


def read_process(process):
    """Return (the id of a process's parent, None if it does not live, and the seconds that it has computed)."""
    try:
        with open(f"/proc/{process}/stat") as f:
            state, *fields = f.read().rpartition(")")[2].split()  # see proc(5)
    except OSError:
        return None, 0.0
    return None if state in "ZX" else int(fields[0]), sum(map(int, fields[10:12])) / os.sysconf("SC_CLK_TCK")
