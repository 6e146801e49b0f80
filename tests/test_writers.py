"""What is written is complete or absent: killed writers, two of one output, full disks, folders that are read-only."""

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from helpers import HANGS, ROOT

import adapt
import convert_hf_checkpoint
import quantize
from measure import exposed, sweep
from model import InputError
from runtime import launch, writing
from training import runs

SWEEP = {"TPS": "1", "BATCHES": "1", "REPEATS": "1", "DEVICE": "cpu", "EXPOSED": "0"}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def writers(tiny, tmp_path, monkeypatch):
    """{name: a function that has a script write the output `out`}."""
    (tmp_path / "text").write_text("Once upon a time there was a little dog. " * 20)
    text = str(tmp_path / "text")
    swept = [f"{name}={value}" for name, value in SWEEP.items()]
    for name in sweep.NAMES:
        monkeypatch.delenv(name, raising=False)
    return {
        "convert": lambda out: convert_hf_checkpoint.main([str(tiny), "--to-hf", str(out)]),
        "quantize": lambda out: quantize.main(["--checkpoint", str(tiny), "--mode", "int8", "--out", str(out)]),
        "adapt": lambda out: adapt.main(
            ["--text", text, "--valid", text, "--out", str(out), "--checkpoint", str(tiny), "--seq-len", "8"]
        ),
        "sweep": lambda out: sweep.main([*swept, f"OUT={out}"]),
        "append": lambda out: writing.append_line(out, {"a": 1}),
        "plot": lambda out: writing.write_text(out, "figure"),
    }


NAMES = ["convert", "quantize", "adapt", "sweep", "append", "plot"]


# Killed


