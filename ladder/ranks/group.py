"""What process groups in Python share: each sums itself, and passes gathers on."""

import itertools

import torch
import torch.distributed as dist

_name_counter = itertools.count()


def new_name(kind):
    """Return a name for a process group that no other group of this process has."""
    return f"{kind}-{next(_name_counter)}"


class Group(dist.ProcessGroup):
    """A process group in Python around another one, `inner`, of the same ranks."""

    def __init__(self, name, inner, rank, tp_size):
        super().__init__(rank, tp_size)
        self.name = new_name(name)
        self.inner = inner
        # The functional collectives find groups by name. No public call gives a name to a group in Python.
        torch._C._distributed_c10d._register_process_group(self.name, self)

    group_name = property(lambda self: self.name)

    def getBackendName(self):
        return self.name

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):
        return self.inner.allgather_into_tensor_coalesced(outputs, inputs)


class Pending(dist.Work):
    """A collective under way. finish: a function that waits for it."""

    def __init__(self, finish):
        super().__init__()
        self.finish = finish

    def wait(self, timeout=None):
        self.finish()
        self.finish = None  # and the tensors that it keeps
        return True
