"""Training on several devices with FSDP2: sharding a model, filling it, and saving and loading its shards.

FSDP2 cuts every parameter along its first dimension, and each rank holds one part. The forward pass of an attention or
an MLP first gathers all of its parameters. Those of the rest (embedding, norms, head) are gathered together.
"""

import shutil

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

from ladder import outputs
from ladder.checkpoints import checkpoint, writing
from ladder.errors import InputError
from ladder.layers.attention_inputs import rope_frequencies
from ladder.progress import progress
from ladder.seeds import generator


def shard(model, sublayers, world, dtype):
    """Shard a model on "meta" in place, first each sublayer, then the rest. It will compute in dtype."""
    mesh = DeviceMesh.from_group(world.dist_group or dist.group.WORLD, world.device.type)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in (*sublayers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    model.to_empty(device=world.device)
    if model.config.tie_embeddings:
        model.output.weight = model.tok_embeddings.weight
    model.rope_frequencies = rope_frequencies(model.config).to(world.device)


@torch.no_grad()
def fill(model, weights, seed=0, dither=False):
    """Fill each rank's shards from a checkpoint.Weights, or with fresh weights if it is None. Raises InputError.

    dither: see dithered; fresh weights need none.
    """
    for i, (name, parameter) in enumerate(model.named_parameters()):
        if weights:
            checkpoint.check_shape(weights, name, parameter.shape)
        whole = weights.read(name) if weights else fresh(name, parameter.shape, seed * 1_000_003 + i)
        if weights and dither:
            whole = dithered(whole.float(), seed * 1_000_003 + i)
        rows = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
        parameter.to_local().copy_(rows)
        if not rows.isfinite().all():
            raise InputError(f"tensor {name} holds NaN or infinite values")
        progress.beat()


def dithered(x, seed):
    """Return x, each number of bfloat16 moved at random within what bfloat16 rounds to it.

    Training in bfloat16 begins with the same weights so, but an update of a tenth of a step of bfloat16 then changes a
    tenth of the weights by a step. Without this it changes none: what a small learning rate learns has no effect.
    """
    step = torch.exp2(torch.frexp(x)[1] - 8.0)
    moved = x + (torch.rand(x.shape, generator=generator(seed)) - 0.5) * step
    return torch.where(moved.bfloat16() == x, moved, x)


def fresh(name, shape, seed):
    """Return a fresh weight, equal on any number of ranks: a matrix from N(0, 1 / columns), a norm of 1, a bias of 0.

    wo and w2 are 0, so that in every wiring a model starts like one without layers.
    """
    if len(shape) == 1 or name.endswith(("wo.weight", "w2.weight", "bias")):
        return torch.full(shape, float(len(shape) == 1 and not name.endswith("bias")))
    return torch.empty(shape).normal_(0, shape[-1] ** -0.5, generator=generator(seed))


def summed(values, world):
    """Return the sums of a list of numbers over the ranks, as a list."""
    total = torch.tensor(values, dtype=torch.float64, device=world.device)
    dist.all_reduce(total, group=world.dist_group)
    return total.tolist()


def write(run, step, model, dtype, world):
    """Write the weights as the checkpoint folder run/best-STEP.

    Every rank must call this, since tensors are gathered one at a time; rank 0 writes.
    """
    parameters = dict(model.named_parameters())
    float32 = torch.float32
    dtypes = {name: float32 if model.config.stays_float32(name) else dtype for name in parameters}

    def read(name):
        return parameters[name].detach().full_tensor().to("cpu", dtypes[name])

    if world.rank > 0:
        for name in parameters:
            read(name)
        return
    target = run / f"best-{step}"
    shutil.rmtree(target, ignore_errors=True)  # of a run that was killed before it saved this step
    with outputs.new_folder(target) as folder:
        writing.write_config(folder, model.config)
        writing.copy_tokenizer(run, folder)
        writing.write_weights(folder, {n: p.numel() * dtypes[n].itemsize for n, p in parameters.items()}, read)


def save(run, step, best, model, optimizer, world):
    """Save a state to resume from as run/state-STEP. Remove other states, and all weights but those of step `best`.

    Raises InputError if the disk is full.
    """
    target = run / f"state-{step}"
    weights, moments = get_state_dict(model, optimizer)
    try:
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=target, process_group=world.dist_group)
    except (OSError, dcp.api.CheckpointException) as e:
        for cause, _ in getattr(e, "failures", {}).values():
            if isinstance(cause, KeyboardInterrupt):  # Ctrl-C or another signal came while it saved
                raise cause from None
        raise InputError(f"cannot write {target}: {checkpoint.first_line(e)}") from None
    if world.rank == 0:
        for old in {*run.glob("state-*"), *run.glob("best-*")} - {target, run / f"best-{best}"}:
            shutil.rmtree(old, ignore_errors=True)


def restore(run, model, optimizer, world):
    """Load the newest state of a run; return its step, or -1 if there is no state."""
    complete = run.glob("state-*/.metadata")  # written last
    step = max((int(path.parent.name.removeprefix("state-")) for path in complete), default=-1)
    if step >= 0:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=run / f"state-{step}", process_group=world.dist_group)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return step
