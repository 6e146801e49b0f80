"""An emulated link between the ranks: each collective takes at least as long as it would take over that link.

A process group passes the model's collectives on to the real group, or to none if a rank is simulated alone. It returns
each result only when the link would have delivered it, counted from this rank's own start. (A peer that starts later
delays a real link by as much, but this one only if the real collective takes longer.)
"""

import argparse
import copy
import re
import time
from typing import NamedTuple

import torch

from ladder.errors import InputError, did_you_mean
from ladder.ranks.group import Group, Pending


def message_bytes(group, tensor):
    """Return as how many bytes an all-reduce of this tensor travels; a group that rounds says it."""
    own = getattr(group, "message_bytes", None)
    return own(tensor) if own else tensor.nbytes


class Link(NamedTuple):
    """A link between ranks. latency_us: microseconds of a small collective. gbps: gigabits per second, or None.

    The next collective starts when this one is delivered, as on NCCL's stream; with tcp when its bytes are sent.
    """

    name: str
    latency_us: float
    gbps: float | None
    tcp: bool = False

    def seconds(self, n_bytes, tp_size, passes=2):
        """Return the seconds of a ring over n_bytes. An all-reduce takes two passes around it, an all-gather one."""
        return 1e-6 * self.latency_us + passes * (tp_size - 1) / tp_size * n_bytes * self.per_byte

    @property
    def flight(self):
        """For how many seconds of a collective the link can already carry the next one."""
        return 1e-6 * self.latency_us * self.tcp

    @property
    def per_byte(self):
        """Seconds for each byte that a rank sends."""
        return 8e-9 / self.gbps if self.gbps else 0.0


# The latency is that of an all-reduce of about 8 KB between 8 ranks, whatever tp is; the bandwidth is the "busbw" of
# nccl-tests times 8 bits. Sources:
# nvlink: NCCL in a CUDA graph, 17.2 us: sgl-project/sglang pull 22734 (whose table does not name its GPUs; outside of a
#   graph 8 H100 took 27.0 us, and reached 479 GB/s at 8 GB: Azure/AI-benchmarking-guide, ND_H100_v5_results.md).
# nvlink-oneshot: kernels that write into the peers' memory, MSCCL++ in a CUDA graph, 6.0 us, and from there to 1 MB
#   (14.0 us) 230 GB/s: the same table of sgl-project/sglang pull 22734.
# pcie-host: two RTX 5070 Ti without peer-to-peer access, through the host's memory: 39 us for 10 KB, 20 MB in 10.9 ms:
#   sgl-project/sglang pull 39605. pcie-p2p: four V100 behind one PCIe switch, one-shot in a CUDA graph, 5.0 us for
#   8 KB; NCCL takes 20 us for that and 83.5 us for 384 KB, hence the bandwidth: haohervchb/sglang-V100 pull 2.
# roce: four DGX Spark, one-shot, 23 us for 48 KB (NCCL: 59): local-inference-lab/b12x pull 295; 200 Gbit/s nominal.
# pcie: 57 us on 8 A800: vllm-project/vllm issue 50576. 28 GB/s on 8 RTX 5090: NVIDIA/nccl issue 1639.
# ib: several nodes, a 400 Gbit/s NIC for each rank. 45.8 us: microsoft/mscclpp pull 794. 48 GB/s a NIC:
#   NVIDIA/nccl-tests issue 290.
# ethernet-*: nominal bandwidth; for the latency no table of 8 ranks was found.
#   100g: 118-130 us on two nodes: NVIDIA/nccl issue 1184. 10g: 6 messages of half a round trip of 0.1 ms, as
#   measured between cloud hosts: gist.github.com/BenTheElder/8ad343913fbe876e219a. 1g: four Raspberry Pi 5, 1.07 ms
#   for each synchronisation beyond the wire's time: b4rtaz/distributed-llama pull 64.
LINKS = {
    name: Link(name, *numbers)
    for name, *numbers in [
        ("free", 0.0, None), ("nvlink", 17.2, 3830.0), ("nvlink-oneshot", 6.0, 1840.0), ("pcie-p2p", 5.0, 74.0),
        ("pcie-host", 39.0, 15.0), ("pcie", 57.0, 224.0), ("roce", 23.0, 200.0), ("ib", 46.0, 384.0),
        ("ethernet-100g", 120.0, 100.0), ("ethernet-10g", 300.0, 10.0), ("ethernet-1g", 1000.0, 1.0),
    ]
}  # fmt: skip
FREE = LINKS["free"]
LINK_FORMS = f"{', '.join(LINKS)}, or its numbers, e.g. 100us, 1ms, 50gbps or 100us+50gbps, or tcp+ and one of these"


