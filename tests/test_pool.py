"""The pool of ranks that the tests run on: what it adds up, and that what fails there fails the test."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from running import run_ranks


def total(world, value):
    numbers = torch.tensor([world.rank + value])
    dist.all_reduce(numbers, group=world.dist_group)
    return numbers.item(), world.gather(world.rank)


def fail(world):
    if world.rank == 1:
        raise ValueError("rank 1 fails")
    return total(world, 0)


def die(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return total(world, 0)


@pytest.mark.parametrize("function, message", [(fail, "ValueError: rank 1 fails"), (die, "terminated|reset|closed")])
def test_a_rank_that_fails_fails_the_test_and_the_next_has_new_ranks(function, message):
    before = run_ranks(2, pid)
    with pytest.raises(pytest.fail.Exception, match=message):
        run_ranks(2, function)
    assert not {*run_ranks(2, pid)} & {*before}


def pid(world):
    return os.getpid()
