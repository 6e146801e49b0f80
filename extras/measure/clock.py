"""The least that a step takes: the loop of model.py on a clock, where computing and all-reduces take known times.

It needs neither weights nor ranks, so it says in no time what a wiring could gain over a link.
"""

import itertools
from types import SimpleNamespace

from model import WIRINGS, interleave, list_sublayers


def variants(n_layers):
    """Return the wirings to compare: each of model.py in all layers, and of those with a parameter some more."""
    middle, half = n_layers // 4, max(1, n_layers // 2)
    more = {
        "ladder": ["ladder", f"ladder:{half}"], "desync": ["desync:2", "desync:4"], "laneformer": [],
        "pair": [f"pair:{middle}-{middle + half // 2 * 2 - 1}"] if n_layers > 3 else [],
        "pair-ladder": ["pair-ladder"] if n_layers > 1 else [],
        "delayed": ["delayed", "delayed-4"][:n_layers],
    }  # fmt: skip
    return [text for name in WIRINGS for text in more.get(name, [name])]


class Clock:
    """Simulated collectives: sublayers and all-reduces take time, and nothing else does.

    all_reduce: seconds of one; flight: those of them during which the link may carry the next. compute: seconds
    computed before each start, in order, since the start or the wait before it; None where the sublayers themselves
    take time. Standard sublayers take the sum of all of both. Without flight, ladder takes the first compute, then
    max(compute, all-reduce) for each further sublayer, then the last all-reduce, which nothing can hide.
    """

    tp_size = lanes = 1

    def __init__(self, all_reduce, compute=None, flight=0.0):
        self.all_reduce, self.flight = all_reduce, flight
        self.compute = itertools.repeat(0.0) if compute is None else iter(compute)
        self.now = self.free_at = 0.0
        self.started = 0

    def start(self, partial):
        self.now += next(self.compute)
        self.started += 1
        delivered = max(self.now, self.free_at) + self.all_reduce
        self.free_at = delivered - self.flight
        return delivered

    def wait(self, pending):
        self.now = max(self.now, pending)
        return 0.0

    def settle(self, x, pending, after=None):
        return x if pending is None else self.wait(pending)


def timed_block(clock, attention=0.0, feed_forward=0.0):
    """Return a block for a split of model.py: its attention and its MLP compute so many seconds, its norms none."""

    def computing(seconds):
        def h(x, *_):
            clock.now += seconds
            return 0.0

        return h

    norms = {norm: lambda x: x for wiring in WIRINGS.values() for norm in wiring.norms}
    return SimpleNamespace(attention=computing(attention), feed_forward=computing(feed_forward), **norms)


def _run(config, clock, block, parts):
    """Return the clock after one step of the config's wiring: the very loop of model.py, its splits, and its turns."""
    sublayers = list_sublayers(config, lambda wiring, i: wiring.split(block, None, None))
    interleave([config.named_wiring.stream(0.0, sublayers, clock, config) for _ in range(parts)])
    return clock


def run_clock(config, compute, all_reduce, parts=1, flight=0.0):
    """Return the Clock after a step whose compute times were measured in this wiring.

    compute, flight: as Clock takes them. parts: of a prefill, each with all-reduces of its own.
    """
    clock = Clock(all_reduce, compute, flight)
    return _run(config, clock, timed_block(clock), parts)


def run_layers(config, attention, feed_forward, all_reduce, parts=1, flight=0.0):
    """Return the Clock after a step in which attention and MLP take so many seconds of each layer, however wired.

    parts: of a prefill, each of which takes all these times.
    """
    clock = Clock(all_reduce, flight=flight)
    return _run(config, clock, timed_block(clock, attention, feed_forward), parts)


def count_all_reduces(config, parts=1):
    """Return the number of all-reduces in one step."""
    return run_layers(config, 0.0, 0.0, 0.0, parts).started
