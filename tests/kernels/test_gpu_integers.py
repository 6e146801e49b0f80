"""The kernels for integers on a GPU, on a CPU: Triton's in its interpreter. tests/test_gpu.py runs them on a GPU."""

import runpy
import types

import pytest
import torch
from helpers import ROOT, counted_kernels, seeded

import generate
from ladder.checkpoints import checkpoint, random_weights
from ladder.kernels import quant_kernels, quant_linear, registry
from ladder.kernels.gpu.integers import INT4_FLOAT_ROWS, pack_int4, unpacked
from ladder.ranks.world import World
from ladder.sources.sizes import named_size


# a part of a tile, whole tiles, some and a part; sums in 7 parts, some of them empty, and in one
# (many tiles, not for one row: the interpreter would take minutes)
@pytest.mark.parametrize("M, N, K", [
    *((M, *shape) for M in (1, 2, 3, 16) for shape in ((5, 33), (128, 256), (131, 1031))),
    *((M, 16389, 40) for M in (2, 3, 16)),
])  # fmt: skip
def test_few_rows_are_multiplied_by_the_integers(M, N, K, monkeypatch):
    """In unequal rows, with NaN behind the end of x and integers behind that of the matrix."""
    # PyTorch for CPUs comes without Triton; the interpreter of the one before, of torch 2.11, fails with numpy 2.4
    pytest.importorskip("triton", minversion="3.7", reason="needs Triton 3.7")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # which is read where a kernel is defined
    multiply = runpy.run_path(str(ROOT / "ladder" / "kernels" / "gpu" / "int8_rows.py"))["multiply"]
    g = seeded(M)
    x = torch.full((M + 20, K), torch.nan)[:M]
    x.normal_(generator=g).mul_(torch.arange(1, M + 1)[:, None])
    weight = torch.randint(-127, 128, (N + 100, K), generator=g, dtype=torch.int8)[:N]
    scales = torch.rand(N, generator=g) + 0.5
    exact = x.double() @ weight.double().T * scales
    size = x.double().abs() @ weight.double().abs().T * scales  # of what is added up
    assert ((multiply(x[None], weight, scales)[0] - exact).abs() <= 2**-20 * size).all()


@pytest.mark.parametrize("N, K, size, bias", [(64, 256, 64, True), (8, 128, 32, False), (40, 512, 128, True)])
def test_int4_in_the_layout_of_a_kernel_is_what_was_stored(N, K, size, bias, monkeypatch):
    """Whatever a layout does with the elements of a tile; few rows go to the kernel, many are multiplied by floats."""
    g = seeded(N)
    order = torch.randperm(8 * 128, generator=g)

    def pack(weight, inner_tiles):
        assert inner_tiles == 8
        q = torch.stack((weight >> 4, weight & 15), dim=-1).flatten(1)  # the even column in the upper half
        q = q.view(len(q) // 8, 8, -1, 128).transpose(1, 2).flatten(2)[..., order]
        return (q[..., ::2] | q[..., 1::2] << 4).view(torch.int32).unflatten(-1, (32, 4))

    def multiply(x, packed, group_size, pairs):
        assert len(x) < INT4_FLOAT_ROWS
        b = packed.flatten(2).view(torch.uint8)
        q = torch.stack((b & 15, b >> 4), -1).flatten(2)[..., order.argsort()]
        q = q.unflatten(-1, (8, 128)).transpose(1, 2).reshape(N, -1, group_size).to(x.dtype)
        scale, middle = pairs.transpose(0, 1).split(1, dim=-1)
        return x @ ((q - 8) * scale + middle).flatten(1).T

    monkeypatch.setattr(torch, "_convert_weight_to_int4pack", pack)
    monkeypatch.setattr(torch, "_weight_int4pack_mm", multiply)
    linear = quant_linear.QuantLinear((N, K), "int4", size, bias)
    linear.weight.copy_(torch.randint(0, 256, (N, K // 2), generator=g, dtype=torch.uint8))
    for tensor in filter(lambda t: t is not None, (linear.scales, linear.zeros, linear.bias)):
        tensor.copy_(torch.rand(tensor.shape, generator=g) + 0.5)
    if bias:
        linear.bias = torch.nn.Parameter(64 * linear.bias.bfloat16(), requires_grad=False)
    exact = quant_linear.dequantize(linear.weight, linear.scales.double(), linear.zeros.double())
    # scales, and the middle of a group, are rounded to bfloat16
    rounded = (linear.zeros.abs() + 16 * linear.scales).double().repeat_interleave(size, dim=1)
    stored = linear.weight.clone()
    pack_int4([linear])
    registry.use([quant_kernels.PACKED])
    assert ((unpacked(linear) - exact).abs() <= 2**-8 * (rounded + exact.abs())).all()
    x = torch.randn(2, INT4_FLOAT_ROWS // 2, K, generator=g).bfloat16()
    for part in x, x[:, :-1]:
        result = part.double() @ unpacked(linear).double().T + (linear.bias if bias else 0)
        with counted_kernels() as counts:
            assert ((linear(part) - result).abs() <= 2**-7 * (part.double().abs() @ exact.abs().T + 96)).all()
        assert counts.total() == 1
    assert torch.equal(linear.stored()[0], stored)


def test_integers_of_8_bits_are_read_as_stored():
    linear = quant_linear.QuantLinear((8, 128), "int8", 64)
    pack_int4([linear])
    assert linear.layout is None


@pytest.mark.parametrize("quant, device, dtype, used", [
    ("int4", "cuda", "bfloat16", True), ("int8", "cuda", "bfloat16", True), ("int8", "cuda", "float16", False),
    ("", "cuda", "bfloat16", False),
])  # fmt: skip
def test_a_model_is_loaded_with_the_kernels_of_its_device(quant, device, dtype, used, monkeypatch):
    config = named_size(f"1b:1:{quant}" if quant else "1b:1")
    calls = []
    linear = quant_linear.QuantLinear((8, 128), quant, 64)
    loaded = types.SimpleNamespace(config=config, dtype=checkpoint.DTYPES[dtype], modules=lambda: [loaded, linear])
    monkeypatch.setattr(random_weights, "RandomWeights", lambda *_: None)
    monkeypatch.setattr(generate, "load_shard", lambda *_: loaded)
    for key in quant_kernels.PACKERS:
        monkeypatch.setitem(quant_kernels.PACKERS, key, lambda linears, key=key: calls.append((key, linears)))
    assert generate.load_model(config, None, dtype, World(0, 1, torch.device(device))) is loaded
    assert calls == [(device, [linear])] * used
    names = [ready.kernel.function.__name__ for function in registry.used for ready in function.kernels]
    assert names == [*["multiply_packed", "multiply_int8", "multiply_fp8"] * used, "sample"]
