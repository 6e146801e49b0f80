"""One GPU against float64, and the emulated link on it.

LADDER_TEST_GPU=1 python -m pytest tests/test_gpu.py    # where there is a GPU
LADDER_TEST_GPU=cpu python -m pytest tests/test_gpu.py  # the same on a CPU, to try the tests; some need a GPU
"""

import copy
import dataclasses
import json
import os

import pytest
import torch
import torch.nn.functional as F
from helpers import WIRED, random_model, script, unequal_rows, wired_id
from reference import Reference

from extras.measure import link
from extras.measure.clock import count_all_reduces
from extras.measure.exposed import Case, own_all_reduce, replays
from formats.sizes import RandomWeights
from generate import Runner, make_cache
from kernels import int_linear
from model import Config
from runtime.launch import World
from runtime.timing import timed
from tp import TensorParallel, load_shard

ON_CPU = os.environ.get("LADDER_TEST_GPU") == "cpu"
DEVICE = torch.device("cpu" if ON_CPU else "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (ON_CPU or torch.cuda.is_available()), reason="needs a GPU, and LADDER_TEST_GPU=1"),
]
needs_cuda = pytest.mark.skipif(ON_CPU, reason="needs a GPU: a CPU has no CUDA graphs")
COMPILED = pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
# shapes that all kernels take: K in multiples of 128, N of 8
CONFIG = Config(3, 8, 2, 16, 128, 256, 136, 64, bos_id=1, eos_ids=(2,))
STEPS = 4  # of decode: of the same CUDA graph, which the first captures


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def logits(net, tokens, lengths, compile):
    """Logits (B, STEPS + 1, V) at the last positions of each row: a prefill, then decode."""
    runner = Runner(net, make_cache(net, len(tokens), tokens.shape[1] + 2), compile)
    tokens, positions = tokens.to(DEVICE), (lengths - STEPS).to(DEVICE)
    found = [net.comm.gather_logits(runner.prefill(tokens[:, : int(positions.max())], positions))]
    for _ in range(STEPS):
        token = tokens.gather(1, positions[:, None])
        after = runner.decode(token, positions, int(positions.max()) + 1)[:, 0]
        found.append(net.comm.gather_logits(after).clone())  # a graph writes again
        positions = positions + 1
    return torch.stack(found, dim=1).double().cpu()


def expected(config, state, tokens, lengths):
    """The same of the float64 reference."""
    reference = Reference(config, state)
    rows = [reference.logits(row[:length])[-STEPS - 1 :] for row, length in zip(tokens, lengths, strict=True)]
    return torch.stack([torch.from_numpy(row) for row in rows])


@COMPILED
@pytest.mark.parametrize("changes", WIRED, ids=wired_id)
def test_every_wiring_computes_what_float64_does(changes, compile):
    """In rows of different lengths: one that read another's would be seen."""
    config = dataclasses.replace(CONFIG, **changes)
    net = random_model(config)
    tokens, lengths = unequal_rows(config)
    exact = expected(config, net.state_dict(), tokens, lengths)
    assert (logits(net.to(DEVICE), tokens, lengths, compile) - exact).abs().max() < 1e-3


def quantized(quant, **changes):
    """(model of random integers in bfloat16 with the kernels of its device, what they stand for as a state dict)."""
    config = dataclasses.replace(CONFIG, quant=quant, group_size=64 if quant == "int4" else None, **changes)
    net = load_shard(config, RandomWeights(config, DEVICE), torch.bfloat16, DEVICE)
    state = dict(net.state_dict())
    for name, module in net.named_modules():
        if isinstance(module, int_linear.Integers):
            zeros = None if module.zeros is None else module.zeros.double()
            state[f"{name}.weight"] = int_linear.dequantize(module.weight, module.scales.double(), zeros)
    int_linear.use_kernels(net)
    return net, state


EAGER = [(quant, rows, False) for quant in ("int8", "int4") for rows in (1, 3, 16, 17)]


@pytest.mark.parametrize("quant, rows, compile", EAGER + [("int8", rows, True) for rows in (2, 5, 16)])
def test_the_kernels_for_integers_multiply_what_they_stand_for(quant, rows, compile):
    """Compiled, few rows go through the Triton kernel."""
    net, state = quantized(quant)
    kernels = {"int8": int_linear.Int8CudaLinear, "int4": int_linear.Int4CudaLinear}
    for name in ("layers.0.attention.wqkv", "layers.1.feed_forward.w2", "output"):
        linear = net.get_submodule(name)
        assert ON_CPU or type(linear) is kernels[quant]
        multiply = torch.compile(linear, dynamic=False) if compile else linear
        x = torch.randn(rows, linear.in_features, generator=torch.Generator().manual_seed(rows)).bfloat16().to(DEVICE)
        weight = state[f"{name}.weight"]
        size = F.linear(x.double().abs(), weight.abs())  # of what is added up: each product may be off by a rounding
        with torch.inference_mode():
            assert ((multiply(x) - F.linear(x.double(), weight)).abs() <= 2**-7 * size).all()


