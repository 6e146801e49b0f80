"""What the tests share: small configs, weights in memory, functions on several ranks, scripts."""

import collections
import contextlib
import copy
import dataclasses
import functools
import io
import math
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from pathlib import Path
from traceback import format_exception

import pytest
import torch
import torch.distributed as dist
from sentencepiece import SentencePieceTrainer

import tp
from generate import Runner
from ladder import wiring_text
from ladder.architectures import ARCHITECTURES, find_architecture
from ladder.checkpoints import checkpoint, writing
from ladder.decoding.batch import make_cache
from ladder.kernels import compilers, registry
from ladder.lanes import wirings
from ladder.ranks import gloo, launch
from ladder.ranks.collectives import connect_auto
from ladder.ranks.meeting import JoinedWorld
from ladder.ranks.world import World
from model import Config, Transformer, all_wirings, attend, find_wiring, list_sublayers, residual_loop

ROOT = Path(__file__).parent.parent
HANGS = 300  # seconds until a process is thought to hang: the ranks' own time limits are half an hour
RANKS = 4  # of the pool
YARN = {"factor": 4.0, "beta_fast": 8.0, "beta_slow": 0.5, "attention_factor": 1.2}
YARN["original_max_position_embeddings"] = 40
LONGROPE = {"attention_factor": 1.3, "original_max_position_embeddings": 10}
LONGROPE |= {"short_factor": [1.0, 1.5, 2.5], "long_factor": [1.25, 3.0, 7.0]}
GEMMA = {  # what Gemma 2 and 3 have together
    "norm": "rms+1", "postnorm": {}, "activation": "gelu_tanh", "embedding_scale": 7.0, "logit_cap": 3.0,
    "tie_embeddings": True, "rope_scaling": {"factor": 2.5}, "heads": {
        "query_scale": 0.7, "score_cap": 1.5, "qk_norm": True, "window_rope_theta": 50.0, "sliding_window": 4,
        "window_layers": (0, 2),
    },
}  # fmt: skip
OLMO = {
    "postnorm": {"input_norms": False}, "rope_scaling": YARN, "heads": {
        "qk_norm": True, "whole_qk_norm": True, "window_rope_theta": 10000.0, "sliding_window": 4,
        "window_layers": (0, 2),
    },
}  # fmt: skip
GLM = {"rotary_dim": 4, "postnorm": {}, "qkv_bias": True, "rope_scaling": YARN}
STABLELM = {"rotary_dim": 2, "norm": "layer", "qkv_bias": True}
PHI = {"rotary_dim": 6, "rope_scaling": LONGROPE, "heads": {"llama4_beta": 0.4}}
LONG_PHI = {**PHI, "rope_scaling": {**LONGROPE, "original_max_position_embeddings": 6}}  # all rows are beyond that
FAMILIES = GEMMA, OLMO, GLM, STABLELM, PHI, LONG_PHI
BASE = Config(3, 6, 2, 8, 48, 100, 131, 64, norm_eps=1e-5, bos_id=1, eos_ids=(2,))


def change(config, **changes):
    """Return a changed copy of a config. mixture={setting: value} changes or adds that architecture; None drops it."""
    own = {each.name: each for each in config.architecture}
    for name in changes.keys() & ARCHITECTURES.keys():
        settings, before = changes.pop(name), own.pop(name, None)
        if settings is not None:
            own[name] = dataclasses.replace(before, **settings) if before else find_architecture(name)(**settings)
    return dataclasses.replace(config, architecture=tuple(own.values()), **changes)


parse_wiring = functools.partial(wiring_text.parse_wiring, find_wiring=find_wiring)


def table_entry(changes):
    """Return the Wiring of config changes."""
    return find_wiring(parse_wiring(changes["wiring"]).name)


def variants(name):
    """Return the config changes to test a wiring with; one layer alone has a seam on either side."""
    layers = ",".join(map(str, range(find_wiring(name).blocks))) if find_wiring(name).blocks > 1 else "1,"
    wiring = find_wiring(name)
    some = [f"{name}:{layers}"] if wiring.takes_layers else [f"{name}:4"] * (":N" in wiring.forms)
    more = {"ladder": ["ladder:2", "ladder:0,1", "ladder-3"], "delayed": ["delayed-2", "delayed-3:1-2"]}.get(name, [])
    return [{"wiring": text} for text in [name, *more, *some]]


