"""The least time that a step takes: model.py's loop, on a clock where computing and all-reduces take known times.

It needs neither weights nor ranks, so it says at once what a wiring could gain over a link.
"""

import itertools
from types import SimpleNamespace

from model import WIRINGS, interleave, list_sublayers


def variants(n_layers):
    """Return the wirings to compare by default: all of model.py, and several parameters of those that take one."""
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

    all_reduce: seconds of an all-reduce. flight: for how many of these the link can already carry the next one.
    compute: seconds of computing before each start, in order; None if the sublayers advance `now` themselves.
    spans: (name, start, end) of every sublayer and all-reduce so far.
    """

    tp_size = lanes = 1

    def __init__(self, all_reduce, compute=None, flight=0.0):
        self.all_reduce, self.flight = all_reduce, flight
        self.compute = itertools.repeat(0.0) if compute is None else iter(compute)
        self.now = self.free_at = 0.0
        self.started, self.spans = 0, []

    def advance(self, name, seconds):
        self.spans.append((name, self.now, self.now + seconds))
        self.now += seconds

    def start(self, partial):
        self.now += next(self.compute)
        self.started += 1
        begin = max(self.now, self.free_at)
        delivered = begin + self.all_reduce
        self.free_at = delivered - self.flight
        self.spans.append(("all-reduce", begin, delivered))
        return delivered

    def wait(self, pending):
        self.now = max(self.now, pending)
        return 0.0

    def settle(self, x, pending, after=None):
        return x if pending is None else self.wait(pending)


def timed_block(clock, attention, feed_forward):
    """Return a stand-in for model.Block: its attention and its MLP take so many seconds, its norms take none."""

    def computing(name, seconds):
        def h(x, *_):
            clock.advance(name, seconds)
            return 0.0

        return h

    norms = {norm: lambda x: x for wiring in WIRINGS.values() for norm in wiring.norms}
    return SimpleNamespace(
        attention=computing("attention", attention), feed_forward=computing("mlp", feed_forward), **norms
    )


def _run(config, clock, block, chunks):
    """Return the clock after one step: the streams, splits and turns of model.py itself."""
    sublayers = list_sublayers(config, lambda wiring, i: wiring.split(block, None, None))
    interleave([config.named_wiring.stream(0.0, sublayers, clock, config) for _ in range(chunks)])
    return clock


def run_clock(config, compute, all_reduce, chunks=1, flight=0.0):
    """Return the Clock after a step whose compute times between starts were measured in this wiring.

    chunks: of the prompt, which take turns, each with its own all-reduces.
    """
    clock = Clock(all_reduce, compute, flight)
    return _run(config, clock, timed_block(clock, 0.0, 0.0), chunks)


def run_layers(config, attention, feed_forward, all_reduce, chunks=1, flight=0.0):
    """Return the Clock after a step in which each attention and each MLP takes so many seconds, in any wiring."""
    clock = Clock(all_reduce, flight=flight)
    return _run(config, clock, timed_block(clock, attention, feed_forward), chunks)


def count_all_reduces(config, chunks=1):
    """Return the number of all-reduces in one step."""
    return run_layers(config, 0.0, 0.0, 0.0, chunks).started
