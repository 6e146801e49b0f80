"""Collectives as operators that the compiler does not look into, and so cannot reorder.

In the example of model.Collectives, the operator settle(x, p0, p1) takes p1 as an input that it ignores. So the wait
for p0 comes after p1's start, and the next h, which reads the result, after both. In the same way pin(x, p0) keeps the
h1 of a ladder, which reads the x that h0 read, behind p0's start.
"""

import torch

from ladder.kernels import registry
from ladder.kernels.registry import Kernel

torch.library.define("ladder::settle", "(Tensor x, Tensor? pending, Tensor? after) -> Tensor")
torch.library.register_fake("ladder::settle", lambda x, pending, after: torch.empty_like(x))


def settle_in_order(x, pending, after):
    """Return x + wait(pending), or a copy of x if pending is None. `after` is only a dependency."""
    return x.clone() if pending is None else x + torch.ops._c10d_functional.wait_tensor(pending)


torch.library.impl("ladder::settle", "default", lambda *arguments: settle_in_order(*arguments))
SETTLE_IN_ORDER = "ladder.kernels.ordered.settle_in_order"


def settle_operator():
    """Return the operator that does what settle_in_order does: that of shared_memory.cpp, if it is loaded, or ours."""
    in_cpp = hasattr(torch.ops.ladder, "settle_in_cpp") and registry.is_unchanged(SETTLE_IN_ORDER)
    return torch.ops.ladder.settle_in_cpp if in_cpp else torch.ops.ladder.settle


torch.library.define("ladder::wait_after", "(Tensor(a!) pending, Tensor after) -> ()")
torch.library.register_fake("ladder::wait_after", lambda pending, after: None)


@torch.library.impl("ladder::wait_after", "default")
def _wait_after(pending, after):
    """Wait like settle, but add nothing: on a GPU the compiler fuses the addition with the next norm."""
    torch.ops._c10d_functional.wait_tensor(pending)


torch.library.define("ladder::gather", "(Tensor part, int tp_size, str group) -> Tensor")
torch.library.register_fake("ladder::gather", lambda part, tp_size, group: part.new_empty(tp_size, *part.shape))


@torch.library.impl("ladder::gather", "default")
def _gather(part, tp_size, group):
    """Return the parts (B, ...) of all ranks as (tp_size, B, ...).

    This operator hides the all-gather from the compiler, in whose C++ wrapper no form of all-gather works (torch 2.13).
    It is the coalesced form, since a process group written in Python has no other.
    """
    ops = torch.ops._c10d_functional
    [parts] = ops.all_gather_into_tensor_coalesced([part.contiguous()], tp_size, group)
    return ops.wait_tensor(parts).unflatten(0, (tp_size, -1))


# ---- What stands in for tp.TensorParallel's plain functions ----------------------------------------------------------


def settle(self, x, pending, newer=()):
    """Return x + the sum; when compiled, the wait comes after the last of the `newer` starts."""
    in_cpp = self.settle_operator is not torch.ops.ladder.settle
    if not newer or not (in_cpp or torch.compiler.is_compiling()) or not isinstance(newer[-1], torch.Tensor):
        return None
    if x.is_cuda:  # the compiler fuses the + with the next norm; on a CPU there is nothing to gain by that
        torch.ops.ladder.wait_after(pending, newer[-1])  # declared to modify `pending`, so the + stays behind it
        return x + pending
    return self.settle_operator(x, pending, newer[-1])


def pin(self, x, newer):
    """Return a copy of x that, when compiled, comes after the last of the `newer` starts."""
    in_order = torch.compiler.is_compiling() and isinstance(
        newer[-1], torch.Tensor
    )  # an edited start may return others
    return self.settle_operator(x, None, newer[-1]) if in_order else None


WAIT = ("tp.TensorParallel.wait",)
KERNELS = [
    Kernel(
        "tp.TensorParallel.settle",
        settle,
        "compiled code keeps its order, so that more overlaps",
        WAIT,
        may_refuse=False,
    ),
    Kernel("tp.TensorParallel.pin", pin, "compiled code keeps its order, so that more overlaps", may_refuse=False),
]
