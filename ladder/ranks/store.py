"""torchrun's key-value store: what ranks tell one another by it before and beside their collectives."""

import collections
import contextlib
import functools
import json
import os
import re
import time
from datetime import timedelta

import torch.distributed as dist

from ladder.errors import InputError, StoreLost, first_line

_gathers = collections.Counter()  # of each number of ranks: the Worlds of a process share the store
END = re.compile(rb"(\d{1,3}) (\d+) (\S+)")  # the exit code, the rank and the node of the first rank that leaves


@functools.cache
def torchrun_store():
    """Return the store that torchrun's environment describes. Raises InputError if it cannot be reached."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun holds it already, or has died
    try:
        result = next(dist.rendezvous("env://", timeout=timedelta(seconds=10 if agent else 300)))[0]
    except (dist.DistError, ValueError, OSError) as e:
        raise InputError(f"WORLD_SIZE is set, but there is no store to meet at: {first_line(e)}") from None
    result.set_timeout(timedelta(seconds=300))
    return result


def gather(value, rank, tp_size):
    """Return the values of all ranks, as World.gather does.

    Unlike a collective, this hears Ctrl-C and the end of other ranks. Values are JSON, as anyone may write to the
    store. Each is None or of one type on all ranks. Raises InputError for what no rank has written.
    """
    _gathers[tp_size] += 1
    number, store = _gathers[tp_size], torchrun_store()
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
        value, kind = json.loads(text), list if isinstance(own, tuple) else type(own)
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
    return code, os.environ.get("LOCAL_RANK", "0") == "0"  # without a store, which goes with torchrun
