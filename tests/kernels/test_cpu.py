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
from cases import slow_case
from configs import BASE, change
from helpers import (
    ALONE,
    ROOT,
    counted_kernels,
    last_logits,
    randn_bf16,
    random_model,
    seeded,
    stop_using_kernels,
    unequal_rows,
)
from parity import reference_logits
from products import check_feed_forward, check_few_rows_of_integers, check_product, check_rounded
from quantized_models import INT8, QUANTIZED, check_quantized_model, in_float64, random_integers
from reference import exact_attention
from running import run_python
from safetensors.torch import save_file

import generate
import model
from ladder.checkpoints import checkpoint
from ladder.kernels import compilers, compiling, cpp, quant_linear, registry
from ladder.kernels.cpu import loading, skinny_gemm, stand_ins
from ladder.layers.attention_inputs import attention_metadata
from model import Linear, rotate_into_cache


def test_few_rows_are_exact_up_to_the_last_rounding(threads):
    skinny_gemm.build()
    shapes = (1, 1), (33, 2731), (301, 2048), (2100, 40)
    for (N, K), M in itertools.product(shapes, (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 24)):
        x = randn_bf16(M, K)
        weight = randn_bf16(N, K)
        check_product(torch.ops.ladder.skinny_gemm(x, weight), x, weight.T)


@pytest.mark.parametrize("N, M, L, K", [(1, 1, 1, 1), (3, 2, 40, 33), (2, 9, 513, 96)])
def test_each_head_has_its_own_matrix(N, M, L, K, threads):
    skinny_gemm.build()
    x = randn_bf16(M, N, K).transpose(0, 1)
    weight = randn_bf16(N, L, K)
    check_product(torch.ops.ladder.skinny_gemm_heads(x, weight), x, weight.mT)
    torch.library.opcheck(torch.ops.ladder.skinny_gemm_heads.default, (x, weight))
    other = randn_bf16(N, K, L)
    check_product(torch.ops.ladder.skinny_gemm_heads_mT(x, other), x, other)
    torch.library.opcheck(torch.ops.ladder.skinny_gemm_heads_mT.default, (x, other))


SHAPES = [(1, 1, None), (33, 2731, None), (64, 129, None)]
SHAPES += [(1, 8, 8), (40, 80, 16), (67, 96, 32), (131, 2048, 64), (50, 4096, 128)]


def test_few_rows_of_integers_are_exact_up_to_rounding(threads):
    skinny_gemm.build()
    for N, K, size in SHAPES:
        weight, scales, zeros = random_integers(N, K, size)
        w = in_float64(weight, scales, zeros)
        # the integers, not W, meet the rounded x: with a zero of the other sign they are the larger
        q = (w - (0 if zeros is None else zeros.double().repeat_interleave(size, 1))).abs()
        packed = skinny_gemm.pack(weight, scales, zeros)
        check_few_rows_of_integers(packed, 8 if zeros is None else 4, w, q, w.abs() + q)


@pytest.mark.parametrize("N, K, size", [(7, 5, None), (160, 72, 8), (312, 2048, 64)])
def test_feed_forward_is_its_three_products(N, K, size, threads):
    """With gates from -90 to 90."""
    skinny_gemm.build()
    matrices = [
        random_integers(N, K, size, seed=1),
        random_integers(N, K, size, seed=2),
        random_integers(K, N, size and 8, seed=3),
    ]
    w1, w3, w2 = (in_float64(*matrix) for matrix in matrices)
    packed = [skinny_gemm.pack(*matrix) for matrix in matrices]
    bits = 8 if size is None else 4
    for M in (1, 3, 8, 17):
        x = randn_bf16(M, K).double()
        x = (x * 90 / (x @ w1.T).abs().amax(1, keepdim=True)).bfloat16()
        x[1:2] = 0
        check_feed_forward(x, packed, [bits] * 3, w1, w3, w2)
    torch.library.opcheck(torch.ops.ladder.feed_forward.default, (x.T.contiguous().T, *packed, N, K, [bits] * 3))