@COMPILED
@pytest.mark.parametrize("changes", [{"wiring": "standard"}, {"wiring": "ladder"}], ids=wired_id)
@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_models_of_integers_compute_what_float64_does(quant, changes, compile):
    net, state = quantized(quant, **changes)
    tokens, lengths = unequal_rows(net.config)
    exact = expected(net.config, state, tokens, lengths)
    found = logits(net, tokens, lengths, compile)
    assert (found - exact).norm() < 0.03 * exact.norm()  # bfloat16
    assert (found[0] - exact[1]).norm() > 0.3 * exact.norm() / len(exact) ** 0.5  # so that rows differ by far more


# ---------------------------------------------------------------------------------------------------------------------
# The link, by one rank of two


@pytest.fixture
def slow():
    """The world of one rank of two, 20 ms from the other."""
    return link.emulate(World(0, 1, DEVICE), link.Link("slow", 20_000.0, None), 2)


def start(world, x):
    return torch.ops._c10d_functional.all_reduce(x, "sum", world.group.group_name)


wait = torch.ops._c10d_functional.wait_tensor


def test_an_all_reduce_takes_what_its_link_takes(slow):
    x = torch.ones(1024, device=DEVICE)
    wait(start(slow, x))
    assert timed(DEVICE, lambda: wait(start(slow, x))) > 0.019
    assert torch.equal(wait(start(slow, x)), x)  # a rank alone sums its own part


def test_an_all_reduce_without_python_takes_what_the_link_of_the_moment_takes(slow):
    """Captured once in a CUDA graph, on a GPU."""
    comm, x = TensorParallel(CONFIG, slow.tp_size, slow.group), torch.ones(500_000, device=DEVICE)
    step = own_all_reduce(slow, Case(CONFIG, None, None, comm, x, slow.group.link))
    for other, least, most in (("20000us", 0.019, 0.03), ("1gbps", 0.0155, 0.03), ("1000us+1gbps", 0.0165, 0.03)):
        slow.group.link = link.parse(other)
        assert least < timed(DEVICE, step) < most


def test_the_link_carries_one_at_a_time(slow):
    x = torch.ones(1024, device=DEVICE)
    assert timed(DEVICE, lambda: [wait(p) for p in [start(slow, x), start(slow, x), start(slow, x)]]) > 0.057


@needs_cuda
def test_what_is_computed_meanwhile_hides_the_link(slow):
    from extras.measure.spin import spin_kernel

    x, work = torch.ones(1024, device=DEVICE), torch.zeros(2, dtype=torch.float64, device=DEVICE)
    work[0] = 20e6  # nanoseconds

    def waiting():
        wait(start(slow, x))
        spin_kernel[(1,)](work, 0)

    def hiding():
        pending = start(slow, x)
        spin_kernel[(1,)](work, 0)
        wait(pending)

    for step in (waiting, hiding):
        step()
    assert timed(DEVICE, hiding) < 0.75 * timed(DEVICE, waiting)


def simulated(changes, world):
    """(a model of one rank, its runner, compiled), in the world."""
    config = dataclasses.replace(CONFIG, **changes)
    net = load_shard(config, RandomWeights(config, DEVICE), torch.float32, DEVICE, world.rank, world.tp_size)
    net.comm = TensorParallel(config, world.tp_size, world.group)
    return net, Runner(net, make_cache(net, 2, 10), compile=True)


@pytest.mark.parametrize("changes", WIRED, ids=wired_id)
def test_collectives_stay_inside_the_cuda_graph(changes, slow, monkeypatch):
    """A replay calls no Python, computes the same, and takes as long as its all-reduces take."""
    net, runner = simulated(changes, slow)
    tokens, lengths = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]], device=DEVICE), torch.tensor([5, 5])
    plain = copy.copy(runner)
    plain._decode = net
    step, eager = (replays(r, tokens, lengths.to(DEVICE))["decode"] for r in (runner, plain))
    before, sent, send = eager().clone(), [], slow.group._send
    monkeypatch.setattr(slow.group, "_send", lambda *args, **passes: sent.append(args) or send(*args, **passes))
    step()  # to capture
    sent.clear()
    seconds = timed(DEVICE, step)
    collectives = count_all_reduces(net.config) + 1  # and the gathered logits
    assert len(sent) == (collectives if ON_CPU else 0)
    assert seconds > 0.95 * 0.02 * collectives
    assert torch.allclose(step(), before, rtol=1e-3, atol=1e-3)


# ---------------------------------------------------------------------------------------------------------------------
# Two GPUs


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("wiring", ["standard", "ladder"])
def test_one_shot_sums_are_nccls(wiring, tmp_path):
    """Of two numbers there is one rounded sum, so the texts are equal; the prompt's sums are two-shot ones."""
    flags = f"--model 1b:2 --dtype float32 --compile --wiring {wiring} --prompt-length 200 --max-new-tokens 30 --json"
    for comm in ("auto", "one-shot"):
        args = *flags.split(), tmp_path / "out.jsonl", "--comm", comm
        done = script("generate.py", *args, ranks=2, CUDA_VISIBLE_DEVICES="0,1")
        if "reach one another's memory" in done.stderr:
            pytest.skip("these GPUs do not reach one another's memory")
        assert done.returncode == 0, done.stderr
    nccl, own = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert nccl["tokens"] == own["tokens"] and own["comm"] == "one-shot"
