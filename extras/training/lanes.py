"""Lanes in training: each computes with its slices of the whole weights, as tp.py cuts them for a rank."""

import copy
import functools
from types import SimpleNamespace

import torch
from torch.func import functional_call

import tp
from model import Transformer
from runtime.errors import load_extra


def cut(weight, piece):
    """Return what a tp.ShardSlice says of a whole weight."""
    if piece.ranges == []:
        return torch.zeros_like(weight)
    if piece.ranges is None:
        return weight
    return torch.cat([weight.narrow(piece.dim, start, stop - start) for start, stop in piece.ranges], piece.dim)


def run_in_lane(module, shards, lane, *args):
    """Run a module of whole weights with a lane's slices of them.

    shards: for each lane, a module of the shard's shape without weights, and {name of a weight: tp.ShardSlice}.
    """
    shard, slices = shards[lane]
    return functional_call(shard, {name: cut(weight, slices[name]) for name, weight in module.named_parameters()}, args)


def split(model):
    """Let the attentions and MLPs of a model on the device "meta" compute in its config's lanes; return the lanes."""
    lanes = [SimpleNamespace(config=model.config, layers=[]) for _ in range(model.config.lanes)]
    plans = [tp.shard_slices(model, torch.float32, lane, len(lanes)) for lane in range(len(lanes))]
    for i, block in enumerate(model.layers):
        for name in "attention", "feed_forward":
            module, shards = getattr(block, name), []
            for plan in plans:
                prefix = f"layers.{i}.{name}."
                slices = {key.removeprefix(prefix): piece for key, piece in plan.items() if key.startswith(prefix)}
                shard = copy.deepcopy(module)
                for path, linear in shard.named_children():
                    if isinstance(linear, torch.nn.Linear):  # head counts are read from its shape
                        linear.out_features, linear.in_features = slices[f"{path}.weight"].shape
                shards.append((shard, slices))
            module.forward = functools.partial(run_in_lane, module, shards)
        norms = {name: norm for name, norm in block.named_children() if name.endswith("norm")}
        for lane, layers in enumerate(lanes):
            attention, feed_forward = (functools.partial(m, lane) for m in (block.attention, block.feed_forward))
            layers.layers.append(SimpleNamespace(attention=attention, feed_forward=feed_forward, **norms))
    return lanes


def streams(model, x, metadata):
    """Return the running streams of a model's lanes, from the embeddings x (B, S, D) on."""
    config = model.config
    comm = load_extra("lanes", f"wiring {config.wiring}").LaneSums(model.comm, config.lanes, config.lanes)
    sublayers = [Transformer.sublayers(lane, metadata) for lane in model.lanes]
    return [config.named_wiring.stream(x, each, comm, config) for each in sublayers]
