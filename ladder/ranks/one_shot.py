"""All-reduces that read the peers' memory instead of going through NCCL: --comm one-shot. No GPU has run it.

The kernels are PyTorch's. For small sums such kernels take a third of NCCL's time (nvlink-oneshot and nvlink in
the measured links), so a ladder should be compared with a standard model that sums by these.
"""

import torch
import torch.distributed._symmetric_memory as symmetric

from ladder.errors import InputError
from ladder.progress import progress
from ladder.ranks.group import Group, Pending
from ladder.ranks.shared_gpu import ThroughHost
from ladder.ranks.world import local_rank_and_size

ONE_SHOT = 2**18  # bytes up to which each rank sums the whole tensor; of a larger one, each sums its share for all
BUFFER = 2**24  # bytes of memory that the peers can read; larger sums go through NCCL
TESTED = 2**12, 2**16, ONE_SHOT, 2**20, 2**23  # bytes of the sums that connect() tries


def connect(world):
    """Sum by kernels that read the peer GPUs' memory, which no GPU has run.

    Returns the OneShotGroup of the World's ranks. Raises InputError, on all ranks alike, where none can be.
    """
    _, local = local_rank_and_size(world.rank, world.tp_size)
    if world.device.type != "cuda" or local != world.tp_size or world.tp_size not in (2, 4, 8):
        # of other numbers nobody has shown that all ranks add in the same order
        raise InputError("--comm one-shot is for 2, 4 or 8 ranks of one node, on GPUs")
    with world.together():
        try:
            group = OneShotGroup(world.group, world.rank, world.tp_size, world.device)
        except RuntimeError as e:
            reason = str(e).splitlines()[0]
            raise InputError(f"--comm one-shot needs GPUs that reach one another's memory: {reason}") from None
    progress.at("trial of one-shot sums (--comm library goes without)")
    with world.together():
        check(group, world.rank, world.device)
    return group


def check(group, rank, device):
    """Raise InputError unless sums of all sizes are NCCL's: over PCIe, some peers' memory gives wrong ones."""
    wrong = torch.zeros((), dtype=torch.bool, device=device)
    for size in TESTED:
        x = (torch.arange(size // 2, device=device) % 17 + rank).bfloat16()  # whose sums are exact, of up to 8 ranks
        for _ in range(4):
            own = x.clone()
            nccl = x.clone()
            group.allreduce([own]).wait()
            group.inner.allreduce([nccl]).wait()
            wrong |= (own != nccl).any()
    if wrong:
        raise InputError("one-shot sums are wrong on these GPUs: give --comm library")


class OneShotGroup(Group):
    """A process group whose sums are PyTorch's symmetric-memory kernels, on a stream of their own.

    inner: NCCL's group of the same ranks, which gathers, or gloo's where NCCL refuses ranks that share a GPU. A kernel
    waits for its peers at its begin, until all have copied their partials into the buffers, and at its end, until all
    have read them. So several sums in flight can share one buffer if every rank runs them in the same order: hence the
    one stream.
    """

    def __init__(self, inner, rank, tp_size, device):
        super().__init__("one-shot", inner, rank, tp_size)
        self.stream = torch.cuda.Stream(device, priority=-1)  # before the computing beside it, like NCCL's
        self.buffer = symmetric.empty(BUFFER, dtype=torch.uint8, device=device)
        through_host = isinstance(inner, ThroughHost)
        self.on_host = inner.on_host - {"sums"} if through_host else frozenset()
        # symmetric memory knows the groups of torch.distributed, not those in Python
        self.peers = (inner.inner if through_host else inner).group_name
        symmetric.rendezvous(self.buffer, self.peers)

    def allreduce(self, tensors, opts=None):
        [tensor] = tensors
        ops = torch.ops.symm_mem
        group = self.peers
        if tensor.nbytes > BUFFER or tensor.dtype not in (torch.bfloat16, torch.float32):  # which no kernel sums
            return self.inner.allreduce(tensors, opts)
        whole = tensor.view(-1)
        shared = self.buffer[: tensor.nbytes].view(tensor.dtype)
        self.stream.wait_stream(torch.cuda.current_stream())  # fork and join by events, which CUDA graphs capture
        with torch.cuda.stream(self.stream):
            # by itself: one_shot_all_reduce_copy (torch 2.13) waits for no warp but the one that tells the peers of it
            shared.copy_(whole)
            if tensor.nbytes <= ONE_SHOT:
                ops.one_shot_all_reduce_out(shared, "sum", group, whole)
            else:
                whole.copy_(ops.two_shot_all_reduce_(shared, "sum", group))
            done = self.stream.record_event()
        # It keeps the tensors: freed before the wait, their memory would go to work on another stream.
        return Pending(lambda kept=tensors: torch.cuda.current_stream().wait_event(done))
