"""Training over several devices: weights in shards (FSDP2), saved and loaded as shards, and the memory that they take.

FSDP2 cuts every parameter along its first dimension, into one part a rank, and gathers it where it is used. The units
that are gathered together are an attention, an MLP, and the rest (embedding, norms, head).
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
from model import InputError, rope_frequencies
from runtime import writing

CHUNK = 1024  # tokens whose logits are there at a time


@contextlib.contextmanager
def process_group(world):
    """The group of all ranks, as it is, or a group of one for the time of the block: FSDP2 takes nothing less."""
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
    """A model that was made on the device "meta", with uninitialised float32 shards; it computes in dtype."""
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
    return model


@torch.no_grad()
def fill(model, weights, world):
    """Read this rank's part of each weight. weights: as for tp.load_shard. Raises InputError as that does."""
    for name, parameter in model.named_parameters():
        checkpoint.check_shape(weights, name, parameter.shape)
        rows = -(-len(parameter) // world.tp_size)
        start, stop = (min(i * rows, len(parameter)) for i in (world.rank, world.rank + 1))
        local = parameter.to_local()
        weights.fill(local, name, 0, [(start, stop)])
        if not local.isfinite().all():
            raise InputError(f"tensor {name} holds NaN or infinite values")


def summed(numbers, world):
    """Numbers, summed over the ranks, as a list."""
    total = torch.tensor(numbers, dtype=torch.float64, device=world.device)
    dist.all_reduce(total, group=world.dist_group)
    return total.tolist()


class FreshWeights:
    """What a training from scratch begins with: matrices from N(0, 0.02), norms 1, biases 0.

    A tensor depends on its name and the seed alone, however many ranks read it.
    """

    def __init__(self, model, seed):
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self.seeds = {name: seed * 1_000_003 + i for i, name in enumerate(self.shapes)}

    def shape(self, name):
        return self.shapes[name]

    def fill(self, target, name, dim=0, ranges=None):
        [(start, stop)] = ranges
        if target.dim() == 1:
            target.fill_(float(not name.endswith("bias")))
        else:
            generator = torch.Generator().manual_seed(self.seeds[name])
            target.copy_(torch.empty(self.shapes[name]).normal_(0, 0.02, generator=generator)[start:stop])


def write(run, step, saved, model, dtype, world):
    """Write the model as the checkpoint folder run/best-STEP, gathered one tensor at a time.

    All ranks must come; rank 0 writes. The folder has its name only when it is complete; then the others go, but for
    that of the step `saved`, which the newest state names.
    """
    parameters = dict(model.named_parameters())

    def read(name):
        return parameters[name].detach().full_tensor().to("cpu", dtype)

    if world.rank > 0:
        for name in parameters:
            read(name)
        return
    target = run / f"best-{step}"
    shutil.rmtree(target, ignore_errors=True)  # of a run that was killed before it saved this step
    with writing.new_folder(target) as folder:
        checkpoint.write_config(folder, model.config)
        checkpoint.copy_tokenizer(run, folder)
        checkpoint.write_weights(folder, {name: p.numel() * dtype.itemsize for name, p in parameters.items()}, read)
    for old in run.glob("best-*"):
        if old.name not in (f"best-{step}", f"best-{saved}"):
            shutil.rmtree(old, ignore_errors=True)


# ---------------------------------------------------------------------------------------------------------------------
# What a run goes on from


def save(run, step, best, model, optimizer, world):
    """Save everything that step + 1 depends on, in shards, as run/state-STEP, and remove the states before it.

    A state has its name only when it is complete. best: {"step", "nats"} of run/best-STEP.
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
            (unfinished / "progress.json").write_text(json.dumps(best))
            writing.publish(unfinished, target)
            for old in _states(run)[:-1]:
                shutil.rmtree(old, ignore_errors=True)
    except (OSError, dcp.api.CheckpointException) as e:
        raise InputError(f"cannot write {target}: {checkpoint.first_line(e)}") from None


def restore(run, model, optimizer, world):
    """Load the newest state of a run; returns (its step, its best), or None where there is none."""
    states = _states(run)
    if not states:
        return None
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=states[-1], process_group=world.dist_group)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return _step(states[-1]), json.loads((states[-1] / "progress.json").read_text())


def _step(path):
    return int(path.name.rpartition("-")[2])


def _states(run):
    return sorted(run.glob("state-*"), key=_step)


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def units(config):
    """Parameters of what is gathered together: (an attention, an MLP, the rest), but for norms and biases."""
    D, heads, kv = config.dim, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    rest = config.vocab_size * D * (1 if config.tie_embeddings else 2)
    return D * (2 * heads + 2 * kv), 3 * D * config.intermediate_size, rest


def memory(config, ranks, rows, seq_len, dtype, recompute, teacher=None):
    """Bytes that training takes on each rank, as {what: bytes}, by arithmetic.

    rows: the windows that a rank computes at once, of seq_len tokens. teacher: the Config of one, or None.
    """

    def gathered(config):
        attention, mlp, rest = units(config)
        return rest + 2 * max(attention, mlp)  # the next one is gathered while one computes

    def stored(config):
        attention, mlp, rest = units(config)
        return -(-(config.n_layers * (attention + mlp) + rest) // ranks)

    D, size, tokens = config.dim, dtype.itemsize, rows * seq_len
    heads, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    # What the backward pass needs, bytes a token: of a norm its output, and in float32 its input and that normalised;
    # of attention q, k, v, q and k rotated, what it gives, and the mask of packed documents; of the MLP the gate, its
    # silu, up, and the product.
    norm = D * (size + (4 if size == 4 else 8))
    within = [norm + (3 * heads + 3 * kv) * size + seq_len * config.n_heads // config.n_kv_heads * size]
    within += [norm + 4 * config.intermediate_size * size]
    streams = 2 * config.n_layers * D * size
    need = {
        "weights, gradients, Adam's moments": 16 * stored(config),
        "gathered": 2 * size * gathered(config),  # and its gradient
        "activations": tokens * (streams + norm + (max(within) if recompute else config.n_layers * sum(within))),
        "logits": 3 * 4 * min(tokens, CHUNK) * config.vocab_size,
    }
    if teacher is not None:
        need["teacher"] = size * (stored(teacher) + gathered(teacher) + tokens * 2 * teacher.n_layers * teacher.dim)
        need["logits"] *= 2
    return need


def in_words(need):
    """What memory found, as a line."""
    return f"{sum(need.values()) / 1e9:.2f} GB (" + ", ".join(f"{k} {v / 1e9:.2f}" for k, v in need.items()) + ")"
