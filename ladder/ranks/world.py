"""The World of a process: its rank among how many, and its device. Here it is alone; meeting.py has that of several."""

import contextlib
import math
import os
import sys

import torch

from ladder.errors import InputError, first_line


def _environment_integers(**defaults):
    """Return the whole numbers in variables of the environment. Raises InputError."""
    texts = {name: os.environ.get(name, str(default)) for name, default in defaults.items()}
    if wrong := [f"{name}={text!r}" for name, text in texts.items() if not (text.isascii() and text.isdecimal())]:
        raise InputError(f"{', '.join(wrong)} in the environment: a launcher gives whole numbers")
    return [*map(int, texts.values())]


def rank_and_size():
    """Return this process's rank and the number of ranks, as torchrun's environment says. Raises InputError."""
    rank, tp_size = _environment_integers(RANK=0, WORLD_SIZE=1)
    if "WORLD_SIZE" in os.environ and rank >= tp_size:
        raise InputError(f"RANK={rank} and WORLD_SIZE={tp_size} in the environment: ranks are from 0 to WORLD_SIZE - 1")
    return rank, tp_size


def say(text):
    """Print a line on stderr, on rank 0, where no World is at hand."""
    if rank_and_size()[0] == 0:
        print(text, file=sys.stderr)


def local_rank_and_size(rank, tp_size):
    """Return this process's rank on its node and the node's number of ranks, which share its cores, memory and GPUs.

    Where the launcher does not say it, all ranks are taken to be on one node. rank, tp_size: of a World, which may be
    that of this process alone within a run of several ranks. Raises InputError for variables that do not fit.
    """
    [local] = _environment_integers(LOCAL_WORLD_SIZE=tp_size)
    [local_rank] = _environment_integers(LOCAL_RANK=rank % max(local, 1))
    world_size = rank_and_size()[1] if "WORLD_SIZE" in os.environ else math.inf
    ranks_here = local if "LOCAL_WORLD_SIZE" in os.environ else world_size
    if not local_rank < ranks_here <= world_size:
        words = "local ranks are from 0 to LOCAL_WORLD_SIZE - 1, and that is from 1 to WORLD_SIZE"
        raise InputError(f"LOCAL_RANK={local_rank} and LOCAL_WORLD_SIZE={local} of {world_size} ranks: {words}")
    return local_rank, local


class World:
    """The ranks of a run, as join() returns them: this process alone, or the JoinedWorld of ladder/ranks/meeting.py.

    group: the process group of the model's collectives, or None for a single device. nodes, devices: the names of each
    rank's node and of its device, which is equal where ranks share a GPU. shares: what each rank holds of a model, in
    proportion to the others; with "auto" equal ones, until ladder/command_line/shares.py has measured the ranks. A
    process alone may simulate a rank of several, to measure it: it has their tp_size and a group. Raises InputError for
    shares of another number of ranks.
    """

    alone = True  # whether this process has no peers
    dist_group = None  # the group to pass to torch.distributed's own functions; None is its default group

    def __init__(self, rank, tp_size, device, group=None, shares=None):
        shares = None if shares == "auto" else shares
        if shares and len(shares) != tp_size:
            lengths = f"--shares has {len(shares)} numbers, and this run's tp is {tp_size}"
            raise InputError(f"{lengths}: give one for each rank that torchrun starts")
        self.rank = rank
        self.tp_size = tp_size
        self.device = device
        self.group = group
        self.shares = shares or (1,) * tp_size
        self.nodes = ("",) * tp_size
        self.devices = range(tp_size)

    simulated = property(lambda self: self.alone and self.tp_size > 1)
    shares_gpu = property(lambda self: len({*self.devices}) < self.tp_size, doc="Whether any ranks share a GPU.")

    def gather(self, value):
        """Return the values of all ranks, in the order of ranks. A value is what JSON holds; tuples become lists."""
        return [value]

    def has_slow_link(self):
        """Return whether sums take so long that even short parts of a prompt are worth overlapping: the same on all.

        Ranks of several machines time some sums for that, so all ranks call it together.
        """
        return False

    def say(self, text):
        """Print a line on stderr, on rank 0."""
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)

    def agree(self, values, **folders):
        """Raise InputError on all ranks, which names each difference, unless all ranks give an equal dict.

        folders: {flag: the checkpoint folder that it names, or None}, whose contents are compared too.
        """

    def contents(self, folder):
        """Return a digest of a checkpoint folder for agree(), or None for a process alone, and without a folder."""

    def together(self):
        """Return a context: if one rank raises InputError in it, all ranks do at its end, and none waits for ever."""
        return contextlib.nullcontext()


def choose_device(device, rank=0, tp_size=1, own_gpu=False):
    """Return the torch.device of a rank, as join says, made CUDA's current one. own_gpu: no other rank sees its GPU."""
    known = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    local_rank, local = local_rank_and_size(rank, tp_size)
    if device is None:
        device = "cuda" if own_gpu or 0 < local < len(known) else "cpu"
        share = " (to try several on one: --device cuda:0)" * (len(known) > 1)
        hidden = os.path.exists("/proc/driver/nvidia/version") and "CUDA_VISIBLE_DEVICES" not in os.environ
        if device == "cpu" and local_rank == 0 and (hidden or len(known) > 1):
            words = f"PyTorch {torch.__version__} sees {len(known) - 1} GPUs for {local} ranks here"
            print(f"running on the CPU: {words}; each rank needs one{share}", file=sys.stderr)
    if device == "cuda":
        device = f"cuda:{local_rank if tp_size > 1 and not own_gpu else 0}"
    if device not in known:
        share = "; --device cuda:0 lets ranks share that one, to try them" * (local > len(known) - 1 > 0)
        raise InputError(f"no such device: {device}; this machine has {', '.join(known)}{share}")
    if device != "cpu":
        try:
            torch.cuda.set_device(torch.device(device))
        except RuntimeError as e:  # above all a driver that is too old for this PyTorch
            raise InputError(f"{device} cannot be used: {first_line(e)} (--device cpu does without)") from None
        if tp_size > 1 and "MIG" in torch.cuda.get_device_name(device):
            raise InputError(f"{device} is a slice of a GPU (MIG), which NCCL does not connect: run one rank alone")
        torch.backends.cuda.enable_cudnn_sdp(False)  # its attention makes a plan for each new length of a prompt
    return torch.device(device)
