"""Does a run fit into the memory of its device? What it takes is known from shapes, before anything is allocated.

Shape letters as in model.py.
"""

import dataclasses
import math
import os
from typing import NamedTuple

import torch

from kernels import int_linear, shared_memory
from measure import report
from measure.clock import count_all_reduces
from model import Config, InputError
from tp import head_rows, shard_plan

FLOATS = 2  # numbers of four bytes that sampling has of each logit at a time; with top-p twice as many
HEAP = 3 * 2**25  # bytes that glibc keeps of the small tensors of a pass, at most (cpu.keep_freed_memory)
COMPILER = 2 * 10**8  # bytes that torch.compile leaves in a process, on a CPU


class Request(NamedTuple):
    """What a run asks for.

    rows: B. prompt: tokens of the longest row. new: further slots of the cache, or None for a pass without a cache that
    gives the logits of all tokens. chunk: tokens of all rows in one pass, or None for all of them in one. floats: see
    FLOATS. compiled: whether torch.compile is asked for. second: the Config of a second model that is loaded, or None.
    proposals: of a row in a pass. draft: the (Config, dtype) of a model that makes them, whole on each rank, or None.
    """

    config: Config
    dtype: torch.dtype
    rows: int
    prompt: int
    new: int | None
    chunk: int | None = None
    floats: int = 0
    compiled: bool = False
    second: Config | None = None
    proposals: int = 0
    draft: tuple[Config, torch.dtype] | None = None


