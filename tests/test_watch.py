"""How a run starts and ends: what a Watch makes of what it sees, signals, exit codes, ranks that were started unlike.

tests/test_faults.py has real deaths and stalls.
"""

import argparse
import dataclasses
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import types

import pytest
import torch
import torch.distributed as dist
from helpers import HANGS, ROOT

from runtime import compiling, launch, ranks, watch
from runtime.errors import InputError


class Ended(Exception):
    pass


class Alone(ranks.Watch):
    """A Watch whose ticks the test makes, and which ends nothing. All ranks are in the same decode step."""

    def __init__(self, tp_size=2, timeout=3, processes=None):
        super().__init__(dist.HashStore(), 0, tp_size, processes or {}, timeout, None)
        self.now = [watch.Place("decode step", 7, timed=True) for _ in range(tp_size)]
        self.stopped = set()  # those that give no sign of life

    def ticks_until_the_end(self, ticks=20, cpu=()):
        """(how many ticks it takes until the run ends, why), or None. cpu: the seconds of rank 1 at each tick."""
        cpu = iter(cpu)
        for i in range(1, ticks + 1):
            for rank, place in enumerate(self.now):
                place.ticks += rank not in self.stopped
                self.store.set(f"place {rank}", json.dumps(dataclasses.asdict(place)))
            try:
                self._judge([dataclasses.replace(place) for place in self.now], {1: (True, next(cpu, 0.0))})
            except Ended as e:
                return i, str(*e.args)
        return None

    def _end(self, why):
        raise Ended(why)


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.setattr(watch, "here", watch.Place("decode step", 7, timed=True))


def test_a_rank_without_a_sign_of_life_ends_the_run():
    w = Alone(3)
    assert w.ticks_until_the_end(2) is None
    w.stopped, w.now[0].timed = {2}, False  # in compilation, say
    line = "rank 2 of 3 hangs in decode step 7: no sign of life for 3 s (LADDER_TIMEOUT)"
    assert w.ticks_until_the_end() == (4, line)
    w = Alone(3)
    w.stopped, w.now[2] = {2}, watch.Place("load of", "layers.1.norm")  # it is there, whatever this rank does
    assert w.ticks_until_the_end()[1].startswith("rank 2 of 3 hangs in load of layers.1.norm: no sign")
    w = Alone(timeout=0)
    w.stopped = {1}
    assert w.ticks_until_the_end() is None


@pytest.mark.parametrize("known", ["how far each came", "shared memory", "nothing"])
def test_ranks_that_make_no_progress_end_the_run_and_the_one_that_others_wait_for_is_named(known):
    w, words = Alone(3), {"nothing": "rank 0 and rank 1 and rank 2 of 3 hang"}.get(known, "rank 1 of 3 hangs")
    if known == "how far each came":
        w.now[0].beats = w.now[2].beats = 5
    if known == "shared memory":
        w.now[0].awaited = w.now[2].awaited = 1
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


def test_the_end_of_a_process_is_seen_and_said():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        w = Alone(processes={1: child.pid})
        for rank, phase in (0, "load of"), (1, "prefill"):
            w.store.set(f"place {rank}", json.dumps(dataclasses.asdict(watch.Place(phase))))
        w._tick()
        child.kill()
        while ranks.read_process(child.pid)[0]:
            time.sleep(0.01)
        with pytest.raises(Ended, match="rank 1 of 2 has died in prefill$"):
            w._tick()
        w.store.set("ended", "0 1")  # it had done all that it should
        w._tick()
        w.store.delete_key("ended")
        w.store.set("ended", "2 1")  # it has said why
        with pytest.raises(Ended, match="^2$"):
            w._tick()


def test_a_store_that_does_not_answer_ends_the_run(monkeypatch):
    w = Alone(timeout=2)
    monkeypatch.setattr(ranks, "TICK", 0.01)
    with pytest.raises(Ended, match=r"torchrun's store has not answered for 2 s \(LADDER_TIMEOUT\), in decode step 7"):
        w._watch_store()


def test_a_rank_whose_main_thread_cannot_end_it_is_ended_by_its_watch(monkeypatch):
    w, calls = Alone(), []
    w.leave = calls.append
    monkeypatch.setattr(ranks, "GRACE", 0)
    monkeypatch.setattr(watch, "monitors", [types.SimpleNamespace(abandon=lambda: calls.append("abandon"))])
    monkeypatch.setattr(ranks.os, "kill", lambda process, number: calls.append((process == os.getpid(), number)))
    why = watch.Verdict("rank 1 hangs")
    ranks.Watch._end(w, why)
    assert calls == ["abandon", (True, signal.SIGTERM), why] and w.known.is_set() and w.verdict is why


