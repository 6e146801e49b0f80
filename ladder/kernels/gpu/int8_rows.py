"""Triton kernels for GPUs that multiply few rows by an int8 matrix, which they read once, as bytes.

Import this module only where it is called, since PyTorch for CPUs comes without Triton.

Shape letters: M rows of x, N rows and K columns of W, S splits of the sum over K.
"""

import torch
import triton
import triton.language as tl

# One row: a program adds ROW_N x ROW_K products at a time, in registers. Of eight sizes this was the fastest one for
# the 8b's matrices on an H100, or within 2 % of it.
ROW_N = 8
ROW_K = 512
ROW_STAGES = 4
# More rows: reading 5 TB/s with a latency of 1 us takes 5 MB in flight, 38 KB per multiprocessor of an H200. A tile of
# W is 8 KB and a program has STAGES - 1 of them in flight, 32 KB; PROGRAMS are about two per multiprocessor. At 16 rows
# the tile of x, read from the L2 cache, is half as large as that of W, so tiles should not have fewer rows of W.
BLOCK_M = 16
BLOCK_N = 64
BLOCK_K = 128
STAGES = 5
PROGRAMS = 256


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _one_row(x, w, scales, y, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr):
    """Write y (N,) = (W x) * scales."""
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)  # an output head may have 2**31 elements
    total = tl.full((BLOCK_N, BLOCK_K), 0, tl.float32)  # tl.zeros, tl.sum are kernels, which the interpreter cannot run
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(x + k, k < K, other=0).to(tl.float32)
        b = tl.load(w + n[:, None] * K + k, (n < N)[:, None] & (k < K), other=0)
        total += b.to(tl.float32) * a
    result = tl.reduce(total, 1, _add) * tl.load(scales + n, n < N, other=0)
    tl.store(y + n, result.to(y.dtype.element_ty), n < N)


@triton.jit
def _partial_sums(x, w, splits, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                  STAGES: tl.constexpr):  # fmt: skip
    """Write splits (S, M, N): each is the sum of x (M, K) W^T (K, N) over every S-th block of columns."""
    s = tl.program_id(1)
    S = tl.num_programs(1)
    m = tl.arange(0, BLOCK_M)[:, None]
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    total = tl.full((BLOCK_M, BLOCK_N), 0, tl.float32)
    for start in tl.range(s * BLOCK_K, K, S * BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(x + m * K + k, (m < M) & (k < K), other=0)
        b = tl.load(w + n * K + k[:, None], (n < N) & (k[:, None] < K), other=0)
        total = tl.dot(a, b.to(a.dtype), total)
    tl.store(splits + (s * M + m) * N + n, total, (m < M) & (n < N))


def multiply(x, weight, scales):
    """Return (x W^T) * scales (..., N) for x (..., K) of at most 16 rows, weight (N, K) int8 and scales (N,).

    The splits are added outside of the kernel, where the compiler fuses the addition with what comes next.
    """
    N, K = weight.shape
    M = x.numel() // x.shape[-1]
    if M == 1:
        y = x.new_empty(*x.shape[:-1], N)
        _one_row[(triton.cdiv(N, ROW_N),)](x.contiguous(), weight, scales, y, N, K, ROW_N, ROW_K, ROW_STAGES)
        return y
    tiles = -(-N // BLOCK_N)
    S = min(7, -(-PROGRAMS // tiles))  # sums of 8 or more would be separate kernels to the compiler
    splits = x.new_empty((S, M, N), dtype=torch.float32)
    blocks = BLOCK_M, BLOCK_N, BLOCK_K, STAGES
    _partial_sums[(tiles, S)](x.reshape(M, K).contiguous(), weight, splits, M, N, K, *blocks)
    return (splits.sum(0) * scales).to(x.dtype).view(*x.shape[:-1], N)
