"""What a GPU is given, and in which order, on a machine without one."""

import copy
import dataclasses
import types

import pytest
import torch
from helpers import BASE, random_model

from decoding import sampling
from decoding.sampling import Plain, Sampler
from generate import Runner, make_cache, pad
from kernels.few_rows import SplitAttention


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


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_gpu_has_its_next_pass_before_the_ids_of_this_one_are_read(temperature, monkeypatch):
    """And generates the same, in rows of different lengths."""
    net, prompts, steps = random_model(BASE), [[3, 1, 4, 1, 5], [9, 2], [6]], 6
    expected = generated(Runner(net, make_cache(net, 3, 12)), prompts, Sampler(temperature), steps)
    events, runner = [], Runner(net, make_cache(net, 3, 12))
    runner.device, last_tokens = torch.device("cuda"), sampling.last_tokens
    runner.decode = lambda *args: events.append("pass") or decode(*args)

    def decode(tokens, positions, longest):
        positions = positions[:, None]
        with torch.inference_mode():
            return net(tokens, positions, runner.cache, longest)

    event = types.SimpleNamespace(synchronize=lambda: events.append("read"))
    stream = types.SimpleNamespace(record_event=lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(sampling, "last_tokens", lambda texts, device: last_tokens(texts, "cpu"))
    assert generated(runner, prompts, Sampler(temperature), steps) == expected
    assert events == ["pass", *["pass", "read"] * steps]


@pytest.mark.parametrize("count", [1, 3])
def test_attention_with_split_keys_is_attention(count):
    """In rows of different lengths, each of one or several positions."""
    config = dataclasses.replace(BASE, n_heads=4, n_kv_heads=2, head_dim=16)
    net, cache_length = random_model(config), 12
    split, start = copy.deepcopy(net), torch.tensor([[5], [0], [9]])
    for layer in split.layers:
        layer.attention.__class__ = SplitAttention
    tokens, positions = torch.arange(3 * count).view(3, -1), start + torch.arange(count)
    generator = torch.Generator().manual_seed(0)
    cache = [tuple(torch.randn(3, 2, 13, 16, generator=generator) for _ in "kv") for _ in net.layers]
    with torch.inference_mode():
        plain, found = (m(tokens, positions, copy.deepcopy(cache), cache_length) for m in (net, split))
    assert torch.allclose(plain, found, atol=1e-5)
