"""The transformer on one device: the cache, the rope, the configuration."""

import dataclasses
import json
import re

import pytest
import torch
from helpers import ANY_TP, BASE, YARN, last_logits, random_model, unequal_rows, wired_id
from reference import Reference

from formats import checkpoint
from formats.checkpoint import SIZES
from model import InputError, Transformer, rope_frequencies


@pytest.mark.parametrize("changes", ANY_TP, ids=wired_id)
def test_prefill_and_decode_equal_the_whole_sequence(changes):
    check_decode(changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"wo_bias": True},
        {"mlp_bias": True},
        {"rope_scaling": YARN},
        {"rope_scaling": {"factor": 2.5}},
        {"nope_layers": (0, 2)},
        {"nope_layers": (1,), "rope_scaling": YARN, "qk_norm": True, "wiring": "ladder"},
    ],
    ids=wired_id,
)
def test_what_some_families_have(changes):
    check_decode(changes)


@pytest.mark.slow  # what ranks compile is tested with them, and in the fast tests
@pytest.mark.parametrize("changes", ANY_TP, ids=wired_id)
def test_compiled_prefill_and_decode_equal_the_whole_sequence(changes):
    check_decode(changes, compile=True, compile_prefill=True)


def check_decode(changes, **compile):
    config = dataclasses.replace(BASE, **changes)
    net = random_model(config)
    tokens, lengths = unequal_rows(config)
    logits = last_logits(net, tokens, lengths, **compile)
    reference = Reference(config, net.state_dict())
    for row, length in enumerate(lengths):
        expected = torch.from_numpy(reference.logits(tokens[row, :length]))[-4:]
        assert (logits[row] - expected).abs().max() < 1e-4


def test_rows_do_not_see_each_other_or_the_padding():
    net = random_model(BASE)
    tokens, lengths = unequal_rows(BASE)
    together = last_logits(net, tokens, lengths)
    for row, length in enumerate(lengths):
        alone = last_logits(net, tokens[row : row + 1, :length], lengths[row : row + 1])
        assert torch.allclose(together[row], alone[0], atol=1e-5)


