"""ladder/ranks/watch.py: what a Watch makes of what it sees. tests/ranks/test_faults.py has real deaths and stalls."""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import signal
import subprocess
import time
import types

import pytest
import torch
import torch.distributed as dist
from cases import refused

from ladder.errors import Verdict
from ladder.progress import Progress, progress
from ladder.ranks import ending, store, watch


class Ended(Exception):
    pass


class Alone(watch.Watch):
    """A Watch whose ticks the test makes, and which ends nothing. All ranks are in the same decode step."""

    def __init__(self, tp_size=2, timeout=3):
        with pytest.MonkeyPatch.context() as m:
            m.setenv("LADDER_TIMEOUT", str(timeout))
            super().__init__(dist.HashStore(), 0, tp_size)
        self.now = [watch.Seen("decode step", 7, timed=True) for _ in range(tp_size)]
        self.stopped, self.silent = set(), [0] * tp_size  # stopped: those that give no sign of life

    def place(self, seen):
        """Say for rank 1 where it is."""
        self.store.set("place 1", json.dumps(dataclasses.asdict(seen)))

    def ticks_until_the_end(self, ticks=20, cpu=()):
        """(how many ticks it takes until the run ends, why), or None. cpu: the seconds of rank 1 at each tick."""
        cpu = iter(cpu)
        for i in range(1, ticks + 1):
            for rank, seen in enumerate(self.now):
                seen.ticks += rank not in self.stopped
            try:
                self._judge([dataclasses.replace(seen) for seen in self.now], {1: (True, next(cpu, 0.0))})
            except Ended as e:
                return i, str(*e.args)
        return None

    def _end(self, why):
        raise Ended(why)


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.setattr(progress, "__dict__", vars(Progress("decode step", 7, timed=True)))
    monkeypatch.setattr(ending, "at_end", [])


def test_a_rank_without_a_sign_of_life_ends_the_run():
    w = Alone(3)
    assert w.ticks_until_the_end(2) is None
    w.stopped, w.now[0].timed = {1, 2}, False  # in compilation, say
    line = "rank 1 and rank 2 of 3 hang in decode step 7: no sign of life for 3 s (LADDER_TIMEOUT)"
    w.processes = {1: -1}
    assert w.ticks_until_the_end() == (4, line)
    [kill] = ending.at_end  # the one of this node, which hears no other signal
    assert (kill.func, *kill.args) == (watch.kill, -1, w.torchrun)
    w = Alone(3)
    progress.at("load of", "norm.weight")
    w.stopped, w.now[2] = {2}, watch.Seen("load of", "layers.1.norm", ticks=1)  # work of its own
    assert w.ticks_until_the_end()[1].startswith("rank 2 of 3 hangs in load of layers.1.norm: no sign")
    w = Alone(timeout=0)
    w.stopped = {1}
    assert w.ticks_until_the_end() is None


@pytest.mark.parametrize("beats, words", [(5, "rank 1 of 3 hangs"), (0, "rank 0 and rank 1 and rank 2 of 3 hang")])
def test_ranks_that_make_no_progress_end_the_run_and_the_one_that_others_wait_for_is_named(beats, words):
    w = Alone(3)
    w.now[0].beats = w.now[2].beats = beats
    ticks, line = w.ticks_until_the_end()
    assert ticks in (4, 5) and line == f"{words} in decode step 7: no progress for 3 s (LADDER_TIMEOUT)"


def test_progress_an_untimed_phase_and_computing_keep_a_run_going():
    w = Alone()
    for sign in "beats", "busy", "beats":
        assert w.ticks_until_the_end(3) is None
        setattr(w.now[1], sign, 9 + getattr(w.now[1], sign))
    w = Alone()
    w.now[1].timed = False
    assert w.ticks_until_the_end() is None
    w = Alone()
    w.stopped = {1}  # its library lets no thread run
    assert w.ticks_until_the_end(cpu=itertools.count(1, 0.1)) is None
    assert w.ticks_until_the_end(cpu=itertools.repeat(3.0))
    w = Alone()
    for _ in range(9):  # on another node
        assert w.ticks_until_the_end(1) is None
        w.now[1].cpu += 0.1
    w.now[1].cpu += 0.01
    assert w.ticks_until_the_end()


def test_a_rank_that_compiles_anew_is_not_taken_to_be_further_than_the_others():
    with progress.during("compilation"):
        progress.at("prefill")
    assert (progress.beats, progress.busy) == (1, 1)


