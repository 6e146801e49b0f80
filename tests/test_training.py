"""What adapt.py trains on: documents, tokens, windows; shards of weights."""

import dataclasses
import functools
import json

import numpy as np
import pytest
import torch
from helpers import BASE, StateWeights, random_model, run_ranks

from extras.lanes import load_lanes
from extras.training import adapt, data, runs, sharding
from extras.training.data import TOKEN, Windows
from formats import checkpoint
from formats.tokenizer import Tokenizer, load_tokenizer
from model import Attention, rewired
from runtime import launch
from runtime.errors import InputError
from tp import load_shard


class Letters(Tokenizer):
    """A token a character; BOS is 1."""

    bos_id, special, vocab_size = 1, {"<s>": 1}, 256
    template = (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )

    def encode_plain(self, text, first=True):
        return [ord(c) for c in text]


def chat(*contents):
    roles = ["user", "assistant"] * len(contents)
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]


def test_documents_of_text_and_of_lines_of_json(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo<|endoftext|>\n  three  <|endoftext|><|endoftext|> \n four")
    assert [d for d, _ in data.documents(tmp_path / "a.txt")] == ["one\n\ntwo", "three", "four"]
    records = [{"text": "x <|endoftext|> y"}, {"messages": chat("hi", "ho")}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n\n" for r in records))
    result = list(data.documents(tmp_path / "a.jsonl"))
    assert [d for d, _ in result] == [records[0]["text"], records[1]["messages"]]
    assert result[1][1].endswith("a.jsonl line 3")
    for line, message in ('{"text": "\\ud800"}', "surrogates"), ('{"messages": [{"role": "user"}]}', '"content"'):
        (tmp_path / "a.jsonl").write_text(line + "\n")
        with pytest.raises(InputError, match=f"a.jsonl line 1.*{message}"):
            list(data.documents(tmp_path / "a.jsonl"))


def test_of_a_chat_only_the_answers_count():
    ids, counts = data.encode(Letters(), chat("hi", "ho", "x", "yes"), end=2)
    assert "".join(map(chr, ids)) == "u:hi;a:ho;u:x;a:yes;"
    assert "".join(chr(i) for i, c in zip(ids, counts, strict=True) if c) == "ho;yes;"
    assert data.encode(Letters(), "ab", end=2) == ([1, 97, 98, 2], [True] * 4)
    assert data.encode(Letters(), "ab", end=None)[0] == [1, 97, 98]

    class Pairs(Letters):
        """Two line breaks are one token, wherever they meet."""

        template = (
            "{% for m in messages %}{{ m.role }}\n{{ m.content }};{% endfor %}"
            "{% if add_generation_prompt %}assistant\n{% endif %}"
        )

        def encode_plain(self, text, first=True):
            return [ord(c) for c in text.replace("\n\n", "N")]

    ids, counts = data.encode(Pairs(), chat("hi", "\nho"), end=2)
    assert "".join(map(chr, ids)) == "user\nhi;assistant\n\nho;"  # as a model meets it: the prompt, then its answer
    assert "".join(chr(i) for i, c in zip(ids, counts, strict=True) if c) == "\nho;"


@pytest.fixture
def tokens(tmp_path):
    """Returns the file of tokens of some texts and a chat, 54 tokens."""
    (tmp_path / "a.txt").write_text("<|endoftext|>".join(["abcdefg", "hij", "k", "lmnopqrstuvwxyz"]))
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": chat("hi", "ho", "x", "yes")}) + "\n")
    tokenizer = Letters()
    tokenizer.template = "{{ messages | length }}" + Letters.template
    with pytest.raises(InputError, match="b.jsonl line 1: the chat template rewrites"):
        data.tokenize([tmp_path / "b.jsonl"], tokenizer, 2, tmp_path / "x.tokens")
    assert not (tmp_path / "x.tokens").exists()
    n = data.tokenize([tmp_path / "a.txt", tmp_path / "b.jsonl"], Letters(), 2, tmp_path / "x.tokens")
    assert n == 9 + 5 + 3 + 17 + 20 and (tmp_path / "x.tokens").stat().st_size == n * TOKEN.itemsize
    return tmp_path / "x.tokens"


def test_windows_hold_every_token_and_no_document_sees_another(tokens):
    windows = Windows(tokens, 5)
    all_tokens = np.fromfile(tokens, TOKEN)
    batch = windows.batch(range(windows.n))
    assert windows.n == 10 and torch.equal(batch.tokens.flatten(), torch.from_numpy(all_tokens["id"][:50].astype(int)))
    assert torch.equal(batch.targets.flatten(), torch.from_numpy(all_tokens["id"][1:51].astype(int)))
    for row in range(windows.n):
        for i in range(5):
            at = 5 * row + i
            document = all_tokens["document"][at]
            before = [j for j in range(5 * row, at + 1) if all_tokens["document"][j] == document]
            assert batch.positions[row, i] == at - before[0]
            assert [5 * row + j for j in range(5) if batch.mask[row, i, j]] == before
            after = all_tokens[at + 1]
            assert batch.counts[row, i] == (after["document"] == document and bool(after["counts"]))
    assert windows.batch([0]).mask is None and windows.batch([None, 0]).counts.sum(1).tolist() == [0, 5]


def test_each_epoch_takes_each_window_once_in_an_order_of_its_own(tokens):
    windows = Windows(tokens, 4, seed=3)
    n = windows.n
    epochs = [windows.indices(n * e, n) for e in range(3)]
    assert all(sorted(e) == list(range(n)) for e in epochs) and epochs[0] != epochs[1] != epochs[2]
    again = Windows(tokens, 4, seed=3)
    assert again.indices(n - 2, 4) == epochs[0][-2:] + epochs[1][:2]  # wherever one begins
    assert Windows(tokens, 4, seed=4).indices(0, n) != epochs[0]
    assert Windows(tokens, 4, at_most=9).n == 2
    with pytest.raises(InputError, match="the file has no token that counts"):
        np.zeros(9, TOKEN).tofile(tokens)
        Windows(tokens, 4)


def test_packed_documents_give_the_losses_of_each_alone(tmp_path, tiny):
    texts = ["Once upon a time there was a dog.", "The dog ran to the park.", "a dog"]
    (tmp_path / "a.txt").write_text(data.SEPARATOR.join(texts))
    tokenizer = load_tokenizer(tiny)
    n = data.tokenize([tmp_path / "a.txt"], tokenizer, 2, tmp_path / "x.tokens")
    config = checkpoint.read_config(tiny)
    config = dataclasses.replace(rewired(config, "ladder"), sliding_window=4, window_layers=(1,))
    model = random_model(config).double()
    batch = Windows(tmp_path / "x.tokens", n - 1).batch([0])
    trainee = trainee_like(model)
    nats = adapt.losses(trainee, batch)[1].item()
    expected = 0.0
    for text in texts:
        ids = torch.tensor([[*tokenizer.encode(text), 2]])
        log_p = model(ids)[0].log_softmax(-1)
        expected -= sum(log_p[i, ids[0, i + 1]].item() for i in range(ids.shape[1] - 1))
    assert batch.mask is not None and nats == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("n_kv_heads, dtype, most", [(1, torch.float64, 1e-12), (2, torch.bfloat16, 0.03)])
def test_attention_in_bands_is_the_plain_one(n_kv_heads, dtype, most, monkeypatch):
    monkeypatch.setattr(adapt, "BAND", 4)
    net = random_model(dataclasses.replace(BASE, n_heads=4, n_kv_heads=n_kv_heads, n_layers=1)).to(dtype)
    document = torch.tensor([[0] * 11, [0] * 3 + [1] * 6 + [2] * 2])
    mask = (document[:, None] == document[..., None]) & torch.ones(11, 11, dtype=torch.bool).tril()
    metadata = net.metadata(torch.arange(11).expand(2, 11), mask)
    generator, result = torch.Generator().manual_seed(0), []
    x = torch.randn(2, 11, BASE.dim, generator=generator, dtype=torch.float64).to(dtype)
    for layer in Attention, adapt.BandedAttention:
        attention = net.layers[0].attention
        attention.__class__ = layer
        given = x.clone().requires_grad_()
        y = attention(given, metadata, None)
        result.append([y.detach(), *torch.autograd.grad((y * x).sum(), [given, *attention.parameters()])])
    for plain, banded in zip(*result, strict=True):
        assert (plain - banded).abs().max() <= most * plain.abs().max()


def trainee_like(model):
    """Returns an adapt.Trainee, not sharded, with a model's weights."""
    trainee = adapt.Trainee(model.config).to(model.dtype).eval()
    trainee.load_state_dict(model.state_dict())
    return trainee


def build_and_run(world, config):
    weights = StateWeights(random_model(config).state_dict())
    model = adapt.build(config, weights, world, torch.float32)
    local = {name: p.to_local().numpy().copy() for name, p in model.named_parameters()}
    with torch.no_grad():
        batch = data.Batch(torch.arange(12).view(2, 6), None, None, torch.arange(6).expand(2, 6), None)
        x = model(batch).numpy()
    model.reshard()
    return local, x


@pytest.mark.parametrize("tp, changes", [(2, {}), (3, {"tie_embeddings": True, "qkv_bias": True}), (4, {})])
def test_ranks_hold_the_rows_of_the_file_and_compute_the_same(tp, changes):
    config = dataclasses.replace(BASE, wiring="ladder", **changes)
    result = run_ranks(tp, functools.partial(build_and_run, config=config))
    whole = random_model(config)
    for name, weight in whole.named_parameters():
        joined = np.concatenate([local[name] for local, _ in result])
        assert np.array_equal(joined, weight.detach().numpy()), name
    with torch.no_grad():
        sublayers = whole.sublayers(whole.metadata(torch.arange(6).expand(2, 6)))
        x = before = whole.tok_embeddings(torch.arange(12).view(2, 6))
        for h, _ in sublayers:
            before, x = x, x + h(before)
        expected = whole.norm(x).numpy()
    for _, x in result:
        assert np.abs(x - expected).max() < 1e-5


LANED = ["spd/4", "spd-ladder:0,2/3", "delayed-3/2", "desync:4/4", "pair", "ladder-2"]


def test_lanes_compute_in_training_what_they_do_afterwards():
    """More of them than KV heads, with norms of queries and biases, which one lane adds."""
    shape = {"qk_norm": True, "qkv_bias": True, "wo_bias": True, "mlp_bias": True}
    configs = [dataclasses.replace(BASE, wiring=name, **shape) for name in LANED]
    for rank in run_ranks(2, build_and_run_each, configs):
        for config, x in zip(configs, rank, strict=True):
            weights = StateWeights(random_model(config).state_dict())
            net = (load_lanes if config.lanes else load_shard)(config, weights, torch.float32, "cpu")
            for lane in net.lanes if config.lanes else [net]:
                lane.output = torch.nn.Identity()
            with torch.no_grad():
                expected = net(torch.arange(12).view(2, 6))[..., : BASE.dim]
            assert (torch.from_numpy(x) - expected).abs().max() < 1e-5, config


def build_and_run_each(world, configs):
    return [build_and_run(world, config)[1] for config in configs]


def test_what_is_written_is_what_was_read(tmp_path):
    world, net = launch.World(0, 1, torch.device("cpu")), random_model(BASE)
    (tmp_path / "best-5").mkdir()
    with sharding.process_group(world):
        trainee = adapt.build(BASE, StateWeights(net.state_dict()), world, torch.float32)
        sharding.write(tmp_path, {"step": 9, "nats": 1.5}, trainee, torch.float32, world)
        bad = StateWeights({**net.state_dict(), "norm.weight": torch.full((48,), torch.nan)})
        with pytest.raises(InputError, match="norm.weight holds NaN"):
            adapt.build(BASE, bad, world, torch.float32)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best-9", "best.json"]
    assert runs.best(tmp_path) == {"step": 9, "nats": 1.5} and checkpoint.read_config(tmp_path / "best-9") == BASE
    weights = checkpoint.Weights(tmp_path / "best-9")
    for name, weight in net.named_parameters():
        assert torch.equal(weights.read(name), weight.detach()), name


def build_fresh(world, config):
    args = adapt.parse(["--text", "x", "--valid", "x", "--out", "x", "--seed", "5"])
    net = adapt.build(config, None, world, torch.float32, args)
    return {name: p.full_tensor().detach().numpy() for name, p in net.named_parameters()}


def test_fresh_weights_do_not_depend_on_the_ranks():
    config, world = dataclasses.replace(BASE, qkv_bias=True), launch.World(0, 1, torch.device("cpu"))
    with sharding.process_group(world):
        one = build_fresh(world, config)
    for name, weight in run_ranks(3, build_fresh, config)[1].items():
        assert np.array_equal(weight, one[name]), name
    for name in "tok_embeddings.weight", "layers.0.attention.wqkv.weight", "layers.0.feed_forward.w1.weight":
        assert one[name].std() == pytest.approx(BASE.dim**-0.5, rel=0.05), name
    assert not any(one[f"layers.0.{name}.weight"].any() for name in ("attention.wo", "feed_forward.w2"))
    assert not np.array_equal(one["tok_embeddings.weight"], one["output.weight"])
    assert (one["norm.weight"] == 1).all() and not one["layers.0.attention.wqkv.bias"].any()
