"""The least that a step takes: the loop of model.py on a clock, where computing and all-reduces take known times.

It needs neither weights nor ranks, so it says in no time what a wiring could gain over a link.
"""

import itertools
from types import SimpleNamespace

from model import WIRINGS

PERIODS = 2, 4  # of a wiring that keeps every n-th all-reduce


def variants(n_layers):
    """{name: changes of a Config}: each wiring of model.py, with its parameter half of the layers or one of PERIODS."""
    found = {}
    for wiring, known in WIRINGS.items():
        if known.parameter == "desync_period":
            found |= {f"{wiring}-{n}": {"wiring": wiring, "desync_period": n} for n in PERIODS}
        elif not known.optional:
            found[wiring] = {"wiring": wiring, "ladder_layers": max(1, n_layers // 2)}  # the last ones
        else:
            found[wiring] = {"wiring": wiring}
    return found


class Clock:
    """Simulated collectives: sublayers and all-reduces take time, and nothing else does.

    compute: seconds computed before each start, in order, since the start or the wait before it. all_reduce: seconds of
    one; the link carries one at a time. Standard sublayers take the sum of all of both. Ladder takes the first compute,
    then max(compute, all-reduce) for each further sublayer, then the last all-reduce, which nothing can hide.
    """

    tp_size = 1

    def __init__(self, compute, all_reduce):
        self.compute, self.all_reduce = iter(compute), all_reduce
        self.now = self.delivered = 0.0
        self.started = 0

    def start(self, partial):
        self.now += next(self.compute)
        self.started += 1
        self.delivered = max(self.now, self.delivered) + self.all_reduce
        return self.delivered

    def wait(self, pending):
        self.now = max(self.now, pending)
        return 0.0

    def settle(self, x, pending, after=None):
        return x if pending is None else self.wait(pending)


def timed_block(clock, attention, feed_forward):
    """What a split of model.py takes for a block: its attention and its MLP compute so many seconds, its norms none."""

    def computing(seconds):
        def h(x, *_):
            clock.now += seconds
            return 0.0

        return h

    norms = {norm: lambda x: x for wiring in WIRINGS.values() for norm in wiring.norms}
    return SimpleNamespace(attention=computing(attention), feed_forward=computing(feed_forward), **norms)


def split(config, block):
    """[(what each layer's wiring makes of such a block, whether it reads the stream stale)]."""
    wirings = map(config.wiring_of, range(config.n_layers))
    return [(wiring.split(block, None, None), wiring.stale) for wiring in wirings]


def outline(config):
    """[(number of sublayers, whether they read the stream stale)] of each layer."""
    return [(len(sublayers), stale) for sublayers, stale in split(config, None)]


def run_clock(config, compute, all_reduce, attention=0.0, feed_forward=0.0):
    """The Clock after one step of the config's wiring: the very loop of model.py, and its blocks, on a clock.

    compute: as Clock takes it, measured on a model of this wiring. attention, feed_forward: or what these take of each
    layer, in seconds, whatever the wiring makes of them.
    """
    clock = Clock(compute, all_reduce)
    layers = split(config, timed_block(clock, attention, feed_forward))
    sublayers = [(h, stale) for some, stale in layers for h in some]
    WIRINGS[config.wiring].stream(0.0, sublayers, clock, config)
    return clock


def run_layers(config, attention, feed_forward, all_reduce):
    """run_clock where nothing else is computed."""
    return run_clock(config, itertools.repeat(0.0), all_reduce, attention, feed_forward)


def count_all_reduces(config):
    """All-reduces of one step."""
    return run_layers(config, 0.0, 0.0, 0.0).started