def test_places_in_words_and_blocks_that_hold_them():
    watch.at("load of", "norm.weight")
    assert str(watch.here) == "load of norm.weight" and watch.here.timed
    with watch.during("compilation"):
        watch.at("decode step", 1)
        assert str(watch.here) == "compilation" and not watch.here.timed and watch.here.beats == 3
    assert str(watch.here) == "load of norm.weight" and watch.here.timed
    watch.at("decode step", 0)
    assert str(watch.here) == "decode step 0" and watch.here.timed


def test_whatever_is_compiled_is_so_in_a_phase_that_may_take_any_time():
    """Dynamo compiles anew for other shapes, whenever these come."""
    places = []

    def backend(graph, inputs):
        places.append((str(watch.here), watch.here.timed))
        return graph

    for _ in range(2):
        compiling.prepare(torch.device("cpu"))
    function = torch.compile(lambda x: x + 1, dynamic=False, backend=backend)
    watch.at("prefill")
    for size in 3, 3, 4:
        function(torch.ones(size))
    assert places == [("compilation", False)] * 2
    assert str(watch.here) == "prefill" and watch.here.timed


# ---------------------------------------------------------------------------------------------------------------------
# Ends


@pytest.mark.parametrize("error, code, line", [
    (None, 0, ""),
    (SystemExit(3), 3, ""),
    (InputError("--x is \x1b[31mwrong\n"), 2, r"x.py: --x is \x1b[31mwrong\n" + "\n"),
    (InputError("a" * 600), 2, f"x.py: {'a' * 300} ... {'a' * 190}\n"),
    (watch.Verdict("rank 1 of 2 has died"), 1, "\nx.py: rank 1 of 2 has died\n"),
    (watch.Terminated("SIGTERM"), 143, "x.py: was stopped by SIGTERM in decode step 7\n"),
    (KeyboardInterrupt("step 3 is saved"), 130, "step 3 is saved\n"),
    (MemoryError(), 1, "x.py: ran out of memory (MemoryError: MemoryError) in decode step 7\n"),
    (ValueError("x\ny"), 1, "ValueError: x\ny\nx.py: failed (ValueError: x) in decode step 7\n"),
])  # fmt: skip
def test_the_exit_code_and_the_line_of_each_end(error, code, line, monkeypatch, capsys):
    undone = []
    monkeypatch.setattr(watch, "at_end", [lambda: 1 / 0, lambda: undone.append(1)])  # the first fails
    monkeypatch.setattr(sys, "argv", ["/some/where/x.py"])
    with pytest.raises(SystemExit) as end:
        launch._leave(error)
    assert (end.value.code, capsys.readouterr().err, undone) == (code, line, [1])


def test_one_rank_says_why_and_all_leave_with_its_code(monkeypatch, capsys, tmp_path):
    store = dist.HashStore()
    kept = ranks.functools.cache(lambda: store)
    kept()
    monkeypatch.setattr(ranks, "store", kept)
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(sys, "argv", ["x.py"])

    def leave(rank, error, node):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "3")
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"{rank}"))
        monkeypatch.delenv("GROUP_RANK", raising=False) if node is None else monkeypatch.setenv("GROUP_RANK", node)
        with pytest.raises(SystemExit) as end:
            launch._leave(error)
        assert capsys.readouterr().err.count("wrong") == (rank == 1)
        return end.value.code

    wrong = InputError("wrong")
    # torchrun lists each rank that fails; on the node of the first one, that is enough
    assert [leave(1, wrong, "0"), leave(0, wrong, "0"), leave(2, wrong, "1")] == [2, 0, 2]
    told = json.loads((tmp_path / "1").read_text())["message"]
    assert told["message"] == "x.py: wrong" and int(told["extraInfo"]["timestamp"]) < int(time.time())
    store.delete_key("ended")
    assert [leave(1, wrong, "0"), leave(0, wrong, None), leave(2, watch.Terminated("SIGTERM"), None)] == [2] * 3
    with pytest.raises(SystemExit) as end:
        launch.World(0, 3, torch.device("cpu")).gather(1)  # rather than wait for ranks that have left
    assert end.value.code == 2
    store.delete_key("ended")
    with pytest.raises(watch.Verdict, match=r"^rank 1 of 3 has not started within 0.1 s \(LADDER_TIMEOUT \+ 60\)$"):
        launch.World(0, 3, torch.device("cpu")).gather(1, patience=0.1)