@pytest.fixture
def waiting():
    """A function that starts a child of this process, which waits for input."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(subprocess.Popen(["cat"], stdin=subprocess.PIPE))


def test_the_end_of_a_process_is_seen_and_said(monkeypatch, waiting):
    monkeypatch.setenv("GROUP_RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(os, "getppid", os.getpid)  # this process is torchrun, too
    with waiting() as child:
        w = Alone()
        peer = watch.Seen("prefill", process=child.pid, node="0")
        w.place(peer)
        w._tick()
        another = dataclasses.replace(peer, process=waiting().pid)  # of a stranger, later
        w.place(another)
        child.kill()
        while watch.read_process(child.pid)[0] is not None:
            time.sleep(0.01)
        with pytest.raises(Ended, match="rank 1 of 2 has died in decode step 7$"):
            w._tick()
        w.store.set("ended", "0 1 0")  # it had done all that it should
        w._tick()
        w.store.delete_key("ended")
        w.store.set("ended", "2 1 0")  # it has said why
        with pytest.raises(Ended, match="^2$"):
            w._tick()


def test_a_process_that_is_no_child_of_this_torchrun_is_neither_watched_nor_killed(monkeypatch, waiting):
    monkeypatch.setenv("GROUP_RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    w, stranger = Alone(timeout=0), waiting()  # a child of this process, and not of its parent
    for process in stranger.pid, 1, 0, -1, True:
        w.place(watch.Seen(ticks=1, process=process, node="0"))
        w._tick()
        assert 1 not in w.processes
    calls = []
    with monkeypatch.context() as m:
        m.setattr(os, "kill", lambda *call: calls.append(call))
        for process, torchrun in (stranger.pid, os.getppid()), (stranger.pid, None), (1, 0), (0, None), (-1, None):
            watch.kill(process, torchrun)
    watch.kill(stranger.pid, os.getpid())
    assert calls == [] and stranger.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize("text", [
    b"\xff", "", "soon", "5", "null", "[]", "[" * 100_000, '{"x": 1}', '{"beats": "9"}', '{"cpu": null}',
    '{"process": "1"}', '{"phase": 7}', "1 2", "-1 0 0", "2 a 0", "2.5 0 0", "9" * 5000 + " 0 0",
])  # fmt: skip
def test_what_a_stranger_writes_to_the_store_is_ignored(text, monkeypatch):
    w = Alone()
    w.place(watch.Seen("prefill", ticks=3))
    w._tick()
    for key in "place 1", "ended":
        w.store.set(key, text)
    w._tick()
    assert w.seen[1].phase == "prefill" and w.silent == [0, 1] and store.ended(w.store) is None
    connected = functools.cache(lambda: w.store)
    connected()
    monkeypatch.setattr(store, "torchrun_store", connected)
    assert store.leave_first(2, 1, None) == (2, True)  # and the others hear of it
    assert store.leave_first(0, 0, None)[0] in (0, 2) and store.ended(w.store) == 2


def test_what_happens_on_another_node_is_said_of_its_torchrun_and_by_the_connection(monkeypatch):
    w = Alone(3)
    w.torchrun = -1  # not this process's parent any more
    with pytest.raises(Ended, match="^the torchrun of rank 0 of 3 has died in decode step 7$"):
        w._tick()
    monkeypatch.setattr(watch, "GRACE", 0)
    error = RuntimeError("gloo: Connection closed by peer")
    assert w.explain(error) is error
    w.silent = [0, 1, 2]
    assert str(w.explain(error)) == "rank 2 of 3 is lost in decode step 7"
    assert w.explain(reason := RuntimeError("something broke")) is reason


def test_a_rank_that_does_not_start_and_a_store_that_does_not_answer_end_the_run(monkeypatch):
    w = Alone(timeout=2)
    w.silent = [-1, -1]  # IMPORTS
    for _ in range(3):
        w._tick()
    with pytest.raises(Ended, match=r"^rank 1 of 2 did not start within 62 s \(LADDER_TIMEOUT \+ 60\)$"):
        w._tick()
    monkeypatch.setattr(watch, "TICK", 0.01)
    with pytest.raises(Ended, match=r"torchrun's store has not answered for 2 s \(LADDER_TIMEOUT\), in decode step 7"):
        w._watch_store()


def test_a_rank_whose_main_thread_cannot_end_it_is_ended_by_its_watch(monkeypatch):
    w = Alone()
    calls = []
    monkeypatch.setattr(ending, "leave", calls.append)
    monkeypatch.setattr(watch, "GRACE", 0)
    monkeypatch.setattr(torch.ops, "ladder", types.SimpleNamespace(memory_abandon=lambda: calls.append("abandon")))
    monkeypatch.setattr(os, "kill", lambda process, number: calls.append((process == os.getpid(), number)))
    why = Verdict("rank 1 hangs")
    watch.Watch._end(w, why)
    assert calls == ["abandon", (True, signal.SIGUSR1), why] and w.known.is_set() and w.verdict is why


def test_the_timeout(monkeypatch):
    for text, seconds in ("2.5", 2.5), ("1", 2), ("0", 0), ("-1", 0), ("nan", 0):
        monkeypatch.setenv("LADDER_TIMEOUT", text)
        assert watch.timeout() == seconds
    monkeypatch.setenv("LADDER_TIMEOUT", "soon")
    refused("LADDER_TIMEOUT='soon' is no number", watch.timeout)
