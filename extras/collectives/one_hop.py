"""The collectives of CPU ranks on several machines through one_hop.cpp: how the machines are connected.

gloo's all-reduce is a ring: 2 (p - 1) messages one after another, so 2, 6, 14 latencies for 2, 4, 8 machines, and more
because receivers first say that they are ready. Here a message goes to all other machines at once: one latency.
"""

import contextlib
import itertools
import socket
from pathlib import Path

import torch

from kernels import cxx, shared_memory
from runtime.errors import InputError

BUFFER = 2**18  # bytes that a connection takes while its peer computes; one_hop.cpp counts on them
PATIENCE = 30  # seconds

_numbers = itertools.count()


@contextlib.contextmanager
def reachable(world):
    """Turn what connections of one rank meet in this block into an InputError of all ranks."""
    with world.together():
        try:
            yield
        except OSError as e:
            raise InputError(f"the machines do not reach one another: {e}") from None


class Node:
    """The ranks of this rank's node, as a launch.World: the first `size` ranks are one node, and so on."""

    def __init__(self, world, size):
        self.world, self.number, self.rank, self.tp_size = world, world.rank // size, world.rank % size, size

    def gather(self, value):
        return self.world.gather(value)[self.number * self.tp_size :][: self.tp_size]

    def tell(self, value):
        return self.gather(value)[0]


def connect(world, address, places):
    """Return a process group of the world's ranks, whose group so far carries large messages.

    world: a launch.World. address: this machine's, for the others. places: the name of each rank's node. Where all
    nodes have as many ranks, those of a node share memory, and rank i of a node has a connection to rank i of each
    other; else every two ranks have one. Raises InputError, on all ranks alike, without a C++ compiler, and where the
    machines do not reach one another.
    """
    first = places.index(places[world.rank]) == world.rank
    for turn in (True, False):  # on each node one rank compiles, then the others load
        with world.together():
            if first == turn:
                try:
                    cxx.load_group(Path(__file__).with_name("one_hop.cpp"), "join_hops", "one hop between machines")
                    shared_memory.build()  # for its settle
                except cxx.CompilerError as e:
                    raise InputError(str(e)) from None
    size = places.count(places[0])
    alike = places == [place for place in dict.fromkeys(places) for _ in range(size)]
    node, memory = Node(world, size if alike else 1), None
    if node.tp_size > 1:
        with contextlib.suppress(shared_memory.Unavailable):
            memory = shared_memory.connect(node)
        if None in world.gather(memory and memory.group_name):
            node, memory = Node(world, 1), None
    with reachable(world):
        if not address:
            raise OSError("no IPv4 address leads from one to another")
        listener = socket.create_server((address, 0))
    with listener:
        listener.settimeout(PATIENCE)
        names = world.gather(listener.getsockname())[node.rank :: node.tp_size]  # of rank i on each node
        with reachable(world):
            peers = {number: socket.create_connection(names[number], PATIENCE) for number in range(node.number)}
            for peer in peers.values():
                peer.sendall(node.number.to_bytes(4))
            for _ in range(node.number + 1, len(names)):
                peer = listener.accept()[0]
                peers[int.from_bytes(peer.recv(4, socket.MSG_WAITALL))] = peer
    for peer in peers.values():
        peer.settimeout(None)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
    sockets = [peers[number].detach() if number in peers else -1 for number in range(len(names))]
    name, shared = f"one-hop-{next(_numbers)}", memory.group_name if memory else ""
    torch.ops.ladder.join_hops(sockets, world.rank, world.tp_size, world.group.group_name, shared, name)
    return torch._C._distributed_c10d._resolve_process_group(name)
