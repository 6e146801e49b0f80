"""How gloo connects the CPU ranks of several machines, and how its threads share the cores with the model's."""

import contextlib
import fcntl
import os
import socket
import struct


def choose_interface(store, rank, tp_size):
    """Let gloo listen where the other nodes can reach it, unless GLOO_SOCKET_IFNAME says where.

    By default it listens at the address that this host's name resolves to, on many systems a loopback address.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    address = address_towards(os.environ["MASTER_ADDR"])
    if rank == tp_size - 1:
        store.set("last rank's address", address)
    if address.startswith("127."):  # node 0's own name may resolve so there: ask for the way to another node
        address = address_towards(store.get("last rank's address").decode(errors="replace"))
    for _, name in socket.if_nameindex():
        if address and _address_of(name) == address:
            os.environ["GLOO_SOCKET_IFNAME"] = name


def _address_of(interface):
    """Return the IPv4 address of an interface, or ""."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s, contextlib.suppress(OSError):
        record = fcntl.ioctl(s.fileno(), 0x8915, struct.pack("256s", interface.encode()[:15]))  # SIOCGIFADDR
        return socket.inet_ntoa(record[20:24])
    return ""


def address_towards(host):
    """Return this machine's IPv4 address on the way to a host, or ""."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s, contextlib.suppress(OSError, ValueError):
        s.connect((host, 1))  # a datagram socket sends nothing here
        return s.getsockname()[0]
    return ""


def threads():
    """Return the thread ids of this process, or none if the system is not Linux."""
    return {int(i) for i in os.listdir("/proc/self/task")} if os.path.isdir("/proc/self/task") else set()


def let_preempt(ids):
    """Let gloo's threads run as soon as they have work, as far as the system allows it.

    Its event loop polls while another of its threads holds a connection's lock, and ordinary threads may keep that one
    from running for milliseconds (benchmarks/overlap.md). Real-time threads, for root or CAP_SYS_NICE, preempt the
    computation, and one another only after 100 ms. With SCHED_FIFO they never do: two ranks on two cores once polled
    for ever, while the threads that held the locks could not run. Batch threads, for anyone, at least do not preempt
    one another.
    """
    for thread in ids:
        for policy, priority in (os.SCHED_RR, 1), (os.SCHED_BATCH, 0):
            with contextlib.suppress(OSError):  # not allowed, or gone
                os.sched_setscheduler(thread, policy, os.sched_param(priority))
                break
