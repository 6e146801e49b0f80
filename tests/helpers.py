"""What the tests share: small configs, weights in memory, and functions run on several ranks."""

import argparse
import os
import pickle
import queue
import socket
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import generate
import tp
from model import Config, Transformer

ROOT = Path(__file__).parent.parent
HANGS = 300  # seconds until a process is thought to hang: the ranks' own time limits are half an hour
BASE = Config(3, 6, 2, 8, 48, 100, 131, 64, norm_eps=1e-5, bos_id=1, eos_ids=(2,))
WIRED = [  # every wiring as config changes
    {"wiring": "standard"},
    {"wiring": "ladder"},
    {"wiring": "hybrid", "ladder_layers": 2},
    {"wiring": "hybrid", "ladder_layers": (0, 1)},
    {"wiring": "hybrid", "ladder_layers": (1,)},
    {"wiring": "parallel"},
    {"wiring": "desync", "desync_period": 2},
    {"wiring": "desync", "desync_period": 4},
    {"wiring": "upper-bound"},
]


def wired_id(changes):
    return "-".join(str(v).replace(" ", "") for v in changes.values())


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
    model = Transformer(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(0, weight.shape[1] ** -0.5, generator=generator)
            else:
                weight.uniform_(0.5, 1.5, generator=generator)
    return model


class StateWeights:
    """A state dict with the interface of checkpoint.Weights."""

    def __init__(self, state):
        self.state = state

    def shape(self, name):
        return tuple(self.state[name].shape)

    def dtype(self, name):
        return self.state[name].dtype

    def fill(self, target, name, dim=0, ranges=None):
        tensor = self.state[name]
        if ranges is not None:
            tensor = torch.cat([tensor.narrow(dim, a, b - a) for a, b in ranges], dim)
        target.copy_(tensor)


def shard(config, rank, tp_size, dtype=torch.float32):
    """This rank's part of random_model, with the collectives of the default group."""
    weights = StateWeights(random_model(config).state_dict())
    net = tp.load_shard(config, weights, dtype, "cpu", rank, tp_size)
    net.comm = tp.TensorParallel(config, tp_size, dist.group.WORLD)
    return net


def unequal_rows(config, batch=3, length=9, seed=1):
    """(tokens (B, S), lengths (B,)): rows that differ in content and in length, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, config.vocab_size, (batch, length), generator=generator)
    return tokens, torch.arange(length, length - batch, -1)


def run_ranks(tp_size, function, *args, timeout=HANGS):
    """[function(rank, tp_size, *args) of each rank], each rank a process with one thread in a gloo group."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = mp.get_context("forkserver")  # its server imports torch once, for all ranks of all tests
    context.set_forkserver_preload(["torch", "torch._dynamo"])
    results = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(r, tp_size, port, results, function, args), daemon=True)
        for r in range(tp_size)
    ]
    for process in ranks:
        process.start()
    try:
        answers = {}
        while len(answers) < tp_size:
            try:
                rank, error, value = results.get(timeout=timeout)
            except queue.Empty:
                pytest.fail(f"ranks {sorted(set(range(tp_size)) - set(answers))} gave no answer in {timeout} s")
            if error:
                pytest.fail(f"rank {rank}:\n{error}")
            answers[rank] = pickle.loads(value)
        return [answers[r] for r in range(tp_size)]
    finally:
        for process in ranks:
            process.terminate()


def _rank(rank, tp_size, port, results, function, args):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(tp_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        tp.join("cpu")
        value = pickle.dumps(
            function(rank, tp_size, *args)
        )  # tensors by value: this process is gone when they are read
        results.put((rank, None, value))
        results.close()
        results.join_thread()
        torch.distributed.barrier()
    except BaseException:
        results.put((rank, traceback.format_exc(), None))


def script(name, *args, ranks=1, timeout=HANGS, stdin="", **environment):
    """Run a script of the project as a user would; returns the finished process with its output as text."""
    command = [sys.executable, str(ROOT / name), *map(str, args)]
    if ranks > 1:
        command[:1] = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=env, input=stdin, errors="surrogateescape"
    )


@torch.no_grad()
def last_logits(net, tokens, lengths, steps=3, compile=False):
    """Logits (B, steps + 1, V) at the last positions of each row: one prefill without the last `steps` tokens, then
    decode, one token of every row at a time, the rows at different positions."""
    torch._dynamo.reset()
    flags = argparse.Namespace(compile=compile, compile_prefill=compile)
    prefill, decode = generate.compiled(net, flags)
    cache = net.new_cache(len(tokens), tokens.shape[1] + 2)
    positions = lengths - steps
    out = [prefill(tokens[:, : int(positions.max())], cache=cache, select=positions - 1)]
    for _ in range(steps):
        token = tokens.gather(1, positions[:, None])
        out.append(decode(token, positions[:, None], cache, int(positions.max()) + 1))
        positions = positions + 1
    return torch.cat(out, dim=1)
