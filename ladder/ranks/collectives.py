"""How ranks sum, by the names that --comm takes.

Once the ranks have met, each calls PROCESS_GROUPS[NAME](world). It returns the process group with which
tp.TensorParallel sums, or raises InputError on all ranks alike.
"""

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


def connect_shared_memory(world):
    """Sum in memory that the CPU ranks of one machine share."""
    from ladder.ranks import shared_memory

    return shared_memory.connect(world)


def connect_one_shot(world):
    """Sum by kernels that read the peer GPUs' memory, which no GPU has run."""
    from ladder.ranks import one_shot

    return one_shot.connect(world)


def connect_int8(world):
    """Sum by gloo or NCCL partials that travel in 8 bits, which rounds them."""
    from ladder.ranks import eight_bits

    return eight_bits.connect(world)


PROCESS_GROUPS = {
    "auto": connect_auto, "library": connect_library, "shared-memory": connect_shared_memory,
    "one-shot": connect_one_shot, "int8": connect_int8,
}  # fmt: skip


def collective(name):
    """Return the function of PROCESS_GROUPS of this name. Raises InputError."""
    if name not in PROCESS_GROUPS:
        names = ", ".join(sorted(PROCESS_GROUPS))
        raise InputError(f"--comm {name} is unknown: use one of {names}{did_you_mean(name, PROCESS_GROUPS)}")
    return PROCESS_GROUPS[name]
