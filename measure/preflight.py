"""A warning, before anything is allocated, of a run whose weights and KV cache are larger than the free memory."""

import math
import os
import sys

from kernels import int_linear
from measure import report
from tp import held, shard_plan


def weight_bytes(config, dtype, rank=0, tp_size=1):
    """Return the bytes of a rank's weights. Raises InputError as shard_plan does."""
    parts = held(int_linear.skeleton(config), dtype, rank, tp_size).values()
    return sum(math.prod(shape) * stored.itemsize for shape, stored, *_ in parts)


def cache_bytes(config, dtype, rows, slots, rank=0, tp_size=1):
    """Return the bytes of a rank's KV cache: the rows of wqkv that are no queries, for each slot."""
    plan = shard_plan(config, rank, tp_size)
    heads, queries = (sum(stop - start for start, stop in plan[name][1]) for name in ("wqkv", "wo"))
    return config.n_layers * rows * slots * (heads - queries) * dtype.itemsize


def warn(world, rows, slots, *models):
    """Print a line on stderr if the models [(Config, dtype, tp_size)] and their caches are larger than the free memory.

    Rank 0 has the largest shard, and says it for all. Activations come on top.
    """
    if world.rank > 0:
        return
    needed = sum(
        weight_bytes(config, dtype, 0, tp_size) + cache_bytes(config, dtype, rows, slots, 0, tp_size)
        for config, dtype, tp_size in models
    )
    # the CPU ranks of a machine share its memory
    sharers = 1 if world.alone or world.device.type != "cpu" else int(os.environ.get("LOCAL_WORLD_SIZE", world.tp_size))
    free = report.free_bytes(world.device) / sharers
    if needed > free:
        print(
            f"weights and cache may not fit: about {needed / 1e9:,.2f} GB needed per rank, {free / 1e9:,.2f} free",
            file=sys.stderr,
        )
