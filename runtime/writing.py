"""Outputs that are complete or absent, whenever their writer is killed, and whoever else would write them.

An unfinished output lies in a folder NAME.tmp beside it, with a file that its writer has locked, and gets its name once
all of it is on the disk. A lock goes with its process, so the next writer can tell what a killed one has left.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import tempfile
from pathlib import Path

from safetensors import SafetensorError

from model import InputError


@contextlib.contextmanager
def reserved(path):
    """Lock an output for this process; yields the empty folder NAME.tmp. Raises InputError if another has it."""
    folder = Path(f"{os.path.realpath(path)}.tmp")
    with _errors(f"cannot write {path}"):
        folder.mkdir(parents=True, exist_ok=True)
        if os.listdir(folder) and not (folder / "lock").exists():
            raise InputError(f"{folder} is needed to write {path}: give it another name")
        lock = open(folder / "lock", "a")  # noqa: SIM115
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(lock.fileno()).st_nlink:  # another has just ended, and removed it
                raise BlockingIOError
        except BlockingIOError:
            lock.close()
            raise InputError(f"{path} is being written by another process") from None
    with lock:
        try:
            for left in folder.iterdir():
                if left.name != "lock":
                    remove(left)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def new_file(path):
    """Yield the name of an unfinished file, which replaces `path` only when the block ends well."""
    with _errors(f"cannot write {path}"), reserved(path) as folder:
        unfinished = folder / os.path.basename(os.path.realpath(path))
        yield unfinished
        publish(unfinished, os.path.realpath(path))


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
        unfinished.write_text(text)


def check_absent(path):
    """Raise InputError unless a folder can be given this name: there is nothing, or an empty folder to replace."""
    real = os.path.realpath(path)
    empty = os.path.isdir(real) and not os.listdir(real) and not os.path.ismount(real) and real != os.getcwd()
    if os.path.lexists(real) and not empty:
        raise InputError(f"{path} already exists: remove it or give another folder")


def publish(unfinished, path):
    """Give a complete file or folder its name, once all of it is on the disk."""
    for part in (unfinished, *unfinished.rglob("*")):
        descriptor = os.open(part, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    os.replace(unfinished, path)


def remove(path):
    """Remove a file, or a folder and all that is in it."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


@contextlib.contextmanager
def _errors(what):
    """Turn an error of the system in this block, above all a full disk, into an InputError that begins with `what`."""
    try:
        yield
    except (OSError, SafetensorError) as e:
        reason = getattr(e, "strerror", None) or str(e).splitlines()[0]
        raise InputError(f"{what}: {reason}") from None


def check_appendable(path, flag=""):
    """Raise InputError, led by the flag, unless lines can be appended to a file; leaves no file that was not there."""
    with _errors(f"{flag}{path} cannot be written"):
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK))  # does not wait for a pipe's reader
        except FileNotFoundError:
            tempfile.TemporaryFile(dir=os.path.dirname(os.path.realpath(path))).close()


def append_line(path, line):
    """Append a JSON line to a file, as append does."""
    append(path, (json.dumps(line) + "\n").encode())


def append(path, data):
    """Append whole lines to a file, in one write, after those that others append at the same time.

    A killed process may leave part of a line. The next line starts on its own, and readers skip the part.
    """
    with _errors(f"{path} cannot be written"), open(path, "a+b", buffering=0) as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        size = os.fstat(f.fileno()).st_size
        if size and os.pread(f.fileno(), 1, size - 1) != b"\n":
            data = b"\n" + data
        if f.write(data) < len(data):
            f.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
