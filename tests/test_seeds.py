"""All bits of a seed count, wherever one is given; torch's generator for CPUs takes 32 of them."""

import random
from types import SimpleNamespace

import pytest
import torch
from cases import refused
from configs import BASE
from helpers import seeded

from generate import sample
from ladder.command_line.prompts import read_prompts
from ladder.decoding.batch import SINGLE_DEVICE, Sampler
from ladder.seeds import generator

BIG = 2**32


@pytest.mark.parametrize("seed", [0, 5, BIG - 1])
def test_a_seed_of_32_bits_draws_what_torch_draws(seed):
    expected = torch.rand(2000, generator=seeded(seed))
    assert torch.equal(torch.rand(2000, generator=generator(seed)), expected)


@pytest.mark.parametrize("seed", [BIG, BIG + 5, 5 * BIG, 2**63 - 1, 2**64 - 5, 2**70 + 3])
def test_a_longer_one_draws_what_python_draws_whose_twister_takes_all_bits(seed):
    python = random.Random(seed)
    expected = [python.getrandbits(32) % 2**24 / 2**24 for _ in range(2000)]
    assert torch.rand(2000, generator=generator(seed)).tolist() == expected


def sampled(seed):
    sampler = Sampler(1.0, seed=seed)
    return [sample(torch.zeros(1, 1000), SINGLE_DEVICE, sampler).item() for _ in range(4)]


def prompts(seed):
    args = SimpleNamespace(prompt=None, prompt_length=4, batch=None, chat=None, seed=seed)
    return read_prompts(args, BASE, None)


def order(seed, tmp_path):
    data = pytest.importorskip("extras.training.data")
    (path := tmp_path / "tokens").write_bytes(bytes(400 * data.TOKEN.itemsize))
    return data.Windows([path], 4, "", seed=seed).indices(0, 20)


def weights(seed):
    sharding = pytest.importorskip("extras.training.sharding")
    ones = torch.ones(50)
    return sharding.fresh("w", (5, 5), seed).tolist(), sharding.dithered(ones, seed).tolist()


@pytest.mark.parametrize("name", ["sampled", "prompts", "order", "weights"])
def test_seeds_that_differ_in_high_bits_alone_draw_others(name, tmp_path):
    draw = globals()[name]
    more = [tmp_path] if name == "order" else []
    seeds = [7, 7 + BIG, 7 + 2 * BIG, 7 + 2**62]
    draws = [draw(seed, *more) for seed in (*seeds, *seeds)]
    assert draws[:4] == draws[4:] and not any(draws[i] == draws[j] for i in range(4) for j in range(i))


def test_a_seed_may_be_negative_and_has_64_bits():
    seeds = [5, -5, -1, -(2**63), 2**63, 2**64 - 1]
    draws = [sampled(seed) for seed in seeds]
    assert draws[2] == draws[5] and draws[3] == draws[4]  # as numbers of 64 bits they are the same
    assert len({str(draw) for draw in draws}) == 4
    for seed in -(2**63) - 1, 2**64:
        refused(f"^seed is {seed} but must be a whole number of 64 bits$", Sampler, 1.0, seed=seed)
