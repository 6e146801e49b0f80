"""A Triton kernel for GPUs: few rows times a matrix of int8, whose bytes are read once and become floats on the chip.

To be imported only where it is called: PyTorch for CPUs comes without Triton.

Shape letters: M rows of x, N rows and K columns of W, S parts of the sum over K.
"""

import torch
import triton
import triton.language as tl

# To read 5 TB/s at a latency of 1 us takes 5 MB under way: 38 KB on each of an H200's 132 multiprocessors. A tile of W
# is 8 KB and a program has STAGES - 1 of them under way, 32 KB; PROGRAMS are two for each multiprocessor. At 16 rows
# the tile of x, out of the L2 cache, is half as large as W's: with fewer rows of W in a tile it would cost as much.
BLOCK_M, BLOCK_N, BLOCK_K, STAGES, PROGRAMS = 16, 64, 128, 5, 256


@triton.jit
def _partial_sums(x, w, parts, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                  STAGES: tl.constexpr):  # fmt: skip
    """Set parts (S, M, N): each the sum of x (M, K) W^T (K, N) over every S-th block of columns."""
    s, S = tl.program_id(1), tl.num_programs(1)
    m = tl.arange(0, BLOCK_M)[:, None]
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)  # an output head may have 2**31 numbers
    total = tl.full((BLOCK_M, BLOCK_N), 0, tl.float32)  # tl.zeros is a kernel, which the interpreter refuses
    for start in tl.range(s * BLOCK_K, K, S * BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(x + m * K + k, (m < M) & (k < K), other=0)
        b = tl.load(w + n * K + k[:, None], (n < N) & (k[:, None] < K), other=0)
        total = tl.dot(a, b.to(a.dtype), total)
    tl.store(parts + (s * M + m) * N + n, total, (m < M) & (n < N))


def multiply(x, weight, scales):
    """Return (x W^T) * scales (..., N) for x (..., K) of at most 16 rows, weight (N, K) int8 and scales (N,).

    The parts of the sum are added outside: there the compiler makes it one with what comes next.
    """
    (N, K), M = weight.shape, x.numel() // x.shape[-1]
    tiles = -(-N // BLOCK_N)
    S = min(7, -(-PROGRAMS // tiles))  # sums of 8 and more are kernels of their own to the compiler
    parts = x.new_empty((S, M, N), dtype=torch.float32)
    blocks = BLOCK_M, BLOCK_N, BLOCK_K, STAGES
    _partial_sums[(tiles, S)](x.reshape(M, K).contiguous(), weight, parts, M, N, K, *blocks)
    return (parts.sum(0) * scales).to(x.dtype).view(*x.shape[:-1], N)
