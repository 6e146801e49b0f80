"""Outputs that are complete or absent, even if their writer is killed: docs/reliability.md, "Killed writers"."""

import contextlib
import fcntl
import json
import os
import shutil
from pathlib import Path

from ladder.errors import InputError


@contextlib.contextmanager
def reserved(path):
    """Lock an output and yield the empty folder NAME.tmp. Raises InputError if another process has locked it."""
    folder = Path(f"{os.path.realpath(path)}.tmp")
    with _errors(path):
        folder.mkdir(parents=True, exist_ok=True)
        if os.listdir(folder) and not (folder / "lock").exists():
            raise InputError(f"{folder} is needed to write {path}: give it another name")
        lock = open(folder / "lock", "a")  # noqa: SIM115
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(lock.fileno()).st_nlink:  # another process has just ended, and removed it
                raise BlockingIOError
        except BlockingIOError:
            raise InputError(f"{path} is being written by another process") from None
        try:
            for left in folder.iterdir():
                if left.name != "lock":
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def new_file(path):
    """Yield the name of an unfinished file or folder, which replaces `path` only when the block ends well."""
    path = os.path.realpath(path)
    with reserved(path) as folder, _errors(path):
        unfinished = folder / os.path.basename(path)
        yield unfinished
        publish(unfinished, path)


@contextlib.contextmanager
def new_folder(path):
    """Yield an unfinished folder, which appears as `path` only when the block ends well."""
    with new_file(path) as unfinished:
        check_absent(path)
        unfinished.mkdir()
        yield unfinished


def check_absent(path):
    """Raise InputError if a file has this name, or a folder with something in it."""
    real = os.path.realpath(path)
    if os.path.lexists(real) and not (os.path.isdir(real) and not os.listdir(real)):
        raise InputError(f"{path} already exists: remove it or give another folder")


def check_absent_first(path):
    """Do what check_absent does, before new_folder; what a killed writer has left of its lock is removed, too."""
    if os.path.lexists(os.path.realpath(path)):
        with reserved(path):
            check_absent(path)


def publish(unfinished, path):
    """Give a complete file or folder its name, once all of it is on the disk."""
    for file in (unfinished, *unfinished.rglob("*")):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    os.replace(unfinished, path)


@contextlib.contextmanager
def _errors(path):
    """Turn the system's errors in this block, above all a full disk, into an InputError that names the output."""
    try:
        yield
    except OSError as e:
        raise InputError(f"cannot write {path}: {e}") from None


def append_line(path, line):
    """Append a line of JSON to a file in one write. Other processes may append to it at the same time.

    A killed process may leave an incomplete line. The next line starts on its own, and readers skip the incomplete one.
    """
    data = (json.dumps(line) + "\n").encode()
    with _errors(path), open(path, "a+b", buffering=0) as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        size = os.fstat(f.fileno()).st_size
        if size and os.pread(f.fileno(), 1, size - 1) != b"\n":
            data = b"\n" + data
        if f.write(data) < len(data):
            f.truncate(size)
            raise InputError(f"cannot write {path}: No space left on device")