# those of any dense model; farskip is for mixtures (tests/test_experts.py), and tests/test_laneformer.py has its own
NAMES = [name for name, wiring in all_wirings().items() if name != "laneformer" and not name.startswith("farskip")]
WIRED = [changes for name in NAMES for changes in variants(name)]
ANY_TP = [changes for changes in WIRED if not table_entry(changes).reads_partials]
ONE_EACH = [*{id(table_entry(changes)): changes for changes in WIRED}.values()]  # with seams where there can be some
LOOPS = residual_loop, wirings.delayed_loop, wirings.desynced_loop, wirings.silent_loop
BY_HAND = [c for c in WIRED if table_entry(c).loop in LOOPS]  # nobody has reckoned by hand what another loop does


def staleness(config):
    """Of each sublayer, by how many it reads the stream stale."""
    return [stale for _, stale in list_sublayers(config, [None] * config.n_layers)]


def queued(sublayers, all_reduce, stale):
    """Seconds, if each sublayer waits for all sums but of the last so many before it; one at a time is on its way."""
    now, there = 0.0, [0.0]
    for i, seconds in enumerate(sublayers):
        now = max(now, there[max(0, i - stale[i])]) + seconds
        there.append(max(there[-1], now) + all_reduce)
    return there[-1]


def wired_id(changes):
    return "-".join(str(v).replace(" ", "") for v in changes.values())


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


def random_model(config, seed=0):
    """A model whose weights are all random, norms and biases too, and large enough that every term matters."""
    net = Transformer(config).eval()
    if config.tie_embeddings:
        net.output.weight = net.tok_embeddings.weight
    generator = torch.Generator().manual_seed(seed)
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


def shard(config, world=None, dtype=torch.float32, state=None, load=tp.load_shard):
    """This rank's part of a state dict, by default random_model's, with the collectives of the world's group.

    Without a world, or on one rank: all of it. load: or load_lanes.
    """
    rank, shares = (0, (1,)) if world is None else (world.rank, world.shares)
    net = load(config, StateWeights(state or random_model(config).state_dict()), dtype, "cpu", rank, shares)
    if world is not None and world.tp_size > 1:
        net.comm = tp.TensorParallel(config, shares, world.group)
    return net


def unequal_rows(config, batch=3, length=9, seed=1):
    """(tokens (B, S), lengths (B,)): rows that differ in content and in length, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
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


def rank_logits(world, config, state=None, dtype=torch.float32, load=tp.load_shard, **how):
    """last_logits of a rank's shard, or without a world of the whole model, for unequal rows."""
    return last_logits(shard(config, world, dtype, state, load), *unequal_rows(config), **how)


def folder_logits(world, folder, prompt=None, how=None):
    """last_logits of a rank's shard of a checkpoint folder, in float32; prompt: tokens, lengths, or unequal rows."""
    config = checkpoint.read_config(folder)
    net = tp.load_shard(config, checkpoint.Weights(folder), torch.float32, "cpu", world.rank, world.shares)
    if world.tp_size > 1:
        net.comm = tp.TensorParallel(config, world.shares, world.group)
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


