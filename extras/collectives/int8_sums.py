"""All-reduces of int8 integers: half the bytes of bfloat16, for a small loss. --comm int8.

A partial travels as groups of 64 int8 integers with a scale. All ranks add the same integers in the same order, so
that their sums are bitwise equal.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from extras.group import Group, Pending, pending_on
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
    """A process group whose sums travel as integers, through the group `inner`.

    own: gloo's or NCCL's group, for the all-to-all that `inner` may lack.

    Two ranks exchange whole partials. More ranks first send each rank the slice that it sums, and then gather the sums,
    which are quantized a second time. On CPUs that gather only starts at the wait: half of the time is not hidden.
    """

    def __init__(self, inner, own, rank, tp_size, device):
        super().__init__("int8", inner, rank, tp_size)
        self.own = own
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self.at_once = tp_size == 2 or self.stream is not None

    def wire_bytes(self, tensor):
        return tensor.nbytes if tensor.nbytes <= SMALL else tensor.numel() * (SIZE + 2) // SIZE

    def allreduce(self, tensors, opts=None):
        if tensors[0].nbytes <= SMALL:
            return self.inner.allreduce(tensors, opts or dist.AllreduceOptions())
        if self.stream is None:
            return Pending(self._start(*tensors))
        self.stream.wait_stream(torch.cuda.current_stream())  # fork and join by events, which CUDA graphs capture
        with torch.cuda.stream(self.stream):
            self._start(*tensors)()
            return pending_on(self.stream, tensors)

    def _start(self, tensor):
        """Send a tensor; return a function that finishes its sum, in place."""
        whole, ranks = tensor.view(-1), self.size()
        rest = -len(whole) % (SIZE * ranks)
        padded = F.pad(whole, (0, rest)) if rest else whole
        if ranks > 2:
            slices = quantized(padded.view(ranks, -1))
            parts = torch.empty_like(slices)
            work = self.own.alltoall_base(parts, slices, [], [])
        else:
            parts, work = self._gather(quantized(padded))

        def finish():
            work.wait()
            total = numbers(parts).sum(0)
            if ranks > 2:
                all_slices, gathering = self._gather(quantized(total))
                gathering.wait()
                total = numbers(all_slices).flatten()
            whole.copy_(total[: len(whole)])

        return finish

    def _gather(self, message):
        """Return the messages of all ranks (tp_size, m), and the work that brings them."""
        parts = message.new_empty(self.size() * len(message))
        work = self.inner.allgather_into_tensor_coalesced([parts], [message])
        return parts.view(self.size(), -1), work


def connect(world):
    """Return the Int8Group of a launch.World's ranks, around the fastest group that they have."""
    inner = COLLECTIVES["auto"].connect(world)
    return Int8Group(inner, world.group, world.rank, world.tp_size, world.device)


COLLECTIVES["int8"] = Collective("as integers, up to three ranks: fewer bytes, a small loss (docs/exact.md)", connect)
