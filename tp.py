"""Tensor parallelism: the collectives of a forward pass, and which rank holds what of the weights.

An example: an MLP with 4 neurons on two equal ranks, y = w2 (act(w1 x) * w3 x). Each rank computes with its own half of
the neurons, and the two partial y add up to the whole one:

                rank 0           rank 1
    w1, w3      rows 0, 1        rows 2, 3        column-parallel: a rank reads all of x and computes its neurons
    w2          columns 0, 1     columns 2, 3     row-parallel: a rank sums over its neurons, the all-reduce over ranks

Attention is shared out in the same way by its heads: wqkv by rows, wo by columns. A bias of a column-parallel linear is
cut with the rows; that of a row-parallel one is zero on all ranks but rank 0, since the all-reduce adds it up.

The output head is cut by the vocabulary, in blocks of 16 ids (model.VOCAB_BLOCK); each rank holds the whole embedding
table.

There are no linears of other classes for this. A shard is the whole Transformer, built without memory, whose parameters
load_shard replaces by this rank's slices; the forward pass reads its head counts from their shapes.

Rank and shares are arguments, so one process can build any rank's shard. shares: the ranks' relative sizes, (1, 1) for
two equal ones. Ranges are half-open: (first, end) of heads, (start, stop) of rows or columns. Shape letters: model.py.
A lane is a shard with a residual stream of its own, of a wiring that depends on their number (ladder/lanes/).
"""

import math
import re
from typing import NamedTuple

import torch
import torch.nn as nn
from tqdm import tqdm

from ladder.checkpoints.checkpoint import check_shape, read_slice
from ladder.errors import InputError
from ladder.kernels.quant_linear import neuron_unit
from ladder.kernels.registry import plain
from ladder.progress import progress
from model import VOCAB_BLOCK, Collectives, build, pad_logits

# ---- The collectives -------------------------------------------------------------------------------------------------


class TensorParallel(Collectives):
    """The collectives that sum over the ranks of a process group; model.Collectives says what each call does.

    --comm names how the group sums: by gloo or NCCL, or in one of the other ways in ladder/ranks/collectives.py. A way
    of your own is an entry of PROCESS_GROUPS there, a function that returns a process group.
    """

    def __init__(self, config, shares, group):
        from ladder.kernels import ordered, registry  # only here, since it registers torch.ops.ladder

        registry.use(ordered.KERNELS)
        self.settle_operator = ordered.settle_operator()  # for these kernels
        self.tp_size = len(shares)
        self.lanes = len(shares)  # partials in a sum: one of each rank, and more where ladder/lanes/ wraps this
        self.on_host = getattr(group, "on_host", self.on_host)
        self.vocab_size = config.vocab_size
        self.group_name = group.group_name
        ranges = [vocab_range(config.vocab_size, rank, shares) for rank in range(self.tp_size)]
        self.first_id = ranges[group.rank()][0]
        self.sizes = [stop - start for start, stop in ranges]

    # The functional collectives, since the compiler can trace them.

    def start(self, partial):
        return torch.ops._c10d_functional.all_reduce(partial, "sum", self.group_name)

    def wait(self, pending):
        return torch.ops._c10d_functional.wait_tensor(pending)

    # These two do what their base does. They are here to be @plain: in compiled code, and where ranks sum in shared
    # memory, kernels that keep the order of the loop stand in for them (ladder/kernels/ordered.py).

    @plain
    def settle(self, x, pending, newer=()):
        return Collectives.settle(self, x, pending, newer)

    @plain
    def pin(self, x, newer):
        return Collectives.pin(self, x, newer)

    def local_logits(self, logits):
        return pad_logits(logits, max(self.sizes)), self.first_id, self.vocab_size

    def all_gather(self, x):
        return torch.ops.ladder.gather(x, self.tp_size, self.group_name)

    def gather_logits(self, logits):
        shards = self.all_gather(self.local_logits(logits)[0])
        return torch.cat([shard[..., :n] for shard, n in zip(shards, self.sizes, strict=True)], -1)


# ---- The sharding plan -----------------------------------------------------------------------------------------------


