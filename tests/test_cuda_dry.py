"""What a GPU is given, and in which order, on a machine without one."""

import contextlib
import copy
import dataclasses
import types

import pytest
import torch
from helpers import BASE, BY_HAND, last_logits, random_model, staleness, unequal_rows, wired_id

import generate as generate_module
from decoding import step
from decoding.sampling import Sampler
from decoding.step import Plain
from extras.measure import link
from generate import Runner, generate, make_cache, pad
from kernels import cuda_graphs
from model import SingleDevice, attention_then_mlp, desynced_stream
from runtime.compiling import SplitAttention
from tp import TensorParallel


def generated(runner, prompts, sample, steps):
    """New ids of each row by plain decoding, [ids read after each pass]."""
    plain, texts, found = Plain(), [list(prompt) for prompt in prompts], []
    tokens, lengths = pad(prompts, "cpu")
    runner.prefill(tokens, lengths)
    plain.begin(tokens, lengths, None)
    for _ in range(steps):
        found.append(plain.step(runner, texts, [False] * len(texts), sample))
        for text, new in zip(texts, found[-1], strict=True):
            text += new
    return found


def pretended(net, cache, monkeypatch):
    """(a runner that says it is on a GPU, the list of its passes and of what is read from it)."""
    events, runner = [], Runner(net, cache)
    runner.device, last_tokens, pad = torch.device("cuda"), step.last_tokens, generate_module.pad

    def decode(tokens, positions, longest):
        events.append("pass")
        with torch.inference_mode():
            return net(tokens, positions[:, None], cache, longest)

    runner.decode = decode
    event = types.SimpleNamespace(synchronize=lambda: events.append("read"))
    stream = types.SimpleNamespace(record_event=lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(step, "last_tokens", lambda texts, device: last_tokens(texts, "cpu"))
    monkeypatch.setattr(generate_module, "pad", lambda prompts, device: pad(prompts, "cpu"))
    return runner, events


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_gpu_has_its_next_pass_before_the_ids_of_this_one_are_read(temperature, monkeypatch):
    """And generates the same, in rows of different lengths."""
    net, prompts, steps = random_model(BASE), [[3, 1, 4, 1, 5], [9, 2], [6]], 6
    expected = generated(Runner(net, make_cache(net, 3, 12)), prompts, Sampler(temperature), steps)
    runner, events = pretended(net, make_cache(net, 3, 12), monkeypatch)
    assert generated(runner, prompts, Sampler(temperature), steps) == expected
    assert events == ["pass", *["pass", "read"] * steps]


def test_a_pass_ahead_stays_within_the_context(monkeypatch):
    """A row at its end waits there for a shorter one."""
    net = random_model(dataclasses.replace(BASE, max_seq_len=12))
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2]]
    expected = generate(Runner(net, make_cache(net, 2, 12)), prompts, 8, Sampler(0)).rows
    assert [len(row) for row in expected] == [3, 8]
    runner = pretended(net, make_cache(net, 2, 12), monkeypatch)[0]
    assert generate(runner, prompts, 8, Sampler(0)).rows == expected


def test_a_captured_step_is_found_again_by_its_shapes_and_gets_its_inputs(monkeypatch):
    """Of several positions and lengths; what a replay writes is where the one before wrote."""
    captures = []

    def captured(step, pool):
        result = step()
        captures.append(pool)
        return lambda: result.copy_(step()), result

    def step(tokens, positions, cache, cache_length):
        return 100 * tokens + 10 * positions + cache_length

    monkeypatch.setattr(cuda_graphs, "captured", captured)
    monkeypatch.setattr(torch, "compile", lambda model, **options: step)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    graphs, seen = cuda_graphs.Graphs(types.SimpleNamespace(comm=SingleDevice())), {}
    for value, S, length in ((1, 1, 256), (2, 1, 256), (3, 2, 256), (4, 1, 512), (5, 2, 256), (6, 1, 256)):
        inputs = torch.full((3, S), value), torch.arange(3)[:, None].expand(3, S)
        logits = graphs(*inputs, None, length)
        assert torch.equal(logits, step(*inputs, None, length))
        assert seen.setdefault((S, length), logits) is logits
    assert captures == ["pool"] * 3


