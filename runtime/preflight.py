"""A warning, before anything is allocated, of a run whose weights and KV cache are larger than the free memory."""

import math
import os
import sys

from model import rewired
from runtime import report
from tp import shard_plan, shard_slices


def weight_bytes(config, dtype, rank=0, shares=1):
    """Return the bytes of a rank's weights. Raises InputError as shard_plan does."""
    slices = shard_slices(rewired(config, "standard"), dtype, rank, shares).values()  # in lanes it is about the same
    return sum(math.prod(piece.shape) * piece.dtype.itemsize for piece in slices)


def cache_bytes(config, dtype, rows, slots, rank=0, shares=1):
    """Return the bytes of a rank's KV cache: the rows of wqkv that are no queries, for each slot."""
    plan = shard_plan(rewired(config, "standard"), rank, shares)
    heads, queries = (sum(stop - start for start, stop in plan[name][1]) for name in ("wqkv", "wo"))
    return config.n_layers * rows * slots * (heads - queries) * dtype.itemsize


def warn(world, rows, slots, *models):
    """Print a line on stderr if models [(Config, dtype, rank, shares)] and their caches exceed the free memory.

    Of equal shares rank 0 has the largest, and says it for all. Activations come on top. Raises InputError.
    """
    if world.rank > 0 and len(set(world.shares)) == 1:
        return
    needed = sum(
        weight_bytes(config, dtype, *place) + cache_bytes(config, dtype, rows, slots, *place)
        for config, dtype, *place in models
    )
    # the CPU ranks of a machine share its memory
    sharers = 1 if world.alone or world.device.type != "cpu" else int(os.environ.get("LOCAL_WORLD_SIZE", world.tp_size))
    here = world.shares[world.rank // sharers * sharers :][:sharers]
    free = report.free_bytes(world.device) * world.shares[world.rank] / sum(here)
    if needed > free:
        text = f"about {needed / 1e9:,.2f} GB needed on rank {world.rank}, {free / 1e9:,.2f} free"
        print(f"weights and cache may not fit: {text}", file=sys.stderr)
