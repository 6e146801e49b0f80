"""How a run starts and ends: ranks that were started unlike, signals, exit codes, the line that says why."""

import argparse
import collections
import functools
import os
import pickle
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from cases import refused
from file_edits import read_json
from helpers import ROOT
from running import HANGS, command

from ladder.command_line import flags
from ladder.errors import InputError, StoreLost, Verdict
from ladder.kernels import compiling
from ladder.progress import Progress, progress
from ladder.ranks import ending, meeting, store
from ladder.ranks.ending import Terminated
from ladder.ranks.meeting import JoinedWorld
from ladder.ranks.world import choose_device


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.setattr(progress, "__dict__", vars(Progress("decode step", 7, timed=True)))


def test_places_in_words_and_blocks_that_hold_them():
    progress.at("load of", "norm.weight")
    assert str(progress) == "load of norm.weight" and progress.timed
    with progress.during("compilation"):
        progress.at("decode step", 1)
        assert str(progress) == "compilation" and not progress.timed and progress.beats == 2
    assert str(progress) == "load of norm.weight" and progress.timed
    progress.at("decode step", 0)
    assert str(progress) == "decode step 0"


def test_whatever_is_compiled_is_so_in_a_phase_that_may_take_any_time():
    """Dynamo compiles anew for other shapes, whenever these come."""
    places = []

    def backend(graph, inputs):
        places.append((str(progress), progress.timed))
        return graph

    for _ in range(2):
        compiling.prepare(torch.device("cpu"))
    function = torch.compile(lambda x: x + 1, dynamic=False, backend=backend)
    progress.at("prefill")
    for size in 3, 3, 4:
        function(torch.ones(size))
    assert places == [("compilation", False)] * 2
    assert str(progress) == "prefill" and progress.timed


# Ends


@pytest.mark.parametrize("error, code, line", [
    (None, 0, ""),
    (SystemExit(3), 3, ""),
    (InputError("--x is \x1b[31mwrong\n"), 2, r"x.py: --x is \x1b[31mwrong\n" + "\n"),
    (InputError("a" * 600), 2, f"x.py: {'a' * 300} ... {'a' * 190}\n"),
    (Verdict("rank 1 of 2 has died"), 1, "\nx.py: rank 1 of 2 has died\n"),
    (Terminated("SIGTERM"), 143, "x.py: was stopped by SIGTERM in decode step 7\n"),
    (KeyboardInterrupt("step 3 is saved"), 130, "step 3 is saved\n"),
    (MemoryError(), 1, "x.py: ran out of memory (MemoryError: MemoryError) in decode step 7\n"),
    (RuntimeError("Cannot allocate memory (os error 12)"), 1,  # safetensors', of mmap
     "x.py: ran out of memory (RuntimeError: Cannot allocate memory (os error 12)) in decode step 7\n"),
    (ValueError("x\ny"), 1, "ValueError: x\ny\nx.py: failed (ValueError: x) in decode step 7\n"),
])  # fmt: skip
def test_the_exit_code_and_the_line_of_each_end(error, code, line, monkeypatch, capsys):
    undone = []
    monkeypatch.setattr(ending, "at_end", [lambda: 1 / 0, lambda: undone.append(1)])  # the first fails
    monkeypatch.setattr(sys, "argv", ["/some/where/x.py"])
    with pytest.raises(SystemExit) as end:
        ending.leave(error)
    assert (end.value.code, capsys.readouterr().err, undone) == (code, line, [1])


def test_one_rank_says_why_and_all_leave_with_its_code(monkeypatch, capsys, tmp_path):
    shared = dist.HashStore()
    connected = functools.cache(lambda: shared)
    connected()
    monkeypatch.setattr(store, "torchrun_store", connected)
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(sys, "argv", ["x.py"])

    def leave(rank, error, node):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "3")
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"{rank}"))
        monkeypatch.delenv("GROUP_RANK", raising=False) if node is None else monkeypatch.setenv("GROUP_RANK", node)
        with pytest.raises(SystemExit) as end:
            ending.leave(error)
        assert capsys.readouterr().err.count("wrong") == (rank == 1)
        return end.value.code

    wrong = InputError("wrong")
    # torchrun lists each rank that fails; on the node of the first one, that is enough
    assert [leave(1, wrong, "0"), leave(0, wrong, "0"), leave(2, wrong, "1")] == [2, 0, 2]
    told = read_json(tmp_path / "1")["message"]
    assert told["message"] == "x.py: wrong" and int(told["extraInfo"]["timestamp"]) < int(time.time())
    shared.delete_key("ended")
    assert [leave(1, wrong, "0"), leave(0, wrong, None), leave(2, Terminated("SIGTERM"), None)] == [2] * 3
    with pytest.raises(SystemExit) as end:
        JoinedWorld(0, 3, torch.device("cpu")).gather(1)  # rather than wait for ranks that have left
    assert end.value.code == 2