def shard_plan(config, rank, shares):
    """Return {name: (dimension, [(start, stop), ...])}: what a rank holds of each linear or norm that ranks share out.

    Column-parallel (rows of the weight, dimension 0): wqkv by KV-head groups, w1, w3, and the output head by the
    vocabulary. Row-parallel (columns of the weight, dimension 1): wo and w2. There may be as many ranks as query heads;
    raises InputError if a rank would have no head or no neuron.
    """
    N = config.n_heads
    if len(shares) > N:
        raise InputError(f"{len(shares)} ranks or lanes cannot shard n_heads {N}: use 1 to {N}")
    wqkv, wo = head_ranges(config, rank, shares)
    plan = {"wqkv": (0, wqkv), "wo": (1, wo), "output": (0, [vocab_range(config.vocab_size, rank, shares)])}
    for mlp, neurons in config.mlps.items():
        ranges = [neuron_range(config, neurons, rank, shares)]
        plan |= {f"{mlp}w1": (0, ranges), f"{mlp}w3": (0, ranges), f"{mlp}w2": (1, ranges)}
    for each in config.architecture:  # what a Llama does not have
        plan |= each.plan_of_heads(config, wo)
        if shared_out := each.sharded_units(config):
            # such as 16, "heads", {"wq": (0, [(0, 4)])}: 16 times 4 rows of wq, of which rank 1 of 2 holds 32 to 64
            n, units, linears = shared_out
            first, end = split_range(n, rank, shares, units)
            for linear, (dim, parts) in linears.items():
                plan[linear] = dim, [(offset + first * size, offset + end * size) for offset, size in parts]
    return plan


