"""Collectives as operators that the compiler does not look into, and so cannot reorder."""

import torch

torch.library.define("ladder::settle", "(Tensor x, Tensor? pending, Tensor? after) -> Tensor")
torch.library.register_fake("ladder::settle", lambda x, pending, after: torch.empty_like(x))


@torch.library.impl("ladder::settle", "default")
def _settle(x, pending, after):
    """Return x + wait(pending), or a copy of x if pending is None.

    `after` is only a dependency: tp.TensorParallel.settle says why. Where the ranks of CPUs share memory,
    shared_memory.cpp has an operator that does the same.
    """
    return x.clone() if pending is None else x + torch.ops._c10d_functional.wait_tensor(pending)


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