@pytest.mark.parametrize("N, K, size", [*SHAPES, (300, 2048, 64)])  # the last in two pieces even for one thread
def test_packed_weights_are_the_weights_for_many_rows(N, K, size, threads, monkeypatch):
    skinny_gemm.build()
    monkeypatch.setattr(skinny_gemm, "PANELS_AT_ONCE", 2)
    weight, scales, zeros = random_integers(N, K, size)
    packed = skinny_gemm.pack(weight, scales, zeros)
    one = torch.eye(K).bfloat16()
    with torch.inference_mode():  # which the other threads do not inherit
        w = torch.ops.ladder.many_rows_int(one, packed, N, K, 8 if zeros is None else 4).T
    check_rounded(w, in_float64(weight, scales, zeros), 1e-7)
    assert torch.get_num_threads() == threads


def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


def packed(*shape):
    return zeros(*shape, 64, dtype=torch.uint8)


INT4, IDS = packed(1, 2, 5), zeros(3, 2, dtype=torch.int64)  # 16 rows of 64 columns in groups of 32
Q = zeros(3, 2, 1, 1, 64)
CACHE = zeros(3, 2, 9, 64)
EXPERT = zeros(4, 8, 8)
ROPE = torch.zeros(3, 1, 1, 1, 32)
X = zeros(3, 1, 8)
WQKV = zeros(384, 8)
WO = zeros(8, 128)
ROWS = torch.arange(3)[:, None]
MASK = torch.ones(3, 1, 9, dtype=torch.bool)
HALF = ROPE[..., :16]
FITS = {  # arguments of operators
    "skinny_gemm": (zeros(2, 8), zeros(4, 8)),
    "skinny_gemm_heads": (zeros(2, 3, 8), zeros(2, 4, 8)),
    "skinny_gemm_heads_mT": (zeros(2, 3, 8), zeros(2, 8, 4)),
    "skinny_gemm_int": (zeros(3, 64), INT4, 16, 64, 4),
    "many_rows_int": (zeros(3, 64), INT4, 16, 64, 4),
    "feed_forward": (zeros(3, 64), INT4, INT4, packed(4, 1, 3), 16, 64, [4] * 3),
    "skinny_gemm_experts": (zeros(3, 8), IDS, EXPERT, EXPERT, EXPERT, 8, 8, [16] * 3, []),
    "decode_attention": (Q, CACHE, CACHE, MASK, 0.125, None),
    "attention_step": (
        X, WQKV, WO, [16, 16], 2, None, [], 0.0, ROPE, ROPE, ROWS, IDS[:, :1], CACHE, CACHE, MASK,
    ),
    "rms_norm": (zeros(3, 64), zeros(64), 1e-5),
    "rotate_into_cache": (Q, Q[:, :, 0], Q[:, :, 0], ROPE, ROPE, ROWS, IDS[:, :1], CACHE, CACHE),
    "latent_attention": (
        zeros(3, 1, 96), zeros(3, 1, 96), zeros(64), 1e-6, zeros(72, 64), 16, 20, HALF, HALF, ROWS, IDS[:, :1],
        zeros(3, 1, 9, 96), MASK, 0.1,
    ),
}  # fmt: skip
NONE = CACHE[:, :, :0]
SHORT = CACHE[..., :32].contiguous()
MISFITS = [  # an operator, and {place: what stands there instead}
    ("skinny_gemm", {0: zeros(2, 9)}),
    ("skinny_gemm", {0: zeros(2, 0), 1: zeros(4, 0)}),
    ("skinny_gemm_heads", {1: zeros(3, 4, 8)}),
    ("skinny_gemm_heads", {1: zeros(2, 4, 9)}),
    ("skinny_gemm_heads", {0: zeros(2, 8)}),
    ("skinny_gemm_heads_mT", {1: zeros(2, 4, 8)}),
    ("skinny_gemm_heads_mT", {1: zeros(3, 8, 8)}),
    ("skinny_gemm_int", {0: zeros(3, 64).float()}),
    ("skinny_gemm_int", {2: 17}),
    ("skinny_gemm_int", {4: 8}),
    ("skinny_gemm_int", {4: 2}),
    ("skinny_gemm_int", {1: INT4[..., :32].contiguous()}),
    ("skinny_gemm_int", {1: packed(1, 2, 10)[:, :, ::2]}),
    ("skinny_gemm_int", {0: zeros(3, 96), 3: 96}),
    ("skinny_gemm_int", {1: packed(1, 2, 17), 4: 8}),
    ("skinny_gemm_int", {0: zeros(3, 256), 1: packed(1, 1, 33), 3: 256}),
    ("skinny_gemm_int", {1: packed(1, 0, 5)}),
    ("skinny_gemm_int", {0: zeros(3, 0), 1: packed(1, 1, 1), 3: 0, 4: 8}),
    ("many_rows_int", {1: packed(1, 4, 4)}),
    ("feed_forward", {2: packed(1, 4, 4)}),
    ("feed_forward", {6: [4] * 2}),
    ("skinny_gemm_experts", {1: IDS + 4}),
    ("skinny_gemm_experts", {1: IDS - 1}),
    ("skinny_gemm_experts", {4: EXPERT[0]}),
    ("skinny_gemm_experts", {1: IDS + 3, 3: EXPERT[:2]}),
    ("skinny_gemm_experts", {0: zeros(3, 64), **dict.fromkeys((2, 3, 4), packed(1, 1, 17)), 5: 16, 6: 64, 7: [8] * 3}),
    ("skinny_gemm_experts", {8: [zeros(4, 8)]}),
    ("skinny_gemm_experts", {8: [zeros(4, 8), zeros(4, 1), zeros(4, 8)]}),
    ("decode_attention", {1: NONE, 2: NONE}),
    ("decode_attention", {2: CACHE[:, :, :8].contiguous()}),
    ("decode_attention", {1: CACHE[:2], 2: CACHE[:2]}),
    ("decode_attention", {1: CACHE.mT.contiguous().mT}),
    ("decode_attention", {3: MASK[:2]}),
    ("decode_attention", {3: MASK.expand(3, 2, 9)}),
    ("decode_attention", {3: MASK.repeat(1, 1, 2)}),
    ("decode_attention", {3: MASK.byte()}),
    ("decode_attention", {5: zeros(3)}),
    ("decode_attention", {0: Q[..., :32], 1: SHORT, 2: SHORT}),
    ("attention_step", {3: [16]}),
    ("attention_step", {1: WQKV[:192], 4: 1}),
    ("attention_step", {1: WQKV[:320]}),
    ("attention_step", {2: WO[:, :64].contiguous()}),
    ("attention_step", {6: [Q]}),
    ("rms_norm", {1: zeros(65)}),
    ("rms_norm", {0: zeros(3, 64).float()}),
    ("rotate_into_cache", {3: ROPE[..., :30]}),
    ("rotate_into_cache", {3: ROPE.double()}),
    ("rotate_into_cache", {6: IDS[:, :1] - 1}),
    ("rotate_into_cache", {7: CACHE[:2]}),
    ("rotate_into_cache", {7: CACHE.half()}),
    ("rotate_into_cache", {5: ROWS + 1}),
    ("latent_attention", {0: zeros(3, 1, 96)[..., 1:]}),
    ("latent_attention", {4: zeros(71, 64)}),
    ("latent_attention", {4: zeros(72, 32)}),
    ("latent_attention", {7: HALF[..., :8], 8: HALF[..., :8]}),
    ("latent_attention", {11: zeros(3, 1, 9, 64)}),
]


