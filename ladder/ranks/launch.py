"""How a script starts and ends: where it runs, with whom, and why it ends."""

import contextlib
import ctypes
import errno
import functools
import json
import os
import signal
import sys
import time
import traceback

import torch
import torch.distributed as dist

from ladder.errors import InputError, Verdict, first_line
from ladder.progress import progress

watch = None  # the Watch of ladder/ranks/watch.py, if this process has one
at_end = []  # functions to call before this process ends, even if its main thread is stuck


def rank_and_size():
    """Return this process's rank and the number of ranks, as torchrun's environment says."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def local_rank_and_size(rank, tp_size):
    """Return this process's rank on its node and the node's number of ranks, without torchrun as on one node."""
    return int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", tp_size))


class World:
    """The ranks of a run, as join() returns them: this process alone, or the subclass in ladder/ranks/meeting.py.

    group: the process group of the model's collectives, or None for a single device. nodes: the name of each rank's
    node. shares: what each rank holds of a model, in proportion to the others. A process alone may simulate a rank of
    several, to measure it: it has their tp_size and a group. Raises InputError for shares of another number of ranks.
    """

    alone = True  # whether this process has no peers
    dist_group = None  # the group to pass to torch.distributed's own functions; None is its default group

    def __init__(self, rank, tp_size, device, group=None, shares=None):
        if shares and len(shares) != tp_size:
            numbers = f"--shares has {len(shares)} numbers, and this run's tp is {tp_size}"
            raise InputError(f"{numbers}: give one for each rank that torchrun starts")
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


# ---- The start -------------------------------------------------------------------------------------------------------


def join(device=None, flags=None):
    """Join the ranks that torchrun started with this one, if any; returns the World.

    device: "cpu", "cuda", "cuda:1", or None for CUDA if every local rank finds a GPU. Of several ranks each takes the
    GPU of its LOCAL_RANK, or the only one that it sees if each sees another one, as with Slurm. flags: {name: value} of
    the command line, equal on all ranks; "comm" names one of ranks.COLLECTIVES.
    Raises InputError for a device that is not there, and for ranks that were not started alike.
    """
    flags = flags or {}
    if rank_and_size()[1] > 1:
        from ladder.ranks import meeting

        return meeting.meet(device, flags)
    world = World(0, 1, None, shares=flags.get("shares"))
    if (comm := flags.get("comm", "auto")) != "auto":
        from ladder.ranks import meeting

        meeting.collective(comm)  # is there such a way?
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


def keep_freed_memory():
    """Let glibc reuse freed memory: otherwise a prefill spends its time on page faults."""
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, at its maximum
        mallopt(-1, 2**30)  # M_TRIM_THRESHOLD


# ---- Signals: whatever cleans up has its turn, as at Ctrl-C ----------------------------------------------------------

received = None  # the Terminated of a signal that came: a library may swallow the exception that it raised
_ENDING = (
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
)  # USR1: a batch system's before its limit, or ladder/ranks/watch.py's


class Terminated(KeyboardInterrupt):
    """A signal other than Ctrl-C's asks this process to end."""


def ignore_signals():
    """Let nothing interrupt the end of this process: a launcher sends one signal after another."""
    for number in signal.SIGINT, *_ENDING:
        signal.signal(number, lambda number, frame: None)  # of SIG_IGN Python reports a signal that comes right now


def terminate(number, frame):
    """End the main thread: a signal's handler."""
    global received
    ignore_signals()
    received = Terminated(signal.Signals(number).name)
    raise received


def heed_signals():
    """Let each of these signals raise Terminated in the main thread."""
    for number in _ENDING:
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores one
            signal.signal(number, terminate)
            # a library's pool ends its workers with SIGTERM
            os.register_at_fork(after_in_child=functools.partial(signal.signal, number, signal.SIG_DFL))
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: torchrun's death


# ---- The end ---------------------------------------------------------------------------------------------------------


