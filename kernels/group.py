"""What this project's own process groups share: each does some collectives its way, and hands the others on."""

import itertools

import torch
import torch.distributed as dist

_numbers = itertools.count()


class Group(dist.ProcessGroup):
    """A process group in Python around another one, `inner`, of the same ranks."""

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


class Sum(dist.Work):
    """A sum under way on a stream of a GPU, recorded there now.

    It keeps the tensors: freed before the wait, their memory would go to computing meanwhile.
    """

    def __init__(self, tensors, stream):
        super().__init__()
        self.tensors, self.done = tensors, stream.record_event()

    def wait(self, timeout=None):
        torch.cuda.current_stream().wait_event(self.done)
        self.tensors = None
        return True
