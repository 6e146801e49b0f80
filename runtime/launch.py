"""How a script starts and ends: the flags that scripts share, the ranks, errors.

main() of every script parses its flags with a Parser, joins the other ranks with join(), and is run by run().
"""

import contextlib
import errno
import functools
import hashlib
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from formats.checkpoint import first_line
from kernels import gloo, shared_memory
from model import InputError
from runtime import watch

# ---------------------------------------------------------------------------------------------------------------------
# Ranks


PATIENCE = 5  # seconds until rank 0 says that it waits for others
DEADLINE = 300  # seconds until it gives up: they may still be importing


def rank_and_size():
    """This process's rank and the number of ranks, as torchrun's environment says."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


@functools.cache
def _store():
    """The key-value store that torchrun's environment describes, or None for a single process."""
    rank, tp_size = rank_and_size()
    if tp_size == 1:
        return None
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError):
        raise InputError("WORLD_SIZE is set, so MASTER_ADDR and MASTER_PORT must be: start it with torchrun") from None
    # the connection is tried again and again in C++, which a Ctrl-C has to end without Python's help
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        with _waiting(f"for the store at {host}:{port}"):
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun holds it, and has for long
                # or it has died, and what follows would try for long
                socket.create_connection((host, port), DEADLINE / 10).close()
                store = next(dist.rendezvous("env://", timeout=timedelta(seconds=DEADLINE / 10)))[0]
                store.set_timeout(timedelta(seconds=DEADLINE))
                return store
            # _wait_for_all says who is missing
            return dist.TCPStore(host, port, tp_size, rank == 0, wait_for_workers=False)
    except (dist.DistError, ValueError, OSError) as e:
        raise InputError(f"no store at MASTER_ADDR {host}, MASTER_PORT {port}: {first_line(e)}") from None
    finally:
        signal.signal(signal.SIGINT, before)


def _get(store, key):
    """What another rank sets, however long it takes: a collective would time out, and not hear a Ctrl-C."""
    while not store.check([key]):
        time.sleep(0.02)
    return json.loads(store.get(key))


_told = itertools.count()  # of all Worlds of a process, since they share the store


class World:
    """The ranks of a run: join() makes one.

    group: the process group of the model's collectives, or None for a single device. dist_group: that of everything
    else, which torch.distributed knows; None for its default. threads: the ids of those that carry the model's
    collectives on the CPU. A simulated rank (measure/link.py) has a tp_size and a group, but no peers.
    """

    def __init__(self, rank, tp_size, device, group=None, threads=(), simulated=False, dist_group=None):
        self.rank, self.tp_size, self.device, self.group = rank, tp_size, device, group
        self.threads, self.simulated, self.dist_group = threads, simulated, dist_group
        self.alone = simulated or tp_size == 1

    def gather(self, value):
        """The value of every rank, as a list in the order of the ranks."""
        if self.alone:
            return [value]
        values = [None] * self.tp_size
        dist.all_gather_object(values, value, group=self.dist_group)
        return values

    def tell(self, value):
        """Rank 0's value (of JSON's types), on every rank, however long rank 0 takes to have one."""
        if self.alone:
            return value
        key, store = f"told {next(_told)}", _store()
        if self.rank == 0:
            store.set(key, json.dumps(value))
        return _get(store, key)

    def first(self, work, *args):
        """Rank 0 does work(*args) while the others wait, however long; its InputError becomes one of all."""
        error = None
        if self.rank == 0:
            try:
                work(*args)
            except InputError as e:
                error = str(e)
        if error := self.tell(error):
            raise InputError(error)

    def agree(self, read):
        """Raise InputError, on all ranks, unless {name of what each has read: digest} is alike on all."""
        compare(self.gather(read))

    @contextlib.contextmanager
    def together(self):
        """An InputError of one rank in this block becomes one of all, so that none waits for it forever."""
        error = None
        try:
            yield
        except InputError as e:
            error = str(e)
        for message in self.gather(error):
            if message is not None:
                raise InputError(message)