@pytest.mark.parametrize("count", [1, 3])
def test_attention_with_split_keys_is_attention(count, monkeypatch):
    """In rows of different lengths, each of one or several positions."""
    config = dataclasses.replace(BASE, n_heads=4, n_kv_heads=2, head_dim=16, sliding_window=4, window_layers=(1,))
    net, cache_length = random_model(config), 12
    split, start = copy.deepcopy(net), torch.tensor([[5], [0], [9]])
    for layer in split.layers:
        layer.attention.__class__ = SplitAttention
    tokens, positions = torch.arange(3 * count).view(3, -1), start + torch.arange(count)
    generator = torch.Generator().manual_seed(0)
    cache = [tuple(torch.randn(3, 2, 13, 16, generator=generator) for _ in "kv") for _ in net.layers]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with torch.inference_mode():
        plain, found = (m(tokens, positions, copy.deepcopy(cache), cache_length) for m in (net, split))
    assert torch.allclose(plain, found, atol=1e-5)


class Queues:
    """The streams of a pretended GPU: names of what they are given, and what each waits for, as a set of indices.

    That is all that was in its stream before it, and in other streams before an event that this one waited for.
    awaited: of each, what the computing stream waits for from there on.
    """

    def __init__(self, monkeypatch):
        self.names, self.waits_for, self.awaited = [], [], []
        self.current = self.computing = Stream()
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.inside)
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        monkeypatch.setattr(link.LinkedGroup, "_spin", lambda group, n_bytes: self.put("link"))

    @contextlib.contextmanager
    def inside(self, stream):
        outer, self.current = self.current, stream
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
        [logits], [part] = outputs, inputs
        logits.fill_(torch.nan)
        return types.SimpleNamespace(wait=lambda: logits.copy_(part))


def queued_beside(config):
    """By hand: what is queued between each all-reduce and the wait for it. [[name]]

    These are the products and the all-reduces of the sublayers that are stale enough not to wait for it.
    """
    attention, mlp, sublayers = ["wqkv", "wo"], ["w1", "w3", "w2"], []
    for wiring, layers in config.spans:
        two = wiring.split is attention_then_mlp
        sublayers += [products * len(layers) for products in ([attention, mlp] if two else [attention + mlp])]
    if config.named_wiring.stream is desynced_stream:
        kept = [i for i in range(1, len(sublayers) + 1) if config.period and (i % config.period == 0)]
        return [[] for _ in kept] if not config.period or len(sublayers) in kept else [[] for _ in [*kept, "last"]]
    beside, stale = [], staleness(config)
    for i in range(len(sublayers)):
        waits = [t for t in range(i + 1, len(sublayers)) if t - stale[t] > i] or [len(sublayers)]
        beside.append([name for products in sublayers[i + 1 : waits[0]] for name in [*products, "link"]])
    return beside


@pytest.mark.parametrize("changes", BY_HAND, ids=wired_id)
def test_the_link_forks_joins_and_runs_beside_the_next_stale_sublayer_only(changes, monkeypatch):
    """In a prefill and a decode step, of rows of different lengths, whose logits are those of the model alone."""
    config = dataclasses.replace(BASE, **changes)
    net, rows, inner = random_model(config), unequal_rows(config), OneRank()
    alone, queues = last_logits(net, *rows, steps=1), Queues(monkeypatch)
    group = link.LinkedGroup(inner, link.FREE, 0, 1, torch.device("cuda"))
    group.stream = Stream()
    net.comm = TensorParallel(config, 1, group)
    for name, module in net.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda *_, name=name: queues.put(name.rpartition(".")[2]))
    assert torch.equal(last_logits(net, *rows, steps=1), alone)

    names, beside = queues.names, queued_beside(config)
    sent = [i for i, name in enumerate(names) if name == "link"]
    assert all(queues.waits_for[i] == set(range(i)) for i in sent)  # forked: after all that was queued before it
    assert queues.computing.past == set(range(len(names)))  # joined
    found = [[names[k] for k in range(i + 1, len(names)) if i not in queues.awaited[k]] for i in sent]
    assert found == 2 * [*beside, []]  # and the gathered logits
    assert inner.asynchronous == [True] * len(beside) * 2  # else NCCL would compute them on the current stream
