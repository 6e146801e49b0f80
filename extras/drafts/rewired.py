"""Drafts for speculative decoding: the model's own weights in another wiring, and @auto.

speculative.py imports this for --draft wiring:NAME and --draft ...@auto.
"""

import copy
import sys

import torch

from decoding.sampling import Sampler, last_tokens
from extras.drafts.speculative import ModelDraft
from formats.wiring_text import wiring_name
from model import WIRINGS, parse_wiring, rewired
from runtime.benchmarking import timed
from runtime.errors import InputError

# ---- The model's own weights in another wiring -----------------------------------------------------------------------


class Rewired(ModelDraft):
    """The model's own weights in another wiring, on the model's own cache.

    The keys and values that it reads there are the model's, not those of its own wiring, except for those of its last
    proposals, which the verification overwrites.
    """

    def read(self, texts, device):
        return self.runner.decode(*last_tokens(texts, device))


def rewire(model, config):
    """Return the model of the same weights in the wiring of another config."""
    model = copy.copy(model)
    model.config = config
    return model


def rewired_draft(control, runner, new_runner, config):
    """Return the draft with a runner's weights and cache in the wiring of config. Else as speculative.build()."""
    return Rewired(control, new_runner(rewire(runner.model, config), runner.cache))


def wiring_of(config, name, tp_size):
    """Return the config in the wiring that --draft wiring:NAME names, in the lanes of the weights. Raises InputError.

    Without lanes in its config, a checkpoint has as many lanes as there are ranks.
    """
    try:
        named, lanes = parse_wiring(name.removeprefix("wiring:")), config.lanes or tp_size
        if named.lanes is None and WIRINGS[named.name].laned:
            named = named._replace(lanes=config.lanes)
        draft = rewired(config, wiring_name(*named))
    except InputError as e:
        raise InputError(f"--draft {name}: {e}") from None
    if (draft.lanes or lanes) != lanes:
        needed = f"the weights in {draft.lanes} lanes, that is on so many ranks"
        raise InputError(f"--draft {name} needs {needed}; here they are in {lanes}")
    pairs = zip(draft.wirings, config.wirings, strict=True)
    missing = {norm for drafts, own in pairs for norm in drafts.norms if norm not in own.norms}
    if missing:
        raise InputError(f"--draft {name} needs {min(missing)}, which {config.wiring} has not")
    if draft.function == config.function:
        raise InputError(f"--draft {name} is the wiring that the model runs in: name another")
    if lanes == 1 and all(c.wiring == "standard" or c.standard_in_one_lane for c in (config, draft)):
        print(f"on one rank {draft.wiring} is {config.wiring} itself: this draft only takes time", file=sys.stderr)
    return draft


# ---- @auto -----------------------------------------------------------------------------------------------------------


def expected(rate, count):
    """Return the mean number of ids that a pass yields in a row, if each of `count` proposals is accepted with
    probability `rate`, given that those before it are."""
    return sum(rate**i for i in range(count + 1))


class Auto:
    """The number of proposals that yields most ids per second, by the recent acceptance rate and the times of passes.

    Observations fade with each pass, so that after a while it tries again: the text may have changed. seconds:
    {count: seconds of a pass}, as time_passes() measures them, equal on all ranks.
    """

    counts = 0, 1, 2, 3, 7  # each is a graph to compile
    seconds = dict.fromkeys(counts, 1.0)
    PRIOR = 0.9  # the rate that it begins with, with the weight of one proposal
    MEMORY = 0.98  # the share of the observations that is left after a pass

    def __init__(self):
        self.accepted = self.tried = 0.0

    def choose(self):
        self.accepted, self.tried = self.MEMORY * self.accepted, self.MEMORY * self.tried
        rate = (self.accepted + self.PRIOR) / (self.tried + 1)
        return max(self.seconds, key=lambda count: expected(rate, count) / self.seconds[count])

    def note(self, count, accepted):
        """Learn how many of `count` proposals each row accepted; those after a refused one were not tried."""
        if accepted:
            self.accepted += sum(accepted) / len(accepted)
            self.tried += sum(min(n + 1, count) for n in accepted) / len(accepted)

    @torch.inference_mode()
    def time_passes(self, draft, runner, prompts, world, sample):
        """Measure a pass with each number of proposals, on the slowest rank. The draft has begun."""
        like = Sampler(sample.temperature, sample.top_k, sample.top_p, device=runner.device)
        texts = [[0] * (max(map(len, prompts)) + 1) for _ in prompts]
        seconds = [
            min(timed(runner.device, lambda n=count: draft.warm_up(runner, texts, n, like)) for _ in range(3))
            for count in draft.counts
        ]
        slowest = [max(times) for times in zip(*world.gather(seconds), strict=True)]
        self.seconds = dict(zip(draft.counts, slowest, strict=True))
