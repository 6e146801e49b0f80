"""What is written is complete or absent: killed writers, two of one output, full disks, folders that are read-only."""

import errno
import fcntl
import os
import resource

import pytest
import torch
from cases import refused, slow_case
from file_edits import read_lines
from running import check_kills, run_main

import quantize
from ladder import outputs
from ladder.checkpoints import writing
from ladder.errors import InputError
from ladder.kernels import cpp


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def append(out):
    """Append 20 lines, some long, as scripts with --json do; lines that are there already are not repeated."""
    for i in range(out.read_bytes().count(b"\n") if out.exists() else 0, 20):
        outputs.append_line(out, {"i": i, "text": "x" * (1000 + 15000 * i)})


def figure(out):
    with outputs.new_file(out) as unfinished:
        unfinished.write_text("figure")


@pytest.fixture
def writers(tiny):
    """{name: a function that writes the output `out`}."""
    return {
        "quantize": lambda out: run_main(quantize, "--checkpoint", tiny, "--mode", "int8", "--out", out),
        "append": append,
        "file": figure,
    }


# Killed


KILLS = [("file", 1), ("append", 4), ("quantize", 7), slow_case("quantize", 2)]


@pytest.mark.parametrize("name, step", KILLS)
def test_killed_at_any_moment_an_output_is_complete_or_absent_and_the_next_run_works(name, step, writers, tmp_path):
    check_kills(writers[name], tmp_path, step, appends=name == "append")


def test_a_folder_of_somebody_else_stays(tmp_path):
    (tmp_path / "new.tmp" / "precious").mkdir(parents=True)
    refused("new.tmp is needed to write .*new: give", figure, tmp_path / "new")
    assert names(tmp_path) == ["new.tmp"] and names(tmp_path / "new.tmp") == ["precious"]


# Two writers, and names


def test_the_second_of_two_writers_is_told_at_once(writers, tmp_path):
    with outputs.reserved(tmp_path / "out") as folder:
        (folder / "part").write_text("")
        for name in "quantize", "file":
            refused("out is being written by another process$", writers[name], tmp_path / "out")
        assert names(folder) == ["lock", "part"]
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["", "/", "loop", "file", "file/out", "/proc", "x" * 256])
def test_names_that_cannot_be_had(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"^[^\n]*(already exists|cannot write)[^\n]*$"), outputs.new_folder(name):
        pytest.fail("it began")
    assert names(tmp_path) == ["file", "loop"]


def test_an_empty_folder_of_that_name_is_filled(tmp_path):
    (tmp_path / "out").mkdir()
    with outputs.new_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("")
        assert names(tmp_path / "out") == []
    assert names(tmp_path / "out") == ["a"]
    with pytest.raises(InputError, match="out already exists"), outputs.new_folder(tmp_path / "out"):
        pytest.fail("it began")


def test_an_error_of_the_system_names_the_output_and_the_file(tmp_path):
    with pytest.raises(InputError, match="^cannot write .*out: .*source"), outputs.new_folder(tmp_path / "out"):
        (tmp_path / "source").read_bytes()
    assert names(tmp_path) == []


def test_weights_are_as_readable_as_other_files(tmp_path):
    mask = os.umask(0o027)
    writing.write_weights(tmp_path, {"a": 4}, lambda name: torch.ones(1))
    os.umask(mask)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("name, size", [("quantize", 20000), ("append", 5000), ("file", 5)])
def test_a_disk_that_is_full_is_one_clear_line(name, size, writers, tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
    try:
        refused(f"^cannot write {tmp_path}/out: [^\n]*$", writers[name], tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert names(tmp_path) == ["out"] * (name == "append")


# File systems that cannot do a thing


def unsupported(number):
    """A function of the system on such a file system."""

    def call(*_):
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize("name", ["ENOSYS", "ENOLCK", "EOPNOTSUPP"])
def test_without_locks_all_is_written_and_a_line_says_so_once(name, writers, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fcntl, "flock", unsupported(getattr(errno, name)))
    outputs.warn_of_no_locks.cache_clear()
    for write in writers.values():
        (folder := tmp_path / str(id(write))).mkdir()
        write(folder / "out")
        assert names(folder) == ["out"] and capsys.readouterr().err.count("its file system has no locks") == 1
    assert (folder / "out").read_text() == "figure"


def test_without_locks_a_kernel_is_compiled(tmp_path, monkeypatch, capsys):
    (source := tmp_path / "a.cpp").write_text('extern "C" int a() { return 1; }\n')
    monkeypatch.setattr(fcntl, "flock", unsupported(errno.ENOLCK))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cpp.load_operators(source, "this test")
    [library] = (tmp_path / "cache/ladder-fast").glob("a-*")
    assert library.suffix == ".so" and "has no locks" in capsys.readouterr().err


def test_a_folder_that_cannot_be_synced_is_written_and_any_other_error_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", unsupported(errno.EINVAL))
    figure(tmp_path / "out")
    descriptors = os.listdir("/proc/self/fd")
    for module, name in (os, "fsync"), (fcntl, "flock"):
        monkeypatch.setattr(module, name, unsupported(errno.EIO))
        refused("^cannot write .*other: .*Input/output error$", figure, tmp_path / "other")
        assert names(tmp_path) == ["other.tmp"] * (name == "flock") + ["out"]
    refused("^cannot write .*lines: .*Input/output error$", outputs.append_line, tmp_path / "lines", 1)
    assert os.listdir("/proc/self/fd") == descriptors


# Lines


def test_a_line_starts_on_its_own_whatever_was_cut_off(tmp_path):
    for i, before in enumerate(['{"a": 1}\n{"b": [1, ', '{"a": 1}\n', ""]):
        (path := tmp_path / f"{i}.jsonl").write_text(before)
        outputs.append_line(path, {"z": 0})
        assert path.read_text().splitlines() == [*before.splitlines(), '{"z": 0}']


def test_many_append_at_the_same_time(tmp_path):
    path = tmp_path / "x.jsonl"
    children = []
    for i in range(4):
        if child := os.fork():
            children.append(child)
            continue
        for j in range(30):
            outputs.append_line(path, {"from": i, "line": j, "text": "x" * 20_000})
        os._exit(0)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    lines = read_lines(path)
    assert len(lines) == 120
    assert all([x["line"] for x in lines if x["from"] == i] == [*range(30)] for i in range(4))