def parse(text):
    """Return the Link of a name in LINKS, or of numbers, of which one may be left out. Used as an argparse type."""
    if text.startswith("tcp+"):
        return parse(text[4:])._replace(name=text, tcp=True)
    if text in LINKS:
        return LINKS[text]
    numbers = re.fullmatch(r"(?:([0-9]*\.?[0-9]+)(us|ms))?\+?(?:([0-9]*\.?[0-9]+)gbps)?", text)
    latency, unit, gbps = numbers.groups() if numbers else (None, None, None)
    latency_us = float(latency or 0) * (1000 if unit == "ms" else 1)
    if not (latency or gbps) or latency_us > 1e7 or not 1e-3 <= float(gbps or 1) <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {LINK_FORMS}{did_you_mean(text, LINKS)}")
    return Link(text, latency_us, gbps and float(gbps))


def emulate(world, link, simulate_tp=None):
    """Return a copy of this World whose collectives take as long as over the link.

    simulate_tp: if given, this process alone simulates rank 0 of so many. Raises InputError.
    """
    if simulate_tp is not None and world.tp_size > 1:
        raise InputError("--simulate-tp is one rank alone: start it with python, not with torchrun")
    tp_size = simulate_tp or world.tp_size
    if tp_size == 1:
        raise InputError("a link needs two or more ranks, started with torchrun, or --simulate-tp")
    linked = copy.copy(world)
    linked.group = LinkedGroup(world.group, link, world.rank, tp_size, world.device)
    linked.tp_size = tp_size
    linked.shares = (1,) * tp_size if simulate_tp else world.shares
    return linked


class LinkedGroup(Group):
    """A process group over an emulated link. On a GPU it carries one collective at a time, even with the link's `tcp`.

    inner: the group that does the work, or None to simulate this rank alone. Then a sum is this rank's partial, and
    every rank's part of a gathered tensor is this rank's. set_link() replaces the link between steps. On a GPU it needs
    a first link that is not free, since a free link launches no kernel.
    """

    def __init__(self, inner, link, rank, tp_size, device):
        super().__init__("linked", inner, rank, tp_size)
        self.tp_size = tp_size
        self.stream = None
        self.free_at = 0.0  # when the link has delivered everything
        if device.type == "cuda" and link.seconds(1, 2) > 0:
            from ladder.kernels import compiling

            compiling.prepare(device)  # the kernel is written in Triton
            self.stream = torch.cuda.Stream(device, priority=-1)  # the link
            self.costs = torch.zeros(2, dtype=torch.float64, device=device)
        self.set_link(link)

    def set_link(self, link):
        self.link = link
        if self.stream is not None:  # a CUDA graph reads them in each replay
            self.costs.copy_(torch.tensor([1e3 * link.latency_us, 1e9 * link.per_byte]))

    def message_bytes(self, tensor):
        return message_bytes(self.inner, tensor)

    def allreduce(self, tensors, opts=None):
        delivered = self._send(sum(map(self.message_bytes, tensors)))
        return self._pending(self.inner and self.inner.allreduce(tensors, opts), delivered)

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):
        delivered = self._send(sum(t.nbytes for t in outputs), passes=1)
        if self.inner:
            return self._pending(self.inner.allgather_into_tensor_coalesced(outputs, inputs), delivered)
        for whole, part in zip(outputs, inputs, strict=True):
            whole.view(self.tp_size, *part.shape).copy_(part)
        return self._pending(None, delivered)

    def _pending(self, work, delivered):
        """Return a Pending whose wait ends when the real collective has ended and the link has delivered it."""

        def finish():
            if work is not None:
                work.wait()
            delivered()

        return Pending(finish)

    def _send(self, n_bytes, passes=2):
        """Send so many bytes over the link; return a function that waits until they are delivered."""
        if self.stream is not None:
            # A kernel spins on the link's stream; CUDA graphs can capture the events that fork and join it.
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                from extras.measure.spin import spin_kernel  # needs Triton, which torch for CPUs does not have

                spin_kernel[(1,)](self.costs, passes * (self.tp_size - 1) * n_bytes // self.tp_size)
                delivered = self.stream.record_event()
            return lambda: torch.cuda.current_stream().wait_event(delivered)
        seconds = self.link.seconds(n_bytes, self.tp_size, passes)
        deadline = max(time.perf_counter(), self.free_at) + seconds
        self.free_at = deadline - self.link.flight
        return lambda: sleep_until(deadline)


def sleep_until(deadline):
    """Sleep, so that others can use the core, but spin for the last 0.1 to 0.2 ms, since sleep() may wake that late."""
    while (left := deadline - time.perf_counter()) > 0:
        if left > 2e-4:
            time.sleep(left - 1e-4)
