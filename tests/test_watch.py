"""The ranks watch one another: what a Watch makes of what it sees. tests/test_faults.py has real deaths and stalls."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from runtime import launch, watch
from runtime.launch import InputError


class Ended(Exception):
    pass


class Alone(watch.Watch):
    """A Watch whose ticks the test makes, and which ends nothing. The others are what the test says."""

    def __init__(self, monkeypatch, tp_size=2, timeout=3):
        monkeypatch.setattr(watch, "here", watch.Place("decode step", 7, timed=True))
        monkeypatch.setattr(watch.shared_memory, "progress", lambda: (0, None))
        monkeypatch.setattr(watch.signal, "set_wakeup_fd", lambda *_, **__: None)
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        self.shared = dist.HashStore()
        super().__init__(self.shared, 0, tp_size, None, timeout)
        self.others = {r: watch.Place("decode step", 7, timed=True) for r in range(1, tp_size)}
        self.stopped = set()  # those that give no sign of life
        for r in self.others:
            self.shared.set(f"process {r}", json.dumps([os.getpid(), "another machine"]))

    def ticks_until_the_end(self, ticks=20):
        """(how many ticks it takes until the run ends, the line, those that are killed), or None."""
        for i in range(1, ticks + 1):
            for r, place in self.others.items():
                place.ticks += r not in self.stopped
                self.shared.set(f"place {r}", json.dumps(dataclasses.asdict(place)))
            try:
                self._tick()
            except Ended as e:
                return i, *e.args
        return None

    def _end(self, line, hung=()):
        raise Ended(line, set(hung))


def test_a_rank_without_a_sign_of_life_ends_the_run(monkeypatch):
    w = Alone(monkeypatch, 3)
    assert w.ticks_until_the_end(2) is None
    w.stopped = {2}
    watch.here.timed = False  # in compilation, say
    found = w.ticks_until_the_end()
    assert found == (4, "rank 2 of 3 hangs in decode step 7: no sign of life for 3 s (--timeout)", {2})
    w = Alone(monkeypatch, 3, timeout=0)
    w.stopped = {2}
    assert w.ticks_until_the_end() is None
    w = Alone(monkeypatch, 3)
    w.stopped, w.others[2].phase, w.others[2].timed = {2}, "end", False
    assert w.ticks_until_the_end() is None


def test_ranks_that_come_no_further_end_the_run_and_the_one_behind_is_named(monkeypatch):
    w = Alone(monkeypatch, 3)
    watch.here.beats = w.others[2].beats = 5
    w.others[1].beats, w.others[1].step = 4, "6"
    ticks, line, hung = w.ticks_until_the_end()
    assert (ticks, hung) == (5, set())  # the first sees where they are
    assert line == "rank 1 of 3 hangs in decode step 6: no rank has come further for 4 s (--timeout 3)"


def test_shared_memory_knows_who_is_waited_for(monkeypatch):
    w = Alone(monkeypatch, 3)
    w.others[1].awaited = 2
    assert "rank 2 of 3 hangs in decode step 7" in w.ticks_until_the_end()[1]
    places = {r: watch.Place(beats=r, awaited=(r + 1) % 3) for r in range(3)}
    assert watch.late(places) == [0, 1]  # each waits for the next: no telling but by how far they have come
    assert watch.late({r: watch.Place(beats=4, busy=r) for r in range(3)}) == []


def test_none_is_behind(monkeypatch):
    assert "all 2 ranks hang in decode step 7" in Alone(monkeypatch).ticks_until_the_end()[1]


@pytest.mark.parametrize("who", [0, 1])
def test_a_phase_that_may_take_any_time_does(monkeypatch, who):
    w = Alone(monkeypatch)
    (watch.here, w.others[1])[who].timed = False
    assert w.ticks_until_the_end() is None


def test_a_rank_that_comes_further_keeps_the_run_going(monkeypatch):
    w = Alone(monkeypatch)
    for _ in range(4):
        assert w.ticks_until_the_end(3) is None
        w.others[1].beats += 1


def test_the_timeout_is_beyond_what_a_step_of_the_phase_took(monkeypatch):
    w = Alone(monkeypatch)
    assert w.ticks_until_the_end(3) is None  # two ticks after the first
    watch.at("decode step", 8)
    assert w.ticks_until_the_end()[0] == 1 + 3 + 2 + 1
    w = Alone(monkeypatch)
    assert w.ticks_until_the_end(3) is None
    watch.at("prefill")
    assert w.ticks_until_the_end()[0] == 1 + 3 + 1  # another phase starts anew


def test_what_took_long_before_it_was_counted_is_no_hang_later(monkeypatch):
    """A first step, of which nobody knows how long it may take, takes longer than the timeout; and so do the others."""
    w = Alone(monkeypatch)
    watch.here.timed = w.others[1].timed = False
    assert w.ticks_until_the_end(8) is None
    watch.here.timed = w.others[1].timed = True
    for _ in range(3):
        watch.beat()
        assert w.ticks_until_the_end(8) is None
    assert w.ticks_until_the_end(20)[0] > 3


def test_who_computes_does_not_hang(monkeypatch):
    w = Alone(monkeypatch, 3)
    seconds = iter(range(1000))
    monkeypatch.setattr(watch.time, "clock_gettime", lambda clock: next(seconds))
    assert w.ticks_until_the_end() is None, "this rank's main thread does"
    w = Alone(monkeypatch)
    w.stopped = {1}
    watch.here.timed = False
    assert w.ticks_until_the_end(1) is None
    w.peers[1].descriptor, taken = -1, iter(range(1000))
    monkeypatch.setattr(watch, "cpu_seconds", lambda process: next(taken))
    assert w.ticks_until_the_end() is None, "the other one does, in what lets no other thread run"
    monkeypatch.setattr(watch, "cpu_seconds", lambda process: 5.0)
    assert w.ticks_until_the_end() is not None


def test_cpu_seconds_of_a_process():
    before, start = watch.cpu_seconds(os.getpid()), time.process_time()
    while time.process_time() < start + 0.3:
        pass
    assert 0.2 < watch.cpu_seconds(os.getpid()) - before < 1 and watch.cpu_seconds(2**22 + 1) == 0


def test_before_all_have_met_nobody_is_judged(monkeypatch):
    w = Alone(monkeypatch, 3)
    late = w.others.pop(2)
    w.stopped = {1}
    assert w.ticks_until_the_end() is None  # ticks are shorter then
    w.others[2] = late
    assert w.ticks_until_the_end()[0] >= 3


def test_a_rank_that_died_before_it_was_met_is_named(monkeypatch):
    w, child = Alone(monkeypatch), subprocess.Popen(["true"])
    child.wait()
    w.shared.set("process 1", json.dumps([child.pid, watch._machine()]))
    assert w.ticks_until_the_end() == (1, "rank 1 of 2 has died in decode step 7", set())


def test_a_timeout_that_is_too_short(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="--timeout is 0.5 but must be 0 or at least 2 s"):
        launch.join("cpu", {"timeout": 0.5})


def test_what_another_rank_says_ends_this_one_without_a_line(monkeypatch):
    w = Alone(monkeypatch)
    assert w.ticks_until_the_end(1) is None
    w.shared.set("stopped", "")
    assert w.ticks_until_the_end(1) == (1, None, set())


def test_places_in_words_and_blocks_that_hold_them(monkeypatch):
    monkeypatch.setattr(watch, "here", watch.Place())
    watch.at("load of", "norm.weight")
    assert str(watch.here) == "load of norm.weight" and watch.here.timed
    with watch.during("compilation"):
        watch.at("decode step", 1)
        assert str(watch.here) == "compilation" and not watch.here.timed and watch.here.beats == 3
    watch.at("decode step", 0)
    assert str(watch.here) == "decode step 0" and watch.here.timed


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="how a process ended can be read on Linux only")
def test_how_a_process_ended():
    def found(code):
        child = subprocess.Popen([sys.executable, "-c", f"import os\n{code}"])
        descriptor = os.pidfd_open(child.pid)
        deadline = time.monotonic() + 60
        while not watch.select.select([descriptor], [], [], 1)[0]:
            assert time.monotonic() < deadline
        os.close(descriptor)
        words = watch.how_it_ended(child.pid)
        child.wait()
        return words, watch.how_it_ended(child.pid)

    assert found("os._exit(3)") == ("has left (exit code 3)", "has died")
    assert found("os.kill(os.getpid(), 15)") == ("was killed (signal 15)", "has died")
    assert found("os.kill(os.getpid(), 9)")[0].startswith("was killed (signal 9, ")


def test_signals_end_a_script_by_way_of_what_cleans_up():
    source = """
