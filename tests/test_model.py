"""The transformer on one device: the cache, the rope, the configuration."""

import json
import pickle
import re

import pytest
import torch
from cases import refused
from configs import ANY_TP, BASE, FAMILIES, LONGROPE, YARN, change, wired_id
from helpers import random_model, seeded
from parity import check_against_the_reference

from ladder.architectures.heads import Heads
from ladder.architectures.mixture import Mixture
from ladder.checkpoints import checkpoint, writing
from ladder.errors import FieldError
from ladder.layers.attention_inputs import rope_frequencies
from ladder.sources.sizes import named_size
from model import build


@pytest.mark.parametrize("changes", [
    {"wo_bias": True, "mlp_bias": True, "rope_scaling": {"factor": 2.5}},
    {"heads": {"nope_layers": (1,), "qk_norm": True}, "rope_scaling": YARN, "wiring": "ladder"},
    {"heads": {"sliding_window": 1, "window_layers": (0, 2)}},
    {"heads": {"sliding_window": 6, "window_layers": (0, 1, 2)}},  # of the prefill, all
    {"heads": {"sliding_window": 4, "window_layers": (1, 2), "nope_layers": (0, 1)}, "wiring": "ladder"},
    *({**family, "wiring": wiring} for family in FAMILIES for wiring in ("standard", "ladder", "ladder-2:0,2")),
], ids=wired_id)  # fmt: skip
def test_what_some_families_have(changes):
    check_against_the_reference(change(BASE, **changes))


@pytest.mark.slow  # what ranks compile is tested with them, and in the fast tests
@pytest.mark.parametrize("changes", ANY_TP, ids=wired_id)
def test_compiled_wirings_compute_the_same(changes):
    check_against_the_reference(change(BASE, **changes), compile=True, compile_prefill=True)


POST_NORMED = {"postnorm": {}}


def heads(**settings):
    return {"architecture": {"heads": settings}}