def test_what_would_be_read_beyond_a_tensor_is_refused():
    """Of arguments that fit, some are replaced."""
    skinny_gemm.build()
    results = {name: getattr(torch.ops.ladder, name)(*arguments) for name, arguments in FITS.items()}
    assert results["latent_attention"].shape == (3, 1, 40)
    for name, changes in MISFITS:
        with pytest.raises((RuntimeError, IndexError)):
            getattr(torch.ops.ladder, name)(*(changes.get(i, value) for i, value in enumerate(FITS[name])))


@pytest.mark.parametrize("G, H", [(1, 64), (2, 192), (7, 64)])
def test_attention_of_a_few_positions_in_unequal_rows(G, H, threads):
    """T positions of a cache, the last S of them new; what lies outside of a row's window is not a number."""
    skinny_gemm.build()
    cases = (1, 1, [0]), (70, 1, [69, 0, 33, 2]), (40, 3, [3, 4, 15, 16]), (30, 5, [29, 4])
    for (T, S, last), window, scale in itertools.product(cases, (100, 7, 1), (3, 300)):
        B = len(last)
        positions = torch.tensor(last)[:, None] + torch.arange(1 - S, 1)
        q = scale * randn_bf16(B, G, S, 2, H).permute(0, 3, 2, 1, 4)
        keys = randn_bf16(B, 2, T, H)
        values = randn_bf16(T, B, 2, H).permute(1, 2, 0, 3).contiguous()
        for row, position in enumerate(last):
            for outside in slice(position + 1, None), slice(max(position + 2 - S - window, 0)):
                keys[row, :, outside] = values[row, :, outside] = torch.nan
        slots = torch.arange(T)
        mask = (slots <= positions[..., None]) & (slots > positions[..., None] - window)
        y = torch.ops.ladder.decode_attention(q, keys, values, mask, H**-0.5)
        check_rounded(y, exact_attention(q, keys, values, mask), 1e-5 * max(1, scale / 10))


