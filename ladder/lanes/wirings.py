"""The wirings that compute another function with another number of lanes. model.py has the other wirings.

A lane is a shard of the model with a residual stream x of its own. spd/8 has eight lanes, on 1, 2, 4 or 8 ranks; spd
alone has one lane on each rank.
"""

import dataclasses
import functools

import model
from ladder.lanes.laneformer import LANEFORMER
from ladder.lanes.lanes import LaneWiring


def attention_into_mlp(x, block, metadata, cache):
    """Sync-point drop: the MLP reads the lane's own partial y of the attention, without an all-reduce between them."""
    y = model.attention_sublayer(x, block, metadata, cache)
    return y + model.mlp_sublayer(x + y, block, metadata, cache)


def delayed_loop(x, sublayers, comm, config):
    """Run a ladder that gets the other lanes' partials late, but this lane's on time: h reads x + sum(own)."""
    own = []  # this lane's partials whose all-reduces residual_loop has in flight, oldest first

    def with_own(h, stale, x):
        while len(own) > stale:  # residual_loop has added their sums to x
            own.pop(0)
        own.append(h(sum(own, start=x)))
        return own[-1]

    delayed = [(functools.partial(with_own, h, stale), stale) for h, stale in sublayers]
    return model.residual_loop(x, delayed, comm, config)


class Delayed(LaneWiring):
    takes_layers = True


@dataclasses.dataclass(frozen=True)
class Desync(LaneWiring):
    period: int = 2  # n of desync:n

    @property
    def forms(self):
        return ":N", *super().forms

    def configured(self, parsed):
        return dataclasses.replace(super().configured(parsed), period=parsed.parameter or self.period)


def desynced_loop(x, sublayers, comm, config):
    """Run an all-reduce after every n-th sublayer (n = wiring.period) and after the last one.

    Between them, the lanes' x drift apart. An all-reduce sets x to AllReduce(x / lanes + h(x)): the mean of the
    lanes' x plus the sum of their partials.
    """
    n = config.named_wiring.period
    for i, (h, _) in enumerate(sublayers, start=1):
        if i % n == 0 or i == len(sublayers):
            pending = comm.start(x / comm.lanes + h(x))
            yield
            x = comm.wait(pending)
        else:
            x = x + h(x)
    yield x


def silent_loop(x, sublayers, comm, config):
    """Run the sublayers without any all-reduce. No overlap can be faster."""
    for h, _ in sublayers:
        x = x + h(x)
    yield x


LANE_WIRINGS = {
    "spd": LaneWiring("the MLP reads its rank's attention", (attention_into_mlp,)),
    "spd-ladder": LaneWiring("spd, one block stale", (attention_into_mlp,), stale=1),
    "delayed": Delayed("a ladder, but own partials are on time", loop=delayed_loop, stale=1),
    "desync": Desync("only every n-th sum (n=2)", loop=desynced_loop),
    "upper-bound": LaneWiring("no sums: a bound on speed", loop=silent_loop),
    "laneformer": LANEFORMER,
}
