"""What a container or a batch system allows this process: the limits of Linux's control groups, of versions 1 and 2."""

import contextlib
import math
import os
import re
from pathlib import Path

import torch

from ladder.ranks.world import local_rank_and_size, rank_and_size

ROOT = Path("/")


def _folders(controller):
    """Yield the folders of this process's groups of a controller and of the groups above, as far as it can see them.

    A container may see its own group as the root, or under a path that names folders of the host.
    """
    try:
        own = [line.split(":", 2) for line in (ROOT / "proc/self/cgroup").read_text().splitlines()]
        mounts = [line.partition(" - ") for line in (ROOT / "proc/self/mountinfo").read_text().splitlines()]
    except (OSError, ValueError):  # not Linux
        return
    for before, _, after in mounts:
        root, mount = before.split()[3:5]
        kind, *_, options = after.split()
        for _, names, path in own:
            version_1 = kind == "cgroup" and controller in names.split(",") and controller in options.split(",")
            if version_1 or (kind == "cgroup2" and not names):
                top = ROOT / mount.lstrip("/")
                below = os.path.relpath(path, root)
                folder = top if below.startswith("..") else top / below
                yield from (each for each in (folder, *folder.parents) if each.is_relative_to(top))


def _read_limits(folder, name):
    """Return the numbers in a file of a group; "max" is infinite. Raises OSError if there is no such file."""
    return [math.inf if word == "max" else int(word) for word in (folder / name).read_text().split()]


def free_bytes():
    """Return how many bytes this process's groups may still take, or infinity. Cached files are given up for others."""
    free = math.inf
    for folder in _folders("memory"):
        for limit, usage in ("max", "current"), ("high", "current"), ("limit_in_bytes", "usage_in_bytes"):
            with contextlib.suppress(OSError, ValueError):
                [limit] = _read_limits(folder, f"memory.{limit}")
                [used] = _read_limits(folder, f"memory.{usage}")
                stat = dict(re.findall(r"(\w+) (\d+)", (folder / "memory.stat").read_text()))
                cached = (stat.get(f"total_{name}", stat.get(name, 0)) for name in ("inactive_file", "active_file"))
                free = min(free, max(0, limit - used + sum(map(int, cached))))
    return free


def cpus():
    """Return how many CPUs' time this process's groups may take, such as 1.5, or infinity."""
    result = math.inf
    for folder in _folders("cpu"):
        with contextlib.suppress(OSError, ValueError):
            quota, period = _read_limits(folder, "cpu.max")
            result = min(result, quota / period)
        with contextlib.suppress(OSError, ValueError):
            [quota] = _read_limits(folder, "cpu.cfs_quota_us")
            [period] = _read_limits(folder, "cpu.cfs_period_us")
            result = min(result, quota / period if quota > 0 else math.inf)  # -1: no limit
    return result


def limit_threads():
    """Let PyTorch use no more threads than CPUs, since the system stops a group that has used up its share of time.

    The ranks of a machine share them. OMP_NUM_THREADS, which torchrun sets too, has precedence. Raises InputError.
    """
    if not os.environ.get("OMP_NUM_THREADS"):
        share = cpus() / local_rank_and_size(*rank_and_size())[1]
        if share < torch.get_num_threads():
            torch.set_num_threads(max(1, int(share)))
