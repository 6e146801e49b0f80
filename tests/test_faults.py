"""Ranks that die, stall, or were not started alike: how the run ends; and that benchmarks/faults.py sees when it should
not have ended so."""

import json
import subprocess
import sys
import time

import pytest

from benchmarks import faults, reliability_tables
from benchmarks.faults import ALL_UNLIKE, OUTSIDE, UNLIKE


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return faults.write_files(tmp_path_factory.mktemp("faults"))


def run(case, files):
    line = faults.run(case, files)
    assert line["wrong"] == [], "\n".join([*line["lines"], *line.get("raised", [])])


FAST = {f"decode 7, {end} of 2" for end in ("SIGKILL, rank 1", "SIGSTOP, rank 1", "exception, rank 1")}
COMMON = "SIGKILL", "exception", "SIGSTOP", "hang", "launcher SIGKILL"
CASES = {faults.name_of(case): case for case in faults.faults([2]) if case["kind"] in COMMON}


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_a_fault_ends_all_soon_with_one_line_that_names_it(name, files):
    run(CASES[name], files)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*faults.DEATHS, *faults.ERRORS, *faults.STALLS, *faults.OUTSIDE])
def test_every_kind_of_fault_among_three_ranks(kind, files):
    run({"phase": "decode", "step": 7, "kind": kind, "rank": 0 if kind in OUTSIDE else 2, "ranks": 3}, files)


WAYS = ["--seed", *(pytest.param(name, marks=pytest.mark.slow) for name in [*UNLIKE, ALL_UNLIKE] if name != "--seed")]


@pytest.mark.parametrize("name", WAYS)
def test_ranks_that_were_not_started_alike_say_so(name, files):
    run({"unlike": name}, files)


# ---------------------------------------------------------------------------------------------------------------------
# What the benchmark finds wrong

GOOD = {
    "phase": "decode", "step": 7, "kind": "SIGKILL", "rank": 1, "ranks": 2, "script": "generate.py", "happened": True,
    "seconds": 1.0, "code": 1, "raised": [], "orphans": [], "port_taken": False, "left": [],
    "lines": ["compiling ...", "generate.py: rank 1 of 2 was killed (signal 9) in decode step 7"], "commit": "c",
}  # fmt: skip
ALIKE = {
    "unlike": "--seed", "ranks": 2, "seconds": 4.0, "codes": [2, 2], "raised": [], "printed": "", "orphans": [],
    "port_taken": False, "left": [], "lines": ["generate.py: rank 1 with --seed 2, rank 0 with --seed 1"],
}  # fmt: skip
SPOILED = [
    (GOOD, {"seconds": 10.1}, "not gone in 10 s"),
    (GOOD, {"seconds": None}, "not gone in 10 s"),
    (GOOD, {"code": 0}, "exit code 0"),
    (GOOD, {"orphans": ["python"]}, "1 processes lived on"),
    (GOOD, {"port_taken": True}, "something was left behind"),
    (GOOD, {"left": ["/dev/shm/x"]}, "something was left behind"),
    (GOOD, {"happened": False}, "the fault did not happen"),
    (GOOD, {"raised": ["RuntimeError: lost"]}, "1 tracebacks"),
    (GOOD, {"lines": []}, "0 lines"),
    (GOOD, {"lines": 2 * GOOD["lines"]}, "2 lines"),
    (GOOD, {"rank": 0}, "the line does not name the rank"),
    (GOOD, {"kind": "SIGABRT"}, "the line does not name the cause"),
    (GOOD, {"step": 8, "phase": "decode", "lines": ["generate.py: rank 1 of 2: signal 9 in decode step 71"]},
     "the line does not name the phase"),
    (ALIKE, {"seconds": None}, "they hang"),
    (ALIKE, {"codes": [2, 1]}, "exit codes [2, 1]"),
    (ALIKE, {"printed": "Once"}, "a text was printed"),
    (ALIKE, {"lines": ["generate.py: rank 1 with --seed 2, rank 0 with no --seed"]}, "the difference is not named"),
    (ALIKE, {"unlike": ALL_UNLIKE}, "the difference is not named"),
]  # fmt: skip


@pytest.mark.parametrize("line", [GOOD, ALIKE, {**GOOD, "kind": "terminal SIGINT", "lines": ["interrupted"]}])
def test_a_good_end_is_not_wrong(line):
    assert faults.wrong(line) == []


@pytest.mark.parametrize("line, change, message", SPOILED)
def test_a_bad_end_is_wrong(line, change, message):
    assert faults.wrong({**line, **change}) == [message]


