"""Collectives of CPU ranks on one machine through shared_memory.cpp: how the ranks come to share the memory.

The memory is a file without a name, so that nothing is left behind however a run ends. Rank 0 creates it, and the other
ranks open it as /proc/PID/fd/FD.
"""

import contextlib
import os
import secrets
from pathlib import Path

import torch

from ladder.errors import InputError, first_line
from ladder.kernels import ordered  # noqa: F401, defines torch.ops.ladder.settle and gather
from ladder.kernels.cpp import load_operators
from ladder.ranks.group import new_name

SLOTS = 8  # of each rank
SLOT_BYTES = 2**23  # take memory only where a message has filled them
GROUP = "shared-memory"


def connect(world, slots=SLOTS, slot_bytes=SLOT_BYTES):
    """Sum on the CPU ranks of one machine through memory that they share.

    Returns the process group of the World's ranks, which lives as long as the process. slot_bytes: a multiple of 8.
    Raises InputError, on all ranks alike, if one cannot.
    """
    name = new_name(GROUP)
    with world.together(), explained():
        build()
        file = create() if world.rank == 0 else {}
    file = world.gather(file)[0]
    with world.together(), explained():
        fd = file["fd"] if world.rank == 0 else open_file(**file)
        torch.ops.ladder.join_memory(fd, world.rank, world.tp_size, slots, slot_bytes, name)
    return torch._C._distributed_c10d._resolve_process_group(name)


def build():
    """Load the operators of shared_memory.cpp, once. Raises InputError."""
    if not hasattr(torch.ops.ladder, "join_memory"):
        source = Path(__file__).with_name("shared_memory.cpp")
        load_operators(source, "memory shared by ranks", "-DUSE_DISTRIBUTED", "-DUSE_C10D")
        torch.library.register_fake("ladder::settle_in_cpp", lambda x, pending, after: torch.empty_like(x))


@contextlib.contextmanager
def explained():
    """Turn whatever fails in this block into an InputError."""
    try:
        yield
    # memfd_create is Linux's; anyone may write to the store in which rank 0 names its file
    except (AttributeError, OSError, RuntimeError, TypeError, ValueError) as e:
        raise InputError(first_line(e)) from None


def create():
    """Create a file in memory; return the arguments of open_file on the other ranks."""
    name = f"ladder-fast-{secrets.token_hex(16)}"
    return {"pid": os.getpid(), "fd": os.memfd_create(name), "name": name}


def open_file(pid, fd, name):
    """Return a descriptor of rank 0's file. Raises InputError if that is another machine's or container's."""
    path = f"/proc/{int(pid)}/fd/{int(fd)}"
    try:
        if os.readlink(path).startswith(f"/memfd:{name}"):
            return os.open(path, os.O_RDWR)
    except OSError as e:
        raise InputError(f"rank 0's memory is out of reach: {e.strerror}") from None
    raise InputError("rank 0 is on another machine or in another container")
