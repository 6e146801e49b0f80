"""What this project's own process groups share: each does some collectives its way, and hands the others on."""

import itertools

import torch
import torch.distributed as dist

_numbers = itertools.count()


class Group(dist.ProcessGroup):
    """A process group in Python around another one, `inner`, of the same ranks."""

    at_once = True  # whether all of a sum travels from its start on

    def __init__(self, kind, inner, rank, tp_size):
        super().__init__(rank, tp_size)
        self.name, self.inner = f"{kind}-{next(_numbers)}", inner
        # The functional collectives know groups by name. No public call gives a group of Python's one.
        torch._C._distributed_c10d._register_process_group(self.name, self)

    group_name = property(lambda self: self.name)

    def getBackendName(self):
        return self.name

    def wire_bytes(self, tensor):
        """Return the bytes of a partial as it travels."""
        return self.inner.wire_bytes(tensor) if isinstance(self.inner, Group) else tensor.nbytes

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):
        return self.inner.allgather_into_tensor_coalesced(outputs, inputs)


class Pending(dist.Work):
    """A collective under way: finish() waits for it."""

    def __init__(self, finish):
        super().__init__()
        self.finish = finish

    def wait(self, timeout=None):
        self.finish()
        self.finish = None  # and what it has kept
        return True


def pending_on(stream, tensors):
    """Return the Pending of what a stream of a GPU has been given so far.

    It keeps the tensors: freed before the wait, their memory would go to computing meanwhile.
    """
    done = stream.record_event()
    return Pending(lambda kept=tensors: torch.cuda.current_stream().wait_event(done))
