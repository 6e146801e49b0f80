"""Collectives as operators that the compiler does not look into, and so cannot reorder."""

import torch

torch.library.define("ladder::settle", "(Tensor x, Tensor? pending, Tensor? after) -> Tensor")
torch.library.register_fake("ladder::settle", lambda x, pending, after: torch.empty_like(x))


@torch.library.impl("ladder::settle", "default")
def _settle(x, pending, after):
    """Return x + wait(pending), or a copy of x. `after` is only a dependency: tp.TensorParallel.settle says why.

    Where ranks share memory, shared_memory.cpp has the same for CPUs.
    """
    return x.clone() if pending is None else x + torch.ops._c10d_functional.wait_tensor(pending)


torch.library.define("ladder::wait_after", "(Tensor(a!) pending, Tensor after) -> ()")
torch.library.register_fake("ladder::wait_after", lambda pending, after: None)


@torch.library.impl("ladder::wait_after", "default")
def _wait_after(pending, after):
    """Wait like settle, without its addition: on a GPU the compiler puts that into the kernel of the next norm."""
    torch.ops._c10d_functional.wait_tensor(pending)


torch.library.define("ladder::gather", "(Tensor part, int tp_size, str group) -> Tensor")
torch.library.register_fake("ladder::gather", lambda part, tp_size, group: part.new_empty(tp_size, *part.shape))


@torch.library.impl("ladder::gather", "default")
def _gather(part, tp_size, group):
    """Return the parts (B, ...) of all ranks as (tp_size, B, ...).

    Like any collective but all_reduce it is wrapped in one opaque operator: in the compiler's C++ wrapper (torch 2.13)
    neither form of all-gather works, and a process group written in Python has only the coalesced one.
    """
    ops = torch.ops._c10d_functional
    [parts] = ops.all_gather_into_tensor_coalesced([part.contiguous()], tp_size, group)
    return ops.wait_tensor(parts).unflatten(0, (tp_size, -1))
