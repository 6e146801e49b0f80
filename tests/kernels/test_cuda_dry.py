"""What a GPU is given, and in which order, on a machine without one."""

import contextlib
import types

import pytest
import torch
from configs import BASE, change
from helpers import check_split_attention, random_model, second_best

import generate as generate_module
from generate import Runner, generate
from ladder.decoding import async_scheduling, batch, fast_sampling
from ladder.decoding.batch import Sampler, make_cache
from ladder.errors import InputError
from ladder.kernels import compilers, compiling, cuda_graphs, registry
from ladder.progress import progress

BUCKET = 4
CUDA = torch.device("cuda")
SETTINGS = {"key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 12, "conv_width": 4}
LINEAR = {"norm": "rms+1", "linear": {"layers": (0, 2), **SETTINGS}}


def pretended(net, cache, monkeypatch):
    """(a runner that says it is on a GPU, the list of its passes and of what is read from it)."""
    events = []
    runner = Runner(net, cache)
    runner.device, runner.lengths = CUDA, []  # lengths: of the cache, which the passes read
    last_tokens = batch.last_tokens
    pad = batch.pad

    def decode(tokens, positions, cache, cache_length):
        events.append("pass")
        runner.lengths.append(cache_length)
        return net(tokens, positions, cache, cache_length)

    runner.passes.decode = decode
    monkeypatch.setattr(batch, "BUCKET", BUCKET)
    event = types.SimpleNamespace(synchronize=lambda: events.append("read"))
    stream = types.SimpleNamespace(record_event=lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    for module in batch, async_scheduling:
        monkeypatch.setattr(module, "last_tokens", lambda sequences, device: last_tokens(sequences, "cpu"))
    for module in batch, compiling:
        monkeypatch.setattr(module, "pad", lambda prompts, device: pad(prompts, "cpu"))
    return runner, events


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_gpu_has_its_next_pass_before_the_ids_of_this_one_are_read(temperature, monkeypatch):
    """And generates the same, in rows of different lengths, of which one waits for the others at the context's end."""
    net = random_model(change(BASE, max_seq_len=12))
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [9, 2], [6]]
    expected = generate(Runner(net, make_cache(net, 3, 12)), prompts, 8, Sampler(temperature)).rows
    assert [len(row) for row in expected] == [3, 8, 8]
    runner, events = pretended(net, make_cache(net, 3, 12), monkeypatch)
    assert generate(runner, prompts, 8, Sampler(temperature)).rows == expected
    assert events == ["pass", *["pass", "read"] * 7]


@pytest.mark.parametrize("prompt, new, changes", [
    (1, 1, {}), (4, 1, {}), (6, 23, {}), (3, 3, {}), (3, 3, LINEAR),
])  # fmt: skip
def test_the_cache_is_read_in_buckets_all_of_which_the_warm_up_has_seen(prompt, new, changes, monkeypatch):
    net = random_model(change(BASE, **changes))
    prompts = [[1] * prompt]
    runner, _ = pretended(net, None, monkeypatch)
    runner.cache = make_cache(types.SimpleNamespace(device=CUDA, new_cache=net.new_cache), 1, prompt + new)
    compiling.warm_up(runner, prompts, new, Sampler(0))
    warm = {*runner.lengths}
    runner.lengths.clear()
    generate(runner, prompts, new, Sampler(0))
    slots = runner.cache[1][0].shape[2]
    least = BUCKET * -(-(prompt + 1) // BUCKET)
    assert slots % BUCKET == 1 and 0 <= slots - 1 - prompt - new < BUCKET
    assert all(length < slots and length % BUCKET == 0 for length in warm)
    assert warm >= {*runner.lengths} and max(warm) <= runner.cache_length(max([*runner.lengths, least]) + 1)


def recorded(monkeypatch, step):
    """(Graphs of a step on a pretended GPU, [what each capture was given]); captured functions run at each replay."""
    captures = []

    def captured(function, pool, generator=None):
        state = generator and generator.get_state()
        result = function()
        if generator:
            generator.set_state(state)
        captures.append((pool, generator, progress.timed))

        def replay():
            for kept, new in zip(*((x,) if torch.is_tensor(x) else x for x in (result, function())), strict=True):
                kept.copy_(new)

        return replay, result

    monkeypatch.setattr(cuda_graphs, "captured", captured)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100 - 7 * len(captures), 200))
    return cuda_graphs.Graphs(step, compiling._compiling), captures


