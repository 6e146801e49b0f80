"""The Triton kernels for int8, in Triton's interpreter on a CPU. tests/test_gpu.py runs them on a GPU."""

import runpy

import pytest
import torch
from helpers import ROOT

# PyTorch for CPUs comes without Triton; the interpreter of the one before, of torch 2.11, fails with numpy 2.4
pytest.importorskip("triton", minversion="3.7", reason="needs Triton 3.7")


# a part of a tile, whole tiles, some and a part; sums in 7 parts, some of them empty, and in one
# (many tiles, not for one row: the interpreter would take minutes)
@pytest.mark.parametrize("M, N, K", [
    *((M, *shape) for M in (1, 2, 3, 16) for shape in ((5, 33), (128, 256), (131, 1031))),
    *((M, 16389, 40) for M in (2, 3, 16)),
])  # fmt: skip
def test_few_rows_are_multiplied_by_the_integers(M, N, K, monkeypatch):
    """In unequal rows, with NaN behind the end of x and integers behind that of the matrix."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # which is read where a kernel is defined
    multiply = runpy.run_path(str(ROOT / "kernels" / "int8_rows.py"))["multiply"]
    g = torch.Generator().manual_seed(M)
    x = torch.full((M + 20, K), torch.nan)[:M]
    x.normal_(generator=g).mul_(torch.arange(1, M + 1)[:, None])
    weight = torch.randint(-127, 128, (N + 100, K), generator=g, dtype=torch.int8)[:N]
    scales = torch.rand(N, generator=g) + 0.5
    exact = x.double() @ weight.double().T * scales
    size = x.double().abs() @ weight.double().abs().T * scales  # of what is added up
    assert ((multiply(x[None], weight, scales)[0] - exact).abs() <= 2**-20 * size).all()