@contextlib.contextmanager
def counted_kernels():
    """A Counter of how often each kernel stands in, by the name of its plain function, of those that are in use now."""
    counts, before = collections.Counter(), [(function, function.kernels) for function in registry.used]

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
    total, mass, kept = sum(weights.values()), 0.0, {}
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

    generator, starts = torch.Generator().manual_seed(0), torch.tensor([[5], [0], [T // 4], [T - count], [T + 300]])
    q = torch.randn(5, 2, 4, count, 16, generator=generator)
    k, v = (torch.randn(5, 2, 513, 16, generator=generator) for _ in "kv")
    positions, keys = starts + torch.arange(count), torch.arange(T)
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


# ---------------------------------------------------------------------------------------------------------------------
# Ranks: one pool of processes for all tests of this process, because to start one takes longer than most tests


_ranks = []  # for each rank an executor of one process
_worlds = {}  # in such a process: {number of ranks: its World}


def run_ranks(ranks, function, *args, timeout=HANGS):
    """[function(world, *args) of each rank], each rank a process of a World. ranks: their number, at most 4, or shares.

    A rank alone is this process. A rank that fails or hangs fails the test, and the next test gets new ranks.
    """
    shares = (1,) * ranks if isinstance(ranks, int) else ranks
    if len(shares) == 1:
        return [function(World(0, 1, torch.device("cpu")), *args)]
    if not _ranks:
        port, context = free_port(), multiprocessing.get_context("forkserver")  # its server imports once, for all ranks
        context.set_forkserver_preload(["torch", "torch._dynamo", "torch._inductor.compile_fx"])
        _ranks.extend(ProcessPoolExecutor(1, context, _join, (rank, port)) for rank in range(RANKS))
        for rank in _ranks:  # they all join, also where fewer are asked
            rank.submit(int)
    work = pickle.dumps((shares, function, args))  # tensors by value
    futures = [rank.submit(_call, work) for rank in _ranks[: len(shares)]]
    done, waiting = wait(futures, timeout, FIRST_EXCEPTION)  # the other ranks may wait for that one forever
    errors = {rank: future.exception() for rank, future in enumerate(futures) if future in done}
    errors = [f"rank {rank}: {''.join(format_exception(error))}" for rank, error in errors.items() if error]
    if errors or waiting:
        stop_ranks()
        pytest.fail("\n".join(errors) or f"no answer in {timeout} s", pytrace=False)
    return [pickle.loads(future.result()) for future in futures]


def stop_ranks():
    for rank in _ranks:
        for process in [*(rank._processes or {}).values()]:
            process.kill()
        rank.shutdown()
    _ranks.clear()


def _join(rank, port):
    """Make a World of each size in a rank's process, which has one thread."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(LADDER_TIMEOUT="0", GLOO_SOCKET_IFNAME="lo")
    _worlds[RANKS], before = launch.join("cpu"), gloo.threads()
    for size in range(2, RANKS):
        group = dist.new_group(range(size))
        _worlds[size] = JoinedWorld(rank, size, torch.device("cpu"))
        _worlds[size].dist_group = group
    gloo.let_preempt(gloo.threads() - before)  # as join() does with those of its group
    for size in range(max(2, rank + 1), RANKS):
        world = _worlds[size]
        world.nodes, world.group = _worlds[RANKS].nodes[:size], world.dist_group
        world.group = connect_auto(world)


def _call(work):
    shares, function, args = pickle.loads(work)
    registry.stop_using()  # what another test's model let stand in
    world = copy.copy(_worlds[len(shares)])
    world.shares = shares
    return pickle.dumps(function(world, *args))


def main_on_ranks(ranks, main, *args):
    """[(what it printed, what it said on stderr)] of main(args) of a script on each rank of the pool."""
    return run_ranks(ranks, call_main, main, [str(arg) for arg in args])


def call_main(world, main, args):
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as m, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        m.setattr(launch, "join", lambda device, flags=None: world)
        m.setenv("RANK", str(world.rank))
        m.setenv("WORLD_SIZE", str(world.tp_size))
        main(args)
    return out.getvalue(), err.getvalue()


# ---------------------------------------------------------------------------------------------------------------------
# Scripts


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def command(name, *args, ranks=1):
    """What starts a script of the project, on so many ranks, as a user would."""
    words = [sys.executable, str(ROOT / name), *map(str, args)]
    if ranks > 1:
        one_machine = "--standalone", "--local_addr=127.0.0.1"  # also where its own name does not resolve
        words[:1] = [sys.executable, "-m", "torch.distributed.run", *one_machine, f"--nproc_per_node={ranks}"]
    return words


def script(name, *args, ranks=1, timeout=HANGS, stdin="", **environment):
    """Run a script of the project as a user would; returns the finished process with its output as text."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.run(
        command(name, *args, ranks=ranks), capture_output=True, text=True, timeout=timeout, env=env, input=stdin,
        errors="surrogateescape",
    )  # fmt: skip


def write_model(folder, config, state, dtype):
    """Write a checkpoint folder's config.json and safetensors of the given dtype from a model's state dict."""
    if config.tie_embeddings:
        state = {k: v for k, v in state.items() if k != "output.weight"}
    sizes = {name: tensor.numel() * dtype.itemsize for name, tensor in state.items()}
    writing.write_config(folder, config)
    writing.write_weights(folder, sizes, lambda name: state[name].to(dtype))