def join(device=None, flags=None):
    """Join the process group that torchrun describes, if there is more than one process; returns the World.

    The model's collectives go through shared memory between the CPU ranks of one machine, else through gloo or NCCL.
    device: "cpu", "cuda", "cuda:1", or None for CUDA where each local rank finds a GPU. Under torchrun each rank takes
    the GPU of its LOCAL_RANK. flags: {name: value} of the command line, alike on all ranks. Raises InputError for a
    device that is not there, and for ranks that were not started alike.
    """
    rank, tp_size = rank_and_size()
    flags = flags or {}
    if tp_size == 1:
        return World(rank, tp_size, choose_device(device, rank, tp_size))
    if 0 < flags.get("timeout", 0) < 2:
        raise InputError(f"--timeout is {flags['timeout']:g} but must be 0 or at least 2 s")
    if _watch is not None:
        _watch.timeout = flags.get("timeout", _watch.timeout)
    store = _store()
    _wait_for_all(store, rank, tp_size)
    if _watch is not None:
        _watch.met.wait(1)
    device = choose_device(device, rank, tp_size)
    store.set(f"start {rank}", json.dumps(_start(flags, device), default=str))
    compare([_get(store, f"start {r}") for r in range(tp_size)])
    several_nodes = int(os.environ.get("LOCAL_WORLD_SIZE", tp_size)) < tp_size
    if device.type == "cpu" and several_nodes:
        gloo.choose_interface(store, rank, tp_size)
    backend = "nccl" if device.type == "cuda" else "gloo"
    on_gpu = {"device_id": device} if device.type == "cuda" else {}
    # NCCL takes its time; of several ranks one says what is wrong
    with _waiting(f"for {backend} to connect the ranks: does {backend.upper()}_SOCKET_IFNAME fit?", 4 * PATIENCE):
        before = gloo.threads()
        # the timeout is of what watch.py does not count
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=tp_size, timeout=timedelta(minutes=30), **on_gpu
        )
        threads = gloo.threads() - before if backend == "gloo" else set()
        gloo.let_preempt(threads)
        dist.barrier()  # so that no rank finds bad input and leaves while another still connects to it
    world = World(rank, tp_size, device, dist.group.WORLD, threads)
    if device.type == "cpu" and not several_nodes:
        try:
            world.group, world.threads = shared_memory.connect(world), ()
        except shared_memory.Unavailable as e:
            if rank == 0:
                print(f"gloo carries the all-reduces: {e}", file=sys.stderr, flush=True)
    return world


# of each rank alone: where its files lie (their contents are compared), and what only rank 0 writes
OWN = {"device", "checkpoint", "draft", "compare", "distill", "text", "valid", "json", "profile"}
ROOMS = ".", "runtime", "formats", "decoding", "kernels", "training", "measure"


def _start(flags, device):
    """What all ranks are to be started with alike, by name."""
    code, root = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(p for room in ROOMS for kind in ("*.py", "*.cpp") for p in (root / room).glob(kind)):
        code.update(path.read_bytes())
    start = {"the script": os.path.basename(sys.argv[0]), "the code": code.hexdigest()[:8]}
    start |= {"torch": torch.__version__, "device": device.type}
    flags = {f"--{name.replace('_', '-')}": v for name, v in flags.items() if name not in OWN}
    return start | {name: v for name, v in flags.items() if v is not None and v is not False}


def compare(starts):
    """Raise InputError, which names each difference, unless all ranks' dicts are equal."""

    def worded(start, names):
        values = [(name, start.get(name)) for name in names]
        return " and ".join(f"no {n}" if v is None else n if v is True else f"{n} {str(v)[:60]}" for n, v in values)

    found, all_names = [], {}
    for rank, start in enumerate(starts):
        names = [name for name in starts[0] | start if start.get(name) != starts[0].get(name)]
        if names[:1] == ["the script"]:  # which has other flags
            names = names[:1]
        if names:
            found.append(f"rank {rank} with {worded(start, names)}")
            all_names |= dict.fromkeys(names)
    if found:
        found.append(f"rank 0 with {worded(starts[0], all_names)}")
        raise InputError(f"the ranks were not started alike: {', '.join(found)}")


