import contextlib
import dataclasses
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

if not os.environ.get("LADDER_TEST_GPU"):  # but for test_gpu.py the tests are of the CPU path
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Inductor's pool of compiling processes takes longer to start than such small kernels take to compile.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Where transformers copies the code that comes with a folder, and imports it from; it looks once, when it is imported.
os.environ["HF_MODULES_CACHE"] = os.path.join(tempfile.gettempdir(), f"ladder-fast-tests-{os.getpid()}")

import pytest

if "helpers" not in sys.modules:  # asserts of what tests share show their values, too
    pytest.register_assert_rewrite(*(path.stem for path in Path(__file__).parent.glob("*.py")))

import torch
import torch.distributed as dist
from configs import BASE
from helpers import stop_using_kernels, train_tokenizer, write_model
from running import stop_ranks

from ladder.errors import InputError
from ladder.kernels import registry
from ladder.kernels.cpu import skinny_gemm
from ladder.ranks import shared_memory
from ladder.ranks.world import World


@pytest.fixture
def fake_world():
    """A function from (rank, tp_size) to a World in this process alone; its collectives do nothing."""

    def make(rank, tp_size):
        if dist.is_initialized():
            dist.destroy_process_group()
        try:
            dist.init_process_group("fake", rank=rank, world_size=tp_size)
        except (RuntimeError, ValueError):  # torch before 2.13 registers the backend on import, and wants a store
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", rank=rank, world_size=tp_size, store=FakeStore())
        return World(rank, tp_size, torch.device("cpu"), dist.group.WORLD)

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(params=[1, 3])
def threads(request):
    """That many threads for the operators of this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _signals():
    """A script that a test runs in this process may end, and leave it deaf, with all processes that it then starts."""
    before = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    }
    hook = sys.unraisablehook
    yield
    sys.unraisablehook = hook
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _kernels():
    """Kernels stand in for a whole process, so that a test would see those of the models before."""
    yield
    stop_using_kernels()
    registry.said.clear()


@pytest.fixture(autouse=True, scope="session")
def _ranks():
    worker = os.environ.get("PYTEST_XDIST_WORKER")  # both compile now: later one would wait for the other
    with contextlib.suppress(InputError):  # no compiler
        (skinny_gemm if worker == "gw1" else shared_memory).build()
    yield
    stop_ranks()
    shutil.rmtree(os.environ["HF_MODULES_CACHE"], ignore_errors=True)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A random checkpoint with a tokenizer, whose uneven 15/5 heads split unevenly over every tp."""
    folder = tmp_path_factory.mktemp("tiny")
    text = "Once upon a time there was a little dog. The dog ran to the park. "
    train_tokenizer([text] * 30, 300, folder / "tokenizer.model")
    config = dataclasses.replace(BASE, n_heads=15, n_kv_heads=5, intermediate_size=101, vocab_size=300, eos_ids=(2,))
    write_model(folder, config)
    return folder


@pytest.fixture
def training_flags(tmp_path, tiny):
    """The flags of a tiny training; texts repeat, so there is something to learn."""
    texts = "Once upon a time there was a little dog.", "The dog ran to the park.", "A cat sat on the mat and slept."
    for name, times in ("train.txt", 20), ("valid.txt", 2):
        (tmp_path / name).write_text("\n<|endoftext|>\n".join(texts * times))
    files = ["--text", tmp_path / "train.txt", "--valid", tmp_path / "valid.txt", "--out", tmp_path / "out"]
    how = "--fresh --batch 8 --seq-len 16 --steps 40 --eval-every 20 --lr 3e-3 --dtype float32"
    return [*map(str, files), "--checkpoint", str(tiny), *how.split()]


@pytest.fixture
def retraining_flags(training_flags):
    """The flags of a retraining with a teacher."""
    training_flags.remove("--fresh")
    how = "--steps 6 --eval-every 3 --lr 1e-3 --wiring ladder:1,2"
    return [*training_flags, *how.split()]


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
