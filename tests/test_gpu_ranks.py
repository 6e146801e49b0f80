"""Several ranks on one GPU: tests/gpu_ranks.py compares them with one rank; here they also die, stop and chat.

LADDER_TEST_GPU=1 python -m pytest tests/test_gpu_ranks.py    # serially: they share the GPU
LADDER_TEST_GPU=cpu python -m pytest tests/test_gpu_ranks.py  # the same on a CPU, to try the tests
"""

import os
import signal

import pytest
import torch
from gpu import DEVICE, NEEDS_A_GPU, ON_CPU, chat_of_two_turns, end_a_rank
from gpu_ranks import beside
from running import script

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
    free = 0 if ON_CPU else torch.cuda.mem_get_info()[0]
    said, taken = end_a_rank(number, "--device", ON, **VISIBLE | {"LADDER_TIMEOUT": "5"})
    assert line in said and taken < seconds
    assert ON_CPU or torch.cuda.mem_get_info()[0] > free - 2**28


def test_a_chat_of_two_turns():
    chat_of_two_turns("--device", ON, **VISIBLE)


def test_what_runs_beside_a_sum():
    """By hand: b begins while the first sum runs, and c when it has ended."""
    kernels = [("a", 0, 2), ("ncclDevKernel_AllReduce", 2, 5), ("b", 4, 6), ("c", 5, 7), ("one_shot_all_reduce", 8, 9)]
    assert beside(kernels) == [1, 0]
