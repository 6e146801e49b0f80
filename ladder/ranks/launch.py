"""What scripts call: run() starts and ends their main(), and join() lets the ranks of a run meet."""

import contextlib
import os
import sys

import torch.distributed as dist

from ladder import cgroups
from ladder.errors import InputError
from ladder.progress import progress
from ladder.ranks import ending, store
from ladder.ranks.world import World, choose_device, rank_and_size


def join(device=None, flags=None):
    """Join the ranks that torchrun started with this one, if any; returns the World.

    device: "cpu", "cuda", "cuda:1", or None for CUDA if every local rank finds a GPU. With "cuda" each of several ranks
    takes the GPU of its LOCAL_RANK, or the only one that it sees if each sees another one, as with Slurm; with "cuda:1"
    all share that one, which is for trying them. flags: {name: value} of
    the command line, equal on all ranks; "comm" names one of PROCESS_GROUPS.
    Raises InputError for a device that is not there, and for ranks that were not started alike.
    """
    cgroups.limit_threads()
    flags = flags or {}
    if rank_and_size()[1] > 1:
        from ladder.ranks import meeting

        return meeting.meet(device, flags)
    world = World(0, 1, None, shares=flags.get("shares"))
    if (comm := flags.get("comm", "auto")) != "auto":
        from ladder.ranks.collectives import collective

        collective(comm)  # is there such a way?
        raise InputError(f"--comm {comm} is how ranks sum: start two or more, with torchrun")
    world.device = choose_device(device)
    return world


def open_streams():
    """Open the null device where stdin, stdout or stderr is closed; show what stdout's encoding lacks as \\xe9."""
    for name, mode in ("stdin", "r"), ("stdout", "w"), ("stderr", "w"):
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, os.O_RDWR)  # the lowest descriptor that is free, so the closed one
            os.set_inheritable(fd, True)
            setattr(sys, name, os.fdopen(fd, mode))
    sys.stdout.reconfigure(errors="backslashreplace")


def run(main):
    """Run a script's main(), and end the process: what ends one rank ends all, and one of them says why in one line."""
    open_streams()
    ending.heed_signals()
    error = None
    several = False
    try:
        try:
            cgroups.limit_threads()
            several = rank_and_size()[1] > 1
            if several:
                store.torchrun_store()  # now, so that of several ranks with bad flags one says so
            main()
            sys.stdout.flush()
            progress.at("the end")
            if dist.is_initialized():
                dist.barrier()
        finally:
            ending.ignore_signals()
    except BaseException as e:
        error = e
    if isinstance(error, Exception):  # which a library may have raised for the one of a signal
        error = ending.received or error
    if several:
        from ladder.ranks import watch

        error = watch.explain(error)
    with contextlib.suppress(OSError):
        sys.stdout.flush()  # what --help printed, or the text so far
    ending.leave(error)