def kills(tmp_path, *words):
    """The lines of benchmarks/kills.py."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    full = [sys.executable, "-m", "benchmarks.kills", "--json", tmp_path / "kills.jsonl", *words]
    done = subprocess.run(full, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (tmp_path / "kills.jsonl").read_text().splitlines()], done.stderr


def check_kills(lines, err):
    for line in lines:
        assert (line["incomplete"], line["differ"]) == (0, 0), err
        assert line["complete"] + line["absent"] + line["torn"] == line["moments"]
        assert not line["torn"] or line["writer"] == "append"


def test_killed_at_some_moments_an_output_is_complete_or_absent_and_nothing_stays(tmp_path):
    lines, err = kills(tmp_path, "--moments", "4", "--writers", "quantize int8,append")
    check_kills(lines, err)
    assert [(line["writer"], line["signal"], line["moments"]) for line in lines] == [
        (name, *kind) for name in ("quantize int8", "append") for kind in (("SIGKILL", 4), ("SIGTERM", 1))
    ]
    assert lines[0]["left"] > 0  # or nothing was killed while it wrote


@pytest.mark.slow
def test_killed_at_many_moments(tmp_path):
    lines, err = kills(tmp_path, "--moments", "40")
    check_kills(lines, err)
    assert len({line["writer"] for line in lines}) == 7


@pytest.mark.parametrize(
    "number, code", [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)]
)
def test_asked_to_end_it_leaves_nothing(number, code, tiny, tmp_path):
    slow = "import quantize, time\nfrom formats import checkpoint\nfrom runtime import launch\n"
    slow += "def save_file(*args, **kwargs):\n    print(flush=True)\n"
    slow += "    time.sleep(600)\ncheckpoint.save_file = save_file\nlaunch.run(quantize.main)"
    words = ["--checkpoint", tiny, "--mode", "int8", "--out", tmp_path / "out"]
    process = subprocess.Popen([sys.executable, "-c", slow, *words], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"\n" and names(tmp_path) == ["out.tmp"]
        process.send_signal(number)
        assert process.wait(HANGS) == code and names(tmp_path) == []
    finally:
        process.kill()
        process.communicate()


def test_what_a_killed_writer_left_goes_with_a_word(tmp_path, capsys):
    out, left = tmp_path / "out", tmp_path / "out.tmp"
    for part in left / "out" / "model.safetensors", left / "lock":
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_text("x")
    with writing.new_folder(out) as folder:
        assert capsys.readouterr().err == f"removed {left}, which a process that was killed had left\n"
        (folder / "a").write_text("a")
    assert names(tmp_path) == ["out"] and names(out) == ["a"]
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp" / "lock").write_text("")  # killed behind the rename
    with pytest.raises(InputError, match="out already exists"), writing.new_folder(out):
        pass
    assert names(tmp_path) == ["out"] and capsys.readouterr().err == ""


def test_a_folder_of_somebody_else_stays(tmp_path):
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp" / "precious").write_text("")
    with (
        pytest.raises(InputError, match="out.tmp is needed to write .*out: give"),
        writing.new_folder(tmp_path / "out"),
    ):
        pass
    assert names(tmp_path) == ["out.tmp"] and names(tmp_path / "out.tmp") == ["precious"]


def test_killed_in_its_last_moment_a_run_keeps_what_it_needs_or_nothing(tmp_path):
    out, run = tmp_path / "out", tmp_path / "out.run"
    for part in "state-3", "best-3", "best-2", "train.tokens.tmp":
        (run / part).mkdir(parents=True)
    for part in "train.tokens", "log.jsonl", "settings.json":
        (run / part).write_text("")
    (run / "best.json").write_text('{"step": 3}')
    before = names(run)
    with runs.reserved(out, run):  # killed before the rename
        assert names(run) == before
    (run / "best-3").rename(out)
    (out / "config.json").write_text("")
    with pytest.raises(InputError, match="already exists"), runs.reserved(out, run):
        pass
    assert names(run) == ["log.jsonl", "settings.json"]


# Two writers


@pytest.mark.parametrize("name", ["convert", "quantize", "adapt", "sweep", "plot"])
def test_the_second_of_two_writers_is_told_at_once(name, writers, tmp_path):
    with writing.reserved(tmp_path / "out") as folder:
        (folder / "part").write_text("")
        with pytest.raises(InputError) as error:
            writers[name](tmp_path / "out")
        assert names(folder) == ["lock", "part"]
    assert f"{tmp_path / 'out'} is being written by another process (pid {os.getpid()} on " in str(error.value)
    assert "\n" not in str(error.value) and names(tmp_path) == ["text"]


def test_a_lock_that_went_with_its_writer_is_not_taken(tmp_path, monkeypatch):
    flock, turns = fcntl.flock, []

    def late(lock, how):
        turns.append(lock)
        if len(turns) == 1:  # the other one ends between the opening and the locking
            shutil.rmtree(tmp_path / "out.tmp")
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with writing.reserved(tmp_path / "out") as folder:
        assert len(turns) == 2 and names(folder) == ["lock"]


# Names


def test_names_of_any_length_and_links(tmp_path):
    long = tmp_path / ("ä" * 127 + "b")  # 255 bytes
    with writing.new_folder(long) as folder:
        (folder / "a").write_text("a")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    with writing.new_folder(tmp_path / "link") as folder:
        (folder / "a").write_text("a")
    assert names(tmp_path) == sorted([long.name, "empty", "link"]) and names(tmp_path / "empty") == ["a"]
    too_long = tmp_path / ("x" * 256)
    with pytest.raises(InputError, match="^cannot write .*xxx: File name too long$"), writing.new_folder(too_long):
        pass


@pytest.mark.parametrize("name", ["", ".", "/", "loop", "file", "file/out", "/proc"])
def test_names_that_cannot_be_had(name, tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("")
    path = tmp_path / name if name[:1] in "lf" and name else name
    refused = pytest.raises(InputError, match="already exists|cannot be replaced|Not a directory")
    with refused as error, writing.new_folder(path):
        pytest.fail("it began")
    assert "\n" not in str(error.value) and names(tmp_path) == ["file", "loop", "work"]


# Disks


@pytest.fixture
def disk(tmp_path):
    """A function that mounts a file system of its own, with options, at `disk`."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(*options):
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", ",".join(options), "none", str(place)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
        return place

    yield mount
    subprocess.run(["umount", "-l", str(place)], capture_output=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_read_only_folder_is_one_clear_line(name, disk, writers):
    with pytest.raises(InputError, match="Read-only file system") as error:
        writers[name](disk("ro") / "out")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_full_disk_is_one_clear_line(name, disk, writers, monkeypatch):
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=10**12))
    folder = disk("size=64k" if name in ("convert", "quantize", "adapt") else "size=4k")
    if name not in ("convert", "quantize", "adapt"):
        (folder / "full").write_bytes(b"x" * 4096)
    with pytest.raises(InputError, match="[Nn]o space left on device") as error:
        writers[name](folder / "out")
    assert "\n" not in str(error.value)
    assert {"out", "out.run", "full"} >= {*names(folder)}
    assert not (folder / "out").exists() or not (folder / "out").read_bytes()


