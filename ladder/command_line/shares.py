"""--shares auto: what each rank gets of a model, by how fast it reads its memory and how much of it is free.

An example: two ranks read 24 and 12 GB/s, so that the first is to get two thirds, and the shares are (2, 1). If the
second had room for a quarter of the weights only, they would be (3, 1).
"""

import torch

from ladder import benchmarking
from ladder.command_line.flags import read_dtype
from ladder.errors import InputError
from ladder.memory import free_bytes, ranks_beside, shard_on_meta, slices_bytes
from tp import shard_plan

USABLE = 0.8  # of the free memory: the rest is for the cache and for activations
READ = 2**28  # bytes that a CPU reads to measure its memory, more than its caches hold
TOLERANCE = 1.1  # a rank may get this many times what suits it: whole heads are not cut finer
MOST_PARTS = 32  # in which the model is cut, unless there are more ranks


def choose_shares(args, world, config):
    """Give the world the shares that --shares auto measures; other ones it has already. All ranks call this together.

    Raises InputError on all ranks where they read other files: with other configs they would not measure alike.
    """
    if args.shares != "auto" or world.alone:
        return
    world.agree({}, checkpoint=args.checkpoint)
    with world.together():
        dtype = read_dtype(args)
    world.shares = measured_shares(world, config, dtype)


def measured_shares(world, config, dtype):
    """Return the shares of the ranks of a world, after measuring each, and say them on rank 0.

    They are equal where a wiring's function depends on how the ranks share it out.
    """
    wiring = config.named_wiring
    has_own_shards = wiring.shards((2, 1)) != (2, 1)
    if wiring.varies_with_ranks or has_own_shards:
        world.say(f"--shares auto: equal ones, since with others wiring {config.wiring} is another function")
        return (1,) * world.tp_size
    free = max(1, free_bytes(world.device))
    room = world.gather(USABLE * free / len(ranks_beside(world)))
    speeds = world.gather(max(1, benchmarking.read_bandwidth(world.device, world, READ)))
    if world.device.type == "cuda":
        torch.cuda.empty_cache()  # of what was read, since others ask the driver what is free
    _, slices = shard_on_meta(config, dtype, 0, (1,))
    weights = slices_bytes(slices)
    room = [each / weights for each in room]
    wanted = fractions(speeds, room)
    shares = whole_numbers(wanted, lambda numbers: fits(config, numbers))
    why = f"the ranks read {', '.join(f'{speed / 1e9:.1f}' for speed in speeds)} GB/s"
    if wanted != fractions(speeds, [1] * len(speeds)):
        why += f" and have room for {', '.join(f'{each:.2g}' for each in room)} of the weights"
    world.say(f"--shares {','.join(map(str, shares))}, since {why}")
    return shares


def fractions(speeds, room):
    """Return what each rank gets of the whole: in proportion to its speed, but no more than it has room for.

    room: of each rank, as a fraction of the whole; if all together have less than the whole, all is by room.
    """
    if sum(room) <= 1:
        return [each / sum(room) for each in room]
    full = {}  # {rank without room for its part: all that it has room for}
    while True:
        left = 1 - sum(full.values())
        speed = sum(each for rank, each in enumerate(speeds) if rank not in full)
        result = [full.get(rank, left * each / speed) for rank, each in enumerate(speeds)]
        over = [rank for rank, part in enumerate(result) if rank not in full and part > room[rank]]
        if not over:
            return result
        full |= {rank: room[rank] for rank in over}


def whole_numbers(wanted, fits):
    """Return the smallest whole numbers by which no rank gets much more than wanted, or those that come closest to it.

    wanted: what each rank is to get of the whole. fits: a function that says whether a model can be cut by numbers.
    """
    best = (1,) * len(wanted)
    for parts in range(len(wanted), max(MOST_PARTS, 2 * len(wanted)) + 1):
        numbers = tuple(max(1, round(parts * part)) for part in wanted)
        if excess(numbers, wanted) < excess(best, wanted) and fits(numbers):
            best = numbers
        if excess(best, wanted) <= TOLERANCE:
            break
    return best


def excess(numbers, wanted):
    """Return how many times as much as wanted the rank gets that all others have to wait for."""
    return max(number / sum(numbers) / part for number, part in zip(numbers, wanted, strict=True))


def fits(config, shares):
    """Return whether each rank would have heads and neurons of the model."""
    try:
        for rank in range(len(shares)):
            shard_plan(config, rank, shares)
    except InputError:
        return False
    return True
