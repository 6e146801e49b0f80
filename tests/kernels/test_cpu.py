"""skinny_gemm.cpp against float64, its compilation, the memory of loading."""

import functools
import itertools
import os
import pwd
import re
import shutil
import subprocess
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from configs import BASE, change
from helpers import ROOT, counted_kernels, last_logits, randn_bf16, random_model, stop_using_kernels, unequal_rows
from quantized_models import INT8, QUANTIZED, check_quantized_model, random_integers
from reference import Reference, exact_attention
from safetensors.torch import save_file

import generate
import model
from ladder.checkpoints import checkpoint
from ladder.kernels import compilers, compiling, cpp, quant_linear, registry
from ladder.kernels.cpu import loading, skinny_gemm, stand_ins
from ladder.layers.attention_inputs import attention_metadata
from ladder.ranks.world import World
from model import Linear, rotate_into_cache

WORLD = World(0, 1, torch.device("cpu"))


def test_few_rows_are_exact_up_to_the_last_rounding(threads):
    """bfloat16 has 8 bits: half a unit in the last place is at most 2^-8 of the result; float32 sums add far less."""
    skinny_gemm.build()
    shapes = (1, 1), (33, 2731), (301, 2048), (2100, 40)
    for (N, K), M in itertools.product(shapes, (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 24)):
        x, weight = randn_bf16(M, K), randn_bf16(N, K)
        y = torch.ops.ladder.skinny_gemm(x, weight)
        exact = x.double() @ weight.double().T
        size = x.double().abs() @ weight.double().abs().T
        assert y.shape == (M, N) and y.dtype == torch.bfloat16
        assert ((y.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6 * size).all(), (M, N, K)


@pytest.mark.parametrize("N, M, L, K", [(1, 1, 1, 1), (3, 2, 40, 33), (2, 9, 513, 96)])
def test_each_head_has_its_own_matrix(N, M, L, K, threads):
    skinny_gemm.build()
    x, weight = randn_bf16(M, N, K).transpose(0, 1), randn_bf16(N, L, K)
    exact = x.double() @ weight.double().mT
    y = torch.ops.ladder.skinny_gemm_heads(x, weight)
    size = x.double().abs() @ weight.double().abs().mT
    assert y.shape == (N, M, L) and ((y.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6 * size).all()
    torch.library.opcheck(torch.ops.ladder.skinny_gemm_heads.default, (x, weight))
    other = randn_bf16(N, K, L)
    exact, size = x.double() @ other.double(), x.double().abs() @ other.double().abs()
    y = torch.ops.ladder.skinny_gemm_heads_mT(x, other)
    assert y.shape == (N, M, L) and ((y.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6 * size).all()
    torch.library.opcheck(torch.ops.ladder.skinny_gemm_heads_mT.default, (x, other))


def in_float64(weight, scales, zeros):
    """The matrix that they stand for."""
    return quant_linear.dequantize(weight, scales.double(), None if zeros is None else zeros.double())


SHAPES = [(1, 1, None), (33, 2731, None), (64, 129, None)]
SHAPES += [(1, 8, 8), (40, 80, 16), (67, 96, 32), (131, 2048, 64), (50, 4096, 128)]


def test_few_rows_of_integers_are_exact_up_to_rounding(threads):
    """Against float64: bfloat16's last rounding, float32 sums, and x as 16 bits of its block's largest."""
    skinny_gemm.build()
    for N, K, size in SHAPES:
        weight, scales, zeros = random_integers(N, K, size)
        w = in_float64(weight, scales, zeros)
        for M in (1, 2, 3, 4, 5, 8, 17):
            x = randn_bf16(M, K)
            x[0, 0] = 100
            if M > 1:
                x[1] = 0
            if M > 2:
                x[2] = 1  # the largest integers of x, times those of W
            y = torch.ops.ladder.skinny_gemm_int(
                x, skinny_gemm.pack(weight, scales, zeros), N, K, 8 if zeros is None else 4
            )
            exact, size_of = x.double() @ w.T, x.double().abs() @ w.abs().T
            # the integers, not W, meet the rounded x: with a zero of the other sign they are the larger
            q = (w - (0 if zeros is None else zeros.double().repeat_interleave(size, 1))).abs()
            blocks = [(x[:, k : k + 128].double().abs(), q[:, k : k + 128]) for k in range(0, K, 128)]
            fixed = sum(b.amax(1, keepdim=True) @ v.sum(1, keepdim=True).T for b, v in blocks) * 2**-16
            bound = 2**-8 * exact.abs() + 1e-6 * (size_of + x.double().abs() @ q.T) + 1.01 * fixed
            assert y.shape == (M, N) and ((y.double() - exact).abs() <= bound).all(), (N, K, size, M)
    packed, x = skinny_gemm.pack(*random_integers(12, 64, 32)), torch.ones(3, 64).bfloat16()
    x[1, 5] = torch.nan
    y = torch.ops.ladder.skinny_gemm_int(x, packed, 12, 64, 4)
    assert not y[1].isfinite().any() and y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("N, K, size", [(7, 5, None), (160, 72, 8), (312, 2048, 64)])
def test_feed_forward_is_its_three_products(N, K, size, threads):
    """In float64, gates from -90 to 90; each product is rounded to bfloat16."""
    skinny_gemm.build()
    matrices = [
        random_integers(N, K, size, seed=1),
        random_integers(N, K, size, seed=2),
        random_integers(K, N, size and 8, seed=3),
    ]
    w1, w3, w2 = (in_float64(*matrix) for matrix in matrices)
    packed, bits = [skinny_gemm.pack(*matrix) for matrix in matrices], 8 if size is None else 4
    for M in (1, 3, 8, 17):
        x = randn_bf16(M, K).double()
        x = (x * 90 / (x @ w1.T).abs().amax(1, keepdim=True)).bfloat16()
        x[1:2] = 0
        y = torch.ops.ladder.feed_forward(x, *packed, N, K, [bits] * 3)
        exact = (F.silu(x.double() @ w1.T) * (x.double() @ w3.T)) @ w2.T
        assert y.shape == (M, K) and y.dtype == torch.bfloat16
        assert ((y.double() - exact).norm(dim=1) <= 0.01 * exact.norm(dim=1)).all(), M
    torch.library.opcheck(torch.ops.ladder.feed_forward.default, (x.T.contiguous().T, *packed, N, K, [bits] * 3))


@pytest.mark.parametrize("N, K, size", [*SHAPES, (300, 2048, 64)])  # the last in two pieces even for one thread
def test_packed_weights_are_the_weights_for_many_rows(N, K, size, threads, monkeypatch):
    skinny_gemm.build()
    monkeypatch.setattr(skinny_gemm, "PANELS_AT_ONCE", 2)
    weight, scales, zeros = random_integers(N, K, size)
    exact = quant_linear.dequantize(weight, scales.float(), None if zeros is None else zeros.float())
    packed, one = skinny_gemm.pack(weight, scales, zeros), torch.eye(K).bfloat16()
    with torch.inference_mode():  # which the other threads do not inherit
        w = torch.ops.ladder.many_rows_int(one, packed, N, K, 8 if zeros is None else 4).T
    assert w.dtype == torch.bfloat16 and ((w.float() - exact).abs() <= 2**-8 * exact.abs() + 1e-7).all()
    assert torch.get_num_threads() == threads


def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


def packed(*shape):
    return zeros(*shape, 64, dtype=torch.uint8)


INT4, IDS = packed(1, 2, 5), zeros(3, 2, dtype=torch.int64)  # 16 rows of 64 columns in groups of 32
Q, CACHE, EXPERT = zeros(3, 2, 1, 1, 64), zeros(3, 2, 9, 64), zeros(4, 8, 8)
ROPE, X, WQKV, WO = torch.zeros(3, 1, 1, 1, 32), zeros(3, 1, 8), zeros(384, 8), zeros(8, 128)
ROWS, MASK = torch.arange(3)[:, None], torch.ones(3, 1, 9, dtype=torch.bool)
STEP = 0.0, ROPE, ROPE, ROWS, IDS[:, :1], CACHE, CACHE, MASK  # the last arguments of attention_step, which fit
HALF = ROPE[..., :16]
LATENT = (  # arguments of latent_attention, which fit
    zeros(3, 1, 96), zeros(3, 1, 96), zeros(64), 1e-6, zeros(72, 64), 16, 20, HALF, HALF, ROWS, IDS[:, :1],
    zeros(3, 1, 9, 96), MASK, 0.1,
)  # fmt: skip
MISFITS = [
    ("skinny_gemm", zeros(2, 9), zeros(4, 8)),
    ("skinny_gemm", zeros(2, 0), zeros(4, 0)),
    ("skinny_gemm_heads", zeros(2, 3, 8), zeros(3, 4, 8)),
    ("skinny_gemm_heads", zeros(2, 3, 8), zeros(2, 4, 9)),
    ("skinny_gemm_heads", zeros(2, 8), zeros(2, 4, 8)),
    ("skinny_gemm_heads_mT", zeros(2, 3, 8), zeros(2, 4, 8)),
    ("skinny_gemm_heads_mT", zeros(2, 3, 8), zeros(3, 8, 8)),
    ("skinny_gemm_int", zeros(3, 64).float(), INT4, 16, 64, 4),
    ("skinny_gemm_int", zeros(3, 64), INT4, 17, 64, 4),
    ("skinny_gemm_int", zeros(3, 64), INT4, 16, 64, 8),
    ("skinny_gemm_int", zeros(3, 64), INT4, 16, 64, 2),
    ("skinny_gemm_int", zeros(3, 64), INT4[..., :32].contiguous(), 16, 64, 4),
    ("skinny_gemm_int", zeros(3, 64), packed(1, 2, 10)[:, :, ::2], 16, 64, 4),
    ("skinny_gemm_int", zeros(3, 96), INT4, 16, 96, 4),
    ("skinny_gemm_int", zeros(3, 64), packed(1, 2, 17), 16, 64, 8),
    ("skinny_gemm_int", zeros(3, 256), packed(1, 1, 33), 16, 256, 4),
    ("skinny_gemm_int", zeros(3, 64), packed(1, 0, 5), 16, 64, 4),
    ("skinny_gemm_int", zeros(3, 0), packed(1, 1, 1), 16, 0, 8),
    ("many_rows_int", zeros(3, 64), packed(1, 4, 4), 16, 64, 4),
    ("feed_forward", zeros(3, 64), INT4, packed(1, 4, 4), packed(4, 1, 3), 16, 64, [4] * 3),
    ("feed_forward", zeros(3, 64), INT4, INT4, packed(4, 1, 3), 16, 64, [4] * 2),
    ("skinny_gemm_experts", zeros(3, 8), IDS + 4, EXPERT, EXPERT, EXPERT, 8, 8, [16] * 3, []),
    ("skinny_gemm_experts", zeros(3, 8), IDS - 1, EXPERT, EXPERT, EXPERT, 8, 8, [16] * 3, []),
    ("skinny_gemm_experts", zeros(3, 8), IDS, EXPERT, EXPERT, EXPERT[0], 8, 8, [16] * 3, []),
    ("skinny_gemm_experts", zeros(3, 8), IDS + 3, EXPERT, EXPERT[:2], EXPERT, 8, 8, [16] * 3, []),
    ("skinny_gemm_experts", zeros(3, 64), IDS, *[packed(1, 1, 17)] * 3, 16, 64, [8] * 3, []),
    ("skinny_gemm_experts", zeros(3, 8), IDS, EXPERT, EXPERT, EXPERT, 8, 8, [16] * 3, [zeros(4, 8)]),
    (
        "skinny_gemm_experts",
        zeros(3, 8),
        IDS,
        EXPERT,
        EXPERT,
        EXPERT,
        8,
        8,
        [16] * 3,
        [zeros(4, 8), zeros(4, 1), zeros(4, 8)],
    ),
    ("decode_attention", Q, CACHE[:, :, :0], CACHE[:, :, :0], MASK, 0.125),
    ("decode_attention", Q, CACHE, CACHE[:, :, :8].contiguous(), MASK, 0.125),
    ("decode_attention", Q, CACHE[:2], CACHE[:2], MASK, 0.125),
    ("decode_attention", Q, CACHE.mT.contiguous().mT, CACHE, MASK, 0.125),
    ("decode_attention", Q, CACHE, CACHE, MASK[:2], 0.125),
    ("decode_attention", Q, CACHE, CACHE, MASK.expand(3, 2, 9), 0.125),
    ("decode_attention", Q, CACHE, CACHE, MASK.repeat(1, 1, 2), 0.125),
    ("decode_attention", Q, CACHE, CACHE, MASK.byte(), 0.125),
    ("attention_step", X, WQKV, WO, [16], 2, None, [], *STEP),
    ("attention_step", X, WQKV[:192], WO, [16, 16], 1, None, [], *STEP),
    ("attention_step", X, WQKV[:320], WO, [16, 16], 2, None, [], *STEP),
    ("attention_step", X, WQKV, WO[:, :64].contiguous(), [16, 16], 2, None, [], *STEP),
    ("attention_step", X, WQKV, WO, [16, 16], 2, None, [Q], *STEP),
    ("rms_norm", zeros(3, 64), zeros(65)),
    ("rms_norm", zeros(3, 64).float(), zeros(64)),
    ("rotate_into_cache", Q, Q[:, :, 0], Q[:, :, 0], ROPE[..., :30], ROPE, ROWS, IDS[:, :1], CACHE, CACHE),
    ("rotate_into_cache", Q, Q[:, :, 0], Q[:, :, 0], ROPE.double(), ROPE, ROWS, IDS[:, :1], CACHE, CACHE),
    ("rotate_into_cache", Q, Q[:, :, 0], Q[:, :, 0], ROPE, ROPE, ROWS, IDS[:, :1] - 1, CACHE, CACHE),
    ("rotate_into_cache", Q, Q[:, :, 0], Q[:, :, 0], ROPE, ROPE, ROWS, IDS[:, :1], CACHE[:2], CACHE),
    ("rotate_into_cache", Q, Q[:, :, 0], Q[:, :, 0], ROPE, ROPE, ROWS, IDS[:, :1], CACHE.half(), CACHE),
    ("rotate_into_cache", Q, Q[:, :, 0], Q[:, :, 0], ROPE, ROPE, ROWS + 1, IDS[:, :1], CACHE, CACHE),
    ("decode_attention", Q, CACHE, CACHE, MASK, 0.125, zeros(3)),
    ("latent_attention", LATENT[0][..., 1:], *LATENT[1:]),
    ("latent_attention", *LATENT[:4], zeros(71, 64), *LATENT[5:]),
    ("latent_attention", *LATENT[:4], zeros(72, 32), *LATENT[5:]),
    ("latent_attention", *LATENT[:7], HALF[..., :8], HALF[..., :8], *LATENT[9:]),
    ("latent_attention", *LATENT[:11], zeros(3, 1, 9, 64), MASK, 0.1),
    ("decode_attention", Q[..., :32], CACHE[..., :32].contiguous(), CACHE[..., :32].contiguous(), MASK, 0.125),
]


def test_what_would_be_read_beyond_a_tensor_is_refused():
    skinny_gemm.build()
    assert torch.ops.ladder.latent_attention(*LATENT).shape == (3, 1, 40)
    for name, *arguments in MISFITS:
        with pytest.raises((RuntimeError, IndexError)):
            getattr(torch.ops.ladder, name)(*arguments)


@pytest.mark.parametrize("G, H", [(1, 64), (2, 192), (7, 64)])
def test_attention_of_a_few_positions_in_unequal_rows(G, H, threads):
    """T positions of a cache, the last S of them new; what lies outside of a row's window is not a number."""
    skinny_gemm.build()
    cases = (1, 1, [0]), (70, 1, [69, 0, 33, 2]), (40, 3, [3, 4, 15, 16]), (30, 5, [29, 4])
    for (T, S, last), window, scale in itertools.product(cases, (100, 7, 1), (3, 300)):
        B, positions = len(last), torch.tensor(last)[:, None] + torch.arange(1 - S, 1)
        q = scale * randn_bf16(B, G, S, 2, H).permute(0, 3, 2, 1, 4)
        keys, values = randn_bf16(B, 2, T, H), randn_bf16(T, B, 2, H).permute(1, 2, 0, 3).contiguous()
        for row, position in enumerate(last):
            for outside in slice(position + 1, None), slice(max(position + 2 - S - window, 0)):
                keys[row, :, outside] = values[row, :, outside] = torch.nan
        slots = torch.arange(T)
        mask = (slots <= positions[..., None]) & (slots > positions[..., None] - window)
        y = torch.ops.ladder.decode_attention(q, keys, values, mask, H**-0.5)
        exact = exact_attention(q, keys, values, mask)
        assert y.shape == q.shape and y.dtype == torch.bfloat16
        assert ((y.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5 * max(1, scale / 10)).all()


@pytest.mark.parametrize("G", [1, 3, 4])
def test_attention_by_any_mask(G, threads):
    """Keys with gaps between them, none at all, and, without a mask, all up to a token's own."""
    skinny_gemm.build()
    q, (keys, values) = randn_bf16(3, 2, 4, G, 64), randn_bf16(2, 3, 2, 21, 64)
    mask = torch.rand(3, 4, 17, generator=torch.Generator().manual_seed(0)) < 0.4
    mask[0, 1], mask[2, 3] = False, True
    for some, visible in (mask, mask), (None, torch.ones(3, 4, 21, dtype=torch.bool).tril()):
        y = torch.ops.ladder.decode_attention(q, keys, values, some, 0.125)
        exact = exact_attention(q, keys, values, visible)
        assert ((y.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5).all()


@pytest.mark.parametrize("shape", [(1, 1), (3, 2, 576), (5, 33)])
def test_a_norm_is_exact_up_to_the_last_rounding(shape, threads):
    skinny_gemm.build()
    x, weight = randn_bf16(*shape), randn_bf16(shape[-1])
    x.view(-1, shape[-1])[-1] *= 100
    y = torch.ops.ladder.rms_norm(x.transpose(0, -2), weight, 1e-5).transpose(0, -2)
    exact = F.rms_norm(x.double(), weight.shape, weight.double(), 1e-5)
    assert y.dtype == torch.bfloat16 and ((y.double() - exact).abs() <= (2**-8 + 1e-6) * exact.abs()).all()


@pytest.mark.parametrize("B, K, G, S, H, R", [(1, 1, 1, 1, 64, 32), (3, 2, 3, 2, 64, 9), (2, 2, 1, 5, 128, 64)])
def test_rotation_writes_the_cache_as_models_does(B, K, G, S, H, R):
    """Rows at unequal positions; bit by bit but where a sum is rounded twice."""
    skinny_gemm.build()
    qkv = randn_bf16(B, S, K, G + 2, H).permute(0, 2, 3, 1, 4)  # views into wqkv's output
    q, k, v = qkv.tensor_split((-2, -1), dim=2)
    positions = torch.tensor([[3 * b + s for s in range(S)] for b in range(B)])
    angles = (positions[..., None] * torch.linspace(0.1, 2, R))[:, None, None]
    rope, rows = (angles.cos(), angles.sin()), torch.arange(B)[:, None]
    caches = [[randn_bf16(B, K, 12, H), randn_bf16(B, K, 12, H)] for _ in range(2)]
    metadata = types.SimpleNamespace(rows=rows, positions=positions, mask=positions)
    expected, *plain = rotate_into_cache(q, k, v, rope, metadata, caches[0])
    turned, *cached = stand_ins.rotate_into_cache(q, k, v, rope, metadata, caches[1])
    uncached = stand_ins.rotate_into_cache(q, k, v, rope, metadata, None)
    assert torch.equal(uncached[0], turned)
    for result in cached, uncached[1:]:
        for ours, theirs in zip(result, plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-6)
    assert torch.equal(caches[0][1], caches[1][1]) and turned.shape == q.shape
    for ours, theirs in (turned, expected), (caches[1][0], caches[0][0]):
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-6)
    with pytest.raises(IndexError, match="position 1. is not in a cache of 12"):
        metadata.positions = positions + 14 - positions.max()
        stand_ins.rotate_into_cache(q, k, v, rope, metadata, caches[1])


@pytest.mark.parametrize("special", [{}, {"qkv_bias": True}, {"heads": {}}, {"heads": {"qk_norm": True}}], ids=str)
@pytest.mark.parametrize("quant, most", [(None, 8), ("int8", 16), ("int4", 16)])
def test_a_layers_attention_in_one_call_is_the_same_bit_by_bit(quant, most, special, monkeypatch):
    """Unequal rows of three tokens, perhaps a layer with a window; and more rows, for which others are faster."""
    monkeypatch.setattr(skinny_gemm, "SKINNY_ROWS", 8)
    shape = {"n_layers": 2, "n_heads": 6, "n_kv_heads": 2, "head_dim": 64, "dim": 128, "intermediate_size": 64}
    config = change(BASE, **shape, **special, quant=quant, group_size=64 if quant == "int4" else None)
    name = "model.Attention.forward"
    if "heads" in special:
        config = change(config, heads={"sliding_window": 5, "window_layers": (1,)})
        name = "ladder.architectures.heads.HeadAttention.forward"
    net = generate.load_model(config, None, "bfloat16", WORLD)
    for i, vector in enumerate(p for p in net.parameters() if p.dim() == 1):  # biases and norms
        vector.data = randn_bf16(i + 1, len(vector))[-1]
    first = torch.tensor([[9], [0]])
    for S, block in itertools.product((3, most // 2 + 1), net.layers):
        metadata = attention_metadata(net, first + torch.arange(S), torch.arange(20))
        x, keys, values = (
            randn_bf16(2, S, 128),
            *randn_bf16(2, 2, 2, 20, 64)[:, None].repeat(1, 2, 1, 1, 1, 1),
        )
        with counted_kernels() as counts:
            one_call = block.attention(x, metadata, (keys[0], values[0]))
        assert counts[name] == (S == 3)
        with pytest.MonkeyPatch.context() as m:
            m.setattr(model.Attention.forward, "kernels", ())
            several = block.attention(x, metadata, (keys[1], values[1]))
        assert torch.equal(one_call, several) and torch.equal(*keys) and torch.equal(*values)


@pytest.mark.slow
def test_a_compiled_model_with_few_rows(monkeypatch):
    monkeypatch.setattr(skinny_gemm, "SKINNY_ROWS", 8)  # more in prefill, fewer in decode
    changes = {
        "head_dim": 64,
        "qkv_bias": True,
        "heads": {"sliding_window": 3, "window_layers": (1,), "qk_norm": True},
    }
    config = change(BASE, wiring="ladder", n_layers=2, **changes)
    net = random_model(config)
    reference = Reference(config, net.state_dict())
    for weight in net.parameters():  # not .to(): the rope frequencies stay float32
        weight.data = weight.data.bfloat16()
    tokens, lengths = unequal_rows(config)
    eager = last_logits(net, tokens, lengths)
    compiling.use_decode_kernels(net)
    with counted_kernels() as counts:
        logits = last_logits(net, tokens, lengths, compile=True)
    assert {"model.attend", "model.Linear.forward", "model.FeedForward.forward"} <= counts.keys()
    for row, length in enumerate(lengths):
        expected = torch.from_numpy(reference.logits(tokens[row, :length]))[-4:]
        assert (logits[row] - expected).abs().max() < 0.05 * expected.abs().max()
        assert (logits[row] - expected).abs().mean() < 1.2 * (eager[row] - expected).abs().mean()


COMPILED = [pytest.param(name, True, marks=pytest.mark.slow) for name in ("tied", "int8", "biased", "kept", "several")]


@pytest.mark.parametrize("name, compile", [*((name, False) for name in QUANTIZED), *COMPILED])
def test_a_quantized_model_computes_what_its_numbers_say(name, compile, monkeypatch):
    monkeypatch.setattr(skinny_gemm, "SKINNY_INT_ROWS", 8)  # more in prefill, fewer in decode
    n_layers = 1 if compile and name != "several" else 3  # which lists matrices of all three
    config = change(QUANTIZED[name], n_layers=n_layers)
    net, counts = check_quantized_model(config, torch.bfloat16, 0.06, fast=True, compile=compile)
    layouts = {m.layout.multiply for m in net.modules() if type(m) is quant_linear.QuantLinear}
    kept = [m for m in net.modules() if type(m) is Linear]
    assert layouts == {skinny_gemm.multiply} and bool(kept) == bool(config.not_quantized)
    assert bool(counts["model.FeedForward.forward"]) == (not config.mlp_bias and config.activation == "silu")


def test_attention_in_a_window_without_a_cache():
    """There v is a view, with strides that the kernel does not take. Only bfloat16 has such kernels."""
    net = random_model(change(BASE, head_dim=64, heads={"sliding_window": 3, "window_layers": (0, 2)}))
    compiling.use_decode_kernels(net)
    assert not registry.used
    net, (tokens, _) = net.bfloat16(), unequal_rows(BASE)
    with torch.inference_mode():
        expected = net(tokens[:, :8])
        compiling.use_decode_kernels(net)
        with counted_kernels() as counts:
            logits = net(tokens[:, :8])
    assert counts["model.attend"] == 2
    assert (logits - expected).norm() < 0.03 * expected.norm()


UNBUILT = [
    ({"CXX": "g++ -O1"}, "skinny_gemm.cpp needs a C.. compiler: .* no options: 'g.. -O1'"),
    ({"CXX": "false"}, "false cannot compile skinny_gemm.cpp: it ends with code 1"),
    ({"XDG_CACHE_HOME": ""}, "skinny_gemm.cpp: no home folder to keep compiled code in: name a folder in .XDG_CACHE"),
    ({"XDG_CACHE_HOME": "/dev/null"}, "cannot use /dev/null/ladder-fast: Not a directory"),
]


@pytest.mark.parametrize("environment, message", UNBUILT, ids=str)
def test_without_what_cannot_be_built_pytorchs_kernels_run_and_one_line_says_why(
    environment, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(loading, "is_built", functools.cache(loading.is_built.__wrapped__))
    monkeypatch.setattr(torch.ops, "ladder", types.SimpleNamespace())  # as if nothing had been built
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    monkeypatch.delenv("HOME", raising=False)
    for name, value in {"XDG_CACHE_HOME": str(tmp_path), **environment}.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):  # models
        net = generate.load_model(INT8, None, "bfloat16", WORLD)
        with counted_kernels() as counts:
            net.output(zeros(3, 64))
        assert net.output.layout is None and counts["ladder.kernels.quant_linear.QuantLinear.forward"] == 1
    assert re.fullmatch("(compiling .*\n)?" + message + ".*: PyTorch's kernels, slower\n", capsys.readouterr().err)
    assert list(tmp_path.rglob("*.so")) == []


@pytest.mark.parametrize("quant", [None, "int8", "int4"])
def test_a_model_in_bfloat16_takes_the_kernels_without_asking(quant, capsys):
    """Its packed integers replace those that were loaded; in other dtypes there are no such kernels."""
    config = change(
        BASE, head_dim=64, dim=64, intermediate_size=96, quant=quant, group_size=32 if quant == "int4" else None
    )
    net = generate.load_model(config, None, "bfloat16", WORLD)
    kind = quant_linear.QuantLinear if quant else Linear
    linears = [m for m in net.modules() if type(m) is kind]
    assert all(m.layout is skinny_gemm.LAYOUT and m.packed.dtype.itemsize == 1 for m in linears if quant)
    with counted_kernels() as counts, torch.inference_mode():
        net(torch.tensor([[5]]), None, net.new_cache(1, 3))
    layers = "model.Attention.forward", "model.FeedForward.forward", "ladder.layers.norms.RMSNorm.forward"
    assert [counts[name] for name in layers] == [3, 3, 7]
    stop_using_kernels()
    net = generate.load_model(config, None, "float32", WORLD)
    said = capsys.readouterr().err
    assert said == "int4 in float32 has no kernels: bfloat16 is many times faster\n" * (quant == "int4")
    assert [function.__name__ for function in registry.used] == ["sample"] and type(net.output) is kind


def test_many_rows_are_multiplied_in_float32_where_nothing_else_is_fast(monkeypatch):
    """With no compiler and no oneDNN for bfloat16; rows with a bias, in pieces of the weights."""
    monkeypatch.setattr(loading, "is_built", lambda: False)
    monkeypatch.setattr(skinny_gemm, "HAS_ONEDNN_BF16", False)
    monkeypatch.setattr(stand_ins, "DEQUANTIZED_AT_ONCE", 700)
    config = change(BASE, qkv_bias=True, mlp_bias=True)
    net, (tokens, lengths) = random_model(config), unequal_rows(config)
    reference = Reference(config, net.state_dict())
    for weight in net.parameters():  # not .to(): the rope frequencies stay float32
        weight.data = weight.data.bfloat16()
    plain = last_logits(net, tokens, lengths)
    loading.use_kernels(net)
    with counted_kernels() as counts:
        logits = last_logits(net, tokens, lengths)
    assert counts["model.Linear.forward"]
    for row, length in enumerate(lengths):
        expected = torch.from_numpy(reference.logits(tokens[row, :length]))[-4:]
        assert (logits[row] - expected).abs().mean() < 1.2 * (plain[row] - expected).abs().mean()


def test_clones_compile_once(tmp_path, monkeypatch):
    (compiler := tmp_path / "compiler").write_text(
        f'#!/bin/sh\nfor last in "$@"; do true; done\necho library > $last; echo >> {tmp_path}/calls'
    )
    compiler.chmod(0o755)
    loaded = []
    monkeypatch.setattr(torch.ops, "load_library", lambda path: loaded.append(path.read_text()))
    for name, value in {"XDG_CACHE_HOME": tmp_path / "cache", "CXX": compiler}.items():
        monkeypatch.setenv(name, str(value))
    shutil.copytree(ROOT / "ladder/kernels/cpu", tmp_path / "clone")
    for folder in ROOT / "ladder/kernels/cpu", tmp_path / "clone":
        cpp.load_operators(folder / "skinny_gemm.cpp", "skinny_gemm.cpp")
    assert loaded == ["library\n"] * 2 and (tmp_path / "calls").read_text() == "\n"


SETS = [("haswell", "avx2"), ("haswell -mavxvnni", "avx_vnni"), ("skylake-avx512", "avx512bw")]
SETS += [("armv8.2-a+dotprod", None), ("armv8.2-a+dotprod+i8mm+bf16", None)]


@pytest.mark.slow
@pytest.mark.parametrize("march, feature", SETS)  # feature: as /proc/cpuinfo calls it
def test_the_loops_on_every_instruction_set(march, feature, tmp_path):
    """Against float64, without PyTorch: on this processor or an emulated one."""
    compiler, *emulator = ("g++",) if feature else ("aarch64-linux-gnu-g++", "qemu-aarch64", "-cpu", "max")
    if missing := [tool for tool in (compiler, *emulator[:1]) if shutil.which(tool) is None]:
        pytest.skip(f"{' and '.join(missing)} not installed")
    if feature and feature not in compilers.features():
        pytest.skip(f"this processor has no {feature}")
    options = ["-O3", *f"-march={march}".split(), "-std=c++20", "-fassociative-math", "-fno-signed-zeros"]
    options += ["-fno-trapping-math", "-w", "-I", ROOT / "ladder/kernels/cpu", *(["-static"] if emulator else [])]
    subprocess.run([compiler, *options, ROOT / "tests/skinny_gemm_alone.cpp", "-o", tmp_path / "loops"], check=True)
    done = subprocess.run([*emulator, tmp_path / "loops"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.slow
def test_the_instructions_that_one_asks_for(tmp_path):
    """What this processor has besides its best, as others have it who have no more: the same tests."""
    if compilers.instruction_set() != "avx512":
        pytest.skip("the other tests run on the only set that this processor has")
    files = [f"tests/{name}.py" for name in ("kernels/test_cpu", "architectures/test_experts", "test_tp")]
    names = "skinny_gemm or attention_of or feed_forward_is or packed_weights"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *files, "-k", names]
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout[-3000:]


@pytest.mark.slow
def test_code_compiled_for_other_instructions_is_not_reused(tmp_path):
    """One cache for both: the loops take as many elements at a time as a vector of the first has."""
    if compilers.instruction_set() != "avx512":
        pytest.skip("this processor has vectors of one length")
    code = "import torch; from ladder.kernels import compilers; compilers.prepare_compile(); x = torch.arange(64.0)"
    code += "; torch._inductor.config.cpp_cache_precompile_headers = False"
    code += "; assert torch.equal(torch.compile(lambda x: 2 * x + 1)(x), 2 * x + 1)"
    for name in "avx512", "avx2":
        environment = os.environ | {"ATEN_CPU_CAPABILITY": name, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)


def test_without_instructions_for_our_kernels_there_are_pytorchs(monkeypatch, capsys):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setattr(compilers, "ON_ARM", False)
    monkeypatch.setattr(torch.ops, "ladder", types.SimpleNamespace())  # as if nothing had been built
    monkeypatch.setattr(loading, "is_built", functools.cache(loading.is_built.__wrapped__))
    net, (tokens, lengths) = random_model(BASE).bfloat16(), unequal_rows(BASE)
    plain = last_logits(net, tokens, lengths)
    compiling.use_decode_kernels(net)
    assert "model.Attention.forward" not in [kernel.kernel.name for f in registry.used for kernel in f.kernels]
    line = "skinny_gemm.cpp knows no such processor or system: PyTorch's kernels, slower\n"
    assert capsys.readouterr().err == line
    assert torch.equal(last_logits(net, tokens, lengths), plain)
    monkeypatch.setattr(compilers, "ON_ARM", True)
    for features, name in (["asimd", "asimddp"], "neon"), (["asimd"], "plain"), ([], "plain"):
        monkeypatch.setattr(compilers, "features", lambda features=features: features)
        assert compilers.instruction_set() == name


@pytest.mark.parametrize("ranges", [None, [(5, 17), (2990, 3000)], [(7, 7)]], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_filling_joins_ranges_in_parts(dim, ranges, tmp_path):
    """The tensor is larger than what is copied at a time."""
    values = randn_bf16(3000, 3000)
    save_file({"w": values}, tmp_path / "model.safetensors")
    expected = torch.cat([values.narrow(dim, a, b - a) for a, b in ranges or [(0, 3000)]], dim)
    target = torch.full(expected.shape, torch.nan)
    checkpoint.Weights(tmp_path).fill(target, "w", dim, ranges)
    assert values.nbytes > 2**24 and torch.equal(target, expected.float())
