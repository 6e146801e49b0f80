"""How ranks sum, by the names that --comm takes.

Once the ranks have met, each calls PROCESS_GROUPS[NAME](world). It returns the process group with which
tp.TensorParallel sums, or raises InputError on all ranks alike.
"""

import importlib

from ladder.errors import InputError, did_you_mean


def connect_auto(world):
    """Sum in shared memory on CPUs of one node, else as library does: no GPU has run one-shot sums."""
    try:
        if world.device.type == "cpu" and len({*world.nodes}) == 1:
            return collective("shared-memory")(world)
    except InputError as e:
        world.say(f"gloo carries the all-reduces: {e}")
    return world.group


def connect_library(world):
    """Sum by gloo or NCCL."""
    return world.group


def connect_of(module):
    """Return the connect() of a module of this folder, which is imported once it is called."""
    return lambda world: importlib.import_module(f"ladder.ranks.{module}").connect(world)


PROCESS_GROUPS = {
    "auto": connect_auto, "library": connect_library, "shared-memory": connect_of("shared_memory"),
    "one-shot": connect_of("one_shot"), "int8": connect_of("eight_bits"),
}  # fmt: skip


def collective(name):
    """Return the function of PROCESS_GROUPS of this name. Raises InputError."""
    if name not in PROCESS_GROUPS:
        names = ", ".join(sorted(PROCESS_GROUPS))
        raise InputError(f"--comm {name} is unknown: use one of {names}{did_you_mean(name, PROCESS_GROUPS)}")
    return PROCESS_GROUPS[name]
