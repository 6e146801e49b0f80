"""Linear attention: against a naive float64 recurrence and transformers' modules."""

import types

import numpy as np
import pytest
import torch

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