def capturing(net, monkeypatch):
    """A runner of two rows whose steps are captured on a pretended GPU."""
    cache = make_cache(types.SimpleNamespace(device=CUDA, new_cache=net.new_cache), 2, 30)
    runner, _ = pretended(net, cache, monkeypatch)
    runner.passes.decode = runner.passes.graphs = recorded(monkeypatch, net)[0]
    registry.use([fast_sampling.KERNEL])
    return runner


def test_a_captured_step_is_found_again_by_its_shapes_and_gets_its_inputs(monkeypatch):
    """Of several positions and lengths; what a replay writes is where the one before wrote."""

    def step(tokens, positions, cache, cache_length):
        cache[0][0].add_(1)
        return 100 * tokens + 10 * positions + cache_length

    graphs, captures = recorded(monkeypatch, step)
    seen = {}
    state = torch.zeros(1)  # of linear attention: each call is one step of it, that of a capture too
    progress.at("decode step", 1)
    calls = (1, 1, 256), (2, 1, 256), (3, 2, 256), (4, 1, 512), (5, 2, 256), (6, 1, 256)
    for steps, (value, S, length) in enumerate(calls, start=1):
        inputs = torch.full((3, S), value), torch.arange(3)[:, None].expand(3, S)
        logits = graphs(*inputs, [(state, state[:0])], length)
        assert state.item() == steps
        assert torch.equal(logits, step(*inputs, [(torch.zeros(1),)], length))
        assert seen.setdefault((S, length), logits) is logits
    assert captures == [("pool", None, False)] * 3 and graphs.n_bytes == [7] * 3  # in a phase that is not timed
    assert progress.timed


@pytest.mark.parametrize("temperature, top_k", [(0, None), (0.8, None), (0.8, 5)])
def test_a_captured_step_with_its_choice_generates_the_same(temperature, top_k, monkeypatch):
    """Also where captures come while a generation runs; afterwards a second generation captures nothing."""
    net = random_model(BASE)
    prompts = [[3, 1, 4], [9]]
    plain = Runner(net, make_cache(net, 2, 30))
    samples = [Sampler(temperature, top_k) for _ in "ab"]
    expected = generate(plain, prompts, 20, samples[0]).rows
    runner = capturing(net, monkeypatch)
    compiling.warm_up(runner, prompts, 1, samples[1])
    assert 1 <= len(runner.passes.graphs.graphs) < 5
    assert generate(runner, prompts, 20, samples[1]).rows == expected
    assert len(runner.passes.graphs.graphs) == 5
    generate(runner, prompts, 20, samples[1])  # of other draws: the pass ahead took one more
    assert len(runner.passes.graphs.graphs) == 5


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_no_graph_holds_a_sample_that_was_edited(temperature, monkeypatch):
    """What it does in Python would run only in the capture; when the edit is undone, the graphs from before serve."""

    net = random_model(BASE)
    prompts = [[3, 1, 4], [9]]
    sampler = Sampler(temperature)
    with monkeypatch.context() as patch:
        patch.setattr(generate_module, "sample", second_best)
        expected = generate(Runner(net, make_cache(net, 2, 30)), prompts, 20, sampler).rows
    runner = capturing(net, monkeypatch)
    generate(runner, prompts, 20, sampler)
    before = {*runner.passes.graphs.graphs}
    assert before and all(len(key) == 2 for _, key in before)  # a length and a Sampler's graph_key
    with monkeypatch.context() as patch:
        patch.setattr(generate_module, "sample", second_best)
        assert generate(runner, prompts, 20, sampler).rows == expected
    added = runner.passes.graphs.graphs.keys() - before
    assert added and all(len(key) == 1 for _, key in added)  # steps without a choice
    assert generate(runner, prompts, 20, sampler).rows != expected
    assert runner.passes.graphs.graphs.keys() - before == added


@pytest.mark.slow
@pytest.mark.parametrize("count, window, T", [(1, None, 512), (3, 200, 509)])
def test_attention_with_split_keys_is_attention(count, window, T):
    check_split_attention(count, window, T, "cpu")


@pytest.mark.parametrize("missing, line", [
    (None, None), ("gcc", "need a C compiler: install gcc"), ("Python.h", "need Python.h, not in /nowhere: install"),
])  # fmt: skip
def test_what_triton_needs_is_asked_for_before_anything_is_loaded(missing, line, monkeypatch, tmp_path):
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("CPATH", f"/other:{tmp_path}" if missing != "Python.h" else "")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compilers.sysconfig, "get_path", lambda *args: "/nowhere")
    monkeypatch.setattr(compilers.shutil, "which", lambda name: missing != "gcc" and f"/usr/bin/{name}" or None)
    with pytest.raises(InputError, match=line) if line else contextlib.nullcontext():
        compiling.prepare(CUDA)
