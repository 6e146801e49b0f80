"""Models in memory and in folders: their weights and shards, what they generate, and how likely draws are."""

import collections
import contextlib
import dataclasses
import functools
import math
import os
from pathlib import Path

import pytest
import torch
from sentencepiece import SentencePieceTrainer

import tp
from generate import Runner
from ladder.checkpoints import checkpoint, writing
from ladder.checkpoints.random_weights import RandomWeights
from ladder.decoding.batch import make_cache
from ladder.kernels import compilers, registry
from ladder.ranks.world import World
from model import Transformer, attend

ROOT = Path(__file__).parent.parent
ALONE = World(0, 1, torch.device("cpu"))
compilers.prepare_compile()  # before anything is compiled: Inductor tries once, and remembers, what it can do from here


def shared_data(name):
    """A file of the optional real data, or a skip."""
    folder = os.environ.get("LADDER_TEST_DATA")
    if not folder:
        pytest.skip("LADDER_TEST_DATA names no folder of real checkpoints, tokenizers and text")
    path = Path(folder) / name
    if not path.is_file():
        pytest.skip(f"{path} does not exist")
    return path


def seeded(seed):
    """Return a torch.Generator with this seed."""
    return torch.Generator().manual_seed(seed)


def random_model(config, seed=0):
    """A model whose weights are all random, norms and biases too, and large enough that every term matters."""
    net = Transformer(config).eval()
    if config.tie_embeddings:
        net.output.weight = net.tok_embeddings.weight
    generator = seeded(seed)
    with torch.no_grad():
        for weight in net.parameters():
            if weight.dim() > 1:
                weight.normal_(0, weight.shape[-1] ** -0.5, generator=generator)
            else:
                weight.uniform_(0.5, 1.5, generator=generator)
    return net


def train_tokenizer(texts, vocab_size, path):
    """Write a SentencePiece vocabulary in Llama 2's style: BOS 1, EOS 2, unknown characters as bytes."""
    with open(path, "wb") as f:
        SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=f, vocab_size=vocab_size, model_type="bpe", num_threads=1,
            byte_fallback=True, character_coverage=0.9999, normalization_rule_name="identity", split_digits=True,
            remove_extra_whitespaces=False, allow_whitespace_only_pieces=True, minloglevel=2,
        )  # fmt: skip


def gguf_types(model):
    """The numbers that GGUF has for the kinds of a SentencePiece model's tokens."""
    kinds = {2: model.is_unknown, 3: model.is_control, 6: model.is_byte}
    return [next((n for n, is_kind in kinds.items() if is_kind(i)), 1) for i in range(model.vocab_size())]


def randn(*shape, seed=0):
    """torch.randn with a seed of its own."""
    return torch.randn(*shape, generator=seeded(seed))


def randn_bf16(*shape):
    """Random numbers in bfloat16; those of unlike shapes differ."""
    return torch.randn(shape, generator=seeded(sum(shape)), dtype=torch.float64).bfloat16()


class StateWeights:
    """A state dict with the interface of checkpoint.Weights."""

    def __init__(self, state):
        self.state = state

    def read(self, name):
        return self.state[name]

    def fill(self, target, name, dim=0, ranges=None):
        tensor = self.state[name]
        if ranges is not None:
            tensor = torch.cat([tensor.narrow(dim, a, b - a) for a, b in ranges], dim)
        target.copy_(tensor)


def shard(config, world=None, dtype=torch.float32, state=None, weights=None):
    """This rank's part of weights, or of a state dict, by default random_model's, with the collectives of its group.

    Without a world, or on one rank: all of it.
    """
    rank, shares = (0, (1,)) if world is None else (world.rank, world.shares)
    load = config.named_wiring.loader(shares) or tp.load_shard
    weights = weights or StateWeights(state or random_model(config).state_dict())
    net = load(config, weights, dtype, "cpu", rank, shares)
    if world is not None and world.tp_size > 1:
        net.comm = tp.TensorParallel(config, shares, world.group)
    return net


