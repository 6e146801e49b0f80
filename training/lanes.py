"""The lanes of whole weights, for training: each computes with its part of every matrix, as tp.py cuts it."""

import copy
import functools
from types import SimpleNamespace

import torch
from torch.func import functional_call

from model import Attention, FeedForward
from tp import shard_plan


class Part:
    """What a lane computes of a module: its forward, with a part of its weights. plan: of tp.shard_plan."""

    def __init__(self, module, plan, lane):
        self.plan, self.lane = plan, lane
        self.shape = copy.deepcopy(module)  # without weights: head counts are read from it
        for name, linear in self.shape.named_children():
            if name in plan:
                linear.out_features, linear.in_features = self.cut(f"{name}.weight", linear.weight).shape

    def cut(self, name, whole):
        module, _, kind = name.rpartition(".")
        dim, ranges = self.plan.get(module, (0, None))
        if dim == 1 and kind == "bias":  # added to a partial: by one lane
            return whole if self.lane == 0 else torch.zeros_like(whole)
        return whole if ranges is None else torch.cat([whole.narrow(dim, a, b - a) for a, b in ranges], dim)

    def __call__(self, module, args):
        return functional_call(self.shape, {n: self.cut(n, p) for n, p in module.named_parameters()}, args)


class Laned:
    """A module that takes a lane before its other arguments."""

    def forward(self, lane, *args):
        return self.parts[lane](self, args)


class LanedAttention(Laned, Attention):
    pass


class LanedFeedForward(Laned, FeedForward):
    pass


def split(model):
    """Split the attentions and MLPs of a model on the device "meta" in its config's lanes; return the lanes."""
    config, L = model.config, model.config.lanes
    plans = [shard_plan(config, lane, L) for lane in range(L)]
    lanes = [SimpleNamespace(layers=[], norm=model.norm) for _ in plans]
    for block in model.layers:
        for module, kind in (block.attention, LanedAttention), (block.feed_forward, LanedFeedForward):
            module.parts = [Part(module, plan, lane) for lane, plan in enumerate(plans)]
            module.__class__ = kind
        norms = {name: norm for name, norm in block.named_children() if name.endswith("norm")}
        for i, lane in enumerate(lanes):
            parts = {name: functools.partial(getattr(block, name), i) for name in ("attention", "feed_forward")}
            lane.layers.append(SimpleNamespace(**parts, **norms))
    return lanes
