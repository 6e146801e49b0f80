"""Laneformers: folders as Kog's, converted and run on any number of ranks, against the function in naive float64."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from cases import refused, slow_case
from collective_order import eager_order
from configs import BASE, change
from file_edits import write_json
from helpers import last_logits, seeded, write_model
from laneformer import Laneformer
from quantized_models import dequantized_state
from running import run_main, run_ranks
from safetensors.torch import load_file, save_file

import convert_hf_checkpoint
import generate
import quantize
from ladder.checkpoints import checkpoint, writing
from ladder.sources.huggingface import config_from_hf

SHAPE = {
    "model_type": "laneformer_tp", "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 16,
    "num_key_value_heads": 8, "intermediate_size": 96, "max_position_embeddings": 64, "vocab_size": 256,
    "rope_theta": 500.0, "norm_eps": 0.01, "num_lanes": 4, "broadcast_delay": 2,
    "architectures": ["LaneformerTPForCausalLM"], "multiple_of": 32, "use_flex_attn": False, "pad_token_id": None,
}  # fmt: skip
SCALING = {
    "scaling_factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32
}  # fmt: skip
RELEASED = {"model_type": "laneformer", "lm_head_type": "vocab_parallel", "replicated_rmsn_scale": False}
CASES = {
    "two lanes": {"num_lanes": 2, "broadcast_delay": 1},
    "lanes alone at first, norms of their own": {"use_early_comm": False, "replicated_rmsn_scale": False},
    "eight lanes, no sums": {"num_lanes": 8, "use_comm": False},
    "no sums of the attention, a stretched rope": {"use_attention_comm": False, "rope_scaling": SCALING},
    "no sums of the MLP, tied": {"use_mlp_comm": False, "use_early_comm": False, "tie_word_embeddings": True},
    "the sum of the lanes": {"pre_norm_lane_agg": True, "replicated_rmsn_scale": False, "num_lanes": 8},
    "parts of the vocabulary": {**RELEASED, "num_lanes": 8},
    "windows in the first layers": {"sliding_window": 5, "sliding_window_n_layers": 3, "unclamped_layers": [1]},
    "windows in the last layers": {"sliding_window": 3, "sliding_window_n_layers": -2, "num_lanes": 2},
    "windows in some layers": {**RELEASED, "sliding_window": 4, "swa_layers": [0, 2, 3]},
}
TOKENS = torch.randint(3, 256, (3, 20), generator=seeded(5))
LENGTHS = torch.tensor([20, 17, 12])


def random_state(hf):
    """Random tensors in the layout of their folders, large enough that every term matters."""
    L, D, width, V = (hf[key] for key in ("num_lanes", "hidden_size", "intermediate_size", "vocab_size"))
    kv = D * hf["num_key_value_heads"] // hf["num_attention_heads"]
    generator = seeded(0)

    def weight(*shape):
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    def norm(name, lanes):
        shape, suffix = ((L, D), "scale") if lanes else ((D,), "weight")
        return {f"model.{name}.{suffix}": torch.rand(shape, generator=generator) + 0.5}

    own = not hf.get("replicated_rmsn_scale", True)
    state = {"model.tok_embeddings.weight": weight(V, D) * 3} | norm("norm", own and not hf.get("pre_norm_lane_agg"))
    rows = {"attention.wq": D, "attention.wk": kv, "attention.wv": kv}
    rows |= {"feed_forward.w1": width, "feed_forward.w3": width}
    columns = {"attention.wo": D, "feed_forward.w2": width}
    for i in range(hf["num_hidden_layers"]):
        state |= {f"model.layers.{i}.{name}.weight": weight(L, n // L, D) for name, n in rows.items()}
        state |= {f"model.layers.{i}.{name}.weight": weight(L, D, n // L) for name, n in columns.items()}
        state |= norm(f"layers.{i}.attention_norm", own) | norm(f"layers.{i}.ffn_norm", own)
    if not hf.get("tie_word_embeddings"):
        parts = (L, V // L, D) if hf.get("lm_head_type") == "vocab_parallel" else (V, D)
        state["lm_head.weight"] = weight(*parts)
    return state


def converted(path, **changes):
    """A random folder of theirs, and ours; returns (values of its config.json, tensors)."""
    hf = {**SHAPE, **changes}
    state = random_state(hf)
    (path / "hf").mkdir()
    write_json(path / "hf" / "config.json", hf)
    save_file(state, path / "hf" / "model.safetensors")
    run_main(convert_hf_checkpoint, path / "hf", "--out", path / "ours")
    return hf, state


def logits_of(world, path, compile=False):
    """Logits of the whole sequences, and of a prefill of unequal rows with token-by-token decode."""
    net = generate.load_model(checkpoint.read_config(path), path, "float32", world)
    with torch.no_grad():
        return net.comm.gather_logits(net(TOKENS)), last_logits(net, TOKENS, LENGTHS, steps=8, compile=compile)


def check(ranks, expected, limit=1e-4):
    """ranks: logits_of each rank; expected: (S, V) of each row."""
    for whole, decoded in ranks:
        for row, length in enumerate(LENGTHS):
            assert np.abs(whole[row].numpy() - expected[row]).max() < limit
            assert np.abs(decoded[row].numpy() - expected[row][length - 9 : length]).max() < limit


@pytest.mark.parametrize("case", [slow_case(c) if "no sums of" in c else c for c in CASES])
def test_converted_folders_compute_the_function_on_any_number_of_ranks(case, tmp_path):
    hf, state = converted(tmp_path, **CASES[case])
    expected = [Laneformer(hf, state).logits(row) for row in TOKENS]
    assert np.std(expected) > 0.3
    for shares in (1,), (1, 1), (1, 1, 1, 1), (3, 1):  # the last: three lanes, and a rank that holds one
        if hf["num_lanes"] % sum(shares) == 0:
            check(run_ranks(shares, logits_of, tmp_path / "ours"), expected)
    config = checkpoint.read_config(tmp_path / "ours")
    assert config_from_hf(tmp_path / "hf" / "config.json") == config


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [2, 4])
def test_a_compiled_step_computes_it_with_one_lane_a_rank_and_with_two(lanes, tmp_path):
    hf, state = converted(tmp_path, num_lanes=lanes)
    ranks = run_ranks(2, functools.partial(logits_of, compile=True), tmp_path / "ours")
    check(ranks, [Laneformer(hf, state).logits(row) for row in TOKENS])


@pytest.mark.parametrize("changes, words", [
    ({"wiring": "laneformer-3/2"}, "a Laneformer's delay is of whole layers"),
    ({"laneformer": {"lane_head": "lane"}}, "lane_head 'lane' is none of"),
    ({"wiring": "laneformer", "laneformer": {"lane_norms": True}}, "but wiring laneformer names no lanes"),
    ({"laneformer": {"lane_head": "vocab_parallel"}}, "vocab_size 131 is no multiple of 16 for each of its lanes"),
], ids=str)  # fmt: skip
def test_settings_that_make_no_model_are_one_clear_line(changes, words):
    refused(words, change, BASE, **{"wiring": "laneformer-2/2", **changes})
    refused("only for wiring laneformer", change, BASE, laneformer={"lane_norms": True})
    values = {
        **writing.config_values(BASE),
        "wiring": "laneformer-2/2",
        "architecture": {"laneformer": {"early": True}},
    }
    refused("^laneformer: unknown key 'early'$", checkpoint.make_config, values)


def test_order_of_the_loop():
    config = dataclasses.replace(BASE, n_layers=2, wiring="laneformer-2/8")
    assert eager_order(config) == "c start1 wait1 c start2 wait2 c wait1 c wait2 start3 wait3"


@pytest.mark.parametrize("case", ["two lanes", "parts of the vocabulary"])
def test_int8_computes_what_its_numbers_mean(case, tmp_path):
    converted(tmp_path, **CASES[case])
    run_main(quantize, "--checkpoint", tmp_path / "ours", "--mode", "int8", "--out", tmp_path / "int8")
    config = checkpoint.read_config(tmp_path / "ours")
    twin = dequantized_state(load_file(tmp_path / "int8" / "model.safetensors"))
    write_model(tmp_path / "twin", config, twin)
    [(expected, _)] = run_ranks(1, logits_of, tmp_path / "twin")
    for ranks in 1, 2:
        check(run_ranks(ranks, logits_of, tmp_path / "int8"), expected.numpy(), limit=1e-3)


@pytest.mark.parametrize("changes, message", [
    ({"broadcast_mlp_to_future": [True]}, r"broadcast_mlp_to_future \[True\] is unknown: drop it from config.json if"),
    ({"qk_norm": True}, "qk_norm True is unknown"),  # another family's
    ({"lm_head_type": "lane"}, "lm_head_type 'lane' is not supported here, only replicate and vocab_parallel"),
    ({"lm_head_type": "vocab_parallel", "pre_norm_lane_agg": True}, "'vocab_parallel' is not .*, only replicate$"),
    ({"attn_mask_type": "block_causal"}, "attn_mask_type 'block_causal' is not supported here, only causal"),
    ({"rope_scaling": {"rope_type": "dynamic"}}, "rope type 'dynamic' is not supported"),
    ({"broadcast_delay": 0}, "no such wiring: 'laneformer-0/4'"),
], ids=str)  # fmt: skip
def test_keys_that_may_mean_another_function_are_one_clear_line(changes, message, tmp_path):
    write_json(tmp_path / "config.json", {**SHAPE, **changes})
    refused(f"config.json: .*{message}", config_from_hf, tmp_path / "config.json")