def test_what_stands_in_the_store_is_read_and_never_run(monkeypatch, tmp_path):
    class Stranger:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    store = dist.HashStore()
    monkeypatch.setattr(ranks, "store", lambda: store)
    monkeypatch.setattr(ranks, "_gathers", ranks.collections.Counter())
    store.set("gathered 2 1 1", pickle.dumps(Stranger()))
    with pytest.raises(ValueError):
        launch.World(0, 2, torch.device("cpu")).gather((1, "a"))
    assert not (tmp_path / "ran").exists()
    store.set("gathered 2 2 1", '[1, "b", null, 0.1, {"c": []}]')
    values = launch.World(0, 2, torch.device("cpu")).gather((1, "a"))
    assert values == [[1, "a"], [1, "b", None, 0.1, {"c": []}]]


def run_source(source, stdout=subprocess.PIPE):
    words = [sys.executable, "-c", f"import os, signal, time; from runtime import launch\n{source}"]
    pipes = {"stdout": stdout, "stderr": subprocess.PIPE}
    return subprocess.run(words, cwd=ROOT, text=True, timeout=HANGS, **pipes)


def test_a_signal_ends_a_script_by_way_of_what_cleans_up_and_a_library_s_workers_at_once():
    """The signal is named, even if a library turns its exception into one of its own, as safetensors does."""
    source = """
number = signal.SIGHUP
signal.signal(number, signal.SIG_DFL)  # nohup ignores it
def main():
    child = os.fork()
    if not child:
        time.sleep(100)
    time.sleep(0.1)
    os.kill(child, number)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -number
    try:
        os.kill(os.getpid(), number)
        time.sleep(100)
    except BaseException:
        raise ValueError("the library's") from None
    finally:
        os.kill(os.getpid(), signal.SIGTERM)  # a launcher sends one after another
        print("cleaned up")
launch.run(main)
"""
    done = run_source(source)
    assert (done.returncode, done.stdout, done.stderr) == (143, "cleaned up\n", "-c: was stopped by SIGHUP\n")


def test_output_that_cannot_be_written_is_one_line_and_none_where_the_reader_has_gone():
    reader, pipe = os.pipe()
    os.close(reader)
    for file, line in (os.open("/dev/full", os.O_WRONLY), "No space left on device"), (pipe, ""):
        done = run_source("launch.run(lambda: print('x' * 100))", stdout=file)
        os.close(file)
        assert done.returncode == 1 and done.stderr.count("\n") == bool(line) and line in done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that were not started alike


def agree(*starts):
    world = launch.World(0, len(starts), torch.device("cpu"))
    world.gather = lambda read: [{name: str(value) for name, value in start.items()} for start in starts]
    world.agree(starts[0])


def test_each_difference_is_named():
    agree({"the code": "a", "--seed": 1}, {"the code": "a", "--seed": 1})
    first = {"the script": "generate.py", "--seed": 1, "--compile": True}
    with pytest.raises(InputError) as error:
        agree(first, first, {"the script": "generate.py", "--seed": 2, "--prompt": ["x" * 100]})
    assert "rank 2 with " in str(error.value) and "rank 1" not in str(error.value)
    for words in "--seed 2", "--compile not given", f"--prompt ['{'x' * 58}", "--seed 1", "--compile True":
        assert words in str(error.value)


def test_what_ranks_are_compared_by(monkeypatch):
    flags = vars(argparse.Namespace(checkpoint="here", seed=0, top_k=3, wiring=None, compile=False, json="x"))
    start = ranks._start(flags, torch.device("cpu"))
    assert start.keys() == {"the script", "the code", "torch", "device", "--seed", "--top-k"}
    assert start["--seed"] == 0 and start["torch"] == torch.__version__
    monkeypatch.setenv("LADDER_TIMEOUT", "2.5")
    assert ranks.timeout() == 2.5
    for text in "-1", "nan", "soon":
        monkeypatch.setenv("LADDER_TIMEOUT", text)
        with pytest.raises(InputError, match=f"LADDER_TIMEOUT='{text}'"):
            ranks.timeout()
