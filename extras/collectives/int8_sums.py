"""All-reduces of int8 integers: half the bytes of bfloat16, for a small loss. --comm int8.

A partial travels as groups of 64 int8 integers with a scale, to all ranks, which add the same integers in the same
order: so their sums are bitwise equal.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from extras.group import Group, Pending, start_on
from runtime.errors import InputError
from tp import COLLECTIVES, Collective

SIZE = 64  # numbers in a group
SMALL = 2**14  # bytes up to which a partial travels as it is: to quantize it would take longer than it saves


def quantized(x):
    """Return the message, int8 (..., n + n / 32), of numbers (..., n): integers, then the scales as bfloat16."""
    groups = x.float().unflatten(-1, (-1, SIZE))
    scales = (groups.abs().amax(-1) / 127).bfloat16()  # not finite if a number is not
    integers = (groups / scales.float().clamp(min=1e-30)[..., None]).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat((integers.flatten(-2), scales.view(torch.int8)), -1)


def numbers(message):
    """Return the numbers (..., n), float32, of a message."""
    n = message.shape[-1] * SIZE // (SIZE + 2)
    scales = message[..., n:].view(torch.bfloat16).float()
    return (message[..., :n].unflatten(-1, (-1, SIZE)) * scales[..., None]).flatten(-2)


class Int8Group(Group):
    """A process group whose ranks exchange their partials as integers, through the group `inner`, and add them up."""

    def __init__(self, inner, rank, tp_size, device):
        super().__init__("int8", inner, rank, tp_size)
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def wire_bytes(self, tensor):
        """Return the bytes of an all-reduce that takes as long as this exchange of whole messages."""
        if tensor.nbytes <= SMALL:
            return tensor.nbytes
        return tensor.numel() * (SIZE + 2) // SIZE * self.size() // 2

    def allreduce(self, tensors, opts=None):
        if tensors[0].nbytes <= SMALL:
            return self.inner.allreduce(tensors, opts or dist.AllreduceOptions())
        if self.stream is None:
            return Pending(self._start(*tensors))
        return start_on(self.stream, tensors, lambda: self._start(*tensors)())

    def _start(self, tensor):
        """Send a tensor; return a function that finishes its sum, in place."""
        whole = tensor.view(-1)
        message = quantized(F.pad(whole, (0, -len(whole) % SIZE)))
        messages = message.new_empty(self.size() * len(message))
        work = self.inner.allgather_into_tensor_coalesced([messages], [message])

        def finish():
            work.wait()
            whole.copy_(numbers(messages.view(self.size(), -1)).sum(0)[: len(whole)])

        return finish


def connect(world):
    """Return the Int8Group of a launch.World's ranks, around the fastest group that they have. Raises InputError."""
    if world.tp_size > 3:
        raise InputError("--comm int8 is for two or three ranks: of more, an exchange of integers sends no fewer bytes")
    return Int8Group(COLLECTIVES["auto"].connect(world), world.rank, world.tp_size, world.device)


COLLECTIVES["int8"] = Collective("as integers, up to three ranks: fewer bytes, a small loss (docs/exact.md)", connect)
