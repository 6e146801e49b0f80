"""The collectives of CPU ranks on several machines: a small message goes to every other machine at once.

gloo's all-reduce is a ring: 2 (p - 1) messages one after another, so 2, 6, 14 latencies for 2, 4, 8 machines, and two
more for each receiver to say that it is ready. Here it is one. A start hands its message to TCP, whose buffers take it,
and a wait reads those of the others: there is no thread that would take time of the cores that compute.
"""

import contextlib
import ctypes
import functools
import socket
from collections import deque

import torch
import torch.distributed as dist

from kernels import shared_memory
from kernels.group import Group, Pending

LARGEST = 2**16  # bytes of a message: of larger ones the ring sends fewer bytes in all, and in a thread of its own
IN_FLIGHT = 2**17  # bytes of messages that were sent, and whose answers are not yet read


class Node:
    """The ranks of this rank's node, as a launch.World: the first `size` ranks are one node, and so on."""

    def __init__(self, world, size):
        self.world, self.number, self.rank, self.tp_size = world, world.rank // size, world.rank % size, size

    def gather(self, value):
        return self.world.gather(value)[self.number * self.tp_size :][: self.tp_size]

    def tell(self, value):
        return self.gather(value)[0]


def connect(world, address, places):
    """Return the OneHopGroup of a launch.World's ranks.

    address: this machine's, for the others. places: the name of each rank's node. Where all nodes have as many ranks,
    those of a node share memory, and rank i of a node has a connection to rank i of each other; else every two ranks.
    """
    size = places.count(places[0])
    alike = places == [place for place in dict.fromkeys(places) for _ in range(size)]
    node, memory = Node(world, size if alike else 1), None
    if node.tp_size > 1:
        with contextlib.suppress(shared_memory.Unavailable):
            memory = shared_memory.connect(node)
        if None in world.gather(memory and memory.group_name):
            node, memory = Node(world, 1), None
    with socket.create_server((address, 0)) as listener:
        names = world.gather(listener.getsockname())[node.rank :: node.tp_size]  # of rank i on each node
        peers = {number: socket.create_connection(names[number]) for number in range(node.number)}
        for peer in peers.values():
            peer.sendall(node.number.to_bytes(4))
        for _ in range(node.number + 1, len(names)):
            peer = listener.accept()[0]
            peers[int.from_bytes(peer.recv(4, socket.MSG_WAITALL))] = peer
    for peer in peers.values():
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * IN_FLIGHT)
    return OneHopGroup(world, node, memory, peers)


class OneHopGroup(Group):
    """A process group whose small messages take one hop, and whose large ones go to the world's own group.

    memory: the process group of the ranks of this node, or None if there is but this one. They first add, then rank i
    of each node exchanges the i-th part with its peers, {number of the node: socket}, and then they gather the parts.

    Messages are completed in their order, as all ranks start them. A start first completes those that would make more
    than IN_FLIGHT: so a peer has twice that to read at most, which TCP's buffers take, and no start waits for ever.
    """

    def __init__(self, world, node, memory, peers):
        super().__init__("one-hop", world.group, world.rank, world.tp_size)
        self.node, self.memory, self.peers, self.n_nodes = node, memory, peers, len(peers) + 1
        self.pending, self.in_flight, self.completed = deque(), 0, 0

    def allreduce(self, tensors, opts=None):
        [tensor], size = tensors, self.node.tp_size
        if tensor.nbytes > LARGEST:
            return self.inner.allreduce(tensors, opts)
        part = whole = tensor.view(-1)
        if self.memory:
            self.memory.allreduce(tensors).wait()
            part = whole.view(size, -1)[self.node.rank] if len(whole) % size == 0 else whole
        parts = part.new_empty(self.n_nodes, len(part))

        def add():
            first, *rest = [part if number == self.node.number else row for number, row in enumerate(parts)]
            part.copy_(functools.reduce(torch.add, rest, first.float() if len(rest) > 1 else first))  # rounded once
            if part is not whole:
                self.memory.allgather_into_tensor_coalesced([whole], [part.clone()]).wait()

        return self._start(part, parts, add)

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):
        [whole], [part] = outputs, inputs
        if part.nbytes * self.node.tp_size > LARGEST:
            return self.inner.allgather_into_tensor_coalesced(outputs, inputs)
        parts = whole.view(self.n_nodes, -1)
        own = parts[self.node.number]
        if self.memory:
            self.memory.allgather_into_tensor_coalesced([own], inputs).wait()
        else:
            own.copy_(part.view(-1))
        return self._start(own, parts, lambda: None)

    def _start(self, own, parts, then):
        """Send own to all peers; return the Work that reads theirs into the parts (nodes, ...) and calls then()."""
        n_bytes = own.nbytes
        while self.pending and self.in_flight + n_bytes > IN_FLIGHT:
            self._complete(self.completed + 1)
        message = memory_of(own.data_ptr(), n_bytes)
        for peer in self.peers.values():
            with contextlib.suppress(OSError):  # a peer that is lost shows where its answer is read
                peer.sendall(message)
        self.in_flight += n_bytes
        self.pending.append((parts, n_bytes, then))
        count = self.completed + len(self.pending)
        return Pending(lambda: self._complete(count))

    def _complete(self, count):
        """Read the peers' answers to the first `count` messages."""
        while self.completed < count:
            parts, n_bytes, then = self.pending[0]
            for number, peer in self.peers.items():
                row = memory_of(parts.data_ptr() + number * n_bytes, n_bytes)
                try:
                    while row:
                        if not (n := peer.recv_into(row, flags=socket.MSG_WAITALL)):
                            raise ConnectionError("it has closed its connection")
                        row = row[n:]  # some are left where a signal came between
                except OSError as e:
                    raise dist.DistNetworkError(f"node {number} is lost: {e}") from None
            then()
            self.pending.popleft()
            self.in_flight -= n_bytes
            self.completed += 1


def memory_of(address, n_bytes):
    return memoryview((ctypes.c_char * n_bytes).from_address(address))
