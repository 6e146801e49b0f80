"""The device of the tests for a GPU; see tests/test_gpu.py."""

import os

import torch

from model import Config


class OnAGpu(torch.Tensor):
    is_cuda = True


ON_CPU = os.environ.get("LADDER_TEST_GPU") == "cpu"
DEVICE = torch.device("cpu" if ON_CPU else "cuda")
# shapes that all kernels take: K in multiples of 128, N of 8
CONFIG = Config(3, 8, 2, 16, 128, 256, 136, 64, bos_id=1, eos_ids=(2,))
