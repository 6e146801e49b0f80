"""What a CPU needs to be fast: huge pages for the weights, and freed memory kept."""

import contextlib
import ctypes
import mmap

import torch

HUGE = 2**21  # bytes of a huge page


def empty(shape, dtype, device="cpu"):
    """Return an uninitialised tensor, on a CPU in huge pages if the system has them: small ones take time to translate.

    It begins where a huge page does. A rest at its end that does not fill one lies in small pages.
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
    """Let glibc keep what is freed for the next tensor: a prefill would spend its time on pages new from the system."""
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, the most that it takes
        mallopt(-1, 2**30)  # M_TRIM_THRESHOLD