import os, signal, sys; from runtime import launch
for number in signal.SIGTERM, signal.SIGHUP:  # which under nohup is ignored
    signal.signal(number, signal.SIG_DFL)
def main():
    try:
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
        signal.pause()
    finally:
        print("cleaned up")
launch.run(main)
"""
    for name in "SIGTERM", "SIGHUP":
        done = subprocess.run([sys.executable, "-c", source, name], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (143, "cleaned up\n")
        assert done.stderr == f"-c: stopped by {name}\n"


def test_a_script_without_standard_streams_and_one_whose_output_is_full():
    source = "from runtime import launch\ndef main():\n    print('x' * 100, flush={})\nlaunch.run(main)\n"
    shell = "sh", "-c", '"$1" -c "$0" '
    words = [*shell[:2], shell[2] + "<&- >&- 2>&-", source.format(True), sys.executable]
    done = subprocess.run(words, timeout=60)
    assert done.returncode == 0
    for flush in True, False:
        words = [*shell[:2], shell[2] + "> /dev/full", source.format(flush), sys.executable]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (1, "-c: the output cannot be written: No space left on device\n")


def test_one_signal_behind_another_is_not_heard(monkeypatch):
    """A terminal that closes sends one to all, and then torchrun another."""
    with pytest.raises(watch.Terminated, match="SIGHUP"):
        watch.terminate(signal.SIGHUP, None)
    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
        assert signal.getsignal(number) == signal.SIG_IGN
        os.kill(os.getpid(), number)


def test_a_signal_in_a_destructor_comes_again():
    source = """
