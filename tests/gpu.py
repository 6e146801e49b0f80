"""What the tests for a GPU run on, see tests/test_gpu.py, and a tensor that pretends to be on one."""

import os

import pytest
import torch

from model import Config

ON_CPU = os.environ.get("LADDER_TEST_GPU") == "cpu"
DEVICE = torch.device("cpu" if ON_CPU else "cuda")
NEEDS_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (ON_CPU or torch.cuda.is_available()), reason="needs a GPU, and LADDER_TEST_GPU=1"),
]
# shapes that all kernels take: K in multiples of 128, N of 8
CONFIG = Config(3, 8, 2, 16, 128, 256, 136, 64, bos_id=1, eos_ids=(2,))


class OnAGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True
