"""Laneformers: folders as Kog's, converted and run on any number of ranks, against the function in naive float64."""

import json
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import last_logits, run_ranks
from laneformer import Laneformer
from safetensors.torch import save_file

import convert_hf_checkpoint
import quantize
import tp
from formats import checkpoint, huggingface
from formats.config import InputError
from kernels import int_linear

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
    "no sums of the attention": {"use_attention_comm": False, "use_early_comm": False},
    "no sums of the MLP, tied": {"use_mlp_comm": False, "tie_word_embeddings": True, "broadcast_delay": 1},
    "the sum of the lanes": {"pre_norm_lane_agg": True, "replicated_rmsn_scale": False, "num_lanes": 8},
    "parts of the vocabulary": {**RELEASED, "num_lanes": 8, "rope_scaling": SCALING},
    "windows in the first layers": {"sliding_window": 5, "sliding_window_n_layers": 3, "unclamped_layers": [1]},
    "windows in the last layers": {"sliding_window": 3, "sliding_window_n_layers": -2, "num_lanes": 2},
    "windows in some layers": {**RELEASED, "sliding_window": 4, "swa_layers": [0, 2, 3]},
}
TOKENS = torch.randint(3, 256, (3, 20), generator=torch.Generator().manual_seed(5))
LENGTHS = torch.tensor([20, 17, 12])


def random_state(hf, seed=0):
    """Random tensors in the layout of their folders, large enough that every term matters."""
    L, D, I, V = hf["num_lanes"], hf["hidden_size"], hf["intermediate_size"], hf["vocab_size"]
    kv = D * hf["num_key_value_heads"] // hf["num_attention_heads"]
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape):
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    def norm(lanes):
        shape, kind = ((L, D), "scale") if lanes else ((D,), "weight")
        return kind, torch.rand(shape, generator=generator) + 0.5

    state = {"model.tok_embeddings.weight": weight(V, D) * 3}
    own = not hf.get("replicated_rmsn_scale", True)
    for i in range(hf["num_hidden_layers"]):
        rows = {"attention.wq": D, "attention.wk": kv, "attention.wv": kv, "feed_forward.w1": I, "feed_forward.w3": I}
        state |= {f"model.layers.{i}.{name}.weight": weight(L, n // L, D) for name, n in rows.items()}
        columns = {"attention.wo": D, "feed_forward.w2": I}
        state |= {f"model.layers.{i}.{name}.weight": weight(L, D, n // L) for name, n in columns.items()}
        for name in ("attention_norm", "ffn_norm"):
            kind, scale = norm(own)
            state[f"model.layers.{i}.{name}.{kind}"] = scale
    kind, scale = norm(own and not hf.get("pre_norm_lane_agg"))
    state[f"model.norm.{kind}"] = scale
    if not hf.get("tie_word_embeddings"):
        parts = (L, V // L, D) if hf.get("lm_head_type") == "vocab_parallel" else (V, D)
        state["lm_head.weight"] = weight(*parts)
    return state


def folder(path, **changes):
    """A random folder of theirs; returns (values of its config.json, tensors)."""
    hf = {**SHAPE, **changes}
    state = random_state(hf)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(hf))
    save_file(state, path / "model.safetensors")
    return hf, state


def converted(path, **changes):
    hf, state = folder(path / "hf", **changes)
    convert_hf_checkpoint.main([str(path / "hf"), "--out", str(path / "ours")])
    return hf, state


def logits_of(world, path):
    """Logits of the whole sequences, and of a prefill of unequal rows with token-by-token decode."""
    config = checkpoint.read_config(path)
    net = tp.load_shard(config, checkpoint.Weights(path), torch.float32, "cpu", world.rank, world.shares)
    int_linear.use_kernels(net)
    if world.group is not None:
        net.comm = tp.TensorParallel(config, world.shares, world.group)
    with torch.no_grad():
        return net.comm.gather(net(TOKENS)), last_logits(net, TOKENS, LENGTHS, steps=8)


def on_ranks(ranks, path):
    if ranks > 1:
        return run_ranks(ranks, logits_of, path)
    return [logits_of(types.SimpleNamespace(rank=0, shares=(1,), group=None), path)]


def check(found, expected, limit=1e-4):
    """found: logits_of of each rank; expected: (S, V) of each row."""
    for whole, decoded in found:
        for row, length in enumerate(LENGTHS):
            assert np.abs(whole[row].numpy() - expected[row]).max() < limit
            assert np.abs(decoded[row].numpy() - expected[row][length - 9 : length]).max() < limit


@pytest.mark.parametrize("case", CASES)
def test_converted_folders_compute_the_function_on_any_number_of_ranks(case, tmp_path):
    hf, state = converted(tmp_path, **CASES[case])
    expected = [Laneformer(hf, state).logits(row) for row in TOKENS]
    assert np.std(expected) > 0.3
    for ranks in (1, 2, 4):
        if ranks <= hf["num_lanes"]:
            check(on_ranks(ranks, tmp_path / "ours"), expected)
    config = checkpoint.read_config(tmp_path / "ours")
    assert huggingface.config_from_hf(tmp_path / "hf" / "config.json") == config
    with pytest.raises(InputError, match=f"the {hf['num_lanes']} lanes of .* do not fit 3 ranks: use 1, 2"):
        tp.held(config, torch.float32, 0, 3)
