"""Lanes in training. Each computes with its slices of the whole weights, which are cut as tp.py cuts them for ranks."""

import copy
import functools
import itertools
from types import SimpleNamespace

import torch
from torch.func import functional_call

import tp
from ladder.lanes.lanes import LaneSums
from model import list_sublayers

SUBLAYERS = "attention", "feed_forward"


def cut(weight, piece):
    """Return the part of a whole weight that a tp.ShardSlice describes."""
    if piece.zeros:
        return torch.zeros_like(weight)
    if piece.ranges is None:
        return weight
    return torch.cat([weight.narrow(piece.dim, start, stop - start) for start, stop in piece.ranges], piece.dim)


def run_in_lane(module, shards, lane, *args):
    """Run a module that has whole weights with a lane's slices of them.

    shards: for each lane, a module of the shard's shape without weights, and {name of a weight: tp.ShardSlice}.
    """
    shard, slices = shards[lane]
    return functional_call(shard, {name: cut(weight, slices[name]) for name, weight in module.named_parameters()}, args)


def split(model):
    """Make the attentions and MLPs of a model on "meta" take the number of a lane as their first argument."""
    lanes = model.config.named_wiring.shards()
    plans = [tp.shard_slices(model, torch.float32, lane, lanes) for lane in range(len(lanes))]
    for i, kind in itertools.product(range(len(model.layers)), SUBLAYERS):
        module = getattr(model.layers[i], kind)
        shards = []
        for plan in plans:
            slices = {name: plan[f"layers.{i}.{kind}.{name}"] for name, _ in module.named_parameters()}
            shard = copy.deepcopy(module)
            for name, linear in shard.named_children():
                if isinstance(linear, torch.nn.Linear):  # head counts are read from its shape
                    linear.out_features, linear.in_features = slices[f"{name}.weight"].shape
            shards.append((shard, slices))
        module.forward = functools.partial(run_in_lane, module, shards)


def loops(model, x, metadata):
    """Return the loop of each lane of a model, for model.interleave. x: the embeddings (B, S, D)."""
    config = model.config
    n_lanes = len(config.named_wiring.shards())
    comm = LaneSums(model.comm, n_lanes, n_lanes)

    def in_lane(block, lane):
        modules = dict(block.named_children())
        return SimpleNamespace(**modules | {name: functools.partial(modules[name], lane) for name in SUBLAYERS})

    def loop(lane):
        blocks = [in_lane(block, lane) for block in model.layers]
        return config.named_wiring.run(x, list_sublayers(config, blocks, metadata), comm, config)

    return [loop(lane) for lane in range(n_lanes)]
