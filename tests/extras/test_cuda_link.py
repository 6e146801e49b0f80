"""What the emulated link of a GPU is given, and in which order, on a machine without one."""

import contextlib
import dataclasses
import sys
import types

import pytest
import torch
from collective_order import eager_order, squeeze
from configs import BASE, BY_HAND, wired_id
from helpers import last_logits, random_model, unequal_rows

from extras.measure import link
from tp import TensorParallel


class Queues:
    """The streams of a pretended GPU: names of what they are given, and what each waits for, as a set of indices.

    That is all that was in its stream before it, and in other streams before an event that this one waited for.
    awaited: of each, what the computing stream waits for from there on.
    """

    def __init__(self, monkeypatch):
        self.names = []
        self.waits_for = []
        self.awaited = []
        self.current = self.computing = Stream()
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.inside)
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        spin = types.SimpleNamespace(spin_kernel={(1,): lambda costs, n_bytes: self.put("link")})
        monkeypatch.setitem(sys.modules, "extras.measure.spin", spin)

    @contextlib.contextmanager
    def inside(self, stream):
        outer = self.current
        self.current = stream
        yield
        self.current = outer

    def put(self, name):
        self.waits_for.append(set(self.current.past))
        self.awaited.append(set(self.computing.past))
        self.current.past.add(len(self.names))
        self.names.append(name)


class Stream:
    def __init__(self):
        self.past = set()  # what its next kernel waits for

    def record_event(self):
        return set(self.past)

    def wait_event(self, event):
        self.past |= event

    def wait_stream(self, other):
        self.past |= other.past


class OneRank:
    """A group of one rank, which holds NaN instead of a result until that is waited for."""

    def __init__(self):
        self.asynchronous = []

    def allreduce(self, tensors, opts):
        self.asynchronous.append(opts.asyncOp)
        [partial] = tensors
        whole = partial.clone()
        partial.fill_(torch.nan)
        return types.SimpleNamespace(wait=lambda: partial.copy_(whole))

    def allgather_into_tensor_coalesced(self, outputs, inputs):
        [logits] = outputs
        [part] = inputs
        logits.fill_(torch.nan)
        return types.SimpleNamespace(wait=lambda: logits.copy_(part))


def queued_beside(config):
    """What the plain loop does between each start and its wait: test_wiring.py knows it by hand."""
    order = eager_order(config).split()
    starts = [i for i, event in enumerate(order) if event.startswith("start")]
    between = [order[i + 1 : order.index(f"wait{n}")] for n, i in enumerate(starts, start=1)]
    return [squeeze("c" if e == "c" else "link" for e in events if not e.startswith("wait")) for events in between]


@pytest.mark.parametrize("changes", BY_HAND[::2], ids=wired_id)
def test_the_link_forks_joins_and_runs_beside_the_next_stale_sublayer_only(changes, monkeypatch):
    """In a prefill and a decode step, of rows of different lengths, whose logits are those of the model alone."""
    config = dataclasses.replace(BASE, **changes)
    net = random_model(config)
    rows = unequal_rows(config)
    inner = OneRank()
    alone = last_logits(net, *rows, steps=1)
    queues = Queues(monkeypatch)
    group = link.LinkedGroup(inner, link.FREE, 0, 1, torch.device("cuda"))
    group.stream = Stream()
    group.costs = None
    net.comm = TensorParallel(config, (1,), group)
    for module in net.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda *_: queues.put("c"))
    assert torch.equal(last_logits(net, *rows, steps=1), alone)

    names = queues.names
    beside = queued_beside(config)
    sent = [i for i, name in enumerate(names) if name == "link"]
    assert all(queues.waits_for[i] == set(range(i)) for i in sent)  # forked: after all that was queued before it
    assert queues.computing.past == set(range(len(names)))  # joined
    result = [squeeze(names[k] for k in range(i + 1, len(names)) if i not in queues.awaited[k]) for i in sent]
    assert result == 2 * [*beside, ""]  # and the gathered logits
    assert inner.asynchronous == [True] * len(beside) * 2  # else NCCL would compute them on the current stream