@pytest.mark.parametrize("G", [1, 3, 4])
def test_attention_by_any_mask(G, threads):
    """Keys with gaps between them, none at all, and, without a mask, all up to a token's own."""
    skinny_gemm.build()
    q = randn_bf16(3, 2, 4, G, 64)
    keys, values = randn_bf16(2, 3, 2, 21, 64)
    mask = torch.rand(3, 4, 17, generator=seeded(0)) < 0.4
    mask[0, 1] = False
    mask[2, 3] = True
    for some, visible in (mask, mask), (None, torch.ones(3, 4, 21, dtype=torch.bool).tril()):
        y = torch.ops.ladder.decode_attention(q, keys, values, some, 0.125)
        check_rounded(y, exact_attention(q, keys, values, visible), 1e-5)


@pytest.mark.parametrize("shape", [(1, 1), (3, 2, 576), (5, 33)])
def test_a_norm_is_exact_up_to_the_last_rounding(shape, threads):
    skinny_gemm.build()
    x = randn_bf16(*shape)
    weight = randn_bf16(shape[-1])
    x.view(-1, shape[-1])[-1] *= 100
    y = torch.ops.ladder.rms_norm(x.transpose(0, -2), weight, 1e-5).transpose(0, -2)
    exact = F.rms_norm(x.double(), weight.shape, weight.double(), 1e-5)
    check_rounded(y, exact, 1e-6 * exact.abs())


@pytest.mark.parametrize("B, K, G, S, H, R", [(1, 1, 1, 1, 64, 32), (3, 2, 3, 2, 64, 9), (2, 2, 1, 5, 128, 64)])
def test_rotation_writes_the_cache_as_models_does(B, K, G, S, H, R):
    """Rows at unequal positions; bit by bit but where a sum is rounded twice."""
    skinny_gemm.build()
    qkv = randn_bf16(B, S, K, G + 2, H).permute(0, 2, 3, 1, 4)  # views into wqkv's output
    q, k, v = qkv.tensor_split((-2, -1), dim=2)
    positions = torch.tensor([[3 * b + s for s in range(S)] for b in range(B)])
    angles = (positions[..., None] * torch.linspace(0.1, 2, R))[:, None, None]
    rope = (angles.cos(), angles.sin())
    rows = torch.arange(B)[:, None]
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
    net = generate.load_model(config, None, "bfloat16", ALONE)
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


def model_in_bfloat16(config):
    """random_model, whose rope frequencies stay float32."""
    net = random_model(config)
    for weight in net.parameters():
        weight.data = weight.data.bfloat16()
    return net


@pytest.mark.slow
def test_a_compiled_model_with_few_rows(monkeypatch):
    monkeypatch.setattr(skinny_gemm, "SKINNY_ROWS", 8)  # more in prefill, fewer in decode
    changes = {
        "head_dim": 64,
        "qkv_bias": True,
        "heads": {"sliding_window": 3, "window_layers": (1,), "qk_norm": True},
    }
    config = change(BASE, wiring="ladder", n_layers=2, **changes)
    net = model_in_bfloat16(config)
    rows = unequal_rows(config)
    eager = last_logits(net, *rows)
    compiling.use_decode_kernels(net)
    with counted_kernels() as counts:
        logits = last_logits(net, *rows, compile=True)
    assert {"model.attend", "model.Linear.forward", "model.FeedForward.forward"} <= counts.keys()
    for ours, plain, exact in zip(logits, eager, reference_logits(config, 1), strict=True):
        assert (ours - exact).abs().max() < 0.05 * exact.abs().max()
        assert (ours - exact).abs().mean() < 1.2 * (plain - exact).abs().mean()


