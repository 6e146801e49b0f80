"""The collectives of CPU ranks on several machines through one_hop.cpp: how the machines are connected. --comm one-hop.

gloo's all-reduce is a ring: 2 (p - 1) messages one after another, so 2, 6, 14 latencies for 2, 4, 8 machines, and more
because receivers first say that they are ready. Here a message goes to all other machines at once: one latency.
"""

import contextlib
import hmac
import os
import secrets
import socket
import time
from multiprocessing.connection import wait
from pathlib import Path

import torch

from extras.collectives import shared_memory
from extras.group import load_group, new_name
from kernels import gloo
from runtime import watch
from runtime.errors import InputError
from tp import COLLECTIVES, Collective

BUFFER = 2**18  # bytes that a connection takes while its peer computes; one_hop.cpp counts on them
PATIENCE = 30  # seconds for all nodes to connect
GREETING = 36  # bytes: a token of 32 and the number of a node


@contextlib.contextmanager
def reachable(world):
    """Turn an OSError of one rank in this block into an InputError on all ranks."""
    with world.together():
        try:
            yield
        except OSError as e:
            raise InputError(f"the machines do not reach one another: {e}") from None


def own_address():
    """Return the IPv4 address where gloo listens for other nodes. Raises OSError if there is none."""
    address = gloo.address_of(os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0])
    if not address:
        raise OSError("no IPv4 address leads from one to another")
    return address


class Node:
    """The ranks of this rank's node, as a launch.World: the first `size` ranks are one node, and so on."""

    def __init__(self, world, size):
        self.world, self.number, self.rank, self.tp_size = world, world.rank // size, world.rank % size, size

    def gather(self, value):
        return self.world.gather(value)[self.number * self.tp_size :][: self.tp_size]

    def tell(self, value):
        return self.gather(value)[0]


def accept(listener, token, numbers):
    """Return {number: socket} of the nodes with these numbers, which connect and send the token and their number.

    Anyone may connect: whoever sends something else, or nothing, is dropped. Raises TimeoutError.
    """
    deadline, peers, greetings = time.monotonic() + PATIENCE, {}, {}  # greetings: what each connection sent so far
    while missing := numbers - peers.keys():
        if time.monotonic() > deadline:
            raise TimeoutError(f"node {min(missing)} has not connected within {PATIENCE} s")
        for ready in wait([listener, *greetings], 1):
            if ready is listener:
                with contextlib.suppress(OSError):
                    greetings[listener.accept()[0]] = b""
                continue
            try:
                more = ready.recv(GREETING - len(greetings[ready]))
            except OSError:
                more = b""
            greetings[ready] += more
            if more and len(greetings[ready]) < GREETING:
                continue
            greeting = greetings.pop(ready)
            number = int.from_bytes(greeting[32:])
            known = len(greeting) == GREETING and hmac.compare_digest(greeting[:32], token)
            if known and number in numbers - peers.keys():
                peers[number] = ready
            else:
                ready.close()
    for stranger in greetings:
        stranger.close()
    return peers


def connect(world):
    """Return a process group of the world's ranks, whose group so far carries large messages.

    Where all nodes of the world have as many ranks, those of a node share memory, and rank i of a node has a connection
    to rank i of each other; else every two ranks have one. Raises InputError, on all ranks alike, without a C++
    compiler, and where the machines do not reach one another.
    """
    places = [*world.nodes]
    if world.device.type != "cpu":
        raise InputError("--comm one-hop is for CPUs")
    with world.together():
        load_group(Path(__file__).with_name("one_hop.cpp"), "join_hops", "one hop between machines")
        shared_memory.build()  # for its settle
    size = places.count(places[0])
    alike = places == [place for place in dict.fromkeys(places) for _ in range(size)]
    node, memory = Node(world, size if alike else 1), None
    if node.tp_size > 1:
        with contextlib.suppress(shared_memory.Unavailable):
            memory = shared_memory.connect(node)
        if None in world.gather(memory and memory.group_name):
            node, memory = Node(world, 1), None
    if memory:
        watch.monitors.add(shared_memory)
    with reachable(world):
        listener = socket.create_server((own_address(), 0))
    with listener:
        listener.setblocking(False)
        names = world.gather(listener.getsockname())[node.rank :: node.tp_size]  # of rank i on each node
        token = world.tell(secrets.token_hex(16)).encode()
        with reachable(world):
            peers = {number: socket.create_connection(names[number], PATIENCE) for number in range(node.number)}
            for peer in peers.values():
                peer.sendall(token + node.number.to_bytes(4))
            peers |= accept(listener, token, {*range(node.number + 1, len(names))})
    for peer in peers.values():
        peer.settimeout(None)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
    sockets = [peers[number].detach() if number in peers else -1 for number in range(len(names))]
    name, shared = new_name("one-hop"), memory.group_name if memory else ""
    torch.ops.ladder.join_hops(sockets, world.rank, world.tp_size, world.group.group_name, shared, name)
    return torch._C._distributed_c10d._resolve_process_group(name)


COLLECTIVES["one-hop"] = Collective("CPUs of several nodes: each message goes to all others at once", connect)
