"""Several lanes on one rank. Of L lanes, a lane is the shard that one of L ranks would hold."""

import dataclasses
import functools
import operator
from itertools import chain

import torch
import torch.nn as nn

from ladder.errors import InputError
from ladder.progress import progress
from model import SingleDevice, Wiring, interleave
from tp import load_shard, split_range


@dataclasses.dataclass(frozen=True)
class LaneWiring(Wiring):
    """A Wiring of NAME[-stale][:n][/lanes], whose sublayers read partials of their own lane."""

    lanes: int | None = None  # L of NAME/L: for how many lanes the weights were made; None: as many as ranks

    reads_partials = True

    @property
    def fixed_shards(self):
        return self.lanes is not None

    @property
    def forms(self):
        return *super().forms, "/LANES"

    def configured(self, parsed):
        return dataclasses.replace(super().configured(parsed), lanes=parsed.lanes)

    def shards(self, shares=(1,)):
        return (1,) * self.lanes if self.lanes else shares

    def loader(self, shares):
        return load_lanes if self.lanes and shares != self.shards() else None  # a lane on each rank: as any shard


def lanes_of_rank(config, rank, shares):
    """Return the range of the lanes that a rank holds. Raises InputError if a lane would have to be cut."""
    lanes = len(config.named_wiring.shards(shares))
    if any(lanes * share % sum(shares) for share in shares):
        fit = ", ".join(str(n) for n in range(1, lanes + 1) if lanes % n == 0)
        what = f"the {lanes} lanes of wiring {config.wiring} do not fit {len(shares)} ranks"
        raise InputError(f"{what}: use {fit} ranks of equal shares")
    return range(*split_range(lanes, rank, shares))


def load_lanes(config, weights, dtype, device, rank=0, shares=(1,)):
    """Return the Lanes of a rank; the arguments and errors are those of tp.load_shard."""
    models = []
    embeddings = None
    lanes = config.named_wiring.shards((1,) * len(shares))
    start = end = progress.beats
    for lane in lanes_of_rank(config, rank, shares):
        progress.beats = start  # else a rank that hangs in a later lane would seem to be ahead of the others
        model = load_shard(config, weights, dtype, device, lane, lanes, embeddings)
        end = max(end, progress.beats)
        for norm in (module for module in model.modules() if isinstance(module, nn.RMSNorm)):
            if len(norm.weight) > config.dim:  # it holds the weights of all lanes, one after another
                norm.weight = nn.Parameter(norm.weight.view(-1, config.dim)[lane], requires_grad=False)
        models.append(model)
        embeddings = models[0].tok_embeddings
    progress.beats = end
    return Lanes(models)


class LaneSums:
    """The collectives of a rank's lanes, whose loops take turns. The last lane to start begins the all-reduce."""

    def __init__(self, comm, lanes_here, lanes):
        self.comm = comm
        self.lanes_here = lanes_here
        self.lanes = lanes
        self.partials = []
        self.sums = []

    def start(self, partial):
        self.partials.append(partial)
        sums = self.sums  # a list that all lanes of this turn get; the last lane puts the all-reduce into it
        if len(self.partials) == self.lanes_here:
            sums.append(self.comm.start(functools.reduce(operator.add, self.partials)))
            self.partials = []
            self.sums = []
        return sums

    def wait(self, pending):
        return self.comm.wait(pending[0])

    def settle(self, x, pending, newer=()):
        return self.comm.settle(x, pending[0], [sums[0] for sums in newer])

    def pin(self, x, newer):
        return self.comm.pin(x, [sums[0] for sums in newer])


class Lanes(nn.Module):
    """The lanes of a rank, each a Transformer with its own shard. It is called like one Transformer."""

    def __init__(self, models):
        super().__init__()
        self.lanes = nn.ModuleList(models)
        self.config = models[0].config
        self.comm = SingleDevice()

    device = property(lambda self: self.lanes[0].device)
    dtype = property(lambda self: self.lanes[0].dtype)

    def forward(self, tokens, positions=None, cache=None, cache_length=None, last_index=None, splits=1):
        """Return the logits of all lanes' parts of the vocabulary, side by side; the arguments: Transformer.forward."""
        n = len(self.lanes)
        n_lanes = len(self.config.named_wiring.shards((1,) * self.comm.tp_size))
        sums = LaneSums(self.comm, n, n_lanes)
        loops = []
        layers = len(self.lanes[0].layers)
        for i, lane in enumerate(self.lanes):
            lane.comm = sums
            lane.config = self.config
            lane_cache = cache and cache[i * layers : (i + 1) * layers]
            loops.append(lane.split_loops(tokens, positions, lane_cache, cache_length, last_index, splits))
        xs = interleave(chain.from_iterable(zip(*loops, strict=True)))  # ordered by part of the sequence, then by lane
        hidden_states = [torch.cat(xs[i::n], dim=1) for i in range(n)]
        return torch.cat([lane.head(x, last_index) for lane, x in zip(self.lanes, hidden_states, strict=True)], dim=-1)

    @property
    def attentions(self):
        """The attentions of all lanes, in the order of the cache."""
        return [attention for lane in self.lanes for attention in lane.attentions]

    def new_cache(self, batch, length):
        """Return the caches of all lanes, one lane's layers after another's."""
        return [layer for lane in self.lanes for layer in lane.new_cache(batch, length)]