def split_range(n, rank, shares, name=None):
    """Return the range (start, stop) of n things that a rank gets, in proportion to its share.

    Bounds are rounded up, so that rank 0 is never the smallest of equals: of 8, three ranks get 3, 3 and 2.
    name: of the things, in the plural; if given, this raises an InputError where a rank would get none.
    """
    bounds = [-(-n * sum(shares[:r]) // sum(shares)) for r in range(len(shares) + 1)]
    if name and len(set(bounds)) < len(bounds):
        raise InputError(f"--shares: {min(shares)} in {sum(shares)} gets none of {n} {name}: give 1 in {n} or more")
    return bounds[rank], bounds[rank + 1]


def head_ranges(config, rank, shares):
    """Return ([row ranges of wqkv], [column ranges of wo]) of a rank; the order of the rows: model.Attention.

    Up to K ranks hold whole KV heads with their query heads: of 4 KV heads, three equal ranks hold 2, 1 and 1. Beyond K
    ranks, rank r holds a copy of KV head r * K // tp_size, and the holders of a KV head divide its query heads by their
    shares. For example, 2 KV heads with 4 query heads each on 3 equal ranks; of the 6 H rows of a KV head, 4 H are its
    queries, then come key and value. The last rank computes twice as much as the others, who wait for it:

                KV head    its query heads    rows of wqkv                  columns of wo
        rank 0  0          0, 1               0 to 2 H and 4 H to 6 H       0 to 2 H
        rank 1  0          2, 3               2 H to 4 H and 4 H to 6 H     2 H to 4 H
        rank 2  1          0 to 3             6 H to 12 H                   4 H to 8 H
    """
    N = config.n_heads
    K = config.n_kv_heads
    H = config.head_dim
    G = N // K
    tp_size = len(shares)
    query_rows = config.ask("query_rows") or H  # of wqkv for a query head
    group_rows = G * query_rows + 2 * H
    if tp_size <= K:
        first, end = split_range(K, rank, shares, "KV heads")
        return [(first * group_rows, end * group_rows)], [(first * G * H, end * G * H)]
    kv_head = rank * K // tp_size
    sharers = [r for r in range(tp_size) if r * K // tp_size == kv_head]  # the ranks with a copy of it
    first, end = split_range(G, sharers.index(rank), [shares[r] for r in sharers], "query heads of a KV head")
    start = kv_head * group_rows  # where its rows of wqkv begin
    stop = start + group_rows
    queries = (start + first * query_rows, start + end * query_rows)
    key_and_value = (stop - 2 * H, stop)
    return [queries, key_and_value], [((kv_head * G + first) * H, (kv_head * G + end) * H)]


def neuron_range(config, neurons, rank, shares):
    """Return the range of an MLP's neurons that a rank holds: rows of w1 and w3, columns of w2.

    Neurons whose columns of w2 share a scale stay together where they can (quant_linear.neuron_unit). Raises InputError
    if a rank or a lane would get no such group, or if the bounds of fixed lanes (ladder/lanes/) would cut one.
    """
    unit = neuron_unit(config, neurons, shares)
    units = neurons // unit
    if len(shares) > units:
        groups = f" in groups of {unit}" if unit > 1 else ""
        raise InputError(f"{len(shares)} ranks or lanes cannot shard {neurons} neurons{groups}: use 1 to {units}")
    lanes = len(config.named_wiring.shards(shares))
    if config.named_wiring.fixed_shards and unit > 1 and units % lanes:
        why = f"{lanes} lanes cut groups of columns at no multiple of {unit} columns of w2"
        raise InputError(f"{why}: keep w2 as it is (quantize.py --keep w2)")
    start, stop = split_range(units, rank, shares, "parts of the MLP")
    return start * unit, stop * unit


def vocab_range(vocab_size, rank, shares):
    """Return the range of a rank's token ids, the rows of the output head: whole blocks but for the last one."""
    blocks = split_range(-(-vocab_size // VOCAB_BLOCK), rank, shares)
    return tuple(min(i * VOCAB_BLOCK, vocab_size) for i in blocks)


class ShardSlice(NamedTuple):
    """What a rank holds of a tensor of the checkpoint, for example columns 512 to 1024 of w2."""

    shape: tuple
    dtype: torch.dtype
    dim: int = 0
    ranges: list | None = None  # [(start, stop), ...] of the matrix along dim, joined; None: all of it
    columns_per_element: int = 1  # that an element covers: 2 for a byte of int4, group_size for one of its scales
    as_stored: bool = False  # keep the stored dtype, float16 or bfloat16: scales of groups in a model of bfloat16
    zeros: bool = False  # zeros instead of the tensor: a bias that rank 0 alone adds


def shard_slices(model, dtype, rank, shares):
    """Return {tensor of the checkpoint: ShardSlice} for a rank. dtype: of the tensors that are not integers.

    For example, of layers.0.attention.wo with 4096 columns, rank 1 of 2 holds: weight: columns 2048 to 4096 (int4:
    bytes 1024 to 2048 of each row); scales of rows (int8): all; bias: zeros, since rank 0 adds it.
    model: a whole one, as build makes it. Raises InputError as shard_plan does.
    """
    plans = [shard_plan(model.config, each, shares) for each in range(len(shares))]
    check_held_once(model, plans)
    named = model.named_parameters()  # without a tied output head
    return {name: _shard_slice(model, name, whole, plans[rank], dtype, rank) for name, whole in named}


def check_held_once(model, plans):
    """Raise InputError unless ranks hold each column of wo, w2 and the like once, so that partials add up, and each id.

    plans: what shard_plan returns for each rank.
    """
    linears = {plan_key(path): module for path, module in model.named_modules() if hasattr(module, "in_features")}
    held = {
        name: ("columns", linears[name].in_features) for name, (dim, _) in plans[0].items() if dim and name in linears
    }
    held["output"] = "rows", model.config.vocab_size
    for name, (what, size) in held.items():
        ranges = sorted(piece for plan in plans for piece in plan[name][1])
        starts = [start for start, _ in ranges]
        stops = [stop for _, stop in ranges]
        if [0, *stops] != [*starts, size]:  # a range begins where the one before it ends
            parts = ", ".join(f"{start} to {stop}" for start, stop in ranges)
            raise InputError(f"the ranks hold {what} {parts} of {name}: each of its {size} must be held once")


def plan_key(name):
    """Return what shard_plan calls a linear or a norm.

    "wo" for "layers.3.attention.wo", "experts.w1" for "layers.3.feed_forward.experts.w1".
    """
    return re.sub(r"^layers\.\d+\.\w+\.", "", name)


def _shard_slice(model, name, whole, plan, dtype, rank):
    """Return the ShardSlice of the parameter `name`, of which a whole model has `whole`.

    Of a linear, a rank holds:

                          column-parallel (dimension 0)    row-parallel (dimension 1)
        weight            its rows                         its columns
        bias              its rows                         all on rank 0, zeros on the others: the sum adds it once
        scales of rows    its rows                         all
        scales of groups  its rows                         those of its columns
    """
    path, _, tensor = name.rpartition(".")  # e.g. "layers.3.attention.wo" and "weight"
    owner = name if path.endswith((".attention", ".feed_forward")) else path  # they may have parameters of their own
    dim, ranges = plan.get(plan_key(owner), (0, None))  # None: all of a norm or an embedding
    dtype, as_stored = _slice_dtype(model.config, name, whole, dtype)
    columns_per_element = 1
    if dim == 1:
        if tensor == "bias":
            return ShardSlice(whole.shape, dtype, zeros=rank > 0)
        columns_per_element = model.get_submodule(path).in_features // whole.shape[-1]
    are_scales_of_rows = dim == 1 and whole.shape[-1] == 1
    if ranges is None or are_scales_of_rows:
        return ShardSlice(whole.shape, dtype, as_stored=as_stored)
    if ".experts." in name:  # the dimension of the experts comes first
        dim += 1
    shape = list(whole.shape)
    shape[dim] = sum(stored_length(start, stop, columns_per_element) for start, stop in ranges)
    return ShardSlice(tuple(shape), dtype, dim, ranges, columns_per_element, as_stored)


def _slice_dtype(config, name, whole, dtype):
    """Return (the dtype of a slice, whether it keeps that of the checkpoint), in a model of `dtype`."""
    if config.stays_float32(name):
        return torch.float32, False
    if whole.itemsize == 1:  # integers or e4m3
        return whole.dtype, False
    is_scale_of_groups = whole.dtype == torch.float16  # as build makes scales and zeros of groups, and nothing else
    return dtype, is_scale_of_groups and dtype == torch.bfloat16


def stored_length(start, stop, columns_per_element):
    """Return how many stored elements cover columns `start` to `stop` of a matrix.

    Where a bound cuts a group, all groups become smaller: their size is the largest that divides both bounds and the
    size before (quant_linear.regroup). Columns 0 to 96 with scales for groups of 64 need 3 scales, for groups of 32.
    """
    return (stop - start) // math.gcd(columns_per_element, start, stop)


# ---- Loading ---------------------------------------------------------------------------------------------------------


def load_shard(config, weights, dtype, device, rank=0, shares=(1,), tok_embeddings=None):
    """Return a rank's Transformer on the device, of the dtype; without collectives.

    weights: anything with read(name) and fill(target, name, dim, ranges), such as checkpoint.Weights, which maps the
    files and reads only these ranges.
    tok_embeddings: those of another shard in this process, to share. Raises InputError for tensors that are missing, of
    another shape than the config says, or not finite.
    """
    model = build(config)
    slices = shard_slices(model, dtype, rank, shares)
    if tok_embeddings is not None:
        model.tok_embeddings = tok_embeddings
        slices = {name: piece for name, piece in slices.items() if not name.startswith("tok_embeddings.")}
    for name, piece in tqdm(slices.items(), desc="loading", unit="tensor", delay=1, disable=rank > 0 or None):
        progress.at("load of", name)
        check_shape(weights, name, model.get_parameter(name).shape)
        set_parameter(model, name, read_slice(weights, name, piece, device))
    if config.tie_embeddings:
        tie_output(model, *vocab_range(config.vocab_size, rank, shares))
    return model.to(device)  # moves the rope frequencies, which build made on the CPU; they stay float32


def tie_output(model, start, stop):
    """Let rows `start` to `stop` of the embedding be the output head: one parameter if these are all, else a view."""
    whole = stop - start == model.config.vocab_size
    model.output.table_rows = start, stop
    for name, table in model.tok_embeddings.named_parameters():
        set_parameter(model, f"output.{name}", table if whole else table[start:stop])


def set_parameter(model, name, tensor):
    """Set a parameter of a model, named as named_parameters does; a linear's sizes follow its weight."""
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    if attribute == "weight" and hasattr(module, "in_features"):  # Attention counts its heads by these
        columns = module.in_features // module.weight.shape[-1]  # of a stored element: 2 in a byte of int4
        module.out_features = tensor.shape[-2]
        module.in_features = tensor.shape[-1] * columns
    is_parameter = isinstance(tensor, nn.Parameter)
    setattr(module, attribute, tensor if is_parameter else nn.Parameter(tensor, requires_grad=False))