def choose_device(device, rank=0, tp_size=1):
    """The torch.device of a rank, as join says, made CUDA's current one."""
    gpus = torch.cuda.device_count()
    known = "cpu" + "".join(f", cuda:{i}" for i in range(gpus))
    if device is None:
        device = "cuda" if 0 < int(os.environ.get("LOCAL_WORLD_SIZE", tp_size)) <= gpus else "cpu"
    try:
        device = torch.device(device)
    except RuntimeError:
        raise InputError(f"no such device: {device}; this machine has {known}") from None
    if device.type == "cuda":
        index = device.index or 0 if tp_size == 1 else int(os.environ.get("LOCAL_RANK", rank))
        device = torch.device("cuda", index)
    at_most = gpus if device.type == "cuda" else 1
    if device.type not in ("cpu", "cuda") or (device.index or 0) >= at_most:
        raise InputError(f"no such device: {device}; this machine has {known}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _wait_for_all(store, rank, tp_size):
    """Wait until every rank is here; a rank with bad input never comes, and says so."""
    start, said = time.monotonic(), False
    size = int(store.compare_set("size", "", str(tp_size)))
    if size != tp_size:
        raise InputError(f"rank {rank} has WORLD_SIZE {tp_size}, another {size}: start all ranks alike")
    if not rank < tp_size or store.add(f"rank {rank}", 1) > 1:
        raise InputError(f"RANK {rank} of WORLD_SIZE {tp_size}: give each process one of 0 to {tp_size - 1}")
    store.add("ready", 1)
    while (ready := store.add("ready", 0)) < tp_size:
        waited = time.monotonic() - start
        if rank == 0 and waited > PATIENCE and not said:
            print(f"waiting for {tp_size - ready} of {tp_size} ranks ...", file=sys.stderr, flush=True)
            said = True
        if waited > DEADLINE:
            _stop(store, 1, f"only {ready} of {tp_size} ranks came within {DEADLINE} s")
        time.sleep(0.02)


@contextlib.contextmanager
def _waiting(what, patience=None):
    """Say what this process is waiting for, and end it when that takes too long: a connection may hang for ever."""

    over, launcher = threading.Event(), os.getppid()

    def wait():
        start, said = time.monotonic(), False
        while not over.wait(min(0.2, PATIENCE)):
            waited = time.monotonic() - start
            if waited > (patience or PATIENCE) and not said:
                print(f"rank {rank_and_size()[0]} is waiting {what}", file=sys.stderr, flush=True)
                said = True
            if waited > DEADLINE:
                print(f"rank {rank_and_size()[0]} has waited {DEADLINE} s {what}", file=sys.stderr, flush=True)
                os._exit(1)
            if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != launcher:
                print(f"torchrun has died while rank {rank_and_size()[0]} waited {what}", file=sys.stderr, flush=True)
                os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    try:
        yield
    finally:
        over.set()


# ---------------------------------------------------------------------------------------------------------------------
# Ends


_watch = None  # of this process, while run() runs a script on several ranks


def run(main):
    """Run a script's main(): what ends one rank ends all, and one of them says it in one line.

    Exit codes: 2 for bad input, 130 for Ctrl-C, 143 for another signal, 1 for anything else.
    """
    global _watch
    store = None
    for name, mode in ("stdin", "r"), ("stdout", "w"), ("stderr", "w"):
        if getattr(sys, name) is None:  # closed, as a daemon's may be
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    watch.heed_signals()
    try:
        try:
            store = _store()
            if store is not None:
                _watch = watch.Watch(store, *rank_and_size(), _stop_all)
                _watch.start()
            main()
            watch.at("the end")
            if dist.is_initialized():
                dist.barrier()
            _done()
            _part(store)
            _leave(0)
        except Exception:
            time.sleep(0)  # a signal that came meanwhile goes first: it may be what made the main thread wait no longer
            watch.hear_no_more()  # but what handles this must not be interrupted
            raise
    except SystemExit as e:  # of --help
        _done()
        _leave(e.code or 0)
    except InputError as e:
        _stop(store, 2, f"{_script()}: {e}")
    except watch.Terminated as e:
        ended, line = _why(1)
        _stop_all(store, line) if ended else _stop(store, 143, _said(f"was stopped by {e}"))
    except KeyboardInterrupt as e:
        _stop(store, 130, str(e) or "interrupted")
    except BrokenPipeError:  # whoever read our output has gone
        _drop_output()
        _stop(store, 1, "")
    except Exception as e:
        # what the compiler's wrapper in C++ (torch 2.13) raises only names the collective that failed
        lost = isinstance(e, dist.DistError) or "gloo" in str(e) or shared_memory.lost_peer()
        ended, line = _why(watch.GRACE if lost else 0)
        if ended:
            _stop_all(store, line)
        elif out_of_memory(e):
            _stop(store, 1, _said(f"ran out of memory ({first_line(e)})"))
        elif isinstance(e, OSError) and e.errno == errno.ENOSPC and e.filename is None:
            _drop_output()
            _stop(store, 1, f"{_script()}: the output cannot be written: {e.strerror}")
        elif store is None:
            raise
        _stop(store, 1, _said(f"failed ({type(e).__name__}: {first_line(e)})"), traceback.format_exc())


def _drop_output():
    """What is still to be written goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def out_of_memory(error):
    """Whether an exception says that there is no more memory, of the machine or of a GPU."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _script():
    return os.path.basename(sys.argv[0])


def _said(what):
    """A line that says what happened to this rank, and where."""
    rank, tp_size = rank_and_size()
    what = f"rank {rank} of {tp_size} {what}" if tp_size > 1 else what.removeprefix("was ")
    return f"{_script()}: {what}" + (f" in {watch.here}" if tp_size > 1 or watch.here.phase != "start" else "")


def _why(patience):
    return _watch.why(patience) if _watch is not None else (False, None)


def _done():
    if _watch is not None:
        _watch.done()


def _stop_all(store, line):
    """What a Watch has found ends this process; line: None where another rank says it."""
    _stop(store, 1, line and f"\n{_script()}: {line}")  # a progress bar may stand there


def _stop(store, code, line=None, trouble=""):
    """Leave; of the ranks that come here with a line the first prints it, and the others wait until it is out.

    They wait because the launcher kills all ranks when one exits. On each other node one rank repeats the line.
    trouble: what is printed before it.
    """
    if threading.current_thread() is threading.main_thread():
        watch.hear_no_more()
    node = os.environ.get("GROUP_RANK", "0")
    if _watch is not None and _watch.orphan:
        store = None

    def first(key):
        try:
            return store.add(key, 1) == 1
        except Exception:  # there is none, or none any more
            return os.environ.get("LOCAL_RANK", "0") == "0"

    if line is not None and first("stopping"):
        if line:
            print(f"{trouble}{line}", file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):  # of the store
            store.set("stopped", json.dumps([node, line, code]))
    elif store is not None:
        with contextlib.suppress(Exception):
            store.wait(["stopped"], timedelta(seconds=5))
            where, said, code = json.loads(store.get("stopped"))
            if said and where != node and first(f"stopping {node}"):
                print(said, file=sys.stderr, flush=True)  # on its terminal
    _part(store)
    _leave(code)


def _part(store):
    """Have no further need of the store; who holds it leaves last, but waits no longer than 3 seconds."""
    rank, tp_size = rank_and_size()
    with contextlib.suppress(Exception):
        left = store.add("left", 1)
        deadline = time.monotonic() + 3
        holds = rank == 0 and "TORCHELASTIC_RUN_ID" not in os.environ
        while holds and left < tp_size and time.monotonic() < deadline:
            time.sleep(0.02)
            left = store.add("left", 0)


def _leave(code):
    """End this process at once: the destructors of a process group may wait for peers that are gone, or abort."""
    if threading.current_thread() is not threading.main_thread():  # which hangs, and may hold what flushing needs
        os._exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    if dist.is_initialized() or _watch is not None:  # which may be asking the store, in C++
        os._exit(code)
    sys.exit(code)
