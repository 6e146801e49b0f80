import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the tests are of the CPU path; several ranks would not find a GPU each

import pytest
import torch
import torch.distributed as dist


@pytest.fixture
def fake_group():
    """A process group of two ranks in one process; its collectives do nothing."""
    try:
        dist.init_process_group("fake", rank=0, world_size=2)
    except (RuntimeError, ValueError):  # torch before 2.13 registers the backend on import, and wants a store
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture(params=[1, 3])
def threads(request):
    """That many threads for the operators of this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
