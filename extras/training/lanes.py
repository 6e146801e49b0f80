"""Lanes in training: each computes with its slices of the whole weights, as tp.py cuts them for a rank."""

import copy
import functools
from types import SimpleNamespace

import torch
from torch.func import functional_call

import tp
from model import Attention, FeedForward
from runtime.errors import load_extra


def cut(weight, piece):
    """Return what a tp.ShardSlice says of a whole weight."""
    if piece.ranges == []:
        return torch.zeros_like(weight)
    if piece.ranges is None:
        return weight
    return torch.cat([weight.narrow(piece.dim, start, stop - start) for start, stop in piece.ranges], piece.dim)


class InLanes:
    """A module of whole weights, of which each lane uses slices. Its forward takes a lane before the other arguments.

    shards: for each lane, a module of the shard's shape without weights, and {name of a weight: tp.ShardSlice}.
    """

    def forward(self, lane, *args):
        module, slices = self.shards[lane]
        return functional_call(module, {n: cut(weight, slices[n]) for n, weight in self.named_parameters()}, args)


class AttentionInLanes(InLanes, Attention):
    pass


class FeedForwardInLanes(InLanes, FeedForward):
    pass


def split(model):
    """Let the attentions and MLPs of a model on the device "meta" compute in its config's lanes; return the lanes."""
    lanes = [SimpleNamespace(config=model.config, layers=[]) for _ in range(model.config.lanes)]
    plans = [tp.shard_slices(model.config, torch.float32, lane, len(lanes), model) for lane in range(len(lanes))]
    for i, block in enumerate(model.layers):
        for name, in_lanes in ("attention", AttentionInLanes), ("feed_forward", FeedForwardInLanes):
            module, shards = getattr(block, name), []
            for plan in plans:
                shard, slices = copy.deepcopy(module), {}
                for weight, _ in module.named_parameters():
                    slices[weight] = piece = plan[f"layers.{i}.{name}.{weight}"]
                    if weight.startswith("w") and weight.endswith(".weight"):
                        linear = shard.get_submodule(weight.removesuffix(".weight"))
                        linear.out_features, linear.in_features = piece.shape  # head counts are read from them
                shards.append((shard, slices))
            module.shards, module.__class__ = shards, in_lanes
        norms = {name: norm for name, norm in block.named_children() if name.endswith("norm")}
        for lane, layers in enumerate(lanes):
            attention, feed_forward = (functools.partial(m, lane) for m in (block.attention, block.feed_forward))
            layers.layers.append(SimpleNamespace(attention=attention, feed_forward=feed_forward, **norms))
    return lanes


def streams(model, x, metadata):
    """Return the running streams of a model's lanes, from the embeddings x (B, S, D) on."""
    config = model.config
    comm = load_extra("lanes", f"wiring {config.wiring}").LaneSums(model.comm, config.lanes, config.lanes)
    sublayers = [model.sublayers(metadata, lane=lane) for lane in model.lanes]
    return [config.named_wiring.stream(x, each, comm, config) for each in sublayers]
