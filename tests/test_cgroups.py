"""ladder/cgroups.py: the limits of containers and batch systems, as Linux writes them in files."""

import math
import subprocess
import sys

import pytest
import torch
from cases import refused
from helpers import ROOT

from ladder import cgroups, memory

V1 = {
    "cpu": "30 23 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct",
    "memory": "31 23 0:30 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
}
V2 = "32 23 0:31 {root} /sys/fs/cgroup{folder} rw - cgroup2 cgroup2 rw,nsdelegate"
STAT_1 = "cache 5\ninactive_file 7\ntotal_inactive_file 30\ntotal_active_file 20\n"
STAT_2 = "anon 350\ninactive_file 30\nactive_file 20\nslab 0\n"
NO_LIMIT = {"memory.limit_in_bytes": 2**63 - 4096, "memory.usage_in_bytes": 400, "memory.stat": STAT_1}
LIMIT_1 = {"memory.limit_in_bytes": 1000, "memory.usage_in_bytes": 400, "memory.stat": STAT_1}
LIMIT_2 = {"memory.max": 1000, "memory.high": "max", "memory.current": 400, "memory.stat": STAT_2}
OPEN_2 = {"memory.max": "max", "memory.high": "max", "memory.current": 400, "memory.stat": STAT_2}
CPU_1 = {"cpu.cfs_quota_us": 150000, "cpu.cfs_period_us": 100000}
CASES = {  # name: /proc/self/cgroup, mounts, {folder: its files}, (free bytes, CPUs)
    "version 1, seen from the host": (
        "9:cpu,cpuacct:/job/step\n8:memory:/job/step\n1:name=systemd:/x\n0::/", [*V1.values()],
        {"cpu,cpuacct/job": CPU_1, "memory/job": LIMIT_1, "memory/job/step": NO_LIMIT, "memory": NO_LIMIT,
         "cpu,cpuacct/job/step": {"cpu.cfs_quota_us": -1, "cpu.cfs_period_us": 100000}}, (650, 1.5),
    ),
    "version 1, in a container that knows its path on the host": (
        "9:cpu,cpuacct:/docker/a\n8:memory:/docker/a/b\n", [line.format(root="/docker/a") for line in V1.values()],
        {"cpu,cpuacct": CPU_1, "memory": NO_LIMIT, "memory/b": LIMIT_1, "memory/docker/a": {}}, (650, 1.5),
    ),
    "version 2, with a limit above": (
        "0::/a.slice/b", [V2], {"a.slice": LIMIT_2, "a.slice/b": OPEN_2 | {"cpu.max": "50000 100000"}}, (650, 0.5),
    ),
    "version 2, in a container of its own": ("0::/", [V2], {"": LIMIT_2 | {"cpu.max": "max 100000"}}, (650, math.inf)),
    "version 2, of a container that sees another's path": (
        "0::/../other", [V2], {"": LIMIT_2 | {"cpu.max": "300000 100000"}}, (650, 3),
    ),
    "version 2, slowed above a limit, and that one exceeded": (
        "0::/a", [V2], {"a": LIMIT_2 | {"memory.high": 700}, "": LIMIT_2}, (350, math.inf),
    ),
    "more used than allowed": ("0::/", [V2], {"": LIMIT_2 | {"memory.max": 100}}, (0, math.inf)),
    "both versions": (
        "4:memory:/m\n0::/c", [V1["memory"], V2.replace("{folder}", "/unified")],
        {"memory/m": LIMIT_1, "unified/c": {"cpu.max": "200000 100000"}}, (650, 2),
    ),
    "no limits": ("0::/", [V2], {"": {}}, (math.inf, math.inf)),
    "no groups": ("", [], {}, (math.inf, math.inf)),
    "not Linux": (None, [], {}, (math.inf, math.inf)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_limits_of_each_kind_of_groups(name, tmp_path, monkeypatch):
    own, mounts, folders, expected = CASES[name]
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    (tmp_path / "proc/self").mkdir(parents=True)
    if own is not None:
        (tmp_path / "proc/self/cgroup").write_text(own)
    lines = ["22 1 8:1 / / rw - ext4 /dev/a rw", *(mount.format(root="/", folder="") for mount in mounts)]
    (tmp_path / "proc/self/mountinfo").write_text("\n".join(lines))
    for folder, files in folders.items():
        (path := tmp_path / "sys/fs/cgroup" / folder).mkdir(parents=True, exist_ok=True)
        for file, value in files.items():
            (path / file).write_text(f"{value}\n")
    assert (cgroups.free_bytes(), cgroups.cpus()) == expected
    free = memory.free_bytes(torch.device("cpu"))
    assert free == expected[0] or free > 2**20


@pytest.mark.parametrize("letter", ["v", "d"])
def test_a_process_s_own_limits_count(letter):
    source = "import torch; from ladder.memory import free_bytes; print(free_bytes(torch.device('cpu')))"
    words = ["sh", "-c", f'ulimit -{letter} 8000000 && exec "$@"', "sh", sys.executable, "-c", source]
    free = int(subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    used = 8e9 * 1.024 - free
    assert 0 < used < 8e9 and free <= memory.free_bytes(torch.device("cpu")) + 2**30


@pytest.mark.parametrize("cpus, local, variable, expected", [
    (math.inf, 1, None, 8), (16, 1, None, 8), (2.5, 1, None, 2), (0.5, 1, None, 1), (6, 3, None, 2), (2, 1, "8", 8),
])  # fmt: skip
def test_threads_are_no_more_than_cpus(cpus, local, variable, expected, monkeypatch):
    threads = [8]
    monkeypatch.setattr(cgroups, "cpus", lambda: cpus)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    monkeypatch.setenv("OMP_NUM_THREADS", variable) if variable else monkeypatch.delenv("OMP_NUM_THREADS", False)
    cgroups.limit_threads()
    assert threads[-1] == expected and (expected < 8) == (len(threads) > 1)
    monkeypatch.delenv("OMP_NUM_THREADS", False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "two")
    refused("^LOCAL_WORLD_SIZE='two' in the environment: a launcher gives whole numbers$", cgroups.limit_threads)
