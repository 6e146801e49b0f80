"""The least time that a step can take: model.py's loop, run on a simulated clock.

Computing and all-reduces take given times, so neither weights nor ranks are needed to say what a wiring could gain.
"""

import contextlib
from types import SimpleNamespace

from ladder.architectures.heads import Heads
from ladder.architectures.mixture import Mixture
from ladder.errors import InputError
from model import all_wirings, interleave, list_sublayers, rewired


def variants(config):
    """Return the wirings to compare by default: all that the model can run in, some with several parameters."""

    def fits(text):
        with contextlib.suppress(InputError):
            return bool(rewired(config, text))

    n_layers = config.n_layers
    mixture = config.find(Mixture)
    middle = n_layers // 4
    half = max(1, n_layers // 2)
    more = {
        "ladder": ["ladder", f"ladder:{half}", *["ladder-4"] * bool(mixture)], "desync": ["desync:2", "desync:4"],
        "laneformer": [], "farskip-attention": [], "farskip-mlp": [],
        "farskip": ["farskip"] * bool(mixture and (mixture.shared_expert_size or mixture.dense_layers)),
        "pair": [f"pair:{middle}-{middle + half // 2 * 2 - 1}"] if n_layers > 3 else [],
        "delayed": ["delayed", "delayed-4"][:n_layers],
    }  # fmt: skip
    return [text for name in all_wirings() for text in more.get(name, [name]) if fits(text)]


def norms_over_ranks(config):
    """Return whether each attention sums over the ranks for its norms (whole_qk_norm)."""
    return (config.find(Heads) or Heads()).whole_qk_norm


class Clock:
    """Simulated collectives: sublayers and all-reduces take time, and nothing else does.

    all_reduce: seconds of an all-reduce. flight: for how many of these seconds the link can already carry the next one.
    now: the time in seconds. started: how many all-reduces were started.
    """

    tp_size = lanes = 1

    def __init__(self, all_reduce, flight):
        self.all_reduce = all_reduce
        self.flight = flight
        self.now = self.free_at = 0.0
        self.started = 0

    def advance(self, seconds):
        self.now += seconds
        return 0.0

    def start(self, partial):
        self.started += 1
        delivered = max(self.now, self.free_at) + self.all_reduce
        self.free_at = delivered - self.flight
        return delivered

    def wait(self, pending):
        self.now = max(self.now, pending)
        return 0.0

    def sum_now(self, seconds):
        """Start a small all-reduce, which waits for those that are in flight, and wait for it."""
        self.started += 1
        self.now = self.free_at = max(self.now, self.free_at) + seconds

    def settle(self, x, pending, newer=()):
        return self.wait(pending)

    def pin(self, x, newer):
        return x


def run_layers(config, attention, feed_forward, all_reduce, splits=1, flight=0.0, norm_sum=0.0):
    """Return the Clock after a step, in any wiring. attention, feed_forward: seconds of each attention and each MLP.

    splits: how many parts of the prompt take turns, each with its own all-reduces. norm_sum: seconds of the sum over
    the ranks that whole_qk_norm waits for in the middle of an attention. all_reduce, flight: as in Clock.
    """

    def attend(*_):
        clock.advance(attention / 2)
        if norms_over_ranks(config):
            clock.sum_now(norm_sum)
        return clock.advance(attention / 2)

    clock = Clock(all_reduce, flight)
    block = SimpleNamespace(attention_norm=lambda x: x, ffn_norm=lambda x: x)
    block.attention = attend
    block.feed_forward = lambda *_: clock.advance(feed_forward)
    sublayers = list_sublayers(config, [block] * config.n_layers)
    interleave([config.named_wiring.run(0.0, sublayers, clock, config) for _ in range(splits)])
    return clock