@pytest.mark.parametrize(
    "kind, scaling",
    [
        ("default", None),
        ("linear", {"factor": 3.0}),
        ("llama3", {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        ("yarn", {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.1}),
        ("yarn", {"factor": 40.0, "beta_fast": 4.0, "beta_slow": 4.0, "attention_factor": 1.1}),
        ("yarn", {"factor": 4.0, "beta_fast": 5000.0, "beta_slow": 1304.0, "attention_factor": 1.1}),
    ],
)
def test_rope_frequencies_match_transformers(kind, scaling):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    if kind in ("llama3", "yarn"):
        scaling = {**scaling, "original_max_position_embeddings": 8192}
    config = dataclasses.replace(BASE, head_dim=128, rope_theta=500000.0, rope_scaling=scaling)
    hf = LlamaConfig(hidden_size=128, num_attention_heads=1, max_position_embeddings=131072)
    hf.rope_parameters = {"rope_theta": 500000.0, "rope_type": kind, **(scaling or {})}
    expected = LlamaRotaryEmbedding(hf).inv_freq
    assert torch.allclose(rope_frequencies(config), expected, rtol=1e-6, atol=0)


def test_half_precision_stays_near_float32():
    net = random_model(BASE)
    tokens, lengths = unequal_rows(BASE)
    expected = last_logits(net, tokens, lengths)
    half = random_model(BASE)
    for weight in half.parameters():  # not .to(): the rope frequencies stay float32
        weight.data = weight.data.bfloat16()
    logits = last_logits(half, tokens, lengths)
    assert logits.dtype == torch.bfloat16
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()


def test_named_sizes_have_the_published_parameter_counts():
    counts = {}
    for name, config in SIZES.items():
        with torch.device("meta"):
            counts[name] = sum(p.numel() for p in Transformer(config).parameters()) / 1e9
    expected = {"1b": 1.236, "3b": 3.213, "8b": 8.030, "34b": 33.744, "70b": 70.554, "405b": 405.853}
    assert {name: round(counts[name], 3) for name in expected} == expected
    assert 200 < counts["176b"] < 225  # BLOOM's width and depth with a gated MLP


CONFIGS = [  # changes and the line
    ({"wiring": "laddr"}, "unknown wiring 'laddr'; known: standard, ladder"),
    ({"wiring": {}}, "wiring is {} but must be a string"),
    ({"wiring": "hybrid"}, "needs ladder_layers"),
    ({"wiring": "ladder", "ladder_layers": 2}, "wiring ladder takes no ladder_layers"),
    ({"wiring": "hybrid", "ladder_layers": 4}, "from 1 to 3"),
    ({"wiring": "hybrid", "ladder_layers": 0}, "ladder_layers is 0 but must be a positive integer or a list"),
    ({"wiring": "hybrid", "ladder_layers": [0, 3]}, "from 0 to 2"),
    ({"wiring": "hybrid", "ladder_layers": [1, 1]}, "distinct layers"),
    ({"wiring": "hybrid", "ladder_layers": ["1"]}, "or a list, each an integer from 0 on"),
    ({"wiring": "hybrid", "ladder_layers": 1.5}, "ladder_layers is 1.5 but must be a positive integer or a list"),
    ({"wiring": "hybrid", "ladder_layers": True}, "ladder_layers is True but must be a positive integer or"),
    ({"wiring": "spd", "ladder_layers": (7,)}, "distinct layers from 0 to 2"),
    ({"wiring": "desync", "ladder_layers": 2}, "wiring desync takes no ladder_layers"),
    ({"wiring": "spd", "made_for_tp": 0}, "made_for_tp is 0 but must be a positive integer"),
    ({"wiring": "ladder", "made_for_tp": 2}, "wiring ladder is the same on any number of ranks: it takes no made_for"),
    ({"n_kv_heads": 4}, "n_heads 6 is not a multiple of n_kv_heads 4"),
    ({"n_layers": 0}, "n_layers is 0 but must be a positive integer"),
    ({"n_layers": "3"}, "n_layers is '3'"),
    ({"dim": 48.0}, "dim is 48.0"),
    ({"norm_eps": "1e-5"}, "norm_eps is '1e-5' but must be a positive number"),
    ({"norm_eps": float("inf")}, "norm_eps is inf"),
    ({"tie_embeddings": "no"}, "tie_embeddings is 'no' but must be true or false"),
    ({"head_dim": 7}, "odd"),
    ({"desync_period": 0}, "desync_period is 0"),
    ({"eos_ids": 2}, "eos_ids is 2 but must be a list, each an integer from 0 on"),
    ({"eos_ids": ["</s>"]}, "a list, each an integer from 0 on"),
    ({"bos_id": "1"}, "bos_id is '1' but must be an integer from 0 on or null"),
    ({"rope_scaling": {}}, "rope_scaling is {} but must be an object of factor, low"),
    ({"rope_scaling": "x"}, "rope_scaling is 'x'"),
    ({"rope_scaling": {"factor": 0}}, "rope_scaling is {'factor': 0}"),
    ({"rope_scaling": {**YARN, "beta_fast": None}}, "or an object of factor, beta_fast"),
    ({"nope_layers": [3]}, "nope_layers (3,) are not layers from 0 to 2"),
    ({"mlp_bias": 1}, "mlp_bias is 1 but must be true or false"),
    ({"experts": 8}, "unknown key 'experts'"),
]


@pytest.mark.parametrize("changes, message", CONFIGS, ids=str)
def test_a_config_that_makes_no_model_is_one_clear_line(changes, message):
    values = {**dataclasses.asdict(BASE), **changes}
    with pytest.raises(InputError, match=re.escape(message)) as error:
        checkpoint.make_config(values, "config.json")
    assert "\n" not in str(error.value)


def test_a_good_config_is_taken():
    first = {"wiring": "hybrid", "ladder_layers": (0,)}  # ids and layers count from 0
    for config in (BASE, dataclasses.replace(BASE, bos_id=0, eos_ids=(0, 2), **first)):
        assert checkpoint.make_config(json.loads(json.dumps(dataclasses.asdict(config))), "config.json") == config
