"""The least that a step takes: the loop of model.py on a clock, where computing and all-reduces take known times.

It needs neither weights nor ranks, so it says in no time what a wiring could gain over a link.
"""

import itertools

from model import WIRINGS


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


def outline(config):
    """[(number of sublayers, whether they read the stream stale)] of each layer."""
    wirings = map(config.wiring_of, range(config.n_layers))
    return [(len(wiring.split(None, None, None)), wiring.stale) for wiring in wirings]


def run_clock(config, compute, all_reduce):
    """The Clock after one step of the config's wiring: the very loop of model.py, on a clock."""
    clock = Clock(compute, all_reduce)
    sublayers = [(lambda x: 0.0, stale) for n, stale in outline(config) for _ in range(n)]
    WIRINGS[config.wiring].stream(0.0, sublayers, clock, config)
    return clock


def count_all_reduces(config):
    """All-reduces of one step."""
    return run_clock(config, itertools.repeat(0.0), 0.0).started