@pytest.mark.parametrize("kind, scaling", [
    ("default", None),
    ("linear", {"factor": 3.0}),
    ("llama3", {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    ("yarn", {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.1}),
    ("yarn", {"factor": 40.0, "beta_fast": 4.0, "beta_slow": 4.0, "attention_factor": 1.1}),
    ("yarn", {"factor": 4.0, "beta_fast": 5000.0, "beta_slow": 1304.0, "attention_factor": 1.1}),
])  # fmt: skip
def test_rope_frequencies_match_transformers(kind, scaling):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    if kind in ("llama3", "yarn"):
        scaling = {**scaling, "original_max_position_embeddings": 8192}
    config = change(BASE, head_dim=128, rope_theta=500000.0, rope_scaling=scaling)
    hf = LlamaConfig(hidden_size=128, num_attention_heads=1, max_position_embeddings=131072)
    hf.rope_parameters = {"rope_theta": 500000.0, "rope_type": kind, **(scaling or {})}
    expected = LlamaRotaryEmbedding(hf).inv_freq
    assert torch.allclose(rope_frequencies(config)[0], expected, rtol=1e-6, atol=0)


def test_named_sizes_have_the_published_parameter_counts():
    expected = {"1b": 1.236, "3b": 3.213, "8b": 8.030, "34b": 33.744, "70b": 70.554, "405b": 405.853}
    expected |= {"qwen3-4b": 4.022, "gemma3-12b": 11.766, "phi4-mini": 3.836, "ministral3-8b": 8.490, "glm4-9b": 9.400}
    expected |= {"30b-a3b": 30.532, "mixtral-8x7b": 46.703, "gpt-oss-20b": 20.915, "deepseek-v2-lite": 15.706}
    expected |= {"instella": 15.863, "glm-4.5-air": 106.852}
    expected["qwen3.6-27b"] = 26.896  # of 27.78, without the tower and the layer that predicts more tokens
    counts = {}
    for name in (*expected, "176b"):
        counts[name] = round(sum(p.numel() for p in build(named_size(name)).parameters()) / 1e9, 3)
    assert {name: counts[name] for name in expected} == expected
    assert 200 < counts["176b"] < 225  # BLOOM's width and depth with a gated MLP


def test_fewer_layers_of_a_size_are_its_first_ones():
    for name in "instella", "deepseek-v2-lite", "glm-4.5-air":
        assert named_size(f"{name}:2").find(Mixture).dense_layers == (0,)
    assert named_size("gpt-oss-20b:3").find(Heads).window_layers == (0, 2)


CONFIGS = [  # changes and the line
    ({"wiring": "laddr"}, "unknown wiring 'laddr'; known: standard, ladder"),
    ({"wiring": "ladder:4"}, "NAME:N takes 1 to 3"),
    ({"wiring": "ladder:0,3"}, "NAME:I,J and NAME:I-J distinct layers from 0 to 2"),
    ({"wiring": "ladder:1,1"}, "distinct layers"),
    ({"wiring": "ladder:x"}, "; write ladder, ladder:N, ladder:I,J,..., ladder:I-J or ladder-K"),
    ({"wiring": "standard:3"}, "no such wiring: 'standard:3'; write standard"),
    (
        {"wiring": "desync:0"},
        "no such wiring: 'desync:0'; write desync, desync:N or desync/LANES; these numbers count from 1",
    ),
    ({"wiring": "pair:0,2"}, "wiring pair:0,2: its layers are wired in groups of 2 neighbours"),
    ({"wiring": "pair:2-1"}, "wiring pair:2-1 does not fit 3 layers"),
    ({"wiring": "ladder:1-999999999"}, "wiring ladder:1-999999999 does not fit 3 layers"),
    ({"wiring": "ladder-2:3-"}, "no such wiring: 'ladder-2:3-'; write ladder, ladder:N"),
    ({"wiring": "delayed-7"}, "wiring delayed-7 is 7 sublayers stale: 3 layers take up to 6"),
    ({"wiring": "ladder/2"}, "no such wiring: 'ladder/2'"),
    ({"n_kv_heads": 4}, "n_heads 6 is not a multiple of n_kv_heads 4"),
    (heads(sliding_window=4, window_layers=(0, 3)), "window_layers takes layers from 0 to 2, not"),
    (heads(window_layers=(0,)), "a sliding_window of 1 or more tokens"),
    (
        {"architecture": POST_NORMED, "wiring": "spd"},
        "wiring spd is not for models with postnorm: it takes partials that are",
    ),
    ({"architecture": POST_NORMED, "wiring": "delayed-2:1"}, "wiring delayed-2:1 is not for models with postnorm"),
    ({"architecture": POST_NORMED, "wiring": "pair:0,1"}, "wiring pair:0,1 is not for models with postnorm"),
    (
        {"architecture": POST_NORMED, "wiring": "parallel-ladder"},
        "wiring parallel-ladder is not for models with postnorm",
    ),
    (
        {**heads(qk_norm=True, whole_qk_norm=True), "wiring": "desync"},
        "wiring desync is not for whole_qk_norm",
    ),
    (heads(whole_qk_norm=True), "whole_qk_norm needs qk_norm and a norm 'rms'"),
    ({"norm": "batch"}, "norm 'batch' is unknown; known: rms, rms+1, layer"),
    ({"activation": "relu"}, "activation 'relu' is unknown; known: silu, gelu_tanh"),
    ({"rotary_dim": 10}, "rotary_dim 10 is odd, or more than head_dim 8"),
    ({"rope_scaling": LONGROPE}, "short_factor has 3 numbers, not 4, one for each pair of dimensions"),
    (heads(llama4_beta=0.1), "llama4_beta needs a rope_scaling with original_max_position_embeddings"),
]


@pytest.mark.parametrize("changes, message", CONFIGS, ids=str)
def test_a_config_that_makes_no_model_is_one_clear_line(changes, message):
    values = {**writing.config_values(BASE), **changes}
    refused(re.escape(message), checkpoint.make_config, values)


def test_a_message_about_fields_can_have_other_names():
    with pytest.raises(FieldError, match="^n_heads 6 is not a multiple of n_kv_heads 4$") as error:
        change(BASE, n_kv_heads=4)
    for e in error.value, pickle.loads(pickle.dumps(error.value)):  # as from another process
        assert e.with_names({"n_heads": "heads"}) == "heads 6 is not a multiple of n_kv_heads 4"


def test_a_good_config_is_taken():
    for config in (BASE, change(BASE, bos_id=0, eos_ids=(0, 2), wiring="ladder:0,")):
        assert checkpoint.make_config(json.loads(json.dumps(writing.config_values(config)))) == config


@pytest.mark.parametrize("wiring", ["standard", "ladder"])
def test_a_deleted_layer_is_not_computed(wiring):
    """The model without its second layer equals one that never had it, with and without a cache."""
    whole = random_model(change(BASE, wiring=wiring))
    shorter = random_model(change(BASE, n_layers=2, wiring=wiring))
    layers = {0: 0, 2: 1}  # {a layer of the whole model: the same one without the second}
    state = {}
    for name, tensor in whole.state_dict().items():
        layer = re.match(r"layers\.(\d+)\.", name)
        if not layer:
            state[name] = tensor
        elif int(layer[1]) in layers:
            state[name.replace(layer[0], f"layers.{layers[int(layer[1])]}.")] = tensor
    shorter.load_state_dict(state)
    del whole.layers[1]
    tokens = torch.randint(BASE.vocab_size, (2, 9), generator=seeded(1))
    assert torch.equal(whole(tokens), shorter(tokens))
    last = torch.tensor([8, 5])
    with_cache = [model(tokens, None, model.new_cache(2, 12), None, last) for model in (whole, shorter)]
    assert torch.equal(*with_cache)


@pytest.mark.parametrize("wiring", ["ladder:2", "pair", "pair-ladder:0,1"])
def test_wirings_that_go_by_numbers_refuse_deleted_layers(wiring):
    model = random_model(change(BASE, wiring=wiring))
    del model.layers[0]
    words = f"has 2 layers, and its config says n_layers 3: .* wiring {wiring} goes by"
    refused(words, model, torch.zeros(1, 2, dtype=torch.int64))
