"""How several ranks meet: they choose their devices, are compared, and make the process group that sums."""

import collections
import contextlib
import hashlib
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ladder.checkpoints.compare import digest
from ladder.errors import InputError
from ladder.progress import progress
from ladder.ranks import gloo, shared_gpu, store, watch
from ladder.ranks.collectives import collective
from ladder.ranks.world import World, choose_device, local_rank_and_size, rank_and_size


class JoinedWorld(World):
    """The World of several ranks, which have met."""

    alone = False

    def gather(self, value):
        return store.gather(value, self.rank, self.tp_size)

    def contents(self, folder):
        return folder and digest(folder)

    def has_slow_link(self):
        return self.device.type == "cpu" and len({*self.nodes}) > 1 and sums_slowly(self)

    def agree(self, values, **folders):
        values |= {f"contents of --{flag}": self.contents(folder) for flag, folder in folders.items()}
        dicts = self.gather({name: str(value) for name, value in values.items()})
        dicts = [{name: str(value) for name, value in (one or {}).items()} for one in dicts]
        unlike = [name for name in collections.ChainMap(*dicts) if len({one.get(name) for one in dicts}) > 1]
        texts = [", ".join(f"{name} {one.get(name, 'not given')[:60]}" for name in unlike) for one in dicts]
        others = [f"rank {rank} with {text}" for rank, text in enumerate(texts) if text != texts[0]]
        if others:
            raise InputError(f"the ranks were not started alike: {'; '.join(others)}; rank 0 with {texts[0]}")

    @contextlib.contextmanager
    def together(self):
        error = None
        try:
            yield
        except InputError as e:
            error = str(e)
        for message in self.gather(error):
            if message is not None:
                raise InputError(message)


def visible_gpus(device=None):
    """Return the UUIDs of the GPUs that this process sees, none if it is to run on the CPU."""
    try:
        count = 0 if device == "cpu" else torch.cuda.device_count()
        return [str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]
    except RuntimeError:  # choose_device says why
        return []


def meet(device, flags):
    """Choose this rank's device, compare the ranks and connect them; returns the World. See launch.join."""
    rank, tp_size = rank_and_size()
    connect = collective(flags.get("comm", "auto"))
    world = JoinedWorld(rank, tp_size, None, shares=flags.get("shares"))
    if dist.is_initialized():
        raise InputError("the ranks have met: name the same device in each load()")
    watch.start(rank, tp_size)
    visible = visible_gpus(device)
    gpus = world.gather(" ".join(visible))
    own_gpu = [len(str(each).split()) for each in gpus] == [1] * tp_size and len({*gpus}) == tp_size
    world.device = choose_device(device, rank, tp_size, own_gpu)
    world.devices = world.gather(visible[world.device.index] if world.device.type == "cuda" else f"CPU of {rank}")
    make_group(world, flags)
    world.group = connect(world)
    if rank > 0 and world.nodes.index(world.nodes[rank]) == rank:  # the first one of another machine
        there = os.environ.get("MASTER_ADDR", "rank 0's machine")
        print(f"all {tp_size} ranks have met; what they compute is printed at {there}", file=sys.stderr, flush=True)
    progress.at("preparation", timed=False)
    return world


def sums_slowly(world):
    """Return whether a sum of 256 KB takes more than 8 ms, as over 100 Mbit/s, but not over 1 Gbit/s: the same on all.

    Over a slow link two halves of a short prompt are computed faster than the whole: the one while the other's sums
    travel. Over 1 Gbit/s that costs more than it hides (docs/two-machines.md).
    """
    partial = torch.zeros(2**17, dtype=torch.bfloat16)
    seconds = []
    for _ in range(4):
        world.gather(None)  # all ranks begin together
        start = time.perf_counter()
        world.group.allreduce([partial]).wait()
        seconds.append(time.perf_counter() - start)
    return max(world.gather(min(seconds[1:]))) > 0.008  # the first one opens connections


def node_name(rank, tp_size):
    """Return torchrun's number of this rank's node or, of another launcher, the machine's name and what comes close."""
    _, local = local_rank_and_size(rank, tp_size)
    return os.environ.get("GROUP_RANK", f"{socket.gethostname()} {rank // local}")


def make_group(world, flags):
    """Compare the ranks, and make torch.distributed's default group: NCCL on GPUs, else gloo. Raises InputError.

    Where ranks share a GPU and NCCL refuses that, gloo sums, through the host's memory.
    """
    world.nodes = world.gather(node_name(world.rank, world.tp_size))
    world.agree(_start(flags, world.device))
    backend = "gloo"
    on_gpu = {}
    last_resort = timedelta(minutes=30)  # ladder/ranks/watch.py reports hangs sooner
    on_gpus = world.device.type == "cuda"
    if on_gpus and (not world.shares_gpu or shared_gpu.prepare(world)):
        # its kernels run first: the sum of a sublayer is waited for before other work
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = last_resort  # else each rank warns that this one is the default
        backend = "nccl"
        on_gpu = {"device_id": world.device, "pg_options": options}
    elif len({*world.nodes}) > 1:
        gloo.choose_interface(store.torchrun_store(), world.rank, world.tp_size)
    before = gloo.threads()
    ranks = {"rank": world.rank, "world_size": world.tp_size}
    dist.init_process_group(backend, store=store.torchrun_store(), timeout=last_resort, **ranks, **on_gpu)
    if backend == "gloo":
        gloo.let_preempt(gloo.threads() - before)
    dist.barrier()  # so that no rank finds bad input and leaves while another still connects to it
    world.group = dist.group.WORLD
    if backend == "gloo" and on_gpus:
        world.group = shared_gpu.ThroughHost("gloo", world.group, world.rank, world.tp_size)


# of each rank alone: where its files lie (their contents are compared), and what only rank 0 writes
OWN = {"device", "checkpoint", "draft", "compare", "distill", "text", "valid", "json"}
ROOT = Path(__file__).parents[2]


def _start(flags, device):
    """Return what all ranks are to be started with alike, by name."""
    packages = [path.parent for path in ROOT.glob("*/__init__.py")]
    inside = (path for package in packages for path in package.rglob("*") if path.suffix in (".py", ".cpp", ".h"))
    files = sorted([*ROOT.glob("*.py"), *inside])
    code = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]
    start = {"the script": os.path.basename(sys.argv[0]), "the code": code}
    start |= {"torch": torch.__version__, "device": device.type}
    flags = {f"--{name.replace('_', '-')}": value for name, value in flags.items() if name not in OWN}
    return start | {name: value for name, value in flags.items() if value is not None and value is not False}