def test_a_trace_that_does_not_fit_is_not_written(disk):
    folder = disk("size=64k")
    steps = {"adding": lambda: [torch.ones(3) + 1 for _ in range(2000)]}
    with pytest.raises(InputError, match="cannot write .*rank0.json: the profiler failed to"):
        exposed.profile(folder, launch.World(0, 1, torch.device("cpu")), steps)
    assert names(folder) == []


# Lines


def test_a_line_is_appended_whole_or_not_at_all(tmp_path):
    path = tmp_path / "x.jsonl"
    writing.append_line(path, {"a": 1})
    before, limit = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limit[1]))
    try:
        with pytest.raises(InputError, match="x.jsonl cannot be written: File too large"):
            writing.append_line(path, {"a": "x" * 9000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "before, kept",
    [
        ('{"a": 1}\n{"b": [1, ', '{"a": 1}\n'),
        ('{"a": 1}\n{"b": "' + "x" * 100_000, '{"a": 1}\n'),
        ('{"b": {"c": 1}', ""),
        ('{"a": 1}\n\0\0\0', '{"a": 1}\n'),
        ('{"a": 1}\n{"b": 2}', '{"a": 1}\n{"b": 2}\n'),
        ("notes without an end", "notes without an end\n"),
        ("", ""),
    ],
    ids=range(7),
)
def test_a_line_that_was_cut_off_goes_and_no_other(before, kept, tmp_path, capsys):
    (path := tmp_path / "x.jsonl").write_text(before)
    writing.append_line(path, {"z": 0})
    assert path.read_text() == kept + '{"z": 0}\n'
    said = f"removed the last line of {path}, which was cut off\n"
    assert capsys.readouterr().err == (said if len(kept) < len(before) else "")


def test_many_append_at_the_same_time(tmp_path):
    path, children = tmp_path / "x.jsonl", []
    for i in range(4):
        if not (child := os.fork()):
            for j in range(30):
                writing.append_line(path, {"from": i, "line": j, "text": "x" * 20_000})
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 120
    assert all([x["line"] for x in lines if x["from"] == i] == [*range(30)] for i in range(4))


def test_to_try_a_file_leaves_no_trace_and_waits_for_nobody(tmp_path, monkeypatch):
    def unlink(*args, **kwargs):
        raise AssertionError("another process may have appended to it by now")

    monkeypatch.setattr(os, "unlink", unlink)
    writing.check_appendable(tmp_path / "new.jsonl")
    assert names(tmp_path) == []
    os.mkfifo(tmp_path / "pipe")
    for name in "pipe", "x" * 256, "":
        with pytest.raises(InputError, match="cannot be written: "):
            writing.check_appendable(tmp_path / name)


# The sweep's commands


@pytest.fixture
def sweeping(tmp_path):
    """A sweep whose first command has begun, and says its process id in the file `pid`, to wait for ever."""
    (tmp_path / "python").write_text("#!/bin/sh\necho $$ > pid.tmp; mv pid.tmp pid; exec sleep 600\n")
    (tmp_path / "python").chmod(0o755)
    words = [f"{name}={value}" for name, value in (SWEEP | {"PYTHON": tmp_path / "python", "OUT": "out"}).items()]
    environment = {k: v for k, v in os.environ.items() if k not in sweep.NAMES} | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "measure.sweep", *words], cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL
    )
    wait_for(lambda: (tmp_path / "pid").exists() or process.poll() is not None)
    yield process
    process.kill()
    process.wait()


def wait_for(condition, seconds=HANGS):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_a_killed_sweep_s_command_ends_and_the_next_sweep_cleans_up(sweeping, tmp_path, writers):
    pid = int((tmp_path / "pid").read_text())
    sweeping.kill()
    try:
        wait_for(lambda: not os.path.exists(f"/proc/{pid}"), 20)
    except AssertionError:
        os.kill(pid, signal.SIGKILL)
        raise
    assert "out.tmp" in names(tmp_path)
    with writing.reserved(tmp_path / "out"):
        pass
    assert names(tmp_path) == ["pid", "python", "text"]
