"""A GPU kernel that keeps a stream busy for as long as an emulated link would be."""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit(do_not_specialize=["n_bytes"])
def spin_kernel(costs, n_bytes):
    """Wait for costs[0] nanoseconds, and costs[1] more per byte. costs: (2,) float64, read at run time."""
    start = globaltimer()
    end = start + (tl.load(costs) + tl.load(costs + 1) * n_bytes).to(tl.int64)
    while globaltimer() < end:
        pass
