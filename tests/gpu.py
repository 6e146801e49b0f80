"""What the tests for a GPU run on, see tests/test_gpu.py, and a tensor that pretends to be on one."""

import os
import subprocess
import time
from pathlib import Path

import pytest
import torch
from running import command, script

from model import Config

ON_CPU = os.environ.get("LADDER_TEST_GPU") == "cpu"
DEVICE = torch.device("cpu" if ON_CPU else "cuda")
NEEDS_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (ON_CPU or torch.cuda.is_available()), reason="needs a GPU, and LADDER_TEST_GPU=1"),
]
# shapes that all kernels take: K in multiples of 128, N of 8
CONFIG = Config(3, 8, 2, 16, 128, 256, 136, 64, bos_id=1, eos_ids=(2,))


def end_a_rank(number, *flags, **environment):
    """(What torchrun said, seconds until it ended) after a signal to the last of two ranks that decode."""
    flags = ["--checkpoint", "demo", *flags, "--prompt", "Once upon a time", "--max-new-tokens", "400"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, **environment}
    with subprocess.Popen(command("generate.py", *flags, ranks=2), env=environment, **pipes) as torchrun:
        assert len(torchrun.stdout.read(30)) == 30  # it decodes
        children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
        os.kill(int(children[-1]), number)
        start = time.monotonic()
        return torchrun.communicate(timeout=60)[1], time.monotonic() - start


def chat_of_two_turns(*flags, **environment):
    """Two ranks that chat, with a second message that is longer than the first."""
    lines = "Once upon a time\nthere was a longer line about a dog and a cat\n"
    words = "--checkpoint", "demo", "--chat", *flags, "--max-new-tokens", "4"
    done = script("generate.py", *words, ranks=2, stdin=lines, **environment)
    assert done.returncode == 0, done.stderr


class OnAGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True
