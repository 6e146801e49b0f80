"""torchrun's key-value store: what ranks tell one another by it before and beside their collectives."""

import collections
import contextlib
import functools
import json
import os
import queue
import re
import secrets
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from ladder.errors import InputError, StoreLost, Verdict, first_line
from ladder.ranks.world import rank_and_size

_gathers = collections.Counter()  # of each number of ranks: the Worlds of a process share the store
END = re.compile(rb"(\d{1,3}) (\d+) (\S+)")  # the exit code, the rank and the node of the first rank that leaves
TICK = 1  # seconds between the looks of ladder/ranks/watch.py
IMPORTS = 60  # seconds that a rank may start later than another, on top of the timeout


def timeout():
    """Return after how many seconds without progress a run ends, or 0 for never. Raises InputError."""
    try:
        seconds = float(text := os.environ.get("LADDER_TIMEOUT", "60"))
    except ValueError:
        raise InputError(f"LADDER_TIMEOUT={text!r} is no number of seconds: give one, or 0 to wait for ever") from None
    return max(seconds, 2 * TICK) if seconds > 0 else 0


@functools.cache
def torchrun_store():
    """Return the keys of this attempt of this run in the store that torchrun's environment describes.

    Raises InputError if the store cannot be reached, StoreLost if it goes, and what own_keys raises.
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun holds it already, or has died
    # The agent answers at once, but a client asks for the peer's name, for which a dead name server lets it wait 10 s.
    limit = 30 if agent else timeout() + IMPORTS if timeout() else 10**6
    results = queue.Queue()

    def connect():  # it waits for ever if another program listens there, which does not answer
        try:
            results.put(next(dist.rendezvous("env://", timeout=timedelta(seconds=limit)))[0])
        except Exception as e:
            results.put(first_line(e))

    threading.Thread(target=connect, daemon=True).start()
    try:
        result = results.get(timeout=limit + 2)
    except queue.Empty:
        result = f"{where()} does not answer"
    if isinstance(result, str):
        slow = "; if a name server does not answer here, list the machines in /etc/hosts" * ("timed out" in result)
        raise InputError(f"WORLD_SIZE is set, but there is no store to meet at: {result}{slow}")
    result.set_timeout(timedelta(seconds=300))
    try:
        return own_keys(result, *rank_and_size())
    except dist.DistError:  # without torchrun it is rank 0's
        raise StoreLost(f"the store at {where()} has gone before all ranks had come") from None


def where():
    return " ".join(f"{name}={os.environ[name]}" for name in ("MASTER_ADDR", "MASTER_PORT"))


def own_keys(store, rank, tp_size):
    """Return the part of a store that is this attempt's of this run, as soon as all of its ranks have come.

    The store may hold what an earlier attempt has left (torchrun --max-restarts), or be that of another run, which was
    given the same port. So rank 0 names the attempt, each other rank takes its place in it, once and for all, and
    rank 0, which lives, answers. Raises InputError for another run's store, and Verdict if a rank does not start.
    """
    torchrun = os.environ.get("TORCHELASTIC_RUN_ID")
    token = secrets.token_hex(8)
    limit = timeout()
    name = f"attempt of {torchrun}"
    late = f"did not start within {limit + IMPORTS:g} s (LADDER_TIMEOUT + {IMPORTS})"
    attempt = f"{token} {tp_size}" * (rank == 0)
    newest = ""
    start = time.monotonic()
    if rank == 0:
        store.set(name, attempt)
    while not attempt or not store.check([f"{attempt} answer"]):
        over = limit and time.monotonic() > start + limit + IMPORTS
        if rank == 0:
            missing = [f"rank {i}" for i in range(1, tp_size) if not store.check([f"{attempt} place {i}"])]
            if over or not missing:
                store.set(f"{attempt} answer", "late" if missing else "complete")
            if missing and over:
                raise Verdict(f"{' and '.join(missing)} of {tp_size} {late}")
        elif store.check([name]) and (text := store.get(name).decode(errors="replace")) != newest:
            newest = text
            start = time.monotonic()
            fits = newest.endswith(f" {tp_size}")
            # an earlier attempt may have been given up since this rank's predecessor did not start: its place is free
            given_up = torchrun and store.check([f"{newest} answer"])
            own = fits and not given_up and store.compare_set(f"{newest} place {rank}", "", token) == token.encode()
            if not own and not torchrun:
                raise InputError(f"rank {rank} of {tp_size} found another run at {where()}: give each run its own port")
            attempt = newest if own else ""  # torchrun's earlier attempt: rank 0 is about to name another one
        elif over:
            raise Verdict(f"rank 0 of {tp_size} {late}") if rank == 1 else SystemExit(1)
        time.sleep(0.005)
    if store.get(f"{attempt} answer") != b"complete":
        raise SystemExit(1)  # rank 0 says why
    return dist.PrefixStore(attempt, store)


def gather(value, rank, tp_size):
    """Return the values of all ranks, as World.gather does.

    Unlike a collective, this hears Ctrl-C and the end of other ranks. Values are JSON, as anyone may write to the
    store. Each is None or of one type on all ranks. Raises InputError for what no rank has written.
    """
    _gathers[tp_size] += 1
    number = _gathers[tp_size]
    store = torchrun_store()
    keys = [f"gathered {tp_size} {number} {rank}" for rank in range(tp_size)]
    store.set(keys[rank], json.dumps(value))
    while not store.check(keys):
        if code := ended(store):
            raise SystemExit(code)  # another rank says why
        time.sleep(0.005)
    # all have come here, and so have read what was gathered before, which must not fill the store for days
    store.delete_key(f"gathered {tp_size} {number - 1} {rank}")
    return [read_value(*written, value) for written in zip(keys, store.multi_get(keys), strict=True)]


def read_value(key, text, own):
    """Return the value that a rank has written to the store as JSON. own: this rank's. Raises InputError."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text)
        kind = list if isinstance(own, tuple) else type(own)
        if value is None or own is None or isinstance(value, kind):
            return value
    raise InputError(f"another program has written {key!r} to this run's store: give each run a port of its own")


def ended(store):
    """Return the exit code of the first rank that has left, or None: strangers may write to the store, too."""
    end = END.fullmatch(store.get("ended")) if store.check(["ended"]) else None
    return int(end[1]) if end else None


def leave_first(code, rank, error):
    """Return (the exit code of this rank, which would leave with `code`, and whether it says why the run ends).

    The first rank that leaves says why, and the others leave with its code. But on its node of torchrun they leave with
    0, since torchrun prints seven lines for each rank that fails.
    """
    if torchrun_store.cache_info().currsize and not isinstance(error, StoreLost):
        with contextlib.suppress(Exception):
            node = os.environ.get("GROUP_RANK")  # None without torchrun
            own = f"{code} {rank} {node}"
            text = torchrun_store().compare_set("ended", "", own)
            if not END.fullmatch(text):  # a stranger's, which the other ranks do not heed
                text = torchrun_store().compare_set("ended", text, own)
            code, first, its_node = text.decode().split()
            speaks = int(first) == rank
            return int(code) if speaks or node is None or node != its_node else 0, speaks
    alone = "TORCHELASTIC_RUN_ID" not in os.environ or type(error) is Verdict  # without a store nobody else says it
    return code, alone or os.environ.get("LOCAL_RANK", "0") == "0"
