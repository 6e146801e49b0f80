"""Several ranks on one GPU: tests/gpu_ranks.py compares them with one rank; here they also die, stop and chat.

LADDER_TEST_GPU=1 python -m pytest tests/test_gpu_ranks.py    # serially: they share the GPU
LADDER_TEST_GPU=cpu python -m pytest tests/test_gpu_ranks.py  # the same on a CPU, to try the tests
"""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from gpu import DEVICE, NEEDS_A_GPU, ON_CPU
from gpu_ranks import beside
from running import command, script

from ladder.ranks.shared_gpu import SHARING_NCCL, nccl_version

pytestmark = NEEDS_A_GPU
ON = f"{DEVICE.type}:0" if DEVICE.type == "cuda" else "cpu"
VISIBLE = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0"), "LADDER_TIMEOUT": "30"}


@pytest.mark.parametrize("comm, ranks, seconds", [
    ("library", 2, 60), ("one-shot", 2, 25), ("gloo", 2, 15), ("library", 3, 20),
])  # fmt: skip
def test_ranks_that_share_a_gpu_compute_what_one_does(comm, ranks, seconds, capfd):
    """One line for each case. one-shot's own test, of sums pushed and pulled, runs before its cases."""
    if comm == "one-shot" and ON_CPU:
        pytest.skip("needs a GPU")
    if comm == "library" and not ON_CPU and nccl_version() < SHARING_NCCL:
        pytest.skip(f"NCCL {nccl_version()} refuses ranks that share a GPU: {SHARING_NCCL} or newer does not")
    done = script("tests/gpu_ranks.py", "--device", ON, "--comm", comm, "--seconds", seconds, ranks=ranks, **VISIBLE)
    with capfd.disabled():
        print("", *(line for line in done.stderr.splitlines() if " ranks" in line), sep="\n")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number, line, seconds", [
    (signal.SIGKILL, "rank 1 of 2 has died in decode step", 5), (signal.SIGSTOP, "hangs in decode step", 20),
])  # fmt: skip
def test_a_rank_that_dies_or_stops_in_a_replay_ends_the_other(number, line, seconds):
    """And their memory is free again. A rank that is stopped gives no sign of life for LADDER_TIMEOUT."""
    flags = ["--checkpoint", "demo", "--device", ON, "--prompt", "Once upon a time"]
    free = 0 if ON_CPU else torch.cuda.mem_get_info()[0]
    environment = {**os.environ, **VISIBLE, "LADDER_TIMEOUT": "5"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    run = command("generate.py", *flags, "--max-new-tokens", "400", ranks=2)
    with subprocess.Popen(run, env=environment, **pipes) as torchrun:
        assert len(torchrun.stdout.read(30)) == 30  # it decodes
        children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
        os.kill(int(children[-1]), number)
        start = time.monotonic()
        assert line in torchrun.communicate(timeout=60)[1]
    assert time.monotonic() - start < seconds
    assert ON_CPU or torch.cuda.mem_get_info()[0] > free - 2**28


def test_a_chat_of_two_turns():
    flags = ["--checkpoint", "demo", "--chat", "--device", ON, "--max-new-tokens", "4"]
    lines = "Once upon a time\nthere was a longer line about a dog and a cat\n"
    done = script("generate.py", *flags, ranks=2, stdin=lines, **VISIBLE)
    assert done.returncode == 0, done.stderr


def test_what_runs_beside_a_sum():
    """By hand: b begins while the first sum runs, and c when it has ended."""
    kernels = [("a", 0, 2), ("ncclDevKernel_AllReduce", 2, 5), ("b", 4, 6), ("c", 5, 7), ("one_shot_all_reduce", 8, 9)]
    assert beside(kernels) == [1, 0]
