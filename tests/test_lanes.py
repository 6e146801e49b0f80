"""extras/lanes: several lanes of integer weights on a rank."""

import dataclasses

import pytest
import torch
from helpers import StateWeights, last_logits, run_ranks, unequal_rows
from test_quantize import BIASED, INT4, INT8, dequantized_state, quantized_state

import tp
from extras.lanes import load_lanes


def lane_logits(world, config, state):
    net = load_lanes(config, StateWeights(state), torch.float32, "cpu", world.rank, world.shares)
    net.comm = tp.TensorParallel(config, world.shares, world.group)
    return last_logits(net, *unequal_rows(config))


@pytest.mark.parametrize("config", [INT8, INT4, BIASED], ids=["int8", "int4", "biased"])
def test_lanes_of_integers_compute_what_their_numbers_say(config):
    """On one device, which holds all four, and on equal and unequal ranks."""
    config = dataclasses.replace(config, wiring="spd/4")
    state, tokens = quantized_state(config), unequal_rows(config)
    plain = dataclasses.replace(config, quant=None, group_size=None)
    twin = load_lanes(plain, StateWeights(dequantized_state(config, state)), torch.float32, "cpu")
    expected = last_logits(twin, *tokens)
    one = last_logits(load_lanes(config, StateWeights(state), torch.float32, "cpu"), *tokens)
    for logits in (one, *run_ranks(2, lane_logits, config, state), *run_ranks((3, 1), lane_logits, config, state)):
        assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
