"""Several ranks on one GPU, which take turns on it: --device cuda:0. For trying and testing; no GPU has run it yet."""

import ctypes
import os

import torch

from ladder.ranks.group import Group, Pending

SHARING_NCCL = 2, 30  # the first version that lets ranks share a GPU
SETTINGS = {  # what is set in the environment unless it is there
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",  # multicast between GPUs
    "NCCL_MAX_CTAS": "2",  # a kernel that waits for a rank whose turn is next should hold little of the GPU
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",  # for --comm one-shot
}


def nccl_version():
    """Return the version of the NCCL that is loaded, such as (2, 30, 7); torch.cuda.nccl has that of the build."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except OSError:  # it is part of PyTorch's own library
        return torch.cuda.nccl.version()[:3]
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def prepare(world):
    """Let ranks share a GPU, and say how they sum; returns whether NCCL does. Every rank calls it: it gathers."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    version = min(map(tuple, world.gather(nccl_version())))
    text = ".".join(map(str, version))
    by_nccl = version >= SHARING_NCCL
    how = f"NCCL {text} connects them"
    if not by_nccl:
        how = f"gloo connects them, through the host's memory, since NCCL {text} refuses this and 2.30 does not: "
        how += "pip install nvidia-nccl-cu13==2.30.7"
    world.say(f"ranks share a GPU and take turns on it, which is for trying, not for speed; {how}")
    return by_nccl


class ThroughHost(Group):
    """A process group for tensors on GPUs, whose inner group, gloo, gets them in the host's memory."""

    on_host = frozenset({"sums", "gathers"})  # see model.Collectives

    def allreduce(self, tensors, opts=None):
        return self._send(tensors, self.inner.allreduce, [tensor.cpu() for tensor in tensors])

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):
        results = [torch.empty_like(tensor, device="cpu") for tensor in outputs]
        return self._send(outputs, self.inner.allgather_into_tensor_coalesced, results, [x.cpu() for x in inputs])

    def alltoall_base(self, output, input, output_sizes, input_sizes, opts=None):
        def collective(results, x):
            return self.inner.alltoall_base(*results, x, output_sizes, input_sizes)

        return self._send([output], collective, [torch.empty_like(output, device="cpu")], input.cpu())

    def _send(self, outputs, collective, results, *inputs):
        """Start a collective whose results, in the host's memory, come to the outputs once it is waited for."""
        work = collective(results, *inputs)

        def finish():
            work.wait()
            for output, result in zip(outputs, results, strict=True):
                output.copy_(result)

        return Pending(finish)
