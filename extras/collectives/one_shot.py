"""All-reduces that read the peers' memory instead of going through NCCL: --comm one-shot. No GPU has run it.

The kernels are PyTorch's. For small sums such kernels take a third of NCCL's time (nvlink-oneshot and nvlink in
extras/measure/link.py), so a ladder should be compared with a standard model that sums by these.
"""

import os

import torch
import torch.distributed._symmetric_memory as symmetric

from extras.group import Group, pending_on
from runtime.errors import InputError
from tp import COLLECTIVES, Collective

ONE_SHOT = 2**18  # bytes up to which each rank sums the whole tensor; of a larger one, each sums its share for all
BUFFER = 2**24  # bytes of memory that the peers can read; larger sums go through NCCL


def connect(world):
    """Return the OneShotGroup of a launch.World's ranks. Raises InputError, on all ranks alike, where none can be."""
    on_one_node = int(os.environ.get("LOCAL_WORLD_SIZE", world.tp_size)) == world.tp_size
    if world.device.type != "cuda" or not on_one_node:
        raise InputError("--comm one-shot is for ranks of one node, each with a GPU")
    with world.together():
        try:
            return OneShotGroup(world.group, world.rank, world.tp_size, world.device)
        except RuntimeError as e:
            reason = str(e).splitlines()[0]
            raise InputError(f"--comm one-shot needs GPUs that reach one another's memory: {reason}") from None


class OneShotGroup(Group):
    """A process group whose sums are PyTorch's symmetric-memory kernels, on a stream of their own.

    inner: NCCL's group of the same ranks, which gathers. A kernel waits for its peers at its begin, until all have
    copied their partials into the buffers, and at its end, until all have read them. So several sums in flight can
    share one buffer if every rank runs them in the same order: hence the one stream.
    """

    def __init__(self, inner, rank, tp_size, device):
        super().__init__("one-shot", inner, rank, tp_size)
        self.stream = torch.cuda.Stream(device, priority=-1)  # before the computing beside it, like NCCL's
        self.buffer = symmetric.empty(BUFFER, dtype=torch.uint8, device=device)
        symmetric.rendezvous(self.buffer, inner.group_name)

    def allreduce(self, tensors, opts=None):
        [tensor], ops, group = tensors, torch.ops.symm_mem, self.inner.group_name
        if tensor.dtype == torch.float16:
            raise InputError("--comm one-shot sums bfloat16 and float32: give --dtype")
        if tensor.nbytes > BUFFER:
            return self.inner.allreduce(tensors, opts)
        whole, shared = tensor.view(-1), self.buffer[: tensor.nbytes].view(tensor.dtype)
        self.stream.wait_stream(torch.cuda.current_stream())  # fork and join by events, which CUDA graphs capture
        with torch.cuda.stream(self.stream):
            # by itself: one_shot_all_reduce_copy (torch 2.13) waits for no warp but the one that tells the peers of it
            shared.copy_(whole)
            if tensor.nbytes <= ONE_SHOT:
                ops.one_shot_all_reduce_out(shared, "sum", group, whole)
            else:
                whole.copy_(ops.two_shot_all_reduce_(shared, "sum", group))
            return pending_on(self.stream, tensors)


COLLECTIVES["one-shot"] = Collective("by kernels that read the peer GPUs' memory, which no GPU has run", connect)
