"""Products of bfloat16 by few rows against float64: by how much a kernel may differ."""

import torch
import torch.nn.functional as F
from helpers import randn_bf16


def check_rounded(y, exact, slack):
    """Check that y differs from `exact` by a slack and the rounding to bfloat16: half a unit of its 8 bits."""
    assert y.shape == exact.shape and y.dtype == torch.bfloat16
    assert ((y.double() - exact).abs() <= 2**-8 * exact.abs() + slack).all()


def check_product(y, x, w):
    """Check that y is x @ w, whose sums in float32 add far less than the last rounding."""
    x = x.double()
    w = w.double()
    check_rounded(y, x @ w, 1e-6 * (x.abs() @ w.abs()))


def check_few_rows_of_integers(packed, bits, w, met, terms):
    """Check rows by packed integers that stand for w (N, K): float32 sums, and x as 16 bits of its block's largest.

    met: the sizes of the numbers that the rounded x is multiplied by; terms: of those that are summed.
    """
    N, K = w.shape
    for M in (1, 2, 3, 4, 5, 8, 17):
        x = randn_bf16(M, K)
        x[0, 0] = 100
        x[1:2] = 0
        x[2:3] = 1  # the largest integers of x, times those of W
        y = torch.ops.ladder.skinny_gemm_int(x, packed, N, K, bits)
        blocks = [(x[:, k : k + 128].double().abs(), met[:, k : k + 128]) for k in range(0, K, 128)]
        fixed = sum(b.amax(1, keepdim=True) @ v.sum(1, keepdim=True).T for b, v in blocks) * 2**-16
        check_rounded(y, x.double() @ w.T, 1e-6 * (x.double().abs() @ terms.T) + 1.01 * fixed)
    x = torch.ones(3, K).bfloat16()
    x[1, -1] = torch.nan
    y = torch.ops.ladder.skinny_gemm_int(x, packed, N, K, bits)
    assert not y[1].isfinite().any() and y[[0, 2]].isfinite().all()


def check_feed_forward(x, packed, bits, w1, w3, w2):
    """Check the three products in one; each is rounded to bfloat16."""
    y = torch.ops.ladder.feed_forward(x, *packed, *w1.shape, bits)
    exact = x.double()
    exact = (F.silu(exact @ w1.T) * (exact @ w3.T)) @ w2.T
    assert y.shape == x.shape and y.dtype == torch.bfloat16
    assert ((y.double() - exact).norm(dim=1) <= 0.01 * exact.norm(dim=1)).all(), len(x)
