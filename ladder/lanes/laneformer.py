"""Kog's Laneformer (kogai/laneformer-2b-it): a wiring whose lanes get each other's partials late."""

import dataclasses

import torch
import torch.nn as nn

from ladder.architectures import Architecture
from ladder.errors import InputError
from ladder.lanes.lanes import LaneWiring, load_lanes
from model import VOCAB_BLOCK, Transformer, list_sublayers

# What the output head reads. "replicate": the mean of the normed lanes. "sum": the norm of their sum. "vocab_parallel":
# for each lane's part of the vocabulary, that lane's normed stream.
LANE_HEADS = "replicate", "sum", "vocab_parallel"


@dataclasses.dataclass(frozen=True)
class LaneformerSettings(Architecture):
    """What Kog's code leaves to a config.json; a Config of this wiring without them has the defaults."""

    name = "laneformer"

    early_comm: bool = True  # whether the first sublayers wait for their own sums
    attention_comm: bool = True  # whether attentions are ever summed over the lanes; mlp_comm says it of MLPs
    mlp_comm: bool = True
    lane_head: str = LANE_HEADS[0]
    lane_norms: bool = False  # whether each lane has norms of its own, stored one after another

    def check(self, config):
        if not isinstance(config.named_wiring, LaneformerWiring):
            raise InputError("laneformer: only for wiring laneformer")

    @classmethod
    def from_hf(cls, hf):
        if "laneformer" not in hf:
            return None
        return hf["laneformer"]["laneformer"], {"wiring": hf["laneformer"]["wiring"]}

    def hf_weights(self, source, config, hf):
        from ladder.sources.laneformer import LaneformerWeights

        return LaneformerWeights(source, config.head_dim)


def settings(config):
    """Return the LaneformerSettings of a Config."""
    return config.find(LaneformerSettings) or LaneformerSettings()


def laneformer_loop(x, sublayers, comm, config, norm=lambda x: x):
    """Run x_i = x_{i-1} + p_i + the other lanes' p_{i-d}, where p_i is this lane's partial h_i(x_{i-1}).

    The first d sublayers wait for the sum of all p_i or, without early_comm, add sqrt(lanes) p_i instead. So do all
    later attentions without attention_comm, and all later MLPs without mlp_comm. The last d sublayers start no
    all-reduce, since its sum would come too late. At the end, one more all-reduce adds up the lanes' streams, or their
    norms for the mean; the head "vocab_parallel" needs none.
    """
    values = settings(config)
    recent = []
    last = None
    has_sums = values.attention_comm, values.mlp_comm
    for i, (h, d) in enumerate(sublayers):
        p = h(x)
        now = i < d and values.early_comm
        later = has_sums[i % 2] and i + d < len(sublayers)
        started = comm.start(p) if now or later else None
        yield
        recent.append((p, started))
        last = last if started is None else started  # the newest start, which no wait may precede
        before, pending = recent.pop(0) if i >= d else (None, None)
        if now:
            x = comm.settle(x, started)
        elif i < d or not has_sums[i % 2]:
            x = x + comm.lanes**0.5 * p
            x = x if last is None else comm.pin(x, [last])
        else:
            x = comm.settle(x + (p - before), pending, newer=[last])
    if values.lane_head != "vocab_parallel":
        summed = values.lane_head == "sum"
        started = comm.start(x if summed else norm(x))
        yield
        x = comm.wait(started) / (1 if summed else comm.lanes)
    yield x


class Laneformer(Transformer):
    """A Transformer whose loop ends with a sum over its lanes, and whose norms may differ from lane to lane."""

    def __init__(self, config):
        super().__init__(config)
        self.settings = values = settings(config)
        for name, module in self.named_modules() if values.lane_norms else ():
            if isinstance(module, nn.RMSNorm) and (name, values.lane_head) != ("norm", "sum"):
                module.weight = nn.Parameter(torch.empty(config.named_wiring.lanes * config.dim))

    def loop(self, x, metadata, cache=None):
        sublayers = list_sublayers(self.config, self.layers, metadata, cache)
        return laneformer_loop(x, sublayers, self.comm, self.config, self.norm)

    def head(self, x, last_index=None):
        if self.settings.lane_head != "replicate":
            return super().head(x, last_index)
        if last_index is not None:
            x = x[torch.arange(len(x), device=x.device)[:, None], last_index[:, None]]
        return self.output(x)  # the loop has normed it, before the lanes' mean


class LaneformerWiring(LaneWiring):
    """The LaneWiring of Kog's model, which needs a class of its own."""

    def check(self, config):
        values = settings(config)
        lanes = self.lanes
        if values.lane_head not in LANE_HEADS:
            raise InputError(f"laneformer: lane_head {values.lane_head!r} is none of {', '.join(LANE_HEADS)}")
        if self.stale % 2:
            raise InputError(f"wiring {config.wiring}: a Laneformer's delay is of whole layers, of two sublayers each")
        if values.lane_head == "vocab_parallel" and config.vocab_size % (VOCAB_BLOCK * (lanes or 1)):
            raise InputError(f"vocab_size {config.vocab_size} is no multiple of {VOCAB_BLOCK} for each of its lanes")
        if values.lane_norms and lanes is None:
            raise InputError(f"lane_norms: each lane has norms of its own, but wiring {config.wiring} names no lanes")

    def loader(self, shares):
        return load_lanes

    def new_model(self, config):
        return Laneformer(config)


LANEFORMER = LaneformerWiring("Kog's Laneformer", loop=laneformer_loop, stale=4)