def load_random(config, dtype=torch.bfloat16):
    """A whole model with the random weights of named sizes, quantized ones too."""
    return tp.load_shard(config, RandomWeights(config, "cpu"), dtype, "cpu")


def unequal_rows(config, batch=3, length=9, seed=1):
    """(tokens (B, S), lengths (B,)): rows that differ in content and in length, padded on the right."""
    generator = seeded(seed)
    tokens = torch.randint(3, config.vocab_size, (batch, length), generator=generator)
    return tokens, torch.arange(length, length - batch, -1)


def last_logits(net, tokens, lengths, steps=3, compile=False, compile_prefill=False, splits=None):
    """Logits (B, steps + 1, V) at the last positions of each row: one prefill without the last `steps` tokens, then
    decode, one token of every row at a time, the rows at different positions."""
    if compile or compile_prefill:  # else the compiler need not be imported
        torch._dynamo.reset()
    runner = Runner(net, make_cache(net, *tokens.shape), compile, compile_prefill, splits)
    positions = lengths - steps
    out = [net.comm.gather_logits(runner.prefill(tokens[:, : int(positions.max())], positions))]
    for _ in range(steps):
        token = tokens.gather(1, positions[:, None])
        after = runner.decode(token, positions, int(positions.max()) + 1)[:, 0]
        out.append(net.comm.gather_logits(after).clone())  # a CUDA graph writes to it again
        positions = positions + 1
    return torch.stack(out, dim=1)


def rank_logits(world, config, state=None, dtype=torch.float32, **how):
    """last_logits of a rank's shard, or without a world of the whole model, for unequal rows."""
    return last_logits(shard(config, world, dtype, state), *unequal_rows(config), **how)


def load_folder(folder):
    """The whole model of a checkpoint folder, in float32."""
    return tp.load_shard(checkpoint.read_config(folder), checkpoint.Weights(folder), torch.float32, "cpu")


def folder_logits(world, folder, prompt=None, how=None):
    """last_logits of a rank's shard of a checkpoint folder, in float32; prompt: tokens, lengths, or unequal rows."""
    config = checkpoint.read_config(folder)
    weights = checkpoint.Weights(folder)
    net = shard(config, world, weights=weights)
    return last_logits(net, *(prompt or unequal_rows(config)), **(how or {}))


def greedy_tokens(net, ids, count, end=None):
    """What follows the ids, the whole sequence computed again for each token."""
    row = []
    while len(row) < count:
        with torch.no_grad():
            token = int(net(torch.tensor([ids + row]))[0, -1].argmax())
        if token == end:
            break
        row.append(token)
    return row


def stop_using_kernels():
    """Let no kernel stand in any longer, in this process."""
    for function in registry.used:
        function.kernels = ()
    registry.used.clear()


@contextlib.contextmanager
def plain_only():
    """Let no kernel stand in within this block."""
    before = [(function, function.kernels) for function in registry.used]
    stop_using_kernels()
    try:
        yield
    finally:
        stop_using_kernels()
        for function, kernels in before:
            function.kernels = kernels
            registry.used[function] = None


def second_best(logits, comm, sampler):
    """An edit of generate.sample."""
    return comm.gather_logits(logits).topk(2).indices[:, 1]


@contextlib.contextmanager
def counted_kernels():
    """A Counter of how often each kernel stands in, by the name of its plain function, of those that are in use now."""
    counts = collections.Counter()
    before = [(function, function.kernels) for function in registry.used]

    def counted(kernel):
        def run(*arguments, **named):
            result = kernel.function(*arguments, **named)
            counts[kernel.name] += result is not None
            return result

        return run

    for function, kernels in before:
        counting = [dataclasses.replace(ready, function=counted(ready.kernel)) for ready in kernels]
        function.kernels = tuple(counting)
    yield counts
    for function, kernels in before:
        function.kernels = kernels


