"""Collectives of CPU ranks on one machine through shared_memory.cpp: how the ranks come to share the memory.

The memory is a file without a name, so that nothing is left behind however a run ends. Rank 0 creates it, and the other
ranks open it as /proc/PID/fd/FD.
"""

import contextlib
import os
import secrets
import sys
from pathlib import Path

import torch

from extras.group import load_group, new_name
from kernels import ordered  # noqa: F401, defines the operators that shared_memory.cpp implements
from runtime import watch
from runtime.errors import InputError
from tp import COLLECTIVES, Collective

SLOTS, SLOT_BYTES = 8, 2**23  # of each rank; a slot takes memory only where a message has filled it
NAME = "ladder-fast"
GROUP = "shared-memory"


class Unavailable(InputError):
    """The ranks cannot share memory; the message says why."""


def connect(world, slots=SLOTS, slot_bytes=SLOT_BYTES):
    """Return a process group of the world's ranks through shared memory. Raises Unavailable, on all ranks alike.

    world: a launch.World. slot_bytes: a multiple of 8.
    """
    name, fd, reason, offer = new_name(GROUP), None, None, None
    try:
        if world.rank == 0:
            with _explained():
                build()
                offer, fd = _create()
    except Unavailable as e:
        offer = str(e)
    offer = world.tell(offer)  # only now do the other ranks load what rank 0 has compiled
    try:
        if isinstance(offer, str):
            raise Unavailable(offer)
        with _explained():
            fd = _open(**offer) if fd is None else fd
            build()
            taken, fd = fd, None
            torch.ops.ladder.join_memory(taken, world.rank, world.tp_size, slots, slot_bytes, name)
    except Unavailable as e:
        reason = str(e)
        if fd is not None:
            os.close(fd)
    reasons = [text for text in world.gather(reason) if text]
    if reasons:
        if reason is None:
            torch.ops.ladder.leave_memory(name)
        raise Unavailable(reasons[0])
    return torch._C._distributed_c10d._resolve_process_group(name)


def shares(group):
    """Return whether a process group, or None, is one of connect()."""
    return getattr(group, "group_name", "").startswith(GROUP)


def lost_peer():
    """Return whether a rank that this process waited for has died."""
    return torch.ops.ladder.memory_lost_peer()


def progress():
    """Return (completed pieces of this process's collectives, the rank that it waits for or None)."""
    pieces, awaited = torch.ops.ladder.memory_progress()
    return pieces, None if awaited < 0 else awaited


def abandon():
    """Make every collective that waits raise, now and from now on."""
    torch.ops.ladder.memory_abandon()


def build():
    """Load the operators of shared_memory.cpp. Raises InputError."""
    load_group(Path(__file__).with_name("shared_memory.cpp"), "join_memory", "memory shared by ranks")


@contextlib.contextmanager
def _explained():
    """Turn whatever fails in this block into Unavailable."""
    try:
        yield
    except (AttributeError, OSError, RuntimeError, ValueError) as e:  # memfd_create is Linux's
        raise Unavailable(str(e).splitlines()[0]) from None


def _create():
    """Return (the arguments of _open on the other ranks, the file descriptor)."""
    fd, token = os.memfd_create(NAME), secrets.token_hex(16)
    os.write(fd, token.encode())
    return {"pid": os.getpid(), "fd": fd, "token": token}, fd


def _open(pid, fd, token):
    """Return a descriptor of rank 0's file. Raises Unavailable if that is another machine's or container's."""
    path = f"/proc/{pid}/fd/{fd}"
    try:
        if os.readlink(path).startswith(f"/memfd:{NAME}"):  # opening another kind of file may have an effect
            own = os.open(path, os.O_RDWR)
            if os.pread(own, len(token), 0) == token.encode():
                return own
            os.close(own)
    except OSError as e:
        raise Unavailable(f"rank 0's memory is out of reach: {e.strerror}") from None
    raise Unavailable("rank 0 is on another machine or in another container")


def connect_watched(world):
    """Return the group of connect(), whose progress the Watch sees."""
    group = connect(world)
    watch.monitors.add(sys.modules[__name__])
    return group


COLLECTIVES["shared-memory"] = Collective("CPU ranks of one machine through memory that they share", connect_watched)
