"""Outputs that are complete or absent, whenever their writer is killed, and whoever else would write them.

What is unfinished lies beside its output in a folder NAME.tmp, and gets its name at the end. In that folder is a file
on which the writer holds a lock. A lock goes with its process, however that ends and whatever gets its number later: so
the next writer of the same output can tell what a dead one has left, and removes it, from what is being written.
"""

import contextlib
import fcntl
import json
import os
import platform
import shutil
import stat
import sys
import tempfile
from pathlib import Path

from safetensors import SafetensorError

from model import InputError

LOCK = "lock"
NAME_BYTES = 255  # of a file's name, at most


@contextlib.contextmanager
def new_folder(path):
    """A folder that appears under its name only when the block ends well; yields the unfinished one to write into.

    Raises InputError where it cannot be written, another process is at it, or its name is taken.
    """
    with _new(path) as (path, unfinished):
        check_absent(path)
        unfinished.mkdir()
        yield unfinished


@contextlib.contextmanager
def new_file(path):
    """A file that appears under its name, in place of an older one, only when the block ends well.

    Yields the name to write it under until then. Raises InputError where that cannot be done, or another is at it.
    """
    with _new(path) as (_, unfinished):
        yield unfinished


def write_text(path, text):
    """Write a text file as new_file does."""
    with new_file(path) as unfinished:
        unfinished.write_text(text)


def check_absent(path):
    """Raise InputError unless a folder can be given this name: there is nothing, or an empty folder to replace."""
    if os.path.lexists(path) and not (os.path.isdir(path) and not os.listdir(path)):
        raise InputError(f"{path} already exists: remove it or give another folder")
    if os.path.ismount(path) or os.path.realpath(path) == os.getcwd():
        what = "a mount point" if os.path.ismount(path) else "the folder that this runs in"
        raise InputError(f"{path} is {what} and cannot be replaced: name a new folder inside of it")


@contextlib.contextmanager
def reserved(path):
    """Have an output for this process alone; yields an empty folder beside it, for what is unfinished.

    Raises InputError, at once, where another process has it, or there can be no such folder.
    """
    path = Path(os.path.realpath(path))
    folder = path.parent / (os.fsdecode(os.fsencode(path.name)[: NAME_BYTES - len(".tmp")]) + ".tmp")
    with _errors(path):
        lock = _take(folder, path)
    try:
        with _errors(path):
            lock.truncate(0)
            lock.write(f"pid {os.getpid()} on {platform.node()}")
            lock.flush()
            if _clear(folder):
                print(f"removed {folder}, which a process that was killed had left", file=sys.stderr, flush=True)
        yield folder
    finally:
        with contextlib.suppress(OSError), lock:
            _clear(folder)
            os.unlink(folder / LOCK)  # last, and while it is held: see _take
            os.rmdir(folder)


@contextlib.contextmanager
def _new(path):
    path = Path(os.path.realpath(path))
    with _errors(path), reserved(path) as folder:
        yield path, folder / path.name
        publish(folder / path.name, path)


@contextlib.contextmanager
def _errors(path):
    """What the system says in this block, above all that the disk is full, as an InputError."""
    try:
        yield
    except (OSError, SafetensorError) as e:
        reason = getattr(e, "strerror", None) or str(e).splitlines()[0]
        raise InputError(f"cannot write {path}: {reason}") from None


def _take(folder, path):
    """The file of a folder, open, on which this process now holds the lock."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            names = os.listdir(folder)
            if names and LOCK not in names:  # it comes first and goes last: this is somebody's own
                raise InputError(f"{folder} is needed to write {path}: give what is there another name")
            lock = open(folder / LOCK, "a+", encoding="utf-8")  # noqa: SIM115
        except FileNotFoundError:  # another writer has just ended, and removed the folder
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read()
            lock.close()
            raise InputError(f"{path} is being written by another process" + f" ({owner})" * bool(owner)) from None
        except OSError:  # a file system without locks: of two writers at once, one fails
            return lock
        if os.fstat(lock.fileno()).st_nlink:
            return lock
        lock.close()  # another writer has removed it in the meantime


def _clear(folder):
    """Remove all but the lock; returns how many names that were."""
    names = [name for name in os.listdir(folder) if name != LOCK]
    for name in names:
        remove(folder / name)
    return len(names)


def remove(path):
    """Remove a file, or a folder and all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def publish(unfinished, path):
    """Give a complete file or folder its name, once all of it is on the disk: a power failure is like a kill."""
    for part in (unfinished, *unfinished.rglob("*")):
        _to_disk(part)
    os.replace(unfinished, path)
    _to_disk(path.parent)


def _to_disk(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def check_appendable(path, flag=""):
    """Raise InputError, led by the flag, unless lines can be appended to a file; leaves no file that was not there."""
    try:
        try:
            os.close(os.open(Path(path), os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK))  # does not wait for a reader
        except FileNotFoundError:  # tried without that name, under which another process may begin to write
            tempfile.TemporaryFile(dir=Path(os.path.realpath(path)).parent).close()
    except OSError as e:
        raise InputError(f"{flag}{path} cannot be written: {e.strerror}") from None


def append_line(path, line):
    """Append a JSON line to a file, as append does."""
    append(path, (json.dumps(line) + "\n").encode())


def append(path, data):
    """Append bytes, whole lines, to a file: all or none of them, behind what others append at the same time.

    Part of a JSON line at the end of the file, of a process that was killed, goes, with a word. Raises InputError.
    """
    try:
        with open(Path(path), "a+b", buffering=0) as f:
            if not stat.S_ISREG(os.fstat(f.fileno()).st_mode):  # a pipe or a device
                f.write(data)
                return
            with contextlib.suppress(OSError):  # a file system without locks: one write at the end is nearly as good
                fcntl.lockf(f, fcntl.LOCK_EX)
            data = _end_of_line(f, path) + data
            size = os.fstat(f.fileno()).st_size
            try:
                while data:
                    data = data[f.write(data) :]
                os.fsync(f.fileno())
            except BaseException:
                f.truncate(size)
                raise
    except OSError as e:  # above all: no space left on the device
        raise InputError(f"{path} cannot be written: {e.strerror}") from None


def _end_of_line(f, path):
    """What the last line of a file lacks: a line break, or nothing; part of a JSON line is removed."""
    size = start = os.fstat(f.fileno()).st_size
    end = b""
    while start > 0 and b"\n" not in end:
        start = max(0, start - 2**16)
        end = os.pread(f.fileno(), size - start, start)
    rest = end.rpartition(b"\n")[2]
    try:
        json.loads(rest or b"0")
    except (ValueError, RecursionError):
        if rest.startswith((b"{", b"\0")):  # zeros: what a power failure may leave
            f.truncate(size - len(rest))
            print(f"removed the last line of {path}, which was cut off", file=sys.stderr, flush=True)
            return b""
    return b"\n" if rest else b""
