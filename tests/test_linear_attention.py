"""Linear attention: against a naive float64 recurrence and transformers' modules."""


import numpy as np
import pytest
import torch
from test_convert import check_parity, convert, hf_model

import linear_attention
from linear_attention import gated_delta_rule


def random_inputs(S, B=2, K=3, R=2, X=8, Y=5, decay=0.3):
    torch.manual_seed(S)
    q, k, state = torch.randn(B, K, S, X), torch.randn(B, K, S, X), torch.randn(B, K, R, X, Y)
    v, rate, beta = torch.randn(B, K, R, S, Y), torch.rand(B, K, R, S), torch.rand(B, K, R, S)
    return linear_attention.normalized(q), linear_attention.normalized(k), v, -decay * rate, beta, state


def recurrence(q, k, v, log_decay, beta, state):
    """The gated delta rule of one head in float64, token by token: q, k (S, X), v (S, Y), state (X, Y)."""
    q, k, v, log_decay, beta, state = (x.double().numpy() for x in (q, k, v, log_decay, beta, state))
    y = []
    for t in range(len(q)):
        state = np.exp(log_decay[t]) * state
        state = state + np.outer(k[t], beta[t] * (v[t] - state.T @ k[t]))
        y.append(state.T @ q[t])
    return torch.from_numpy(np.array(y)), torch.from_numpy(state)


@pytest.mark.parametrize("decay", [0.001, 0.3, 30.0])  # it hardly forgets; it forgets more than exp can say
@pytest.mark.parametrize("S", [1, 2, 63, 64, 65, 150])
def test_chunks_equal_the_naive_recurrence(S, decay):
    inputs = random_inputs(S, decay=decay)
    y, state = gated_delta_rule(*inputs)
    q, k, *by_head = inputs
    for b, h, r in np.ndindex(*inputs[-1].shape[:3]):
        expected = recurrence(q[b, h], k[b, h], *(x[b, h, r] for x in by_head))
        assert (y[b, h, r] - expected[0]).abs().max() < 1e-4
        assert (state[b, h, r] - expected[1]).abs().max() < 1e-4


# ---------------------------------------------------------------------------------------------------------------------
# Parity with transformers

LINEAR = {
    "head_dim": 16, "num_hidden_layers": 4, "layer_types": None, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4, "bos_token_id": None,
}  # fmt: skip
EXPERTS = {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 36, "shared_expert_intermediate_size": 28,
    "mlp_only_layers": [1],
}  # fmt: skip
FAMILIES = {
    "qwen3-next": ("Qwen3NextConfig", {**LINEAR, **EXPERTS, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}}),
    "qwen3.5": ("Qwen3_5TextConfig", {**LINEAR, "layer_types": ["linear_attention", "full_attention"] * 2, "linear_conv_kernel_dim": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}}),
}  # fmt: skip


def transformers_model(family):
    """With decays from hardly any to nearly all: those of transformers forget everything at once."""
    net = hf_model(FAMILIES[family])
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if name.endswith("A_log"):
                weight.uniform_(-5, 0)
    return net


@pytest.mark.parametrize("family", FAMILIES)
def test_parity_with_transformers(family, tmp_path):
    theirs = transformers_model(family)
    theirs.save_pretrained(tmp_path / "hf")
    check_parity(convert(tmp_path / "hf", tmp_path / "ours"), theirs)
