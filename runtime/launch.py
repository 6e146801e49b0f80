"""How a script starts: where it runs, and with whom. Also run(), from a script's main() to its end."""

import contextlib
import os
import sys

import torch
import torch.distributed as dist

import tp
from formats.checkpoint import first_line
from runtime import place
from runtime.errors import InputError

watch = None  # the Watch of extras/watch, if this process has one


def rank_and_size():
    """Return this process's rank and the number of ranks, as torchrun's environment says."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def local_rank_and_size(rank, tp_size):
    """Return this process's rank on its node and the node's number of ranks, without torchrun as on one node."""
    return int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", tp_size))


class World:
    """The ranks of a run, as join() returns them: this process alone, or the subclass in runtime/ranks.py.

    group: the process group of the model's collectives, or None for a single device. nodes: the name of each rank's
    node. shares: what each rank holds of a model, in proportion to the others. A process alone may simulate a rank of
    several (extras/measure): it has their tp_size and a group. Raises InputError for shares of another number of ranks.
    """

    alone = True  # whether this process has no peers
    dist_group = None  # the group to pass to torch.distributed's own functions; None is its default group

    def __init__(self, rank, tp_size, device, group=None, shares=None):
        if shares and len(shares) != tp_size:
            raise InputError(f"--shares has {len(shares)} numbers: give {tp_size}, one for each rank")
        self.rank, self.tp_size, self.device, self.group = rank, tp_size, device, group
        self.shares, self.nodes = shares or (1,) * tp_size, ("",) * tp_size

    simulated = property(lambda self: self.alone and self.tp_size > 1)

    def gather(self, value):
        """Return the values of all ranks, in the order of ranks. A value is what JSON holds; tuples become lists."""
        return [value]

    def say(self, text):
        """Print a line on stderr, on rank 0."""
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)

    def agree(self, values, **folders):
        """Raise InputError on all ranks, which names each difference, unless all ranks give an equal dict.

        folders: {flag: the checkpoint folder that it names, or None}, whose contents are compared too.
        """

    def together(self):
        """Return a context: if one rank raises InputError in it, all ranks do at its end, and none waits for ever."""
        return contextlib.nullcontext()


def join(device=None, flags=None):
    """Join the ranks that torchrun started with this one, if any; returns the World.

    device: "cpu", "cuda", "cuda:1", or None for CUDA if every local rank finds a GPU. Of several ranks each takes the
    GPU of its LOCAL_RANK, or the only one that it sees if each sees another one, as with Slurm. flags: {name: value} of
    the command line, equal on all ranks; "comm" names one of tp.COLLECTIVES.
    Raises InputError for a device that is not there, and for ranks that were not started alike.
    """
    flags = flags or {}
    if rank_and_size()[1] > 1:
        from runtime import ranks

        return ranks.meet(device, flags)
    world = World(0, 1, None, shares=flags.get("shares"))
    if (comm := flags.get("comm", "auto")) != "auto":
        tp.collective(comm)  # is there such a way?
        raise InputError(f"--comm {comm} is how ranks sum: start two or more, with torchrun")
    world.device = choose_device(device)
    return world


def choose_device(device, rank=0, tp_size=1, own_gpu=False):
    """Return the torch.device of a rank, as join says, made CUDA's current one. own_gpu: no other rank sees its GPU."""
    known = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    local_rank, local = local_rank_and_size(rank, tp_size)
    if device is None:
        device = "cuda" if own_gpu or 0 < local < len(known) else "cpu"
        hidden = os.path.exists("/proc/driver/nvidia/version") and "CUDA_VISIBLE_DEVICES" not in os.environ
        if device == "cpu" and local_rank == 0 and (hidden or len(known) > 1):
            words = f"PyTorch {torch.__version__} sees {len(known) - 1} GPUs for {local} ranks here"
            print(f"running on the CPU: {words}; each rank needs one", file=sys.stderr)
    if device == "cuda" or (device.startswith("cuda:") and tp_size > 1):
        device = f"cuda:{local_rank if tp_size > 1 and not own_gpu else 0}"
    if device not in known:
        raise InputError(f"no such device: {device}; this machine has {', '.join(known)}")
    if device != "cpu":
        try:
            torch.cuda.set_device(torch.device(device))
        except RuntimeError as e:  # above all a driver that is too old for this PyTorch
            raise InputError(f"{device} cannot be used: {first_line(e)} (--device cpu does without)") from None
        if tp_size > 1 and "MIG" in torch.cuda.get_device_name(device):
            raise InputError(f"{device} is a slice of a GPU (MIG), which NCCL does not connect: run one rank alone")
        torch.backends.cuda.enable_cudnn_sdp(False)  # its attention makes a plan for each new length of a prompt
    return torch.device(device)


def run(main):
    """Run a script's main(), and end the process: what ends one rank ends all, and one of them says why in one line."""
    from runtime import ending  # before anything fails

    ending.heed()
    error = None
    try:
        try:
            if rank_and_size()[1] > 1:
                from runtime import ranks

                ranks.store()  # now, so that of several ranks with bad flags one says so
            main()
            sys.stdout.flush()
            place.at("the end")
            if dist.is_initialized():
                dist.barrier()
        finally:
            ending.ignore()
    except BaseException as e:
        error = e
    if isinstance(error, Exception):  # which a library may have raised for the one of a signal
        error = ending.received or error
    if watch:
        error = watch.explain(error)
    with contextlib.suppress(OSError):
        sys.stdout.flush()  # what --help printed, or the text so far
    ending.leave(error)
