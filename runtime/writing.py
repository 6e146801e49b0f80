"""Outputs that are complete or absent, whenever their writer is killed, and whoever else would write them.

An unfinished output lies in a folder NAME.tmp beside it, with a file that its writer has locked, and gets its name once
all of it is on the disk. A lock goes with its process, so the next writer can tell what a killed one has left.
"""

import contextlib
import fcntl
import json
import os
import shutil
from pathlib import Path

from safetensors import SafetensorError

from runtime.errors import InputError


@contextlib.contextmanager
def reserved(path):
    """Lock an output for this process; yields the empty folder NAME.tmp. Raises InputError if another has it."""
    folder = Path(f"{os.path.realpath(path)}.tmp")
    with _errors(path):
        folder.mkdir(parents=True, exist_ok=True)
        if os.listdir(folder) and not (folder / "lock").exists():
            raise InputError(f"{folder} is needed to write {path}: give it another name")
        lock = open(folder / "lock", "a")  # noqa: SIM115
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(lock.fileno()).st_nlink:  # another has just ended, and removed it
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
    with _errors(path), reserved(path) as folder:
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


def write_text(path, text):
    """Write a text file as new_file does."""
    with new_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def check_absent(path):
    """Raise InputError if a file or a folder has this name."""
    if os.path.lexists(os.path.realpath(path)):
        raise InputError(f"{path} already exists: remove it or give another folder")


def publish(unfinished, path):
    """Give a complete file or folder its name, once all of it is on the disk."""
    for part in (unfinished, *unfinished.rglob("*")):
        descriptor = os.open(part, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    os.replace(unfinished, path)


@contextlib.contextmanager
def _errors(path):
    """Turn an error of the system in this block, above all a full disk, into an InputError that names the output."""
    try:
        yield
    except (OSError, SafetensorError) as e:
        raise InputError(f"cannot write {path}: {getattr(e, 'strerror', None) or e}") from None


def append_line(path, line):
    """Append a line of JSON to a file, in one write, after the lines that others append at the same time.

    A killed process may leave part of a line. The next line starts on its own, and readers skip the part.
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
