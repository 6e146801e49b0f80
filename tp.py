"""Tensor parallelism: the process group, which rank holds what, the collectives. The only file that knows of ranks.

Shape letters as in model.py.
"""

import argparse
import contextlib
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

from model import InputError, Transformer

# ---------------------------------------------------------------------------------------------------------------------
# The sharding plan


def split(n, part, parts):
    """The range (start, stop) of one of `parts` contiguous parts of n things; sizes differ by at most one."""
    return n * part // parts, n * (part + 1) // parts


def shard_plan(config, rank, tp_size):
    """What this rank holds of each sharded linear: {name in its module: (dimension, [(start, stop), ...])}.

    Column-wise (rows of the weight, dimension 0): wqkv by KV-head groups, w1, w3, and the output head by the
    vocabulary. Row-wise (columns of the weight, dimension 1): wo and w2. With more ranks than KV heads, the ranks
    that share a KV head each hold a copy of it and a part of its query heads.
    Raises InputError when a rank would be left without a head or a row.
    """
    N, K, H = config.n_heads, config.n_kv_heads, config.head_dim
    G = N // K
    for name in ("n_heads", "intermediate_size", "vocab_size"):
        if not 1 <= tp_size <= getattr(config, name):
            raise InputError(
                f"tp {tp_size} cannot shard {name} {getattr(config, name)}: use 1 to {config.n_heads} ranks"
            )
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
    hidden = [split(config.intermediate_size, rank, tp_size)]
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

    weights: anything with shape(name) and read(name, dim, ranges), such as checkpoint.Weights; only the shard is read.
    Raises InputError for tensors that are missing, of another shape than the config says, or not finite.
    """
    plan = shard_plan(config, rank, tp_size)
    with torch.device("meta"):
        model = Transformer(config)
    parameters = list(model.named_parameters())  # a tied output head is not among them
    for name, parameter in tqdm(parameters, desc="loading", unit="tensor", delay=1, disable=rank > 0):
        if weights.shape(name) != parameter.shape:
            raise InputError(f"tensor {name} is {weights.shape(name)}, but the config says {tuple(parameter.shape)}")
        path, _, kind = name.rpartition(".")
        tensor = weights.read(name, *plan.get(path.rpartition(".")[2], (0, None)))
        if not tensor.sum(dtype=torch.float32).isfinite():
            raise InputError(f"tensor {name} holds NaN or infinite values")
        _put(model.get_submodule(path), kind, tensor.to(device, dtype))
    if config.tie_embeddings:
        start, stop = plan["output"][1][0]
        _put(model.output, "weight", model.tok_embeddings.weight[start:stop])
    return model.to(device)  # moves the rope frequencies, which stay float32


def _put(module, kind, tensor):
    setattr(module, kind, nn.Parameter(tensor, requires_grad=False))
    if isinstance(module, nn.Linear) and kind == "weight":
        module.out_features, module.in_features = tensor.shape


# ---------------------------------------------------------------------------------------------------------------------
# The collectives


torch.library.define("ladder::settle", "(Tensor x, Tensor? pending, Tensor? after) -> Tensor")


@torch.library.impl("ladder::settle", "default")
def _settle(x, pending, after):
    """x + wait(pending). Opaque to the compiler, and `after`, a collective started later, is an input: so the wait can
    move neither in front of that start nor, through x, behind the next sublayer's computation. With plain operators
    Inductor fuses the residual additions of neighbouring sublayers and waits for both all-reduces at once.
    """
    if pending is None:
        return x.clone()
    return x + torch.ops._c10d_functional.wait_tensor(pending)


@torch.library.register_fake("ladder::settle")
def _(x, pending, after):
    return torch.empty_like(x)


class TensorParallel:
    """The collectives of the default process group; see SingleDevice in model.py for their meaning."""

    def __init__(self, config, tp_size):
        self.tp_size = tp_size
        self.vocab_size = config.vocab_size
        self.group = dist.group.WORLD.group_name

    def start(self, partial):
        return torch.ops._c10d_functional.all_reduce(partial, "sum", self.group)

    def wait(self, pending):
        return torch.ops._c10d_functional.wait_tensor(pending)

    def settle(self, x, pending, after=None):
        if pending is None and after is None:
            return x
        return torch.ops.ladder.settle(x, pending, after)

    def gather(self, logits):
        """This rank's part of the vocabulary (B, S, v) -> the logits of all of it (B, S, V), on every rank."""
        part = head_rows(self.vocab_size, self.tp_size)
        logits = F.pad(logits, (0, part - logits.shape[-1]))
        parts = torch.ops._c10d_functional.all_gather_into_tensor(logits, self.tp_size, self.group)
        parts = torch.ops._c10d_functional.wait_tensor(parts).unflatten(0, (self.tp_size, -1))  # (tp, B, S, part)
        return parts.permute(1, 2, 0, 3).flatten(2)[..., : self.vocab_size]


# ---------------------------------------------------------------------------------------------------------------------
# The processes


def init(device):
    """Join the process group that torchrun describes, if there is more than one process.

    device: "cpu", "cuda", "cuda:1" or None for CUDA where there is one. Returns (rank, tp_size, torch.device); under
    torchrun each rank takes the GPU of its LOCAL_RANK.
    """
    rank, tp_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    gpus = torch.cuda.device_count()
    try:
        device = torch.device(device or ("cuda" if gpus else "cpu"))
    except RuntimeError:
        raise InputError(f"no such device: {device}; this machine has {_devices(gpus)}") from None
    if device.type == "cuda" and tp_size > 1:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and (device.index or 0) >= gpus):
        raise InputError(f"no such device: {device}; this machine has {_devices(gpus)}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if tp_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        dist.barrier()  # so that no rank finds bad input and leaves while another still connects to it
    return rank, tp_size, device


def gather_objects(value, tp_size):
    """The value of every rank, as a list in the order of the ranks."""
    values = [value] * tp_size
    if tp_size > 1:
        dist.all_gather_object(values, value)
    return values


def broadcast(value, tp_size):
    """Rank 0's value, on every rank."""
    values = [value]
    if tp_size > 1:
        dist.broadcast_object_list(values)
    return values[0]


def _devices(gpus):
    return "cpu" + "".join(f", cuda:{i}" for i in range(gpus))


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises InputError, for run() to print once, where others print a usage from every rank."""

    def __init__(self, description):
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message):
        raise InputError(message)


def run(main):
    """Run a script's main(): bad input ends all ranks with one line from one of them and exit code 2."""
    try:
        main()
        if dist.is_initialized():
            dist.barrier()
            _leave(0)
    except InputError as e:
        _stop(f"{os.path.basename(sys.argv[0])}: {e}")
    except KeyboardInterrupt:
        _stop("interrupted", code=130)
    except Exception:
        if dist.is_initialized() and _store().check(["stopped"]):
            _stop()  # a peer that stopped has cut this rank's connections
        raise


def _store():
    return dist.distributed_c10d._get_default_store()


def _stop(line=None, code=2):
    if not dist.is_initialized():
        if line and os.environ.get("RANK", "0") == "0":
            print(line, file=sys.stderr)
        sys.exit(code)
    if line and _store().add("stopping", 1) == 1:
        print(line, file=sys.stderr, flush=True)
        _store().set("stopped", "")
    else:  # the launcher kills all ranks when one exits: let the one that speaks finish
        with contextlib.suppress(RuntimeError):
            _store().wait(["stopped"], timedelta(seconds=5))
    _leave(code)


def _leave(code):
    """End this rank at once: the destructors of a process group may wait for peers that are gone, or abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