import os, signal, sys, time; from runtime import launch
signal.signal(signal.SIGTERM, signal.SIG_DFL)
class Slow:
    def __del__(self):
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
        time.sleep(0)
def main():
    Slow()
    time.sleep(30)
launch.run(main)
"""
    for name, code in ("SIGTERM", 143), ("SIGINT", 130):
        done = subprocess.run([sys.executable, "-c", source, name], capture_output=True, text=True, timeout=60)
        assert done.returncode == code and done.stderr.count("\n") == 1, done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that were not started alike


def test_each_difference_is_named():
    launch.compare([{"the code": "a", "--seed": 1}] * 3)
    first = {"the script": "generate.py", "--seed": 1, "--compile": True, "--top-p": 1.0}
    starts = [first, first, {"the script": "generate.py", "--seed": 2, "--prompt": ["x" * 100], "--top-p": 1.0}]
    with pytest.raises(InputError) as e:
        launch.compare(starts)
    x = str(["x" * 100])[:60]
    assert str(e.value) == (
        "the ranks were not started alike: "
        f"rank 2 with --seed 2 and no --compile and --prompt {x}, rank 0 with --seed 1 and --compile and no --prompt"
    )
    with pytest.raises(InputError, match="alike: rank 1 with --seed 1, rank 2 with --seed 2, rank 0 with --seed 0$"):
        launch.compare([{"--seed": r} for r in range(3)])
    with pytest.raises(InputError, match="rank 1 with the script eval.py, rank 0 with the script generate.py$"):
        launch.compare([first, {"the script": "eval.py", "--seed": 3}])


def test_what_ranks_are_compared_by():
    import argparse

    import torch

    flags = vars(argparse.Namespace(checkpoint="here", seed=0, ladder_layers="3", compile=False, json="x", ladder=True))
    start = launch._start(flags, torch.device("cpu"))
    assert start.keys() == {"the script", "the code", "torch", "device", "--seed", "--layers", "--ladder"}
    assert start["--seed"] == 0 and start["--ladder"] is True and start["torch"] == torch.__version__


def test_the_contents_of_a_checkpoint(tiny, tmp_path):
    import shutil

    from formats.checkpoint import digest

    copy = tmp_path / "copy"
    shutil.copytree(tiny, copy)
    assert digest(copy) == digest(tiny)
    path = copy / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    assert digest(copy) != digest(tiny)


def test_the_numbers_of_the_ranks_are_compared_before_they_wait(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(launch, "DEADLINE", 1)
    store.set("ready", "1")
    launch._wait_for_all(store, 0, 2)
    with pytest.raises(InputError, match="rank 1 has WORLD_SIZE 3, another 2"):
        launch._wait_for_all(store, 1, 3)
    for rank in 0, 2:  # taken; too large
        with pytest.raises(InputError, match=f"RANK {rank} of WORLD_SIZE 2: give each process one of 0 to 1"):
            launch._wait_for_all(store, rank, 2)


def test_a_signal_that_the_script_goes_on_after_leaves_the_collectives_alone(monkeypatch):
    w, abandoned = Alone(monkeypatch), []
    monkeypatch.setattr(watch.shared_memory, "abandon", lambda: abandoned.append(True))
    before = signal.signal(signal.SIGINT, lambda *_: None)  # as adapt.py, which saves first
    try:
        w._hear(bytes([signal.SIGINT]))
        assert not abandoned
        signal.signal(signal.SIGINT, signal.default_int_handler)
        w._hear(bytes([signal.SIGINT]))
        assert abandoned
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_rank_whose_main_thread_cannot_end_it_is_ended_from_here(monkeypatch):
    """And one that hears nothing is killed."""
    w, seen = Alone(monkeypatch), []
    monkeypatch.setattr(watch, "GRACE", 0)
    monkeypatch.setattr(watch.shared_memory, "abandon", lambda: None)
    w.stop = lambda store, line: seen.append(line)
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as hung:
        w.peers[1].descriptor = os.pidfd_open(hung.pid)
        hung.send_signal(signal.SIGSTOP)
        monkeypatch.setattr(watch.os, "kill", lambda process, number: seen.append((process == os.getpid(), number)))
        watch.Watch._end(w, "rank 1 hangs", [1])
        monkeypatch.undo()
        with contextlib.suppress(subprocess.TimeoutExpired):
            hung.wait(10)
        code = hung.returncode
        hung.kill()
    assert code == -signal.SIGKILL
    assert seen == [(True, signal.SIGTERM), "rank 1 hangs"] and w.why() == (True, "rank 1 hangs")
    second = Alone(monkeypatch)
    monkeypatch.setattr(watch, "GRACE", 0)
    monkeypatch.setattr(watch.shared_memory, "abandon", lambda: None)
    monkeypatch.setattr(watch.os, "kill", lambda *_: None)
    second.store, second.stop = w.store, w.stop
    watch.Watch._end(second, "another view of it")
    assert seen[-1] == "rank 1 hangs", "all ranks say what the first has found"
