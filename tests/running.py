"""Functions on several ranks, scripts as a user starts them, and writers that are killed."""

import contextlib
import copy
import io
import itertools
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from traceback import format_exception

import pytest
import torch
import torch.distributed as dist
from helpers import ROOT, stop_using_kernels
from tqdm import tqdm

from ladder.ranks import gloo, launch
from ladder.ranks.collectives import connect_auto
from ladder.ranks.meeting import JoinedWorld
from ladder.ranks.world import World

HANGS = 300  # seconds until a process is thought to hang: the ranks' own time limits are half an hour

# ---------------------------------------------------------------------------------------------------------------------
# Ranks: one pool of processes for all tests of this process, because to start one takes longer than most tests


RANKS = 4
_ranks = []  # for each rank an executor of one process
_worlds = {}  # in such a process: {number of ranks: its World}


def run_ranks(ranks, function, *args, timeout=HANGS):
    """[function(world, *args) of each rank], each rank a process of a World. ranks: their number, at most 4, or shares.

    A rank alone is this process. A rank that fails or hangs fails the test, and the next test gets new ranks.
    """
    shares = (1,) * ranks if isinstance(ranks, int) else ranks
    if len(shares) == 1:
        return [function(World(0, 1, torch.device("cpu")), *args)]
    if not _ranks:
        port, context = free_port(), multiprocessing.get_context("forkserver")  # its server imports once, for all ranks
        context.set_forkserver_preload(["torch", "torch._dynamo", "torch._inductor.compile_fx"])
        _ranks.extend(ProcessPoolExecutor(1, context, _join, (rank, port)) for rank in range(RANKS))
        for rank in _ranks:  # they all join, also where fewer are asked
            rank.submit(int)
    work = pickle.dumps((shares, function, args))  # tensors by value
    futures = [rank.submit(_call, work) for rank in _ranks[: len(shares)]]
    done, waiting = wait(futures, timeout, FIRST_EXCEPTION)  # the other ranks may wait for that one forever
    errors = {rank: future.exception() for rank, future in enumerate(futures) if future in done}
    errors = [f"rank {rank}: {''.join(format_exception(error))}" for rank, error in errors.items() if error]
    if errors or waiting:
        stop_ranks()
        pytest.fail("\n".join(errors) or f"no answer in {timeout} s", pytrace=False)
    return [pickle.loads(future.result()) for future in futures]


def stop_ranks():
    for rank in _ranks:
        for process in [*(rank._processes or {}).values()]:
            process.kill()
        rank.shutdown()
    _ranks.clear()


def _join(rank, port):
    """Make a World of each size in a rank's process, which has one thread."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(LADDER_TIMEOUT="0", GLOO_SOCKET_IFNAME="lo")
    _worlds[RANKS] = launch.join("cpu")
    before = gloo.threads()
    for size in range(2, RANKS):
        group = dist.new_group(range(size))
        _worlds[size] = JoinedWorld(rank, size, torch.device("cpu"))
        _worlds[size].dist_group = group
    gloo.let_preempt(gloo.threads() - before)  # as join() does with those of its group
    for size in range(max(2, rank + 1), RANKS):
        world = _worlds[size]
        world.nodes = _worlds[RANKS].nodes[:size]
        world.group = world.dist_group
        world.group = connect_auto(world)


def _call(work):
    shares, function, args = pickle.loads(work)
    stop_using_kernels()  # what another test's model let stand in
    world = copy.copy(_worlds[len(shares)])
    world.shares = shares
    return pickle.dumps(function(world, *args))


def main_on_ranks(ranks, main, *args):
    """[(what it printed, what it said on stderr)] of main(args) of a script on each rank of the pool."""
    return run_ranks(ranks, call_main, main, [str(arg) for arg in args])


def call_main(world, main, args):
    out = io.StringIO()
    err = io.StringIO()
    with pytest.MonkeyPatch.context() as m, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        m.setattr(launch, "join", lambda device, flags=None: world)
        m.setenv("RANK", str(world.rank))
        m.setenv("WORLD_SIZE", str(world.tp_size))
        main(args)
    return out.getvalue(), err.getvalue()


# ---------------------------------------------------------------------------------------------------------------------
# Scripts


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def command(name, *args, ranks=1):
    """What starts a script of the project, on so many ranks, as a user would."""
    words = [sys.executable, str(ROOT / name), *map(str, args)]
    if ranks > 1:
        one_machine = "--standalone", "--local_addr=127.0.0.1"  # also where its own name does not resolve
        words[:1] = [sys.executable, "-m", "torch.distributed.run", *one_machine, f"--nproc_per_node={ranks}"]
    return words


def run_main(script, *args):
    """Run the main of a script in this process, with texts, numbers and paths as its flags."""
    script.main([str(arg) for arg in args])


def run_python(*words, cwd=ROOT, **how):
    """Run Python with these words behind its name; returns the finished process with its output as text."""
    return subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True, **how)


def script(name, *args, ranks=1, timeout=HANGS, stdin="", **environment):
    """Run a script of the project as a user would; returns the finished process with its output as text."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.run(
        command(name, *args, ranks=ranks), capture_output=True, text=True, timeout=timeout, env=env, input=stdin,
        errors="surrogateescape",
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Writers


def killed(write, out, event=None):
    """Run a writer in a fork. Kill it before its event-th change in the folder of `out`, and return whether it was."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    events = itertools.count()

    def hook(name, args):
        changes = name in ("os.remove", "os.rmdir") or any(str(out.parent) in str(a) for a in args)
        if changes and next(events) == event:
            os.kill(os.getpid(), signal.SIGKILL)

    tqdm.set_lock(threading.RLock())  # its own is shared with forks, of which one may be killed while it holds it
    torch.set_num_threads(1)  # a fork has none of the others, and would wait for them
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.addaudithook(hook)
    try:
        write(out)
    finally:
        os._exit(0)


def contents(folder, beginning=""):
    """{name: bytes} of the files whose names begin so, but for those with times in them."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in ("log.jsonl", "settings.json")]
    files = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    return {name: data for name, data in files.items() if f"{name}/".startswith(beginning)}


def check_kills(write, folder, step, appends=False):
    """Kill a writer before every step-th change: the output is complete or absent, and the next run completes it.

    The output of one that appends is the beginning of the complete one.
    """
    tqdm.monitor_interval = 0  # no thread beside this one, which forks
    (whole := folder / "whole").mkdir()
    assert not killed(write, whole / "out") and contents(whole, "out/")
    outputs = []
    for event in itertools.count(0, step):
        (some := folder / str(event)).mkdir()
        if not killed(write, some / "out", event):
            break
        outputs.append(contents(some, "out/"))
        if appends:
            assert (whole / "out").read_bytes().startswith(outputs[-1].get("out", b""))
        else:
            assert outputs[-1] in ({}, contents(whole, "out/"))
        killed(write, some / "out")
        assert contents(some) == contents(whole)
    assert len(outputs) > 2 and {} in outputs
