"""Tensor parallelism: which rank holds what of the weights, and the collectives of a forward pass. Nothing else shards,
and nothing else communicates while a model computes.

shard_plan says which linears are column-parallel (dimension 0) and which row-parallel (dimension 1), load_shard cuts
them. An asynchronous all-reduce starts in TensorParallel.start and is waited for in settle. Shape letters: model.py.
"""

import math
import re
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn as nn
from tqdm import tqdm

from formats.checkpoint import check_shape, read_part
from kernels import cpu, int_linear, shared_memory
from model import VOCAB_BLOCK, pad_logits
from runtime import extras, watch
from runtime.errors import InputError

# ---- The sharding plan -----------------------------------------------------------------------------------------------


def share(n, rank, shares, things=None):
    """Return the range (start, stop) of n things that a rank gets; where they have a name, no rank may get none.

    The first of equal shares is never a smaller one: a rank that is simulated alone has the slowest rank's work.
    """
    bounds = [-(-n * sum(shares[:r]) // sum(shares)) for r in range(len(shares) + 1)]
    if things and len({*bounds}) <= len(shares):
        raise InputError(f"--shares: {min(shares)} of {sum(shares)} is none of {n} {things}: each needs 1 in {n}")
    return bounds[rank], bounds[rank + 1]


def as_shares(shares):
    """Return a World's shares as they are, and a number of ranks as so many alike."""
    return (1,) * shares if isinstance(shares, int) else shares


def lanes_of(config, rank, shares):
    """Return [(lane, lanes)] that a rank holds, each to be cut like a rank of so many; without lanes [(rank, shares)].

    Raises InputError if a lane would have to be cut.
    """
    shares, L = as_shares(shares), config.lanes
    if L is None:
        return [(rank, shares)]
    if any(L * part % sum(shares) for part in shares):
        fit = ", ".join(str(n) for n in range(1, L + 1) if L % n == 0)
        raise InputError(f"the {L} lanes of wiring {config.wiring} do not fit {len(shares)} ranks: use {fit}, alike")
    return [(lane, (1,) * L) for lane in range(*share(L, rank, shares))]


def shard_plan(config, rank, shares):
    """Return {name in its module: (dimension, [(start, stop), ...])}: what this rank holds of each sharded linear.

    Column-wise (rows of the weight, dimension 0): wqkv by KV-head groups, w1, w3, and the output head by the
    vocabulary. Row-wise (columns of the weight, dimension 1): wo and w2. With more ranks than KV heads, the ranks
    that share a KV head each hold a copy of it and a part of its query heads. The MLP is cut between the groups of w2,
    in int4 every 128 columns if it can be; where groups are too few, between halves of them and so on.
    shares: a World's, or a number of ranks alike. Raises InputError when one would have no head or part of the MLP.
    """
    shares = as_shares(shares)
    tp_size, alike = len(shares), sum(shares) / min(shares)  # so many ranks if each had the least share
    N, K, H = config.n_heads, config.n_kv_heads, config.head_dim
    G, width = N // K, config.intermediate_size
    size = 1 if config.group_size is None or "w2" in config.kept else config.group_size
    if size > 1 and width % 128 == 0 and width >= 8 * 128 * alike and not config.kind.laned:
        size = 128  # as PyTorch's kernel for int4 on a GPU wants it; no share is more than an eighth above its due
    if config.lanes and size > 1:  # the neurons that they have without integers
        if width % (8 * config.lanes):
            raise InputError(f"{config.lanes} lanes cut groups of int4 at no multiple of 8 columns of w2: keep w2")
        size = 8
    while size > 8 and width // size < alike:  # few_rows.cpp takes groups of 8 and more
        size //= 2
    parts, limit = width // size, min(N, width // size)
    if tp_size > limit:
        name = "n_heads" if limit == N else "intermediate_size" + (f" / {size}" if size > 1 else "")
        what, who = (f"tp {tp_size}", "ranks") if config.lanes is None else (f"wiring {config.wiring}", "lanes")
        raise InputError(f"{what} cannot shard {name} {limit}: use 1 to {limit} {who}")
    if tp_size <= K:
        first, last = share(K, rank, shares, "KV heads")
        qkv = [(first * (G + 2) * H, last * (G + 2) * H)]
        heads = first * G, last * G
    else:
        group = rank * K // tp_size
        sharers = [r for r in range(tp_size) if r * K // tp_size == group]
        a, b = share(G, sharers.index(rank), [shares[r] for r in sharers], "query heads of a KV head")
        start = group * (G + 2) * H
        qkv = [(start + a * H, start + b * H), (start + G * H, start + (G + 2) * H)]
        heads = group * G + a, group * G + b
    hidden = [tuple(i * size for i in share(parts, rank, shares, "parts of the MLP"))]
    return {
        "wqkv": (0, qkv), "wo": (1, [(heads[0] * H, heads[1] * H)]), "w1": (0, hidden), "w3": (0, hidden),
        "w2": (1, hidden), "output": (0, [head_rows(config.vocab_size, rank, shares)]),
    }  # fmt: skip


def head_rows(vocab_size, rank, shares):
    """Return the range of the rows of the output head on a rank: whole blocks, but for the vocabulary's end."""
    return tuple(
        min(i * VOCAB_BLOCK, vocab_size) for i in share(-(-vocab_size // VOCAB_BLOCK), rank, as_shares(shares))
    )


def held(config, dtype, rank=0, shares=1, skeleton=None):
    """Return {name in load_shard's model: (name, shape, dtype, dimension, ranges, each)}: what a rank holds of a
    checkpoint's tensor of that name.

    That is the ranges [(start, stop), ...] of the dimension, joined; None for all of it, [] for zeros. Ranges count the
    columns of a matrix; one stored number covers `each` of them: a packed byte 2, the scale of a group all of its own.
    skeleton: load_shard's, if there is one already. Raises InputError as shard_plan and lanes_of do.
    """
    lanes, found = lanes_of(config, rank, shares), {}
    skeleton, plans = skeleton or int_linear.skeleton(config, len(lanes)), [shard_plan(config, *lane) for lane in lanes]
    head = head_rows(config.vocab_size, rank, shares)
    for place, whole in skeleton.named_parameters():  # a tied output head is not among them
        other = re.match(r"other_lanes\.(\d+)\.", place)
        i = int(other[1]) + 1 if other else 0
        name = place[other.end() :] if other else place
        path, _, kind = name.rpartition(".")
        module = path.rpartition(".")[2]
        dim, ranges = plans[i].get(module, (0, None))
        shape, each, D = list(whole.shape), 1, config.dim
        if module == "output":
            ranges = [head]
        elif module.endswith("norm") and shape[0] > D:  # of lanes
            ranges = [(lanes[i][0] * D, (lanes[i][0] + 1) * D)]
        elif dim == 1 and kind == "bias":  # added to a partial: whole in one, zero in the others
            dim, ranges = 0, None if lanes[i][0] == 0 else []
        elif dim == 1 and shape[1] == 1:  # the scale of a row
            ranges = None
        elif dim == 1:
            each = skeleton.get_submodule(path).in_features // shape[1]
        if ranges:  # a group that is cut becomes smaller ones
            shape[dim] = sum((stop - start) // math.gcd(each, start, stop) for start, stop in ranges)
        dtype_of = dtype if whole.is_floating_point() else whole.dtype
        found[place] = name, tuple(shape), dtype_of, dim, ranges, each
    return found


def load_shard(config, weights, dtype, device, rank=0, shares=1):
    """Return the Transformer with this rank's shard of the weights, on the device, of the dtype; without collectives.

    weights: anything with shape(name), dtype(name) and fill(target, name, dim, ranges), such as checkpoint.Weights.
    Raises InputError for tensors that are missing, of another shape than the config says, or not finite.
    """
    if torch.device(device).type == "cpu":
        cpu.keep_freed_memory()
    model = int_linear.skeleton(config, len(lanes_of(config, rank, shares)))
    parts = held(config, dtype, rank, shares, model)
    for place, (name, *part) in tqdm(parts.items(), desc="loading", unit="tensor", delay=1, disable=rank > 0 or None):
        watch.at("load of", name)
        check_shape(weights, name, model.get_parameter(place).shape)
        _put(model, place, read_part(weights, name, *part, device))
    if config.tie_embeddings:
        start, stop = head_rows(config.vocab_size, rank, shares)
        for kind, tensor in model.tok_embeddings.named_parameters():
            _put(model, f"output.{kind}", tensor[start:stop])
    return model.to(device)  # moves the rope frequencies, which stay float32


def _put(model, name, tensor):
    path, _, kind = name.rpartition(".")
    module = model.get_submodule(path)
    setattr(module, kind, nn.Parameter(tensor, requires_grad=False))
    if isinstance(module, nn.Linear) and kind == "weight":
        module.out_features, module.in_features = tensor.shape


# ---- The collectives -------------------------------------------------------------------------------------------------

torch.library.define("ladder::settle", "(Tensor x, Tensor? pending, Tensor? after) -> Tensor")
torch.library.register_fake("ladder::settle", lambda x, pending, after: torch.empty_like(x))


@torch.library.impl("ladder::settle", "default")
def _settle(x, pending, after):
    """Return x + wait(pending), or a copy of x. Opaque to the compiler; `after`, a later collective, is an input.

    `after` is only a dependency: the wait cannot move before that start, nor past the next sublayer, which reads x.
    With plain operators Inductor fuses the residual additions of neighbouring sublayers and waits for both at once.
    Where ranks share memory, shared_memory.cpp has the same for CPUs.
    """
    return x.clone() if pending is None else x + torch.ops._c10d_functional.wait_tensor(pending)


torch.library.define("ladder::arrive", "(Tensor(a!) pending, Tensor after) -> ()")
torch.library.register_fake("ladder::arrive", lambda pending, after: None)


@torch.library.impl("ladder::arrive", "default")
def _arrive(pending, after):
    """Wait like settle, without its addition: on a GPU the compiler puts that into the kernel of the next norm."""
    torch.ops._c10d_functional.wait_tensor(pending)


torch.library.define("ladder::gather", "(Tensor part, int tp_size, str group) -> Tensor")
torch.library.register_fake("ladder::gather", lambda part, tp_size, group: part.new_empty(tp_size, *part.shape))


@torch.library.impl("ladder::gather", "default")
def _gather(part, tp_size, group):
    """Return the parts (B, ...) of all ranks as (tp_size, B, ...).

    Like any collective but all_reduce it is wrapped in one opaque operator: in the compiler's C++ wrapper (torch 2.13)
    neither form of all-gather works, and a process group written in Python has only the coalesced one.
    """
    ops = torch.ops._c10d_functional
    [parts] = ops.all_gather_into_tensor_coalesced([part.contiguous()], tp_size, group)
    return ops.wait_tensor(parts).unflatten(0, (tp_size, -1))


class Collective(NamedTuple):
    """A way to sum over ranks. about: its line of --help. connect(world): returns the process group that does it.

    connect gets a launch.World whose `group` is torch.distributed's own. Raises InputError, on all ranks alike, where
    the ranks cannot use it.
    """

    about: str
    connect: Callable


def connect_auto(world):
    """Return the fastest group: memory that CPU ranks share, or one hop between their nodes; else NCCL or gloo."""
    if world.device.type != "cpu":
        return world.group
    try:
        if len({*world.nodes}) > 1:
            return collective("one-hop").connect(world)
        group = shared_memory.connect(world)
    except (InputError, shared_memory.Unavailable) as e:
        if world.rank == 0:
            print(f"gloo carries the all-reduces: {e}", file=sys.stderr, flush=True)
        return world.group
    watch.monitors.add(shared_memory)
    return group


COLLECTIVES = {
    "auto": Collective("CPUs of one node through shared memory, of several in one hop; GPUs by NCCL", connect_auto),
    "library": Collective("by gloo or NCCL", lambda world: world.group),
}


def collective(name):
    """Return the Collective of this name, if need be from extras/collectives. Raises InputError for unknown ones."""
    if name not in COLLECTIVES:
        extras.load("collectives", f"--comm {name}")
    if name not in COLLECTIVES:
        raise InputError(f"--comm {name} is unknown: use one of {', '.join(sorted(COLLECTIVES))}")
    return COLLECTIVES[name]


class TensorParallel:
    """The collectives of a process group; see SingleDevice in model.py for their meaning."""

    def __init__(self, config, shares, group):
        shares = as_shares(shares)
        self.tp_size, self.vocab_size, self.group = len(shares), config.vocab_size, group.group_name
        parts = [head_rows(config.vocab_size, rank, shares) for rank in range(self.tp_size)]
        self.first, self.sizes = parts[group.rank()][0], [stop - start for start, stop in parts]

    def start(self, partial):
        return torch.ops._c10d_functional.all_reduce(partial, "sum", self.group)

    def wait(self, pending):
        return torch.ops._c10d_functional.wait_tensor(pending)

    def settle(self, x, pending, after=None):
        if after is None:  # nothing to hold back: fuse this with the next norm
            return x if pending is None else x + self.wait(pending)
        if pending is None or not x.is_cuda:
            return torch.ops.ladder.settle(x, pending, after)
        torch.ops.ladder.arrive(pending, after)
        return x + pending

    def local_logits(self, logits):
        return pad_logits(logits, -(-max(self.sizes) // VOCAB_BLOCK) * VOCAB_BLOCK), self.first, self.vocab_size

    def all_gather(self, x):
        return torch.ops.ladder.gather(x, self.tp_size, self.group)

    def gather_logits(self, logits):
        return torch.cat(
            [x[..., :n] for x, n in zip(self.all_gather(self.local_logits(logits)[0]), self.sizes, strict=True)], -1
        )
