"""A CPU: its instructions; huge pages for the weights, and freed memory that is kept for reuse."""

import contextlib
import ctypes
import mmap
import os
import platform
from pathlib import Path

import torch

HUGE = 2**21  # bytes of a huge page
ON_ARM = platform.machine() in ("aarch64", "arm64")


def features():
    """Return the names of this processor's features, of which -march=native makes use; none if this is not Linux."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split() for line in lines if line.startswith(("flags", "Features"))), [])


def instruction_set():
    """Return what extras/cpu compiles its kernels for, "avx512", "avx2" or "neon", or "plain": for none of them.

    $ATEN_CPU_CAPABILITY, PyTorch's own setting, chooses one.
    """
    if ON_ARM:
        return "neon" if "asimddp" in features() and os.environ.get("ATEN_CPU_CAPABILITY") != "default" else "plain"
    if not features():  # not Linux: other systems' compilers have OpenMP of another kind than PyTorch
        return "plain"
    return {"AVX512": "avx512", "AVX2": "avx2"}.get(torch.backends.cpu.get_cpu_capability(), "plain")


def empty(shape, dtype, device="cpu"):
    """Return an uninitialised tensor, on a CPU in huge pages if the system has them: address translation takes time.

    It begins at a huge page. What does not fill a huge page at its end lies in small pages.
    """
    size = dtype.itemsize * torch.Size(shape).numel()
    if torch.device(device).type != "cpu" or size < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    every = torch.frombuffer(memory, dtype=torch.uint8)
    start = -every.data_ptr() % HUGE
    with contextlib.suppress(OSError):  # a kernel built without them
        memory.madvise(mmap.MADV_HUGEPAGE, start, size // HUGE * HUGE)
    return every[start : start + size].view(dtype).view(shape)


def keep_freed_memory():
    """Let glibc reuse freed memory: otherwise a prefill spends its time on page faults."""
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, at its maximum
        mallopt(-1, 2**30)  # M_TRIM_THRESHOLD
