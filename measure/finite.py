"""Numbers that are not finite: the error that ends a generation, and where in the model they begin."""

import copy

import torch

from formats.checkpoint import dtype_name
from model import InputError

SUBLAYERS = {1: ("attention and MLP",), 2: ("attention", "MLP")}  # of a block, by their number


def computed_in(model):
    """The dtype that a model computes in, as a phrase, and the wider one of its checkpoint, if that is one."""
    dtype, stored = model.norm.weight.dtype, getattr(model, "stored_dtype", model.norm.weight.dtype)
    phrase = f"computed in {dtype_name(dtype)}"
    if torch.finfo(stored).max > torch.finfo(dtype).max:
        name = dtype_name(stored)
        phrase += f", which ends at {torch.finfo(dtype).max:g}: these weights are {name}, run with --dtype {name}"
    return phrase


class NotFinite(InputError):
    """The logits of a step were not finite in a row. rows: the new tokens before it."""

    def __init__(self, model, rows, step, row):
        self.rows, self.step = rows, step
        where = f"step {step} ({'decode' if step else 'prefill'}), row {row} of {len(rows)}"
        super().__init__(f"the logits are NaN or infinite in {where}, {computed_in(model)}")


class Probe:
    """Looks at what all sublayers of a model read and return, and at the logits, while its copy of the model runs.

    sample: a sampler for that run, which draws nothing: it gives the tokens of rows once more, and 0 behind their ends.
    """

    def __init__(self, model, rows):
        self.rows, self.step = rows, 0
        self.first = None  # (step, sublayer, 0 for what it reads or 1 for what it returns)
        self.largest = 0.0
        self.model = copy.copy(model)
        self.model.sublayers = lambda *args: [
            (self._watched(i, h), stale) for i, (h, stale) in enumerate(model.sublayers(*args))
        ]
        config = model.config
        counts = [wiring.n_sublayers for wiring in config.wirings]
        self.names = [f"layer {layer}'s {name}" for layer, n in enumerate(counts) for name in SUBLAYERS[n]]
        self.names.append("the output head")

    def _watched(self, i, h):
        def watched(x):
            self._look(x, i, 0)
            y = h(x)
            self._look(y, i, 1)
            return y

        return watched

    def _look(self, x, i, returned):
        top = torch.stack(x.aminmax()).abs().max().item()
        if top < float("inf"):
            self.largest = max(self.largest, top)
        elif self.first is None:
            self.first = self.step, i, returned

    def sample(self, logits):
        self._look(logits, len(self.names) - 1, 1)
        tokens = [row[self.step] if self.step < len(row) else 0 for row in self.rows]
        self.step += 1
        return torch.tensor(tokens, device=logits.device)

    def words(self, world):
        """What was seen, of all ranks, as a phrase; they all must come."""
        firsts, largest = world.gather(self.first), max(world.gather(self.largest))
        found = sorted((*first, rank) for rank, first in enumerate(firsts) if first is not None)
        if not found:
            dtype = self.model.norm.weight.dtype
            ends = f"the largest is {largest:.4g}, and {dtype_name(dtype)} ends at {torch.finfo(dtype).max:.4g}"
            return (
                f"all numbers of {len(self.names) - 1} sublayers in {self.step} steps, run eagerly, are finite: {ends}"
            )
        step, i, returned, rank = found[0]
        if not returned:
            what = f"the stream that {self.names[i]} reads: a sum or the embedding"
        elif i == len(self.names) - 1:
            what = f"the logits of {self.names[i]}"
        else:
            what = f"what {self.names[i]} returns on rank {rank}"
        return f"run eagerly, the first numbers that are not finite are, in step {step}, {what}"
