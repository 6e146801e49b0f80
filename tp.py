"""Tensor parallelism: which rank holds what, the collectives, the processes. Only this file shards and communicates.

Shape letters as in model.py.
"""

import argparse
import contextlib
import copy
import functools
import json
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

import cpu
import int_linear
from link import LinkedGroup
from model import InputError, SingleDevice

# ---------------------------------------------------------------------------------------------------------------------
# The sharding plan


def split(n, part, parts):
    """The range (start, stop) of one of `parts` contiguous parts of n things; sizes differ by at most one.

    The first part is never a smaller one: a rank that is simulated alone stands for the slowest.
    """
    return -(-n * part // parts), -(-n * (part + 1) // parts)


def shard_plan(config, rank, tp_size):
    """What this rank holds of each sharded linear: {name in its module: (dimension, [(start, stop), ...])}.

    Column-wise (rows of the weight, dimension 0): wqkv by KV-head groups, w1, w3, and the output head by the
    vocabulary. Row-wise (columns of the weight, dimension 1): wo and w2. With more ranks than KV heads, the ranks
    that share a KV head each hold a copy of it and a part of its query heads. The MLP is cut between the groups of w2,
    or, where there are too few, between halves of them and so on.
    Raises InputError when a rank would be left without a head or without a part of the MLP.
    """
    N, K, H = config.n_heads, config.n_kv_heads, config.head_dim
    G = N // K
    size = 1 if config.group_size is None or "w2" in config.kept else config.group_size
    while size > 8 and config.intermediate_size // size < tp_size:  # few_rows.cpp takes groups of 8 and more
        size //= 2
    parts = config.intermediate_size // size
    limit = min(N, parts)
    if not 1 <= tp_size <= limit:
        name = "n_heads" if limit == N else "intermediate_size" + (f" / {size}" if size > 1 else "")
        raise InputError(f"tp {tp_size} cannot shard {name} {limit}: use 1 to {limit} ranks")
    if tp_size <= K:
        first, last = split(K, rank, tp_size)
        qkv = [(first * (G + 2) * H, last * (G + 2) * H)]
        heads = first * G, last * G
    else:
        group = rank * K // tp_size
        sharers = [r for r in range(tp_size) if r * K // tp_size == group]
        a, b = split(G, sharers.index(rank), len(sharers))
        start = group * (G + 2) * H
        qkv = [(start + a * H, start + b * H), (start + G * H, start + (G + 2) * H)]
        heads = group * G + a, group * G + b
    hidden = [tuple(i * size for i in split(parts, rank, tp_size))]
    part = head_rows(config.vocab_size, tp_size)
    vocabulary = [(min(rank * part, config.vocab_size), min((rank + 1) * part, config.vocab_size))]
    return {
        "wqkv": (0, qkv),
        "wo": (1, [(heads[0] * H, heads[1] * H)]),
        "w1": (0, hidden),
        "w3": (0, hidden),
        "w2": (1, hidden),
        "output": (0, vocabulary),
    }


def head_rows(vocab_size, tp_size):
    """Rows of the output head on every rank but the last ones, which may hold fewer: so gather pads only the end."""
    return -(-vocab_size // tp_size)


def load_shard(config, weights, dtype, device, rank=0, tp_size=1):
    """The Transformer with this rank's shard of the weights, on the device, of the dtype; without collectives.

    weights: anything with shape(name) and fill(target, name, dim, ranges), such as checkpoint.Weights.
    Raises InputError for tensors that are missing, of another shape than the config says, or not finite.
    """
    plan = shard_plan(config, rank, tp_size)
    if torch.device(device).type == "cpu":
        cpu.keep_freed_memory()
    model = int_linear.skeleton(config)
    parameters = list(model.named_parameters())  # a tied output head is not among them
    columns = {name: m.in_features for name, m in model.named_modules() if hasattr(m, "in_features")}
    for name, parameter in tqdm(parameters, desc="loading", unit="tensor", delay=1, disable=rank > 0):
        if weights.shape(name) != parameter.shape:
            raise InputError(f"tensor {name} is {weights.shape(name)}, but the config says {tuple(parameter.shape)}")
        stored, wanted = weights.dtype(name), dtype if parameter.is_floating_point() else parameter.dtype
        if stored != wanted and not (stored.is_floating_point and wanted.is_floating_point):
            raise InputError(f"tensor {name} holds {dtype_name(stored)}, but the config says {dtype_name(wanted)}")
        path, _, kind = name.rpartition(".")
        dim, ranges = plan.get(path.rpartition(".")[2], (0, None))
        # what stands for several columns, a packed byte or the scale of a group, is one of as many fewer
        each = columns[path] // parameter.shape[1] if dim == 1 else 1
        parts = ranges and [(start // each, -(-stop // each)) for start, stop in ranges]
        shape = list(parameter.shape)
        if parts:
            shape[dim] = sum(stop - start for start, stop in parts)
        tensor = cpu.empty(shape, wanted, device)
        weights.fill(tensor, name, dim, parts)
        if kind in ("scales", "zeros") and dim == 1 and config.quant == "int4":
            tensor = int_linear.regroup(tensor, *ranges[0], each)
        if tensor.numel() and tensor.is_floating_point() and not torch.stack(tensor.aminmax()).isfinite().all():
            raise InputError(f"tensor {name} holds NaN or infinite values in {dtype_name(dtype)}")
        _put(model.get_submodule(path), kind, tensor)
    if config.tie_embeddings:
        start, stop = plan["output"][1][0]
        for kind, tensor in model.tok_embeddings.named_parameters():
            _put(model.output, kind, tensor[start:stop])
    return model.to(device)  # moves the rope frequencies, which stay float32


def dtype_name(dtype):
    return str(dtype).removeprefix("torch.")


def _put(module, kind, tensor):
    setattr(module, kind, nn.Parameter(tensor, requires_grad=False))
    if isinstance(module, nn.Linear) and kind == "weight":
        module.out_features, module.in_features = tensor.shape


# ---------------------------------------------------------------------------------------------------------------------
# The collectives


torch.library.define("ladder::settle", "(Tensor x, Tensor? pending, Tensor? after) -> Tensor")


@torch.library.impl("ladder::settle", "default")
def _settle(x, pending, after):
    """x + wait(pending), or a copy of x. Opaque to the compiler, and `after`, a collective started later, is an input.

    The body does not use `after`: what counts is that it must be there first. So the wait can move neither in front of
    that start nor, through x, behind the next sublayer's computation. With plain operators Inductor fuses the residual
    additions of neighbouring sublayers and waits for both at once.
    """
    if pending is None:
        return x.clone()
    return x + torch.ops._c10d_functional.wait_tensor(pending)


@torch.library.register_fake("ladder::settle")
def _(x, pending, after):
    return torch.empty_like(x)


class TensorParallel:
    """The collectives of a process group; see SingleDevice in model.py for their meaning."""

    def __init__(self, config, tp_size, group):
        self.tp_size = tp_size
        self.vocab_size = config.vocab_size
        self.group = group.group_name

    def start(self, partial):
        return torch.ops._c10d_functional.all_reduce(partial, "sum", self.group)

    def wait(self, pending):
        return torch.ops._c10d_functional.wait_tensor(pending)

    def settle(self, x, pending, after=None):
        if after is not None:
            return torch.ops.ladder.settle(x, pending, after)
        return x if pending is None else x + self.wait(pending)  # nothing to hold back: fuse this with the next norm

    def gather(self, logits):
        """This rank's part of the vocabulary (B, S, v) -> the logits of all of it (B, S, V), on every rank."""
        part = head_rows(self.vocab_size, self.tp_size)
        logits = F.pad(logits, (0, part - logits.shape[-1]))
        # coalesced, because that is the form that a group written in Python can take
        [parts] = torch.ops._c10d_functional.all_gather_into_tensor_coalesced([logits], self.tp_size, self.group)
        parts = torch.ops._c10d_functional.wait_tensor(parts).unflatten(0, (self.tp_size, -1))  # (tp, B, S, part)
        return parts.permute(1, 2, 0, 3).flatten(2)[..., : self.vocab_size]


class Silent(TensorParallel):
    """No all-reduce: every wiring computes what it always does, on partials, to measure what the all-reduces cost."""

    start, wait, settle = SingleDevice.start, SingleDevice.wait, SingleDevice.settle


def silenced(model, world):
    """The same model, of the same weights, without its all-reduces."""
    model = copy.copy(model)
    model.comm = Silent(model.config, world.tp_size, world.group)
    return model


# ---------------------------------------------------------------------------------------------------------------------
# The processes


def rank_and_size():
    """This process's rank and the number of ranks, as torchrun's environment says."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


@functools.cache
def _store():
    """The key-value store that torchrun's environment describes, or None for a single process."""
    if rank_and_size()[1] == 1:
        return None
    return next(dist.rendezvous("env://"))[0]


class World:
    """The ranks of a run: join() makes one.

    group: the process group of the model's collectives, or None for a single device. threads: the ids of those that
    carry them on the CPU. A simulated rank has a tp_size and a group, but no peers.
    """

    def __init__(self, rank, tp_size, device, group=None, threads=(), simulated=False):
        self.rank, self.tp_size, self.device, self.group = rank, tp_size, device, group
        self.threads, self.simulated = threads, simulated
        self.alone = simulated or tp_size == 1
        self.told = 0

    def gather(self, value):
        """The value of every rank, as a list in the order of the ranks."""
        if self.alone:
            return [value]
        values = [None] * self.tp_size
        dist.all_gather_object(values, value)
        return values

    def tell(self, value):
        """Rank 0's value (of JSON's types), on every rank, however long rank 0 takes to have one."""
        if self.alone:
            return value
        self.told += 1
        key, store = f"told {self.told}", _store()
        if self.rank == 0:
            store.set(key, json.dumps(value))
        while not store.check([key]):  # a collective would time out under a slow typist, and not hear a Ctrl-C
            time.sleep(0.02)
        return json.loads(store.get(key))

    @contextlib.contextmanager
    def together(self):
        """An InputError of one rank in this block becomes one of all, so that none waits for it forever."""
        error = None
        try:
            yield
        except InputError as e:
            error = str(e)
        for message in self.gather(error):
            if message is not None:
                raise InputError(message)


def join(device=None, link=None, simulate_tp=None):
    """Join the process group that torchrun describes, if there is more than one process; returns the World.

    device: "cpu", "cuda", "cuda:1", or None for CUDA where each local rank finds a GPU. Under torchrun each rank takes
    the GPU of its LOCAL_RANK. link: a Link of link.py for the collectives to take as long as over it.
    simulate_tp: be rank 0 of so many, alone; needs a link.
    """
    rank, tp_size = rank_and_size()
    if simulate_tp is not None and tp_size > 1:
        raise InputError("--simulate-tp is one rank alone: start it with python, not with torchrun")
    if link is not None and max(tp_size, simulate_tp or 1) == 1:
        raise InputError(
            "one rank has no link (--link, --exposed): start two or more with torchrun, or use --simulate-tp"
        )
    gpus = torch.cuda.device_count()
    known = "cpu" + "".join(f", cuda:{i}" for i in range(gpus))
    if device is None:
        device = "cuda" if 0 < int(os.environ.get("LOCAL_WORLD_SIZE", tp_size)) <= gpus else "cpu"
    try:
        device = torch.device(device)
    except RuntimeError:
        raise InputError(f"no such device: {device}; this machine has {known}") from None
    if device.type == "cuda":
        index = device.index or 0 if tp_size == 1 else int(os.environ.get("LOCAL_RANK", rank))
        device = torch.device("cuda", index)
    if (
        device.type not in ("cpu", "cuda")
        or (device.index or 0) >= max(gpus, 1)
        or (device.type == "cuda" and not gpus)
    ):
        raise InputError(f"no such device: {device}; this machine has {known}")
    on_gpu, threads = {}, set()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        on_gpu = {"device_id": device}
    if tp_size > 1:
        store = _store()
        store.add("ready", 1)
        while store.add("ready", 0) < tp_size:  # a rank with bad input never comes
            if store.check(["stopped"]):
                _stop(2)
            time.sleep(0.02)
        backend, before = "nccl" if device.type == "cuda" else "gloo", _threads()
        dist.init_process_group(backend, store=store, rank=rank, world_size=tp_size, **on_gpu)
        if backend == "gloo":
            threads = _threads() - before
            _let_preempt(threads)
        dist.barrier()  # so that no rank finds bad input and leaves while another still connects to it
    group = dist.group.WORLD if tp_size > 1 else None
    if link is not None:
        group = LinkedGroup(group, link, rank, simulate_tp or tp_size, device)
    return World(rank, simulate_tp or tp_size, device, group, threads, simulated=simulate_tp is not None)


def _threads():
    """The thread ids of this process; none where the system is not Linux."""
    return {int(i) for i in os.listdir("/proc/self/task")} if os.path.isdir("/proc/self/task") else set()


def _let_preempt(threads):
    """Let gloo's threads run as soon as they have something to do, as far as the system allows it.

    Its event loop polls while another of its threads holds a connection's lock. Between ordinary threads the one that
    polls may keep the one with the lock from running until the scheduler's next tick, milliseconds later
    (benchmarks/gloo_threads.py shows it). Real-time threads preempt the computation, but not one another; to have them
    takes root or CAP_SYS_NICE. Batch threads, for anyone, at least do not preempt one another.
    """
    for thread in threads:
        for policy, priority in (os.SCHED_FIFO, 1), (os.SCHED_BATCH, 0):
            with contextlib.suppress(OSError):  # not allowed, or gone
                os.sched_setscheduler(thread, policy, os.sched_param(priority))
                break


class Help(argparse.RawDescriptionHelpFormatter):
    """Help that ends in the default, where there is one."""

    def _get_help_string(self, action):
        plain = action.default is None or action.default is False or action.default == argparse.SUPPRESS
        return action.help if plain else f"{action.help or ''} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises InputError, for run() to print once, where others print a usage from every rank."""

    def __init__(self, description):
        super().__init__(description=description, formatter_class=Help)

    def error(self, message):
        raise InputError(message)


def run(main):
    """Run a script's main(): bad input ends all ranks with one line from one of them and exit code 2."""
    store = None
    try:
        store = _store()
        main()
        if dist.is_initialized():
            dist.barrier()
        _leave(0)
    except InputError as e:
        _stop(2, f"{os.path.basename(sys.argv[0])}: {e}")
    except KeyboardInterrupt:
        _stop(130, "interrupted")
    except BrokenPipeError:  # whoever read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _stop(1, "")
    except Exception as e:
        if store is not None and _has_stopped(store):
            _stop(2)  # a peer that stopped has cut this rank's connections
        if store is not None and (isinstance(e, dist.DistBackendError) or "gloo" in str(e)):
            _stop(1, "a rank is gone, and the others with it")
        raise


def _has_stopped(store):
    with contextlib.suppress(Exception):
        return store.check(["stopped"])
    return True  # the store went with the rank that held it


def _stop(code, line=None):
    """Leave; of the ranks that come here with a line the first prints it, and the others wait until it is out.

    They wait because the launcher kills all ranks when one exits, and rank 0, which may hold the store, leaves last.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # one Ctrl-C may arrive from the terminal and from the launcher
    store, (rank, tp_size) = _store(), rank_and_size()
    if store is None:
        if line:
            print(line, file=sys.stderr)
        _leave(code)
    with contextlib.suppress(Exception):  # without a store there is nobody to wait for
        if line is not None and store.add("stopping", 1) == 1:
            if line:
                print(line, file=sys.stderr, flush=True)
            store.set("stopped", "")
        else:
            store.wait(["stopped"], timedelta(seconds=5))
        store.add("left", 1)
        deadline = time.monotonic() + 3
        while rank == 0 and store.add("left", 0) < tp_size and time.monotonic() < deadline:
            time.sleep(0.02)
    _leave(code)


def _leave(code):
    """End this process at once: the destructors of a process group may wait for peers that are gone, or abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    if dist.is_initialized():
        os._exit(code)
    sys.exit(code)
