"""What benchmarks share: times taken in turns, the memory's bandwidth, what a result depends on, and tables."""

import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from ladder.kernels import compilers
from ladder.kernels.huge_pages import empty_in_huge_pages
from ladder.memory import free_bytes

QUEUED = 8  # calls that a GPU is given at once
SETTINGS = "NCCL_", "TORCH_NCCL_", "GLOO_", "ENABLE_INTRA_NODE_COMM", "ATEN_", "ONEDNN_", "MKL_"  # of the environment


def timed(device, step):
    """Return the seconds that step() takes on the device; on a GPU the mean of QUEUED calls."""
    if torch.device(device).type != "cuda":
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    step()  # while it runs, the host queues the others: what it does for a call counts only where the GPU waits
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(QUEUED):
        step()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end) / QUEUED


def in_turns(ways, rounds):
    """Return {name: [results]} of {name: way}. Each round calls all once, so that other programs disturb all alike."""
    results = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            results[name].append(way())
    return results


def quartiles(values):
    """Return (lower quartile, median, upper quartile), none outside of the values; of a single one it, three times."""
    return tuple(statistics.quantiles(values, n=4, method="inclusive")) if len(values) > 1 else (values[0],) * 3


def read_bandwidth(device, world=None, size=2**30, repeats=9):
    """Return the bytes per second that this process reads from the device's memory: the median of some passes.

    A pass sums a tensor of `size` bytes, far more than the caches hold; less where memory is short, and on a GPU up to
    8 GiB. The ranks of the world, if given, measure at the same time: those of one machine share its memory.
    """
    free = free_bytes(device) // (world.tp_size if world and world.shares_gpu else 1)
    size = min(2**33, free // 4) if device.type == "cuda" else min(size, free // 32)
    tensor = empty_in_huge_pages((size // 4,), torch.float32, device).fill_(1)
    timed(device, tensor.sum)
    passes = repeats
    if world and not world.alone:
        world.gather(None)  # all have a tensor
        passes = 2 * repeats  # the second half keeps the memory busy while slower ranks measure
    seconds = [timed(device, tensor.sum) for _ in range(passes)]
    return size / statistics.median(seconds[:repeats])


def processor():
    """Return this machine's number of cores, and the name that its CPU gives itself."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    names = [line.partition(": ")[2] for line in text.splitlines() if line.startswith("model name")]
    amx = " with AMX" * (" amx_bf16" in text)
    return f"{len(names)} cores of {names[0]}{amx}" if names else platform.processor()


def environment(world):
    """Return what a result depends on besides its flags. settings: its variables of SETTINGS."""
    device = world.device
    return {
        "tp": world.tp_size, "shares": world.shares, "simulated": world.simulated, "device": device.type,
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "threads": torch.get_num_threads(), "load_average": os.getloadavg()[0],
        "instructions": compilers.instruction_set(),
        "torch": torch.__version__, "commit": git_commit(), "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith(SETTINGS)},
    }  # fmt: skip


def git_commit():
    """Return the commit of this code, with "+" if it was edited since, or None outside a git checkout."""
    here = {"cwd": Path(__file__).parents[1], "stderr": subprocess.DEVNULL, "text": True}
    try:
        code = "*.py", "*.cpp", "*.h", "*.sh"
        edited = subprocess.check_output(["git", "status", "--porcelain", "-uno", *code], **here)
        return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], **here).strip() + "+" * bool(edited)
    except (OSError, subprocess.CalledProcessError):
        return None


def markdown(head, rows):
    """Return a table; head: the cells of its first row, rows: a list of as many cells each."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


def pivot(head, lines, row, column, cell):
    """Return a Markdown table of results, a line of them in each cell.

    row(line): the first cells of its row, a tuple, under `head`. column(line): the head of its column.
    cell(line, {column: line} of its row): the text.
    """
    columns = list(dict.fromkeys(map(column, lines)))
    rows = {}
    for line in lines:
        rows.setdefault(row(line), {})[column(line)] = line
    cells = [[*first, *(cell(by[c], by) if c in by else "" for c in columns)] for first, by in rows.items()]
    return markdown([*head, *columns], cells)
