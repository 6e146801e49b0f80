"""Neurons in lanes by affinity: the standard model stays the same, and its lanes miss less of one another."""

import dataclasses
import itertools
import math
import re
import shutil

import numpy as np
import pytest
import torch
from helpers import BASE, StateWeights, random_model, train_tokenizer
from reference import Reference, rms_norm

from complete import load
from extras.lanes import load_lanes
from extras.training import affinity
from formats import checkpoint
from model import rewired
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
    checkpoint.write_model(tmp_path / "a", CONFIG, model_of_two_kinds(CONFIG).state_dict(), torch.float32)
    train_tokenizer([text] * 30, 300, tmp_path / "a" / "tokenizer.model")
    return tmp_path


def naive_costs(model, config, tokens, lanes):
    """The cost (n_layers, I, L) of each neuron in each lane in float64, from the whole standard model."""
    naive, L = Reference(config, model.state_dict()), config.n_layers
    G, K = config.n_heads // config.n_kv_heads, config.n_kv_heads
    bounds = [G * math.ceil(K * lane / lanes) for lane in range(lanes + 1)]  # whole KV heads; the first lanes have more
    result = np.zeros((L, config.intermediate_size, lanes))

    def neurons(i, x):
        n = rms_norm(x, naive.w[f"layers.{i}.ffn_norm.weight"], config.norm_eps)
        names = "w1.weight", "w1.bias", "w3.weight", "w3.bias"
        w = {name: naive.w[f"layers.{i}.feed_forward.{name}"] for name in names}
        gate = n @ w["w1.weight"].T + w["w1.bias"]
        return gate / (1 + np.exp(-gate)) * (n @ w["w3.weight"].T + w["w3.bias"])

    for row in tokens:
        x = naive.w["tok_embeddings.weight"][row]
        for i in range(L):
            ys = [naive.attention(i, x, heads) for heads in itertools.pairwise(bounds)]
            whole = neurons(i, x + sum(ys))
            for lane, y in enumerate(ys):
                w2 = naive.w[f"layers.{i}.feed_forward.w2.weight"]
                off = (whole - neurons(i, x + y))[..., None] * w2.T  # (S, I, D): of the MLP's output
                result[i, :, lane] += (off * off).sum((0, 2))
            x = x + sum(ys)
            x = x + naive.mlp(i, x, (0, config.intermediate_size))
    return result


@pytest.mark.parametrize("lanes", [2, 3])
def test_costs_are_those_of_the_equations(lanes):
    config = dataclasses.replace(CONFIG, n_heads=12, n_kv_heads=4, head_dim=4, intermediate_size=25)
    model = random_model(config).requires_grad_(False)
    tokens = torch.randint(300, (3, 7), generator=torch.Generator().manual_seed(1))
    laned = load_lanes(rewired(config, f"spd/{lanes}"), StateWeights(model.state_dict()), torch.float32, "cpu")
    result = affinity.costs(laned, tokens).numpy()
    assert np.allclose(result, naive_costs(model, config, tokens, lanes), rtol=1e-3)


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
    checkpoint.write_config(folder / "laned", rewired(CONFIG, "spd/2"))
    flags = ["--checkpoint", "a", "--lanes", "2", "--text", "text.txt", "--out", "b"]
    for more, message in (["--lanes", "7"], "n_heads 6: use 1 to 6"), (["--checkpoint", "laned"], "laned is spd/2"):
        with pytest.raises(InputError, match=message):
            affinity.main([*flags, *more])
    assert not (folder / "b").exists()