def weight_bytes(config, dtype, rank=0, tp_size=1):
    """Bytes of the shard of a rank, from those of one standard layer. Raises InputError as shard_plan does."""
    changes = {"wiring": "standard", "made_for_tp": None, "nope_layers": ()}
    one = int_linear.skeleton(dataclasses.replace(config, n_layers=1, **changes))
    plan, total = shard_plan(config, rank, tp_size), 0
    for path, module in one.named_modules():
        dim, ranges = plan.get(path.rpartition(".")[2], (0, None))
        for kind, weight in module.named_parameters(recurse=False):
            if path == "output" and config.tie_embeddings:
                continue  # a part of the table
            held = weight.numel()
            if ranges and dim == 0:
                held = held // len(weight) * sum(stop - start for start, stop in ranges)
            elif ranges and kind != "bias":  # which is whole
                each = module.in_features // weight.shape[1]  # columns that a byte, or the scale of a group, covers
                if config.quant == "int4" and kind != "weight":
                    each = math.gcd(each, *ranges[0])  # see int_linear.regroup
                held = len(weight) * sum(-(-stop // each) - start // each for start, stop in ranges)
            held *= config.n_layers if path.startswith("layers.") else 1
            total += held * (dtype if weight.is_floating_point() else weight.dtype).itemsize
    return total


def memory(request, rank=0, tp_size=1, device="cpu"):
    """Bytes that a run takes on one rank, beyond what its process has, as {what: bytes}; device: "cpu" or "cuda".

    A pass has its activations (the most of an attention, an MLP and the logits) once, and of an attention over what is
    cached already the mask, as bool and as numbers. What is lost between small tensors is not known: with many rows of
    an integer model, which a CPU multiplies in pieces, that may be as much again. Raises InputError as shard_plan does.
    """
    c, size, plan, B = request.config, request.dtype.itemsize, shard_plan(request.config, rank, tp_size), request.rows
    on_cpu, several, H, V = device == "cpu", tp_size > 1, c.head_dim, c.vocab_size
    [(first, last)], [(start, stop)] = plan["wo"][1], plan["w2"][1]
    heads, inner = (last - first) // H, stop - start
    kv = (sum(b - a for a, b in plan["wqkv"][1]) // H - heads) // 2
    width = request.prompt if request.chunk is None else min(request.prompt, max(1, request.chunk // B))
    tokens, in_parts = B * width, width < request.prompt
    need = {"weights": weight_bytes(c, request.dtype, rank, tp_size)}
    if request.second is not None:
        need["weights"] += weight_bytes(request.second, request.dtype, rank, tp_size)
    if request.new is not None:
        room = request.proposals + bool(request.proposals)
        slots = request.prompt + request.new + room  # a GPU's rounded up, by 256 at most
        need["cache"] = 2 * c.n_layers * B * kv * slots * H * size
    stream = (3 + 2 * several) * tokens * c.dim * size
    masks = in_parts * tokens * request.prompt * (1 + heads // kv * (1 + size))
    attention, mlp = tokens * (heads + kv) * H * (size + 8), 3 * tokens * inner * size
    logits = B * (1 + request.proposals) * V if request.new is not None else tokens * V
    parts = logits // V * 2 * head_rows(V, tp_size) if several else 0  # of this rank, and padded
    copies = 1 + several + 2 * in_parts + (request.second is not None) + (c.quant is not None)
    held = size * (1 + 3 * several)  # of several ranks also the part, padded, what was gathered, and that in order
    logits = max((copies * logits + parts) * size, logits * (held + 4 * request.floats))
    need["activations"] = max(stream + masks + attention, stream + mlp, logits)
    if on_cpu:
        need["activations"] += min(stream + attention + mlp, HEAP)
    if on_cpu and several:  # all ranks on this machine
        message, passes = tokens * c.dim * size, -(-request.prompt // max(1, width))
        slots = shared_memory.SLOTS * min(shared_memory.SLOT_BYTES, message)
        need["shared memory"] = min(slots, count_all_reduces(c) * passes * message)
    if on_cpu and request.compiled:
        need["compiler"] = COMPILER
    if request.draft is not None:
        config, dtype = request.draft
        own = memory(request._replace(config=config, dtype=dtype, compiled=False, draft=None), 0, 1, device)
        need["draft"] = own["weights"] + own["cache"]
        need["activations"] = max(need["activations"], own["activations"])  # the one has them when the other has none
    return need


def check(world, request, names):
    """Raise InputError, with the sum and what would fit, unless the ranks of this machine fit into its free memory.

    names: {field of Request, or "quant": how a smaller one is asked for, with {} for it}, of those that may be named.
    """
    device, tp_size = world.device.type, world.tp_size
    local = 1 if world.alone else int(os.environ.get("LOCAL_WORLD_SIZE", tp_size))
    sharers = local if device == "cpu" else 1  # ranks that have one memory together

    def sums(request, ranks=tp_size, first=0):
        every = [memory(request, rank, ranks, device) for rank in range(first, min(first + sharers, ranks))]
        return {what: sum(need[what] for need in every) for what in every[0]}

    need, free = sums(request, first=world.rank // sharers * sharers), report.free_bytes(world.device)
    if sum(need.values()) <= free:
        return

    def fits(request, ranks=tp_size):
        return sum(sums(request, ranks).values()) <= free

    found = [(name, _most(request, name, fits)) for name in ("rows", "new", "prompt") if name in names]
    found += [("quant", _quantized(request, fits))] if "quant" in names else []
    would = [names[name].format(value) for name, value in found if value]
    if ranks := _fewest(request, tp_size, sharers, fits):
        would.append(f"{ranks} ranks" + (f", {sharers} on each machine like this" if device == "cpu" else ""))
    raise InputError(
        f"this would run out of memory: it takes {in_words(sum(need.values()))}"
        f" ({', '.join(f'{what} {in_words(n)}' for what, n in need.items())}), and {in_words(free)} are free on"
        f" {world.device}: {'what fits is ' + ', or '.join(would) if would else 'no smaller run fits'}"
    )


def in_words(n):
    return f"{n / 1e9:,.2f} GB"


def _most(request, name, fits):
    """The largest number for a field of the request that fits, the others as they are, or 0."""
    low, high = 0, getattr(request, name)  # the one fits, the other does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(request._replace(**{name: middle})) else (low, middle)
    return low


def _quantized(request, fits):
    """The first of int8 and int4 that fits, or None."""
    for quant, group_size in ("int8", None), ("int4", 64):
        if request.config.quant in (None, "int8") and quant != request.config.quant:
            config = dataclasses.replace(request.config, quant=quant, group_size=group_size)
            try:
                int_linear.check(config)
            except InputError:  # its columns are not a multiple of the group
                continue
            if fits(request._replace(config=config)):
                return quant
    return None


def _fewest(request, tp_size, group, fits):
    """The smallest number of ranks that fits, a multiple of those that share a memory, or None."""
    try:
        return next(n for n in range(tp_size + group, request.config.n_heads + 1, group) if fits(request, n))
    except (StopIteration, InputError):  # more than there are parts of the MLP
        return None


def generation(args, config, dtype, prompts, new, proposals=0, draft=None):
    """(Request, names) for check() of what generate.py is to do. args: its flags. new: tokens of an answer, or, where
    there are no prompts, the context of a chat. proposals, draft: see Request."""
    in_passes = not (args.exposed or args.profile)  # which run the prefill in one
    floats = 0 if args.temperature == 0 else FLOATS * (1 + (args.top_p < 1))
    request = Request(
        config, dtype, rows=max(1, len(prompts)), prompt=max(map(len, prompts), default=0), new=new,
        chunk=args.prefill_chunk if in_passes else None, floats=floats, compiled=args.compile or args.compile_prefill,
        proposals=proposals, draft=draft,
    )  # fmt: skip
    names = {"quant": "--quant {}" if args.model else "the same weights in {} (quantize.py)"}
    if prompts:
        return request, names | {"rows": "--batch {}", "new": "--max-new-tokens {}", "prompt": "prompts of {} tokens"}
    return request, names | {"new": "--interactive {}"}