def test_what_stands_in_the_store_is_read_and_never_run(monkeypatch, tmp_path):
    class Stranger:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    shared = dist.HashStore()
    monkeypatch.setattr(store, "torchrun_store", lambda: shared)
    monkeypatch.setattr(store, "_gathers", collections.Counter())
    world = JoinedWorld(0, 2, torch.device("cpu"))
    for n, text in enumerate([pickle.dumps(Stranger()), "", b"\xff", "5", '{"a": 1}', "[" * 100_000], start=1):
        shared.set(f"gathered 2 {n} 1", text)
        refused(f"^another program has written 'gathered 2 {n} 1' to this run's store", world.gather, (1, "a"))
    assert not (tmp_path / "ran").exists()
    for n, text in enumerate(["null", '{"a": [1]}', '{"b": null}'], start=7):
        shared.set(f"gathered 2 {n} 1", text)
        refused("not started alike", world.agree, {"a": 1})
    shared.set("gathered 2 10 1", '[1, "b", null, 0.1, {"c": []}]')
    assert world.gather((1, "a")) == [[1, "a"], [1, "b", None, 0.1, {"c": []}]]


# Attempts and other runs, which may share a store


def in_threads(calls):
    """What each of the calls returns or raises, all at the same time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
    return [future.exception() or future.result() for future in futures]


def own_keys(shared, rank, tp_size=2, sleep=0):
    time.sleep(sleep)
    return store.own_keys(shared, rank, tp_size)


def test_an_attempt_of_torchrun_does_not_see_what_an_earlier_one_has_left(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    shared = dist.HashStore()
    earlier = in_threads([functools.partial(own_keys, shared, rank, 3) for rank in range(3)])
    earlier[0].set("ended", "1 1 0")
    assert all(store.ended(each) == 1 for each in earlier)
    name = "attempt of none"
    shared.set("4567 2 answer", "late")
    # of the second one rank 1 died before it came, too; of the third rank 0 has said so
    for before in shared.get(name), b"0123 2", b"4567 2":
        shared.set(name, before)
        # rank 1 comes first, and finds that attempt
        calls = [functools.partial(own_keys, shared, 0, sleep=0.1), functools.partial(own_keys, shared, 1)]
        zero, one = in_threads(calls)
        zero.set("a", "b")
        assert one.get("a") == b"b" and store.ended(one) is None and not earlier[1].check(["a"])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "other")  # torchrun's own stores may be shared
    other, _ = in_threads([functools.partial(own_keys, shared, rank) for rank in range(2)])
    assert not other.check(["a"]) and zero.check(["a"])


@pytest.mark.parametrize("rank, tp_size", [(1, 2), (1, 3), (2, 3)])
def test_a_rank_that_finds_another_run_leaves_and_does_not_touch_it(rank, tp_size, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "here")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    shared = dist.HashStore()
    first, _ = in_threads([functools.partial(own_keys, shared, rank) for rank in range(2)])
    words = f"^rank {rank} of {tp_size} found another run at MASTER_ADDR=here MASTER_PORT=29500: give each run its own"
    with pytest.raises(InputError, match=words) as error:
        own_keys(shared, rank, tp_size)
    store.torchrun_store.cache_clear()
    assert store.leave_first(2, rank, error.value) == (2, True) and store.ended(first) is None


def test_a_port_at_which_nobody_answers_ends_the_run(monkeypatch):
    """torch's own client of a store waits for ever if what listens there says nothing."""
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **more: time.sleep(20))
    monkeypatch.setattr(store, "IMPORTS", -1.9)
    variables = {"MASTER_ADDR": "here", "MASTER_PORT": "1", "RANK": "1", "WORLD_SIZE": "2", "LADDER_TIMEOUT": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    store.torchrun_store.cache_clear()
    refused("no store to meet at: MASTER_ADDR=here MASTER_PORT=1 does not answer$", store.torchrun_store)


def test_a_store_that_goes_before_all_have_come_is_no_traceback(monkeypatch):
    def go(*_):
        raise dist.DistNetworkError("Connection was likely closed")

    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(store, "own_keys", go)
    store.torchrun_store.cache_clear()
    with pytest.raises(StoreLost, match="^the store at MASTER_ADDR=127.0.0.1 MASTER_PORT=0 has gone before all ranks"):
        store.torchrun_store()


@pytest.mark.parametrize("torchrun", [None, "none"])
def test_a_rank_that_does_not_start_is_named_by_one_that_has(torchrun, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", torchrun)
    monkeypatch.setenv("LADDER_TIMEOUT", "2")
    monkeypatch.setattr(store, "IMPORTS", -1.9)
    limit = r"did not start within 0\.1 s \(LADDER_TIMEOUT \+ -1\.9\)$"
    errors = in_threads([functools.partial(own_keys, dist.HashStore(), rank, 3) for rank in (1, 2)])
    assert re.fullmatch(f"rank 0 of 3 {limit}", str(errors[0])) and errors[1].code == 1
    shared = dist.HashStore()
    errors = in_threads([functools.partial(own_keys, shared, rank, 4) for rank in (0, 2)])
    assert re.fullmatch(f"rank 1 and rank 3 of 4 {limit}", str(errors[0])) and errors[1].code == 1


@pytest.mark.slow
def test_torchrun_starts_again_what_has_died(tmp_path):
    source = """
import os, signal
from complete import complete, load
from ladder.ranks import launch
def main():
    model, tokenizer = load("demo", "cpu")
    if (os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]) == ("0", "1"):
        os.kill(os.getpid(), signal.SIGKILL)
    print(*complete(model, tokenizer, ["Once"], 5, temperature=0), flush=True)
launch.run(main)
"""
    (tmp_path / "user.py").write_text(source)
    words = command(tmp_path / "user.py", ranks=2)
    words[3:3] = ["--max-restarts=1"]
    done = subprocess.run(
        words, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, capture_output=True, timeout=HANGS
    )
    assert done.returncode == 0 and done.stdout.count(" upon a time") == 2, done.stderr


def run_source(source, stdout=subprocess.PIPE, closed="", **environment):
    """closed: redirections of a shell, such as >&-."""
    words = [sys.executable, "-c", f"import os, signal, sys, time; from ladder.ranks import launch\n{source}"]
    words = ["sh", "-c", f'exec "$@" {closed}', "sh", *words]
    env = {name: value for name, value in {**os.environ, **environment}.items() if value is not None}
    return subprocess.run(words, cwd=ROOT, text=True, timeout=HANGS, stdout=stdout, stderr=subprocess.PIPE, env=env)


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


@pytest.mark.parametrize("swallows", [
    "    thing = weakref.ref(Thing, end)\n    del Thing\n    gc.collect()", "    Thing.__del__ = end\n    Thing()",
    "    with contextlib.suppress(BaseException):\n        end()",
])  # fmt: skip
def test_a_signal_is_not_lost_where_its_exception_is_swallowed(swallows):
    """And the reminder does not disturb what cleans up."""
    source = """
import contextlib, gc, weakref
from ladder.ranks import ending
ending.REMINDER = 0.2
def end(*_):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)
def main():
    class Thing: pass
SWALLOWS
    try:
        time.sleep(20)
        print("not ended")
    finally:
        time.sleep(0.5)
        print("cleaned up")
launch.run(main)
"""
    done = run_source(source.replace("SWALLOWS", swallows))
    assert (done.returncode, done.stdout) == (143, "cleaned up\n"), done.stderr
    assert done.stderr.endswith("-c: was stopped by SIGTERM\n")


@pytest.mark.parametrize("variables, words", [
    ({"RANK": ""}, "RANK=''"), ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
    ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1'"), ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 and WORLD_SIZE=2"),
    ({"LOCAL_RANK": "x"}, "LOCAL_RANK='x'"), ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_RANK=0 and LOCAL_WORLD_SIZE=0 of"),
    ({"WORLD_SIZE": "1", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=2 and LOCAL_WORLD_SIZE=2 of 1"),
    ({"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=0 and LOCAL_WORLD_SIZE=2 of 1 ranks: local ranks are"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, ".*MASTER_PORT expected, but not set"),
])  # fmt: skip
def test_what_a_launcher_sets_wrongly_is_named(variables, words):
    unset = dict.fromkeys(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"))
    done = run_source("launch.run(lambda: launch.join('cpu'))", **unset | variables)
    assert done.returncode == 2 and re.match(f"-c: {words}", done.stderr) and done.stderr.count("\n") == 1


@pytest.mark.parametrize("more", [{}, {"LOCAL_WORLD_SIZE": "2"}])
def test_a_model_of_a_rank_alone_is_no_misfit_of_the_launchers_variables(more, monkeypatch):
    """complete() and a draft choose a device so, in a run of several ranks."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", False)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", **more}.items():
        monkeypatch.setenv(name, value)
    assert str(choose_device("cpu")) == "cpu"


def test_a_process_alone_loads_nothing_of_what_several_ranks_take():
    several = "{f'ladder.ranks.{name}' for name in ('meeting', 'watch', 'collectives', 'gloo', 'shared_memory')}"
    done = run_source(f"launch.run(lambda: print(launch.join('cpu').alone, sys.modules.keys() & {several}))")
    assert (done.returncode, done.stdout, done.stderr) == (0, "True set()\n", "")


def test_a_reader_of_the_output_that_has_gone_is_no_error_to_speak_of():
    reader, pipe = os.pipe()
    os.close(reader)
    done = run_source("launch.run(lambda: print('x' * 100))", stdout=pipe)
    os.close(pipe)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("closed, out, err", [
    (">&-", "", "told\n"), ("2>&-", "shown\nby a child\n", ""), ("<&- >&- 2>&-", "", ""),
])  # fmt: skip
def test_a_script_runs_with_streams_that_are_closed(closed, out, err):
    """Children have them too, and no file takes the descriptors 0 to 2, to which libraries write."""
    source = """
def main():
    print("shown", flush=True)
    print("told", file=sys.stderr)
    assert os.system("echo by a child") == 0 and sys.stdin.read() == "" and os.open("/dev/null", os.O_RDONLY) > 2
launch.run(main)
"""
    done = run_source(source, closed=f"</dev/null {closed}")
    assert (done.returncode, done.stdout, done.stderr) == (0, out, err)


@pytest.mark.parametrize("encoding, shown", [("latin-1", b"\xe9\\u20ac"), ("ascii", b"\\xe9\\u20ac")])
def test_what_the_encoding_of_stdout_lacks_is_escaped(encoding, shown, tmp_path):
    with open(tmp_path / "out", "w") as out:
        done = run_source(r"launch.run(lambda: print('\xe9\u20ac'))", stdout=out, PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr, (tmp_path / "out").read_bytes()) == (0, "", shown + b"\n")


def test_one_rank_prints_the_help(monkeypatch, capsys):
    for rank in 0, 1:
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(SystemExit) as end:
            flags.Parser("what it does").parse_args(["--help"])
        assert end.value.code == 0 and ("what it does" in capsys.readouterr().out) == (rank == 0)


# Ranks that were not started alike


def test_each_difference_is_named():
    world = JoinedWorld(0, 3, torch.device("cpu"))
    own = {"the script": "x.py", "--seed": "1"}
    world.gather = lambda value: [own] * 3
    world.agree(own)
    world.gather = lambda value: [own, own, {"the script": "x.py", "--prompt": "x" * 100}]
    message = refused("rank 2 with ", world.agree, own)
    assert "rank 1" not in message
    for words in f"--prompt {'x' * 60}", "--seed not given", "--seed 1", "--prompt not given":
        assert words in message


def test_machines_are_told_apart_whatever_the_launcher_says(monkeypatch):
    def names(*hosts, **variables):
        for name in "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE":
            monkeypatch.setenv(name, variables[name]) if name in variables else monkeypatch.delenv(name, False)
        for rank, host in enumerate(hosts):
            monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
            yield meeting.node_name(rank, len(hosts))

    assert len({*names("a", "a")}) == 1 and len({*names("a", "b")}) == 2
    assert len({*names("a", "a", LOCAL_WORLD_SIZE="1")}) == 2 and {*names("a", "b", GROUP_RANK="3")} == {"3"}


def test_what_ranks_are_compared_by():
    flags = vars(argparse.Namespace(checkpoint="here", seed=0, top_k=3, wiring=None, compile=False, json="x"))
    start = meeting._start(flags, torch.device("cpu"))
    assert start.keys() == {"the script", "the code", "torch", "device", "--seed", "--top-k"}
    assert start["--seed"] == 0 and start["torch"] == torch.__version__