COMPILED = [slow_case(name, True) for name in ("tied", "int8", "biased", "kept", "several")]


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
    net = net.bfloat16()
    tokens, _ = unequal_rows(BASE)
    with torch.inference_mode():
        expected = net(tokens[:, :8])
        compiling.use_decode_kernels(net)
        with counted_kernels() as counts:
            logits = net(tokens[:, :8])
    assert counts["model.attend"] == 2
    assert (logits - expected).norm() < 0.03 * expected.norm()


@pytest.fixture
def unbuilt(monkeypatch):
    """As if nothing had been built."""
    monkeypatch.setattr(loading, "is_built", functools.cache(loading.is_built.__wrapped__))
    monkeypatch.setattr(torch.ops, "ladder", types.SimpleNamespace())


UNBUILT = [
    ({"CXX": "g++ -O1"}, "skinny_gemm.cpp needs a C.. compiler: .* no options: 'g.. -O1'"),
    ({"CXX": "false"}, "false cannot compile skinny_gemm.cpp: it ends with code 1"),
    ({"XDG_CACHE_HOME": ""}, "skinny_gemm.cpp: no home folder to keep compiled code in: name a folder in .XDG_CACHE"),
    ({"XDG_CACHE_HOME": "/dev/null"}, "cannot use /dev/null/ladder-fast: Not a directory"),
]


@pytest.mark.parametrize("environment, message", UNBUILT, ids=str)
def test_without_what_cannot_be_built_pytorchs_kernels_run_and_one_line_says_why(
    environment, message, unbuilt, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    monkeypatch.delenv("HOME", raising=False)
    for name, value in {"XDG_CACHE_HOME": str(tmp_path), **environment}.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):  # models
        net = generate.load_model(INT8, None, "bfloat16", ALONE)
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
    net = generate.load_model(config, None, "bfloat16", ALONE)
    kind = quant_linear.QuantLinear if quant else Linear
    linears = [m for m in net.modules() if type(m) is kind]
    assert all(m.layout is skinny_gemm.LAYOUT and m.packed.dtype.itemsize == 1 for m in linears if quant)
    with counted_kernels() as counts, torch.inference_mode():
        net(torch.tensor([[5]]), None, net.new_cache(1, 3))
    layers = "model.Attention.forward", "model.FeedForward.forward", "ladder.layers.norms.RMSNorm.forward"
    assert [counts[name] for name in layers] == [3, 3, 7]
    stop_using_kernels()
    net = generate.load_model(config, None, "float32", ALONE)
    said = capsys.readouterr().err
    assert said == "int4 in float32 has no kernels: bfloat16 is many times faster\n" * (quant == "int4")
    assert [function.__name__ for function in registry.used] == ["sample"] and type(net.output) is kind


def test_many_rows_are_multiplied_in_float32_where_nothing_else_is_fast(monkeypatch):
    """With no compiler and no oneDNN for bfloat16; rows with a bias, in pieces of the weights."""
    monkeypatch.setattr(loading, "is_built", lambda: False)
    monkeypatch.setattr(skinny_gemm, "HAS_ONEDNN_BF16", False)
    monkeypatch.setattr(stand_ins, "DEQUANTIZED_AT_ONCE", 700)
    config = change(BASE, qkv_bias=True, mlp_bias=True)
    net = model_in_bfloat16(config)
    rows = unequal_rows(config)
    plain = last_logits(net, *rows)
    loading.use_on_cpu(net)
    with counted_kernels() as counts:
        logits = last_logits(net, *rows)
    assert counts["model.Linear.forward"]
    for ours, other, exact in zip(logits, plain, reference_logits(config, 1), strict=True):
        assert (ours - exact).abs().mean() < 1.2 * (other - exact).abs().mean()


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
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *files, "-k", names]
    done = run_python(*words, env=os.environ | {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"})
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


def test_without_instructions_for_our_kernels_there_are_pytorchs(unbuilt, monkeypatch, capsys):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setattr(compilers, "ON_ARM", False)
    net = random_model(BASE).bfloat16()
    tokens, lengths = unequal_rows(BASE)
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
