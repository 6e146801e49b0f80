"""How ranks meet, sum and leave: they are compared, make a process group, and the first that leaves says why.

A process alone imports this file only to refuse a --comm.
"""

import collections
import contextlib
import functools
import hashlib
import json
import os
import re
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ladder.checkpoints.compare import digest
from ladder.errors import InputError, StoreLost, first_line
from ladder.progress import progress
from ladder.ranks import gloo, launch

_gathers = collections.Counter()  # of each number of ranks: the Worlds of a process share the store


@functools.cache
def store():
    """Return the key-value store that torchrun's environment describes."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun holds it already, or has died
    try:
        result = next(dist.rendezvous("env://", timeout=timedelta(seconds=10 if agent else 300)))[0]
    except (dist.DistError, ValueError, OSError) as e:
        raise InputError(f"WORLD_SIZE is set, but there is no store to meet at: {first_line(e)}") from None
    result.set_timeout(timedelta(seconds=300))
    return result


class World(launch.World):
    """Ranks that have met; see launch.World."""

    alone = False

    def gather(self, value):
        """Unlike a collective, this hears Ctrl-C and the end of other ranks. JSON, as anyone may write to the store.

        Each value is None or of one type on all ranks. Raises InputError for what no rank has written.
        """
        _gathers[self.tp_size] += 1
        number = _gathers[self.tp_size]
        keys = [f"gathered {self.tp_size} {number} {rank}" for rank in range(self.tp_size)]
        store().set(keys[self.rank], json.dumps(value))
        while not store().check(keys):
            if code := ended(store()):
                raise SystemExit(code)  # another rank says why
            time.sleep(0.005)
        # all have come here, and so have read what was gathered before, which must not fill the store for days
        store().delete_key(f"gathered {self.tp_size} {number - 1} {self.rank}")
        return [read_value(*written, value) for written in zip(keys, store().multi_get(keys), strict=True)]

    def agree(self, values, **folders):
        values |= {f"contents of --{flag}": folder and digest(folder) for flag, folder in folders.items()}
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


def read_value(key, text, own):
    """Return the value that a rank has written to the store as JSON. own: this rank's. Raises InputError."""
    with contextlib.suppress(ValueError, RecursionError):
        value, kind = json.loads(text), list if isinstance(own, tuple) else type(own)
        if value is None or own is None or isinstance(value, kind):
            return value
    raise InputError(f"another program has written {key!r} to this run's store: give each run a port of its own")


# ---- How ranks sum ---------------------------------------------------------------------------------------------------
# --comm NAME: once the ranks have met, each calls COLLECTIVES[NAME](world), which returns the process group that
# TensorParallel sums with, or raises InputError on all ranks alike.


def connect_auto(world):
    """Sum in shared memory on CPUs of one node, else as library does: no GPU has run one-shot sums."""
    try:
        if world.device.type == "cpu" and len({*world.nodes}) == 1:
            return collective("shared-memory")(world)
    except InputError as e:
        world.say(f"gloo carries the all-reduces: {e}")
    return world.group


def connect_library(world):
    """Sum by gloo or NCCL."""
    return world.group


def connect_shared_memory(world):
    """Sum in memory that the CPU ranks of one machine share."""
    from ladder.ranks import shared_memory

    return shared_memory.connect(world)


def connect_one_shot(world):
    """Sum by kernels that read the peer GPUs' memory, which no GPU has run."""
    from ladder.ranks import one_shot

    return one_shot.connect(world)


COLLECTIVES = {
    "auto": connect_auto, "library": connect_library, "shared-memory": connect_shared_memory,
    "one-shot": connect_one_shot,
}  # fmt: skip


def collective(name):
    """Return the function of COLLECTIVES of this name. Raises InputError."""
    if name not in COLLECTIVES:
        raise InputError(f"--comm {name} is unknown: use one of {', '.join(sorted(COLLECTIVES))}")
    return COLLECTIVES[name]


# ---- How ranks meet and leave ----------------------------------------------------------------------------------------


def visible_gpus(device=None):
    """Return the UUIDs of the GPUs that this process sees, none if it is to run on the CPU."""
    try:
        count = 0 if device == "cpu" else torch.cuda.device_count()
        return [str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]
    except RuntimeError:  # choose_device says why
        return []


def meet(device, flags):
    """Choose this rank's device, compare the ranks and connect them; returns the World. See launch.join."""
    rank, tp_size = launch.rank_and_size()
    connect = collective(flags.get("comm", "auto"))
    world = World(rank, tp_size, None, shares=flags.get("shares"))
    if dist.is_initialized():
        raise InputError("the ranks have met: name the same device in each load()")
    from ladder.ranks import watch

    launch.watch = watch.Watch(store(), rank, tp_size)
    launch.watch.start()
    gpus = world.gather(" ".join(visible_gpus(device)))
    own_gpu = [len(str(each).split()) for each in gpus] == [1] * tp_size and len({*gpus}) == tp_size
    world.device = launch.choose_device(device, rank, tp_size, own_gpu)
    make_group(world, flags)
    world.group = connect(world)
    progress.at("preparation", timed=False)
    return world


def make_group(world, flags):
    """Compare the ranks, and make torch.distributed's default group: NCCL on GPUs, else gloo. Raises InputError."""
    _, local = launch.local_rank_and_size(world.rank, world.tp_size)
    # torchrun's number of the node, or what comes close
    world.nodes = world.gather(os.environ.get("GROUP_RANK", str(world.rank // local)))
    world.agree(_start(flags, world.device))
    backend, on_gpu, last_resort = "gloo", {}, timedelta(minutes=30)  # ladder/ranks/watch.py reports hangs sooner
    if world.device.type == "cuda":  # its kernels run first: the sum of a sublayer is waited for before other work
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = last_resort  # else each rank warns that this one is the default
        backend, on_gpu = "nccl", {"device_id": world.device, "pg_options": options}
    elif len({*world.nodes}) > 1:
        gloo.choose_interface(store(), world.rank, world.tp_size)
    before, ranks = gloo.threads(), {"rank": world.rank, "world_size": world.tp_size}
    dist.init_process_group(backend, store=store(), timeout=last_resort, **ranks, **on_gpu)
    if backend == "gloo":
        gloo.let_preempt(gloo.threads() - before)
    dist.barrier()  # so that no rank finds bad input and leaves while another still connects to it
    world.group = dist.group.WORLD


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


END = re.compile(rb"(\d{1,3}) (\d+) (\S+)")  # the exit code, the rank and the node of the first rank that leaves


def ended(store):
    """Return the exit code of the first rank that has left, or None: strangers may write to the store, too."""
    end = END.fullmatch(store.get("ended")) if store.check(["ended"]) else None
    return int(end[1]) if end else None


def leave_first(code, rank, error):
    """Return (the exit code, that of the first rank that leaves, whether that is this one, which leaves with `code`).

    On the first one's node of torchrun the others leave with 0: of each that fails torchrun prints seven lines.
    """
    if store.cache_info().currsize and not isinstance(error, StoreLost):
        with contextlib.suppress(Exception):
            node = os.environ.get("GROUP_RANK")  # None without torchrun
            own = f"{code} {rank} {node}"
            text = store().compare_set("ended", "", own)
            if not END.fullmatch(text):  # a stranger's, which the other ranks do not heed
                text = store().compare_set("ended", text, own)
            code, first, its_node = text.decode().split()
            speaks = int(first) == rank
            return int(code) if speaks or node is None or node != its_node else 0, speaks
    return code, os.environ.get("LOCAL_RANK", "0") == "0"  # without a store, which goes with torchrun
