"""Neurons in lanes by affinity: the standard model stays the same, and its lanes miss less of one another."""

import dataclasses
import itertools
import re
import shutil

import pytest
import torch
from helpers import BASE, random_model, train_tokenizer, write_model

from complete import load
from extras.training import affinity
from model import rewired
from runtime import writing
from runtime.errors import InputError

CONFIG = dataclasses.replace(BASE, n_layers=2, vocab_size=300, max_seq_len=512, mlp_bias=True)


def model_of_two_kinds(config):
    """A model whose even neurons read what the first half of the heads writes, and its odd ones the second."""
    model, half = random_model(config).requires_grad_(False), config.n_heads * config.head_dim // 2
    for block in model.layers:
        written = block.attention.wo.weight.T.split(half)  # of (half, D)
        for linear in block.feed_forward.w1, block.feed_forward.w3:
            for odd in 0, 1:
                linear.weight[odd::2] = linear.weight[odd::2, :half] @ written[odd] * (config.dim / half) ** 0.5
    return model


@pytest.fixture
def folder(tmp_path):
    text = "Once upon a time there was a little dog. The dog ran to the park and saw a big tree. "
    (tmp_path / "text.txt").write_text(text * 40)
    (tmp_path / "a").mkdir()
    write_model(tmp_path / "a", CONFIG, model_of_two_kinds(CONFIG).state_dict(), torch.float32)
    train_tokenizer([text] * 30, 300, tmp_path / "a" / "tokenizer.model")
    return tmp_path


def test_two_lanes_are_shared_out_at_the_lowest_cost():
    for seed in range(5):
        cost = torch.rand(7, 2, generator=torch.Generator().manual_seed(seed))
        sums = [cost[range(7), lanes].sum() for lanes in itertools.product((0, 1), repeat=7) if sum(lanes) == 3]
        result = affinity.assign(cost, [4, 3])
        assert result.tolist().count(1) == 3 and cost[range(7), result].sum() == pytest.approx(min(sums).item())


def test_neurons_move_between_lanes_and_the_standard_model_stays(folder, capsys):
    flags = ["--checkpoint", folder / "a", "--lanes", "2", "--text", folder / "text.txt", "--out", folder / "b"]
    affinity.main([*map(str, flags), "--tokens", "600"])
    was, now = re.search(r"MLPs: (\S+), now (\S+)\n", capsys.readouterr().out).groups()
    assert 0 < float(now) < 0.95 * float(was)
    tokens = torch.randint(300, (2, 50), generator=torch.Generator().manual_seed(1))

    def logits(name, wiring):
        with torch.inference_mode():
            return load(folder / name, wiring=wiring)[0](tokens)

    for wiring in "standard", "ladder", "pair":
        assert (logits("a", wiring) - logits("b", wiring)).abs().max() < 1e-4, wiring
    off = [(logits(name, "spd/2") - logits("a", "standard")).square().mean() for name in "ab"]
    assert off[1] < 0.9 * off[0]
    left = {name: (folder / "b" / name).read_bytes() for name in ("config.json", "tokenizer.model")}
    assert all((folder / "a" / name).read_bytes() == data for name, data in left.items())


def test_bad_input(folder, monkeypatch):
    monkeypatch.chdir(folder)
    shutil.copytree("a", "laned")
    writing.write_config(folder / "laned", rewired(CONFIG, "spd/2"))
    flags = ["--checkpoint", "a", "--lanes", "2", "--text", "text.txt", "--out", "b"]
    for more, message in (["--lanes", "7"], "n_heads 6: use 1 to 6"), (["--checkpoint", "laned"], "laned is spd/2"):
        with pytest.raises(InputError, match=message):
            affinity.main([*flags, *more])
    assert not (folder / "b").exists()
