"""Training on several devices: FSDP2 shards the weights, which are saved and loaded as shards.

FSDP2 cuts every parameter along its first dimension, one chunk per rank, and gathers it for use. Each attention and
each MLP is gathered at once, and so is the rest (embedding, norms, head).
"""

import contextlib
import json
import shutil

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from formats import checkpoint
from model import rope_frequencies
from runtime import writing
from runtime.errors import InputError


@contextlib.contextmanager
def process_group(world):
    """Keep the group of all ranks, or make one of this process alone for the block: FSDP2 needs a group."""
    if dist.is_initialized():
        yield
        return
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard(model, world, dtype):
    """Shard a model from the device "meta" in place; parameters become uninitialized float32, it computes in dtype."""
    mesh = DeviceMesh.from_group(world.dist_group or dist.group.WORLD, world.device.type)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.layers:
        fully_shard(block.attention, mesh=mesh, mp_policy=policy)
        fully_shard(block.feed_forward, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=world.device)
    if model.config.tie_embeddings:
        model.output.weight = model.tok_embeddings.weight
    model.rope_frequencies = rope_frequencies(model.config).to(world.device)


@torch.no_grad()
def fill(model, weights, world):
    """Read this rank's rows of each weight. weights, InputError: as in tp.load_shard."""
    for name, parameter in model.named_parameters():
        checkpoint.check_shape(weights, name, parameter.shape)
        weights.fill(parameter.to_local(), name, 0, [_rows(parameter, world)])
        if not parameter.to_local().isfinite().all():
            raise InputError(f"tensor {name} holds NaN or infinite values")


@torch.no_grad()
def fill_afresh(model, seed, world):
    """Draw matrices from N(0, 1 / columns), set norms to 1, biases to 0: the same weights on any number of ranks.

    wo and w2 start at 0, so that in every wiring a model starts as one without layers.
    """
    for i, (name, parameter) in enumerate(model.named_parameters()):
        whole = torch.full(parameter.shape, float(parameter.dim() == 1 and not name.endswith("bias")))
        if parameter.dim() == 2 and not name.endswith(("wo.weight", "w2.weight")):
            generator = torch.Generator().manual_seed(seed * 1_000_003 + i)
            whole.normal_(0, parameter.shape[1] ** -0.5, generator=generator)
        start, stop = _rows(parameter, world)
        parameter.to_local().copy_(whole[start:stop])


def _rows(parameter, world):
    """Return the range (start, stop) of this rank's rows."""
    size = -(-len(parameter) // world.tp_size)
    return tuple(min(rank * size, len(parameter)) for rank in (world.rank, world.rank + 1))


def summed(values, world):
    """Sum a list of numbers over the ranks; return a list."""
    total = torch.tensor(values, dtype=torch.float64, device=world.device)
    dist.all_reduce(total, group=world.dist_group)
    return total.tolist()


def write(run, best, model, dtype, world):
    """Write the checkpoint folder run/best-STEP, then best.json, which names it. best: {"step", "nats"}.

    Every rank must call this, since tensors are gathered one at a time; rank 0 writes.
    """
    parameters = dict(model.named_parameters())

    def read(name):
        return parameters[name].detach().full_tensor().to("cpu", dtype)

    if world.rank > 0:
        for name in parameters:
            read(name)
        return
    target = run / f"best-{best['step']}"
    shutil.rmtree(target, ignore_errors=True)  # it may be there if the run was killed before it wrote best.json
    with writing.new_folder(target) as folder:
        writing.write_config(folder, model.config)
        writing.copy_tokenizer(run, folder)
        writing.write_weights(folder, {name: p.numel() * dtype.itemsize for name, p in parameters.items()}, read)
    writing.write_text(run / "best.json", json.dumps(best))
    for old in run.glob("best-*"):
        if old != target:
            shutil.rmtree(old, ignore_errors=True)


def save(run, step, model, optimizer, world):
    """Save the weights and the optimizer's state as run/state-STEP, and remove earlier ones.

    Raises InputError if the disk is full.
    """
    unfinished, target = run / "state.tmp", run / f"state-{step}"
    weights, moments = get_state_dict(model, optimizer)
    try:
        if world.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        dist.barrier(group=world.dist_group)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=unfinished, process_group=world.dist_group)
        dist.barrier(group=world.dist_group)
        if world.rank == 0:
            writing.publish(unfinished, target)
            for _, old in _states(run)[:-1]:
                shutil.rmtree(old, ignore_errors=True)
    except (OSError, dcp.api.CheckpointException) as e:
        raise InputError(f"cannot write {target}: {checkpoint.first_line(e)}") from None


def restore(run, model, optimizer, world):
    """Load the newest state of a run; return its step, or None if there is no state."""
    if not (states := _states(run)):
        return None
    step, path = states[-1]
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=path, process_group=world.dist_group)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return step


def _states(run):
    return sorted((int(path.name.removeprefix("state-")), path) for path in run.glob("state-*"))
