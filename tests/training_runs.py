"""Runs of adapt.py: on a rank, interrupted and resumed, and compared by their logs and weights."""

import pytest
import torch
from cases import refused
from file_edits import read_lines
from helpers import seeded
from running import run_main

from extras.training import adapt, data, sharding
from ladder.checkpoints import checkpoint
from ladder.ranks import launch
from ladder.text.tokenizer import SplittingTokenizer


class Letters(SplittingTokenizer):
    """A token a character; BOS is 1."""

    prefix = [1]
    vocab_size = 256
    template = "<s>{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"

    def __init__(self):
        super().__init__({"<s>": 1})

    def encode_text(self, text, first):
        return [ord(c) for c in text]


def random_batch():
    """A data.Batch of two rows, of whose tokens some do not count."""
    generator = seeded(0)
    tokens, targets = torch.randint(0, 131, (2, 2, 9), generator=generator)
    counts = torch.rand(2, 9, generator=generator) < 0.6
    return data.Batch(tokens, targets, counts, torch.arange(9).expand(2, 9), None)


def plain_batch():
    """A data.Batch of two rows of tokens without targets."""
    return data.Batch(torch.arange(12).view(2, 6), None, None, torch.arange(6).expand(2, 6), None)


def trainee_like(model):
    """Returns an adapt.Trainee, not sharded, with a model's weights."""
    trainee = adapt.Trainee(model.config).to(model.dtype)
    trainee.load_state_dict(model.state_dict())
    return trainee


def read_losses(out):
    """Returns the log of a run, without what depends on the machine."""
    lines = read_lines(out / "log.jsonl")
    return [{k: v for k, v in line.items() if k != "tokens_per_s"} for line in lines]


def check_same_run(one, other, rel):
    """Two runs have the same log and weights, but for rounding where rel > 0."""
    for a, b in zip(read_losses(one), read_losses(other), strict=True):
        assert a == pytest.approx(b, rel=rel)
    a = checkpoint.Weights(one)
    b = checkpoint.Weights(other)
    assert all((a.read(name) - b.read(name)).abs().max() <= rel for name in a.names())


def train_on_rank(world, argv):
    """Run adapt.main as one of the pool's ranks."""
    with pytest.MonkeyPatch.context() as m:
        m.setattr(launch, "join", lambda device, flags: world)
        adapt.main(argv)


def check_resumption(flags, tmp_path, monkeypatch, rel=0.0):
    flags = [*flags, "--steps", "12", "--eval-every", "3"]
    run_main(adapt, *flags, "--out", tmp_path / "whole")
    step = adapt.optimizer_step
    save = sharding.save
    for at, where in (2, "step"), (5, "step"), (9, "save"), (9, "save"), (11, "step"):

        def killed(n, *args, at=at, where=where):
            if n == at and where == "step":
                raise KeyboardInterrupt
            return step(n, *args)

        def killed_saving(run, n, *args, at=at):
            if n == at:
                (run / f"state-{n}").mkdir(exist_ok=True)
                raise KeyboardInterrupt
            save(run, n, *args)

        with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
            m.setattr(adapt, "optimizer_step", killed)
            m.setattr(sharding, "save", killed_saving if where == "save" else save)
            adapt.main(flags)
    assert sorted(p.name for p in (tmp_path / "out.run").glob("[bs]*-*")) == ["best-9", "state-9"]
    refused("holds a run with --lr 0.001, not 0.0001", adapt.main, [*flags, "--lr", "1e-4"])
    adapt.main(flags)
    check_same_run(tmp_path / "out", tmp_path / "whole", rel)
