"""Outputs that are complete or absent, even if their writer is killed: docs/reliability.md."""

import contextlib
import errno
import fcntl
import functools
import json
import os
import shutil
import sys
from pathlib import Path

from ladder.errors import InputError

# what file systems answer that cannot do a thing: Lustre without -o flock, NFS without its lock daemon, some of FUSE
UNSUPPORTED = errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL


def supported(call, *args):
    """Call a function of the system; return whether the file system can do such a thing at all."""
    try:
        call(*args)
    except OSError as e:
        if e.errno not in UNSUPPORTED:
            raise
        return False
    return True


def lock(file, operation):
    """Lock a file, or say that its file system has no locks."""
    if not supported(fcntl.flock, file, operation):
        warn_of_no_locks(os.path.dirname(os.path.abspath(file.name)))


@functools.cache  # once for each folder
def warn_of_no_locks(folder):
    words = "its file system has no locks, so let no other process write there at the same time"
    print(f"{folder}: {words}", file=sys.stderr)


@contextlib.contextmanager
def reserved(path):
    """Lock an output and yield the empty folder NAME.tmp. Raises InputError if another process has locked it."""
    folder = Path(f"{os.path.realpath(path)}.tmp")
    with _errors(path):
        folder.mkdir(parents=True, exist_ok=True)
        if os.listdir(folder) and not (folder / "lock").exists():
            raise InputError(f"{folder} is needed to write {path}: give it another name")
        lock_file = open(folder / "lock", "a")  # noqa: SIM115
    with lock_file:
        with _errors(path):
            try:
                lock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.fstat(lock_file.fileno()).st_nlink:  # another process has just ended, and removed it
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
        try:
            supported(os.fsync, descriptor)  # some cannot do it for folders
        finally:
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
        lock(f, fcntl.LOCK_EX)
        size = os.fstat(f.fileno()).st_size
        if size and os.pread(f.fileno(), 1, size - 1) != b"\n":
            data = b"\n" + data
        if f.write(data) < len(data):
            f.truncate(size)
            raise InputError(f"cannot write {path}: No space left on device")
