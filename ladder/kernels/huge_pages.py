"""Memory in huge pages, from which a CPU reads weights faster."""

import contextlib
import mmap

import torch

HUGE_PAGE = 2**21  # bytes of a huge page


def empty_in_huge_pages(shape, dtype, device="cpu"):
    """Return an uninitialised tensor, on a CPU in huge pages if the system has them: they save address translation.

    It begins at the start of a huge page. The rest at its end, which does not fill a huge page, lies in small pages.
    """
    size = dtype.itemsize * torch.Size(shape).numel()
    if torch.device(device).type != "cpu" or size < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    start = -buffer.data_ptr() % HUGE_PAGE
    with contextlib.suppress(OSError):  # the system's kernel was built without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE, start, size // HUGE_PAGE * HUGE_PAGE)
    return buffer[start : start + size].view(dtype).view(shape)