def naive(logits, temperature, top_k, top_p, min_p=0.0):
    """What is sampled from, in float64, a token at a time."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])[:top_k]
    weights = {i: math.exp((float(logits[i]) - float(logits[order[0]])) / temperature) for i in order}
    weights = {i: weight for i, weight in weights.items() if weight >= min_p}
    total = sum(weights.values())
    mass = 0.0
    kept = {}
    for i in weights:
        if mass >= top_p:
            break
        kept[i] = weights[i]
        mass += weights[i] / total
    return [kept.get(i, 0.0) / sum(kept.values()) for i in range(len(logits))]


def p_value(draws, least=0):
    """Of the chi-square test of [(counts, distribution), ...]; rare cells of a draw count as one."""
    distance = freedom = 0
    for counts, p in draws:
        assert not any(n for n, share in zip(counts, p, strict=True) if share == 0)
        cells = [(n, share * sum(counts)) for n, share in zip(counts, p, strict=True)]
        rare = [sum(column) for column in zip((0, 0.0), *(cell for cell in cells if cell[1] < 8), strict=True)]
        cells = [cell for cell in (*cells, rare) if cell[1] >= 8]
        distance += sum((n - mean) ** 2 / mean for n, mean in cells)
        freedom += max(len(cells) - 1, 0)
    assert freedom > least
    return torch.special.gammaincc(*(torch.tensor([freedom, distance], dtype=torch.float64) / 2)).item()


def check_split_attention(count, window, T, device, sinks=None):
    """Compare split_attend, compiled, with attend in rows of different lengths, one of them done, of `count` queries.

    Keys in blocks that a row need not read are NaN.
    """
    from ladder.architectures.heads import attend_with_sinks
    from ladder.kernels.gpu.split_attention import KEY_BLOCK, split_attend  # imports the compiler

    generator = seeded(0)
    starts = torch.tensor([[5], [0], [T // 4], [T - count], [T + 300]])
    q = torch.randn(5, 2, 4, count, 16, generator=generator)
    k, v = (torch.randn(5, 2, 513, 16, generator=generator) for _ in "kv")
    positions = starts + torch.arange(count)
    keys = torch.arange(T)
    mask = (keys <= positions[..., None]) & (keys > positions[..., None] - (window or T))
    plain = attend(q, k, v, mask) if sinks is None else attend_with_sinks(q, k, v, mask, sinks)
    plain = plain.flatten(2, 3)
    for row, (start, end) in enumerate(positions[:, [0, -1]].clamp(max=T - 1).tolist()):
        needed = range((max(0, start + 1 - window) if window else 0) // KEY_BLOCK, end // KEY_BLOCK + 1)
        unneeded = [i for i in range(513) if i // KEY_BLOCK not in needed]
        k[row, :, unneeded] = v[row, :, unneeded] = torch.nan

    @functools.partial(torch.compile, fullgraph=True, dynamic=False)
    def split(q, sinks, *rest):  # with heads apart: the compiler for CPUs takes no view of another shape (torch 2.13)
        return split_attend(q.unflatten(2, (4, count)), *rest, sinks)

    result = split(*[x if x is None else x.to(device) for x in (q.flatten(2, 3), sinks, k, v, mask)]).cpu()
    assert torch.allclose(plain[:-1], result[:-1], atol=1e-5)


def write_model(folder, config, state=None, dtype=torch.float32):
    """Write a checkpoint folder without a tokenizer: a config and a state dict, by default random_model's."""
    state = dict(state or random_model(config).state_dict())
    if config.tie_embeddings:
        state.pop("output.weight", None)
    sizes = {name: tensor.numel() * dtype.itemsize for name, tensor in state.items()}
    folder.mkdir(exist_ok=True)
    writing.write_config(folder, config)
    writing.write_weights(folder, sizes, lambda name: state[name].to(dtype))