def open_streams():
    """Open the null device where stdin, stdout or stderr is closed; show what stdout's encoding lacks as \\xe9."""
    for name, mode in ("stdin", "r"), ("stdout", "w"), ("stderr", "w"):
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, os.O_RDWR)  # the lowest descriptor that is free, so the closed one
            os.set_inheritable(fd, True)
            setattr(sys, name, os.fdopen(fd, mode))
    sys.stdout.reconfigure(errors="backslashreplace")


def run(main):
    """Run a script's main(), and end the process: what ends one rank ends all, and one of them says why in one line."""
    open_streams()
    heed_signals()
    error = None
    try:
        try:
            if rank_and_size()[1] > 1:
                from ladder.ranks import meeting

                meeting.store()  # now, so that of several ranks with bad flags one says so
            main()
            sys.stdout.flush()
            progress.at("the end")
            if dist.is_initialized():
                dist.barrier()
        finally:
            ignore_signals()
    except BaseException as e:
        error = e
    if isinstance(error, Exception):  # which a library may have raised for the one of a signal
        error = received or error
    if watch:
        error = watch.explain(error)
    with contextlib.suppress(OSError):
        sys.stdout.flush()  # what --help printed, or the text so far
    leave(error)


def printable(text):
    """Return a text in one line of at most 500 characters: what it quotes may come from a stranger's file."""
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return text if len(text) <= 500 else f"{text[:300]} ... {text[-190:]}"


def out_of_memory(error):
    """Return whether an exception says that memory is short; PyTorch's for CPUs is a plain RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def leave(error):
    """End this process with the exit code of the first rank that leaves, which also says why."""
    folder, script = os.path.split(sys.argv[0])
    script = os.path.basename(folder) if script == "__main__.py" else script  # of python -m PACKAGE
    rank, tp_size = rank_and_size()
    who = f"{script}: rank {rank} of {tp_size}" if tp_size > 1 else f"{script}:"
    where = f" in {progress}" if tp_size > 1 or progress.phase != "start" else ""
    what = f"({type(error).__name__}: {printable(first_line(error))})"
    full = isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None
    endings = [
        (error is None, 0, ""),
        (isinstance(error, SystemExit), getattr(error, "code", 0) or 0, ""),
        (isinstance(error, InputError), 2, f"{script}: {printable(str(error))}"),
        # a progress bar may stand in the line before
        (isinstance(error, Verdict), 1, f"\n{script}: {printable(str(error))}"),
        (isinstance(error, Terminated), 143, f"{who} was stopped by {error}{where}"),
        (isinstance(error, KeyboardInterrupt), 130, str(error) or "interrupted"),
        (isinstance(error, BrokenPipeError), 1, ""),  # whoever read our output has gone
        (full, 1, f"{script}: the output cannot be written: {what}"),
        (out_of_memory(error), 1, f"{who} ran out of memory {what}{where}"),
        (True, 1, "".join(traceback.format_exception(error)) + f"{who} failed {what}{where}"),
    ]
    code, line = next((code, line) for matches, code, line in endings if matches)
    speaks = True
    if tp_size > 1:
        from ladder.ranks import meeting

        code, speaks = meeting.leave_first(code, rank, error)
    if line and speaks:
        print(line, file=sys.stderr, flush=True)
    if line and (path := os.environ.get("TORCHELASTIC_ERROR_FILE")):  # what torchrun's report then ends with
        # which is the earliest failure's, and those that torchrun then stops may be of the same second
        earlier = str(int(time.time()) - 1)
        cause = {"message": line.strip().splitlines()[-1], "extraInfo": {"timestamp": earlier}}
        with contextlib.suppress(OSError), open(path, "w") as f:
            json.dump({"message": cause}, f)
    for function in at_end:
        with contextlib.suppress(Exception):  # the terminal may have gone
            function()
    if isinstance(error, OSError):  # what is still to be written goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if tp_size > 1:
        os._exit(code)  # the destructors of a process group may wait for peers that are gone, or abort
    sys.exit(code)