def test_tracebacks_are_counted_without_what_they_are_chained_to():
    errors = """compiling ...
Traceback (most recent call last):
  File "a.py", line 1
KeyError: 1

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3
ValueError: 2
generate.py: rank 0 of 2 failed (ValueError: 2) in decode step 7
[W1122 10:00:00.000000 1 torch/x.py:1] a warning
Exception raised from recvBytes at Utils.hpp:784 (most recent call first):
frame #0: c10::Error::Error() + 0x9d (0x7fd0 in libc10.so)
<omitting python frames>
decoding:  10%|x\r[rank1]: Traceback (most recent call last):
[rank1]:   File "a.py", line 1
[rank1]: OSError: 3
training:  7%|x| 2/30 [00:01<00:10, nats]adapt.py: rank 0 of 2 hangs
"""
    lines, raised = faults.spoken(errors)
    said = ["generate.py: rank 0 of 2 failed (ValueError: 2) in decode step 7", "adapt.py: rank 0 of 2 hangs"]
    assert lines == ["compiling ...", *said]
    assert raised == ["ValueError: 2", "OSError: 3"]


def test_what_is_kept_of_a_run_does_not_say_where_it_was():
    text = f"{faults.ROOT}/launch.py, {sys.base_prefix}/lib/threading.py"
    assert faults.placeless(text) == "./launch.py, python/lib/threading.py"
    assert str(faults.ROOT) not in (faults.ROOT / "benchmarks/results/faults.jsonl").read_text()


def test_the_processes_of_a_run_are_found_by_its_mark():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={faults.MARK: "a mark"})
    try:
        while process.pid not in faults.of_run("a mark"):  # it has not begun yet
            pass
        assert not faults.of_run("a")
        assert [*faults.end_all("a mark")] == [process.pid]
        assert faults.wait_for_end("a mark", time.time(), 20) is not None  # nobody has asked how it ended yet
    finally:
        process.kill()
        process.communicate()


def test_the_tables_count_what_ended_well(capsys, tmp_path):
    stretch = {"kind": "chat", "model": "demo", "dtype": "bfloat16", "ms_per_token": {"1": 2.0, "2": 4.0}}
    rank = {"resident": 5e8, "graphs": 4, "files": 16, "threads": 6}
    stretch |= {"ranks": [rank, {**rank, "resident": 6e8, "threads": 7}], "launcher_resident": 2e8}
    lines = {
        "faults": [
            *(
                {**GOOD, "seconds": seconds, "wrong": wrong}
                for seconds, wrong in ((1.0, []), (2.0, []), (None, ["hm"]))
            ),
            {**GOOD, "kind": "SIGSTOP", "seconds": 5.0, "wrong": []},
            {**ALIKE, "wrong": []},
        ],
        "kills": [
            {"writer": "convert", "signal": "SIGKILL", "moments": 9, "complete": 5, "absent": 4, "torn": 0}
            | {"incomplete": 1, "left": 2, "differ": 3}
        ],
        "fuzz": [{"target": "templates", "cases": 10000, "works": 1000, "refused": 8998, "unclean": 2}],
        "soak": [{**stretch, "done": 50 * i} for i in (1, 2, 3)],
    }
    for name, some in lines.items():
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in some))
    reliability_tables.main([str(tmp_path / name) for name in lines])
    shown = capsys.readouterr().out
    assert "| SIGKILL | 3 | 2 | 1.0 to 2.0 or never |" in shown
    assert "| SIGKILL |  |  |  |  | 2/3 |" in shown and "| SIGSTOP: the whole rank stalls |  |  |  |  | 1/1 |" in shown
    assert "SIGKILL in decode, rank 1 of 2, commit c: hm" in shown
    assert "| --seed | ok | generate.py: rank 1 with --seed 2, rank 0 with --seed 1 |" in shown
    assert "| convert | SIGKILL | 9 | 5 | 4 | 0 | 1 | 2 | 3 |" in shown
    assert "| templates | 10,000 | 1,000 | 8,998 | 2 |" in shown
    assert "| chat, demo, bfloat16 | 150 | 3.00 | 500 and 600 | 200 | 4 | 16 | 7 |" in shown


def test_a_line_is_written_for_each_case(tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    monkeypatch.setattr(faults, "run", lambda case, files: {**GOOD, **case, "wrong": []})
    monkeypatch.setattr(faults, "write_files", lambda folder: {})
    faults.main(["--only", "decode 7,exception", "--ranks", "2,3", "--json", str(out)])
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["phase"], line["kind"], line["ranks"]) for line in lines] == [
        ("decode", "exception", n) for n in (2, 3)
    ]
    assert all(line["command"] and line["commit"] and line["torch"] for line in lines)


def test_every_case_has_a_name_of_its_own_and_ranks_that_are_there():
    cases = faults.cases([2, 3])
    assert len({faults.name_of(case) for case in cases}) == len(cases)
    assert all(case["rank"] < case["ranks"] for case in cases if "rank" in case)
