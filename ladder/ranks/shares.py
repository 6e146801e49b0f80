"""--shares auto: what each rank gets of a model, by how fast it reads its memory and how much of it is free.

An example: two ranks read 24 and 12 GB/s, so that the first is to get two thirds, and the shares are (2, 1). If the
second had room for a quarter of the weights only, they would be (3, 1).
"""

from ladder import benchmarking
from ladder.errors import InputError
from ladder.memory import free_bytes, shard_on_meta, slices_bytes
from ladder.ranks.world import local_rank_and_size
from tp import shard_plan

USABLE = 0.8  # of the free memory: the rest is for the cache and for activations
TOLERANCE = 1.1  # a rank may get this many times what suits it: whole heads are not cut finer
MOST_PARTS = 32


def measured_shares(world, config, dtype):
    """Return the shares of the ranks of a world, after measuring each, and say them on rank 0.

    Equal ones where a wiring's function depends on how the ranks share it out, and where no other ones fit the model.
    All ranks call this at the same time.
    """
    equal = (1,) * world.tp_size
    wiring = config.named_wiring
    if world.alone or wiring.varies_with_ranks or wiring.fixed_shards:
        return equal
    speeds = world.gather(benchmarking.read_bandwidth(world.device, world))
    _, local_ranks = local_rank_and_size(world.rank, world.tp_size)
    room = world.gather(USABLE * free_bytes(world.device) / local_ranks)
    _, slices = shard_on_meta(config, dtype, 0, (1,))
    weights = slices_bytes(slices)
    wanted = fractions(speeds, [each / weights for each in room])
    shares = whole_numbers(wanted, lambda numbers: fits(config, numbers))
    figures = ", ".join(f"{speed / 1e9:.1f}" for speed in speeds)
    world.say(f"--shares {','.join(map(str, shares))}, since the ranks read {figures} GB/s")
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
    for parts in range(len(wanted), MOST_PARTS + 1):
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
