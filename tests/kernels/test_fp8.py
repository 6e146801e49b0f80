"""fp8: e4m3 weights with a scale per row, activations with a scale per token."""

import dataclasses

import pytest
import torch
from cases import refused
from configs import BASE
from helpers import StateWeights, last_logits, randn, rank_logits, seeded, shard, unequal_rows
from quantized_models import E4M3_VALUES, e4m3_value, expected_logits, quantized_state
from running import run_ranks

import tp
from ladder.checkpoints import rounding
from ladder.kernels import quant_kernels, quant_linear, registry
from ladder.kernels.gpu import integers

CONFIG = dataclasses.replace(BASE, n_heads=8, n_kv_heads=4, head_dim=16, dim=64, intermediate_size=160, quant="fp8")


def make_linear(N, K, bias=False, seed=0):
    g = seeded(seed)
    linear = quant_linear.QuantLinear((N, K), "fp8", None, bias)
    weight, scales = rounding.to_e4m3(torch.randn(N, K, generator=g) * torch.logspace(-3, 3, N)[:, None])
    linear.weight.copy_(weight)
    linear.scales.copy_(scales)
    if bias:
        linear.bias = torch.nn.Parameter(100 * torch.randn(N, generator=g).bfloat16(), requires_grad=False)
    return linear


def test_weights_are_the_nearest_numbers_of_e4m3():
    w = randn(30, 64) * torch.logspace(-6, 6, 30)[:, None]
    w[3] = 0
    q, scales = rounding.to_e4m3(w)
    assert q.dtype == torch.float8_e4m3fn and scales.dtype == torch.bfloat16 and scales.shape == (30, 1)
    assert torch.equal(q.double(), q.view(torch.uint8).double().apply_(
        lambda bits: e4m3_value(int(bits))))  # fmt: skip
    exact = w.double()
    s = scales.double()
    nearest = (E4M3_VALUES * s[..., None] - exact[..., None]).abs().amin(-1)
    assert ((q.double() * s - exact).abs() <= nearest + 1e-6 * exact.abs()).all() and (q[3].double() == 0).all()
    assert (q.double().abs().amax(1)[[0, 1, 2, 4]] >= 416).all()  # the range is used


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_that_of_scaled_tokens(bias, monkeypatch):
    """Of unequal rows; what is stored is searched in a table of e4m3, and multiplied in float64."""
    monkeypatch.setattr(quant_linear, "DEQUANTIZED_AT_ONCE", 700)  # several pieces of the matrix
    linear = make_linear(48, 64, bias)
    x = randn(2, 5, 64, seed=1) * torch.logspace(-4, 2, 5)[:, None]
    x[1, 2] = 0
    s = x.double().abs().amax(-1, keepdim=True) / 448
    q = E4M3_VALUES[(E4M3_VALUES - (x.double() / s.where(s > 0, 1))[..., None]).abs().argmin(-1)]
    w = linear.weight.double() * linear.scales.double()
    exact = (q * s) @ w.T + (linear.bias.double() if bias else 0)
    size = (q * s).abs() @ w.abs().T + (linear.bias.double().abs() if bias else 0)
    for dtype, error in (torch.float32, 2**-18), (torch.bfloat16, None):
        y = linear(x.to(dtype))
        assert y.dtype == dtype
        if error:  # few ties are rounded another way by float32
            assert ((y.double() - exact).abs() <= error * size + 2**-4 * s * w.abs().amax(1)).all()
            assert ((y.double() - exact).abs() <= error * size).double().mean() > 0.98


@pytest.mark.parametrize("bias", [False, True])
def test_the_kernel_of_a_gpu_computes_the_same(bias, monkeypatch):
    """PyTorch's, which also has a form for CPUs; not where shape or GPU do not fit."""
    linear = make_linear(48, 64, bias)
    odd = make_linear(40, 64)
    for capability, used in ((8, 6), False), ((8, 9), True):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        x = randn(3, 7, 64, seed=2).bfloat16()
        x *= torch.arange(1, 8)[:, None]
        assert integers.multiply_fp8(linear, x) is None  # which is on a CPU
        with monkeypatch.context() as m:
            m.setattr(integers, "fits", lambda x: True)
            result = integers.multiply_fp8(linear, x)
            assert integers.multiply_fp8(odd, x) is None and (result is not None) == used
        expected = linear(x)
        if used:
            assert (result.float() - expected.float()).abs().max() <= 2**-7 * expected.float().abs().max()


@pytest.mark.parametrize("changes", [
    {}, {"tie_embeddings": True}, {"not_quantized": ("output", "w2"), "qkv_bias": True, "wiring": "ladder"},
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_computes_what_its_weights_say_but_for_rounded_activations(changes, dtype):
    config = dataclasses.replace(CONFIG, **changes)
    net = shard(config, None, dtype, quantized_state(config))
    registry.use(quant_kernels.KERNELS["cpu"])
    exact = torch.stack(expected_logits(config))
    logits = last_logits(net, *unequal_rows(config))
    assert (logits.double() - exact).norm() < 0.08 * exact.norm()
    assert (logits[0].double() - exact[1]).norm() > 0.5 * exact[1].norm()  # another row's are far


def on_a_rank(world, config):
    return rank_logits(world, config, quantized_state(config))  # made on each rank, since e4m3 cannot be pickled


@pytest.mark.parametrize("shares", [2, 3, 4, (3, 1)], ids=str)
def test_any_tp_computes_nearly_what_one_device_does(shares):
    """Each rank scales its own columns of a token, so that these are rounded another way; all ranks agree."""
    config = dataclasses.replace(CONFIG, wiring="ladder")
    expected = on_a_rank(None, config)
    first, *others = run_ranks(shares, on_a_rank, config)
    assert all(torch.equal(first, other) for other in others)
    assert (first - expected).norm() < 0.08 * expected.norm()


def test_ranks_get_neurons_in_multiples_of_16():
    """Which the kernel of a GPU wants, as long as each gets some."""
    cuts = [tp.shard_plan(CONFIG, rank, (1,) * 3)["w2"][1][0][0] for rank in range(3)]
    assert cuts == [0, 64, 112]
    assert quant_linear.neuron_unit(dataclasses.replace(CONFIG, intermediate_size=100), 100, (1, 1)) == 1


def test_bad_tensors_are_refused(monkeypatch):
    state = quantized_state(CONFIG)
    name = "layers.1.attention.wo.weight"
    nan = state[name].view(torch.uint8).clone()
    nan[3, 5] = 255
    for tensor, words in (nan.view(torch.float8_e4m3fn), "NaN or infinite"), (state[name].bfloat16(), "holds bfloat16"):
        line = f"tensor {name} {words}|tensor {name} holds {words}"
        refused(line, tp.load_shard, CONFIG, StateWeights({**state, name: tensor}), torch.bfloat16, "cpu")
