"""Integers of 8 bits in groups of columns: in how few bits they are packed, and their products on a CPU."""

import dataclasses

import pytest
import torch
from cases import refused
from configs import BASE
from helpers import ALONE, randn_bf16, seeded
from products import check_feed_forward, check_few_rows_of_integers, check_rounded
from quantized_models import in_float64

import generate
from ladder import config_check
from ladder.kernels import quant_linear
from ladder.kernels.cpu import skinny_gemm
from model import build

RANGES = {  # (lowest, highest integer): (bits, whether they are signed)
    (0, 15): (4, False), (-8, 7): (4, True), (0, 31): (5, False), (-16, 15): (5, True), (0, 16): (5, False),
    (-1, 8): (5, True), (-9, 0): (5, True), (-32, 31): (6, True), (0, 63): (6, False), (0, 64): (8, False),
    (-33, 0): (8, True), (-128, 127): (8, True), (0, 0): (4, False),
}  # fmt: skip
SHAPES = (1, 32, 32), (33, 96, 16), (67, 40, 8), (50, 2048, 64), (18, 4096, 128)  # N, K, columns of a group


def in_groups(N, K, size, bounds=(-128, 127), has_zeros=True, dtype=torch.float16, seed=0):
    """Integers with these bounds, both of which occur, scales and zeros."""
    draw = seeded(seed)
    q = torch.randint(bounds[0], bounds[1] + 1, (N, K), generator=draw)
    q[0, :2] = torch.tensor(bounds)
    scales = torch.randn(N, K // size, generator=draw) / 100
    zeros = torch.randn(N, K // size, generator=draw) * has_zeros
    return q.to(torch.int8), scales.to(dtype), zeros.to(dtype)


def make_linear(N, K, size, **how):
    linear = quant_linear.QuantLinear((N, K), "int8", size)
    for name, tensor in zip(quant_linear.STORED, in_groups(N, K, size, **how), strict=True):
        setattr(linear, name, torch.nn.Parameter(tensor, requires_grad=False))
    return linear


def packed(*matrix):
    """What skinny_gemm.cpp takes: the packed integers and its `bits`."""
    form = skinny_gemm.form_of(*matrix)
    return skinny_gemm.pack(*matrix, form=form), form.code


@pytest.mark.parametrize("bounds", RANGES, ids=str)
def test_numbers_are_packed_in_as_few_bits_as_they_need_and_come_back(bounds, monkeypatch):
    monkeypatch.setattr(skinny_gemm, "PANELS_AT_ONCE", 2)
    for N, K, size in SHAPES:
        for has_zeros, dtype in (True, torch.bfloat16), (False, torch.float16):
            matrix = in_groups(N, K, size, bounds, has_zeros, dtype)
            form = skinny_gemm.form_of(*matrix)
            assert form == (*RANGES[bounds][:1], size, has_zeros, RANGES[bounds][1])
            linear = quant_linear.QuantLinear((N, K), "int8", size)
            linear.pack(skinny_gemm.layout_of(form), packed=skinny_gemm.pack(*matrix, form=form))
            per_group = 2 * 16 * (1 + has_zeros) * 32 // min(size, 32)
            assert linear.packed.nbytes == -(-N // 16) * -(-K // 32) * (per_group + 64 * form.bits)
            for stored, tensor in zip(linear.stored(), matrix, strict=True):
                assert stored.dtype == tensor.dtype and torch.equal(stored, tensor)


THREADS = pytest.mark.parametrize("threads", [1, 2], indirect=True)
BOUNDS = pytest.mark.parametrize("bounds", [(0, 15), (-16, 15), (0, 31), (-32, 31), (-128, 127)], ids=str)


@THREADS
@BOUNDS
def test_few_rows_are_exact_up_to_rounding(bounds, threads):
    skinny_gemm.build()
    for N, K, size in SHAPES:
        for has_zeros, dtype in (True, torch.bfloat16), (False, torch.float16):
            matrix = in_groups(N, K, size, bounds, has_zeros, dtype)
            w = in_float64(*matrix)
            terms = in_float64(matrix[0].abs() + 256, *(tensor.abs() for tensor in matrix[1:]))
            check_few_rows_of_integers(*packed(*matrix), w, w.abs(), terms)


@THREADS
@BOUNDS
def test_for_many_rows_they_become_the_same_floats(bounds, threads):
    skinny_gemm.build()
    for N, K, size in (*SHAPES, (300, 2048, 16)):
        for has_zeros, dtype in (True, torch.float16), (False, torch.bfloat16):
            matrix = in_groups(N, K, size, bounds, has_zeros, dtype)
            exact = in_float64(*matrix)
            weight, bits = packed(*matrix)
            with torch.inference_mode():
                w = torch.ops.ladder.many_rows_int(torch.eye(K).bfloat16(), weight, N, K, bits).T
            check_rounded(w, exact, 1e-6)


KINDS = {  # w1, w3, w2 of a feed-forward: columns of a group and bounds, "int4" or "bfloat16"
    "Q4_K_M": ("int4", "int4", (16, (-32, 31))), "alike": ((32, (0, 31)), (32, (-16, 15)), (32, (-128, 127))),
    "other groups": ((32, (0, 31)), (16, (-16, 15)), "int4"), "some floats": ((32, (0, 31)), "bfloat16", (16, (0, 7))),
    "int4 of other sums": ("int4", (32, (0, 31)), "bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_a_feed_forward_of_several_forms_is_its_three_products(name):
    skinny_gemm.build()
    N = 96
    K = 160
    arguments = []
    matrices = []
    bits = []
    for seed, (kind, rows, columns) in enumerate(zip(KINDS[name], (N, N, K), (K, K, N), strict=True)):
        if kind == "bfloat16":
            w = randn_bf16(rows, columns)
            form = 16
            exact = w.double()
        elif kind == "int4":
            q, scales, zeros = in_groups(rows, columns, 32, (0, 15), seed=seed)
            exact = in_float64(q, scales, zeros)
            w = skinny_gemm.pack(q[:, ::2].byte() | q[:, 1::2].byte() << 4, scales, zeros)
            form = 4
        else:
            matrix = in_groups(rows, columns, *kind, seed=seed)
            exact = in_float64(*matrix)
            w, form = packed(*matrix)
        arguments.append(w)
        matrices.append(exact)
        bits.append(form)
    for M in (1, 3, 17):
        check_feed_forward(x := randn_bf16(M, K), arguments, bits, *matrices)
    torch.library.opcheck(torch.ops.ladder.feed_forward.default, (x, *arguments, N, K, bits))


FITTING, CODE = packed(*in_groups(16, 64, 32))
MISFITS = [
    (FITTING, 17, 64, CODE), (FITTING, 16, 96, CODE), (FITTING[..., :1, :], 16, 64, CODE),
    (FITTING.int(), 16, 64, CODE),
    (FITTING, 16, 64, CODE ^ 1 << 4), (FITTING, 16, 64, CODE + 256), (FITTING, 16, 64, CODE - 2),
    (FITTING, 16, 64, CODE - 5), (FITTING, 16, 64, 8), (FITTING.view(1, 1, -1, 32), 16, 64, CODE),
]  # fmt: skip


@pytest.mark.parametrize("weight, N, K, bits", MISFITS)
def test_what_does_not_fit_is_refused(weight, N, K, bits):
    skinny_gemm.build()
    with pytest.raises(RuntimeError, match="what skinny_gemm.pack returns"):
        torch.ops.ladder.skinny_gemm_int(torch.zeros(3, K).bfloat16(), weight, N, K, bits)


INT4 = dataclasses.replace(BASE, head_dim=16, dim=64, intermediate_size=96, quant="int4", group_size=32)
REFUSED = [
    ({"int8": ("w2:8",)}, "int8 lists 'w2:8', but groups have 16, 32, 64, 128 columns"),
    ({"int8": ("w2:",)}, "int8 lists 'w2:', but groups have 16"),
    ({"int8": ("w2:16:16",)}, "int8 lists 'w2:16:16', but groups"),
    ({"int8": ("w4:16",)}, "cannot give 'w4' 8 bits; known: "),
    ({"int8": ("layers.0.w4:16",)}, "cannot give 'w4' 8 bits; known: "),
    ({"int8": ("w2:128",)}, "int8 lists w2:128, but its columns are 96, no multiple of 128"),
    ({"int8": ("w2:16",), "not_quantized": ("w2",)}, "w2 is in int8 and in not_quantized, too"),
    ({"quant": "fp8", "group_size": None, "int8": ("w2:16",)}, "whose quant is int4 or int8"),
    ({"quant": "fp8"}, "a group size is for int4 and int8"),
    ({"quant": "int8", "group_size": 24}, "group size 24 is none of 16, 32, 64, 128"),
    ({"quant": "int8", "group_size": 128}, "group size 128 does not divide the columns of tok_embeddings .64."),
    ({"group_size": 16}, "group size 16 is none of 32, 64, 128"),
    ({"int8": ("layers.9.feed_forward.w2:16",)}, "int8 lists layers.9.feed_forward.w2, which is no matrix of this"),
    ({"int8": ("layers.0.attention.w2:16",)}, "int8 lists layers.0.attention.w2, which is no matrix of this"),
]  # fmt: skip


@pytest.mark.parametrize("changes, message", REFUSED)
def test_lists_that_make_no_model_are_refused(changes, message):
    refused(message, lambda: build(dataclasses.replace(INT4, **changes)))


def test_a_path_takes_precedence_over_a_kind_and_that_over_quant():
    net = build(dataclasses.replace(INT4, n_layers=2, int8=("w2", "layers.1.feed_forward.w2:16")))
    w2 = [block.feed_forward.w2 for block in net.layers]
    assert [m.scales.shape[-1] for m in w2] == [1, 6] and net.layers[0].feed_forward.w1.scales.shape[-1] == 2
    assert {m.weight.dtype for m in w2} == {torch.int8} and w2[0].zeros is None and w2[1].zeros is not None
    assert config_check.GROUPS_OF_8_BITS[0] == 16


def test_a_shard_whose_groups_are_too_small_for_the_kernel_computes_the_same():
    """Groups of 4 columns, as a cut of heads of 20 columns would make."""
    linear = make_linear(24, 40, 4)
    skinny_gemm.pack_all([linear])
    x = randn_bf16(3, 40)
    exact = x.double() @ in_float64(*linear.stored()).T
    assert linear.layout is None and (linear(x).double() - exact).norm() < 0.01 * exact.norm()


def test_pytorchs_kernel_for_a_scale_per_row_stands_back():
    linear = make_linear(24, 64, 32, dtype=torch.bfloat16)
    assert quant_linear.multiply_int8(linear, randn_bf16(3, 64)) is None
    rows = quant_linear.QuantLinear((24, 64), "int8", None)
    rows.load_state_dict({"weight": linear.weight, "scales": linear.scales[:, :1]})
    assert quant_linear.multiply_int8(rows, randn_bf16(3, 64)) is not None


@pytest.mark.parametrize("quant, group_size", [("int8", 32), ("fp8", None)])
def test_random_weights_of_a_size_have_the_deviation_of_its_floats(quant, group_size):
    config = dataclasses.replace(INT4, quant=quant, group_size=group_size)
    net = generate.load_model(config, None, "float32", ALONE)
    assert net.layers[0].feed_forward.w1.rows(slice(None)).float().std() == pytest.approx(0.02, rel=0.05)
