"""Sums of eight bits, for links that are slower than the computing: --comm int8.

A rank's partial travels as integers of 8 bits in groups of 32 with a scale of bfloat16: 34 bytes instead of bfloat16's
64. All ranks add the same rounded numbers in the same order, their own included, so their sums are equal to the bit.

The error: a is the largest size of a group's 32 numbers. Its scale is a / 127, rounded to bfloat16, and each number is
off by at most half a scale, so by at most a / 253. A sum over two ranks is off by at most a / 253 of each partial. With
more ranks each sums a part of the tensor and rounds the sum again, which adds a / 253 of the sum. Then the sum, which
is one of float32, is rounded to the tensor's dtype. The bound holds for numbers of any size from 1e-36, since bfloat16
has float32's exponents, which float16 has not. Groups with a number that is not finite are not finite in the sum.
"""

import concurrent.futures

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ladder.ranks import gloo
from ladder.ranks.group import Group, Pending

GROUP = 32  # numbers that share a scale
ROUNDED = torch.bfloat16, torch.float16, torch.float32  # whatever has another dtype is summed exactly
LEAST = torch.finfo(torch.bfloat16).tiny  # of a scale: a group of zeros is divided by it


def connect(world):
    """Sum in numbers of 8 bits by gloo or NCCL. Returns the EightBits of the World's ranks."""
    second = world.group
    if world.device.type == "cpu" and world.tp_size > 2:
        before = gloo.threads()
        second = dist.new_group()
        gloo.let_preempt(gloo.threads() - before)
    return EightBits(world.group, second, world.rank, world.tp_size, world.device)


def message_bytes(count):
    """Return the bytes in which so many numbers travel."""
    groups = -(-count // GROUP)
    return groups * (GROUP + torch.bfloat16.itemsize)


def round_to_message(x):
    """Return numbers (..., n) as a message (..., n + n / 16) of bytes: the integers, then the scales. n: in groups."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / 127).clamp(min=LEAST).bfloat16()
    # A scale that was rounded down makes 127.496 at most. What is not finite makes any integer, and such a scale.
    integers = (groups / scales.unsqueeze(-1)).round_().to(torch.int8)
    return torch.cat([integers.flatten(-2).view(torch.uint8), scales.view(torch.uint8)], -1)


def read_message(message):
    """Return the numbers (..., n) of a message in float32, which holds an integer times a scale exactly."""
    n = message.shape[-1] * GROUP // (GROUP + torch.bfloat16.itemsize)
    integers = message[..., :n].view(torch.int8)
    scales = message[..., n:].contiguous().view(torch.bfloat16)
    return (integers.unflatten(-1, (-1, GROUP)) * scales.float().unsqueeze(-1)).flatten(-2)


class EightBits(Group):
    """A process group whose sums of floats travel in 8 bits. Gathers, and sums of other dtypes, are those of `inner`.

    inner: the group of the same ranks that carries the messages, gloo's or NCCL's. Two ranks exchange their partials.
    More ranks exchange parts of them; each sums a part, and `second` gathers the sums, while the model computes: on a
    CPU in a thread, on a GPU in a stream. gloo matches messages by the order of the calls, which differs among ranks
    where two threads call; so on CPUs `second` is another group.
    """

    def __init__(self, inner, second, rank, tp_size, device):
        super().__init__("int8", inner, rank, tp_size)
        self.second = second
        self.tp_size = tp_size
        self.on_host = getattr(inner, "on_host", frozenset())
        self.thread = self.stream = None
        if tp_size > 2 and device.type == "cpu":
            self.thread = concurrent.futures.ThreadPoolExecutor(1, "eight bits")
        elif tp_size > 2:
            self.stream = torch.cuda.Stream(device, priority=-1)  # before the computing beside it, like NCCL's

    def message_bytes(self, tensor):
        """Return the bytes in which an all-reduce of this tensor counts, as a ring's bytes do."""
        return message_bytes(tensor.numel()) if tensor.dtype in ROUNDED else tensor.nbytes

    def allreduce(self, tensors, opts=None):
        [tensor] = tensors
        if tensor.dtype not in ROUNDED or (opts and opts.reduceOp != dist.ReduceOp.SUM):
            return self.inner.allreduce(tensors, opts)
        parts = 1 if self.tp_size == 2 else self.tp_size
        x = tensor.reshape(-1)
        if missing := -len(x) % (parts * GROUP):
            x = F.pad(x, (0, missing))
        message = round_to_message(x.view(parts, -1))
        start = self._exchange if parts == 1 else self._scatter_and_gather
        read = start(message)

        def finish():
            tensor.copy_(read().flatten()[: tensor.numel()].view(tensor.shape))

        return Pending(finish)

    def _exchange(self, message):
        """Send a message (1, bytes) to the other rank; return a function that waits, and returns the sum (n)."""
        messages = message.new_empty(self.tp_size, message.shape[-1])
        work = self.inner.allgather_into_tensor_coalesced([messages], [message])

        def read():
            work.wait()
            return read_message(messages).sum(0)

        return read

    def _scatter_and_gather(self, messages):
        """Send a part of the messages (tp_size, bytes) to each rank; return what _exchange does."""
        received = torch.empty_like(messages)
        work = self.inner.alltoall_base(received, messages, [], [])

        @torch.inference_mode()  # as in the main thread: a collective writes to no tensor of the other mode
        def sum_part():
            work.wait()
            own = round_to_message(read_message(received).sum(0, keepdim=True))
            sums = torch.empty_like(received)
            self.second.allgather_into_tensor_coalesced([sums], [own]).wait()
            return sums

        if self.thread:
            job = self.thread.submit(sum_part)
            return lambda: read_message(job.result())
        self.stream.wait_stream(torch.cuda.current_stream())  # by events, which CUDA graphs capture
        with torch.cuda.stream(self.stream):
            sums = sum_part()
            done = self.stream.record_event()

        def read(kept=(received, messages)):  # whose memory may not go to other work before the wait
            torch.cuda.current_stream().wait_event(done)
            return read_message(sums)

        return read
