"""How many bytes a rank's weights and cache take, how many a step reads, and how many are free."""

import contextlib
import ctypes
import math
import os
import resource
import sys
from pathlib import Path

import torch

from ladder import cgroups
from ladder.ranks.world import local_rank_and_size
from model import build, has_slots
from tp import set_parameter, shard_slices

GRAPH_BYTES = 4e8  # of a GPU's captured decode steps, 20 MB each by estimate


def free_bytes(device):
    """Return the free memory of the device; on a CPU, what the system can give, and may give here, without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = _kilobytes("/proc/meminfo", "MemAvailable:")
    available = available or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # not Linux: what it has
    return min(available, cgroups.free_bytes(), *_below_limits())


def _below_limits():
    """Yield how many bytes this process may still take below its own limits: ulimit -v and ulimit -d."""
    for kind, used in (resource.RLIMIT_AS, "VmSize:"), (resource.RLIMIT_DATA, "VmData:"):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            yield max(0, limit - (_kilobytes("/proc/self/status", used) or 0))


def _kilobytes(path, name):
    """Return the bytes that a file of /proc says in kB, or None if this is not Linux."""
    info = Path(path)
    return 1024 * int(info.read_text().partition(name)[2].split()[0]) if info.is_file() else None


def shard_on_meta(config, dtype, rank, shares):
    """Return (a rank's Transformer on "meta", without memory and with a whole tied head; {name: ShardSlice})."""
    model = build(config)
    slices = shard_slices(model, dtype, rank, shares)
    for name, piece in slices.items():
        set_parameter(model, name, torch.empty(piece.shape, dtype=piece.dtype, device="meta"))
    return model, slices


def slices_bytes(slices):
    """Return the bytes of a rank's weights. slices: as shard_on_meta returns them."""
    return sum(math.prod(piece.shape) * piece.dtype.itemsize for piece in slices.values())


def cache_bytes(model, rows, slots):
    """Return the bytes of a rank's cache."""
    return sum(tensor.nbytes for layer in model.new_cache(rows, slots) for tensor in layer)


def ranks_beside(world):
    """Return the ranks that share this one's memory, itself included: those of its GPU, or of its machine."""
    if world.device.type == "cuda":
        return [rank for rank, name in enumerate(world.devices) if name == world.devices[world.rank]]
    _, local = local_rank_and_size(world.rank, world.tp_size)
    first = world.rank // local * local
    return [*range(first, min(first + local, world.tp_size))]


def warn_of_memory(world, config, dtype, rows, slots):
    """Print a line on stderr if this rank's weights, cache and CUDA graphs exceed the free memory.

    Of equal shares rank 0 has the largest, and says it for all, unless some KV heads have more ranks than others. A
    GPU's free memory is without what the ranks that have met already took: the context, and NCCL's buffers. Ranks of
    one machine, or of one GPU, share its memory. Activations, and a draft's model, come on top. Raises InputError.
    """
    if world.rank > 0 and len({*world.shares}) == 1 and world.tp_size % config.n_kv_heads in (0, world.tp_size):
        return
    model, slices = shard_on_meta(config, dtype, world.rank, world.shares)
    needed = slices_bytes(slices) + cache_bytes(model, rows, slots)
    free = free_bytes(world.device)
    if world.device.type == "cuda":
        needed += GRAPH_BYTES
    free *= world.shares[world.rank] / sum(world.shares[rank] for rank in ranks_beside(world))
    if needed > free:
        text = f"about {needed / 1e9:,.2f} GB needed, {free / 1e9:,.2f} free" + " for it" * world.shares_gpu
        print(f"weights and cache of rank {world.rank} may not fit: {text}", file=sys.stderr)


def weight_bytes(model, tokens):
    """Return {name: bytes} that a pass of so many tokens reads of each weight: of experts, those that they choose.

    How many these are is the mean. Of the embedding table a pass reads next to nothing.
    """
    result = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        if "tok_embeddings." not in name:
            result[name] = weight.nbytes * share_read(model.config, name, tokens)
    return result


def share_read(config, name, tokens):
    """Return the expected share of the parameter `name` that a pass of so many tokens reads."""
    return math.prod(each.share_read(name, tokens) for each in config.architecture)


def step_bytes(model, cache, filled, drafted=0):
    """Return the bytes that a decode step of this rank reads, of a token and so many drafted ones in each row.

    Of the cache count `filled` slots, or a window of them, or the state of linear attention.
    """
    total = sum(weight_bytes(model, len(cache[0][0]) * (1 + drafted)).values())
    for attention, layer in zip(model.attentions, cache, strict=True):
        if has_slots(layer):
            total += sum(tensor[:, :, 0].nbytes for tensor in layer) * attention.slots_read(filled)
        else:  # a state, which a step reads as a whole
            total += sum(tensor.nbytes for tensor in layer)
    return total


def peak_bytes(device):
    """Return the peak memory of this process: allocated on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # on Linux ru_maxrss would count the parent's memory at the time of the fork
    return _kilobytes("/proc/self/status", "VmHWM:") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def keep_freed_memory():
    """Let glibc reuse freed memory: otherwise a prefill spends its time on page faults."""
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, at its maximum
        mallopt(-1, 2**30)  # M_TRIM_THRESHOLD


def release_freed_memory():
    """Let glibc give freed memory back, which otherwise stays with the process in pieces."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
