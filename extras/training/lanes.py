"""The lanes of whole weights, for training: each computes with its part of every matrix, as tp.py cuts it."""

import copy
import functools
from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.func import functional_call

import tp
from model import Attention, FeedForward


class Part:
    """What a lane computes of a module: its forward, with a part of its weights. held: of tp.held, by their names."""

    def __init__(self, module, held):
        self.held = held
        self.shape = copy.deepcopy(module)  # without weights: head counts are read from it
        for name, linear in self.shape.named_children():
            if isinstance(linear, nn.Linear):
                linear.out_features, linear.in_features = held[f"{name}.weight"][1]

    def cut(self, name, whole):
        _, _, _, dim, ranges, _ = self.held[name]
        if ranges == []:
            return torch.zeros_like(whole)
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
    lanes = [SimpleNamespace(layers=[], norm=model.norm) for _ in range(model.config.lanes)]
    held = [tp.held(model.config, torch.float32, lane, len(lanes), model) for lane in range(len(lanes))]
    for i, block in enumerate(model.layers):
        for name, kind in ("attention", LanedAttention), ("feed_forward", LanedFeedForward):
            module, prefix = getattr(block, name), f"layers.{i}.{name}."
            own = [{n.removeprefix(prefix): part for n, part in of.items() if n.startswith(prefix)} for of in held]
            module.parts = [Part(module, part) for part in own]
            module.__class__ = kind
        norms = {name: norm for name, norm in block.named_children() if name.endswith("norm")}
        for number, lane in enumerate(lanes):
            parts = {name: functools.partial(getattr(block, name), number) for name in ("attention", "feed_forward")}
            lane.layers.append(SimpleNamespace(**parts, **norms))
    return lanes
