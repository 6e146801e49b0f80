"""One GPU against float64.

LADDER_TEST_GPU=1 python -m pytest tests/test_gpu.py    # where there is a GPU
LADDER_TEST_GPU=cpu python -m pytest tests/test_gpu.py  # the same on a CPU, to try the tests; some need a GPU
"""

# The order matters: `make gpu` has 150 s, of which a cold compiler takes most, so the telling tests come first.
import json
import signal

import pytest
import torch
import torch.nn.functional as F
from configs import WIRED, change, wired_id
from file_edits import read_lines
from gpu import CONFIG, DEVICE, NEEDS_A_GPU, ON_CPU, chat_of_two_turns, end_a_rank
from helpers import check_split_attention, last_logits, randn, random_model, unequal_rows
from reference import MixtureReference
from running import script

from ladder.checkpoints.random_weights import RandomWeights
from ladder.kernels import quant_kernels, quant_linear, registry
from ladder.kernels.gpu import integers
from tp import load_shard

pytestmark = [*NEEDS_A_GPU, pytest.mark.usefixtures("fresh_compiler")]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
COMPILED = pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
# mixtures whose steps gather the experts that tokens choose, or have all compute
MIXED = [
    {**WIRED[1], "mixture": {"n_experts": 5, "experts_per_token": k, "expert_size": 72, "dense_layers": (1,)}}
    for k in (1, 4)
]
STEPS = 4  # of decode: of the same CUDA graph, which the first captures


def logits(net, tokens, lengths, compile):
    """Logits (B, STEPS + 1, V) at the last positions of each row: a prefill, then decode."""
    return last_logits(net, tokens.to(DEVICE), lengths.to(DEVICE), STEPS, compile).double().cpu()


def expected(config, state, tokens, lengths):
    """The same of the float64 reference."""
    reference = MixtureReference(config, state)
    rows = [reference.logits(row[:length])[-STEPS - 1 :] for row, length in zip(tokens, lengths, strict=True)]
    return torch.stack([torch.from_numpy(row) for row in rows])


@COMPILED
@pytest.mark.parametrize("changes", WIRED[:2] + MIXED, ids=wired_id)
def test_a_model_computes_what_float64_does(changes, compile):
    """In rows of different lengths: one that read another's would be seen."""
    config = change(CONFIG, **changes)
    net = random_model(config)
    tokens, lengths = unequal_rows(config)
    exact = expected(config, net.state_dict(), tokens, lengths)
    assert (logits(net.to(DEVICE), tokens, lengths, compile) - exact).abs().max() < 1e-3


@pytest.mark.parametrize("T", [512, 509, 9])
@pytest.mark.parametrize("window", [None, 4, 200])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("sinks", [None, torch.linspace(-3, 5, 8)], ids=["", "sinks"])
def test_attention_with_split_keys_is_attention(count, window, T, sinks):
    check_split_attention(count, window, T, DEVICE, sinks)


def quantized(quant, **changes):
    """(model of random integers in bfloat16 with the kernels of its device, what they stand for as a state dict)."""
    config = change(CONFIG, quant=quant, group_size=64 if quant == "int4" else None, **changes)
    net = load_shard(config, RandomWeights(config, DEVICE), torch.bfloat16, DEVICE)
    state = dict(net.state_dict())
    for name, module in net.named_modules():
        if isinstance(module, quant_linear.QuantLinear):
            zeros = None if module.zeros is None else module.zeros.double()
            state[f"{name}.weight"] = quant_linear.dequantize(module.weight, module.scales.double(), zeros)
    quant_kernels.pack(net, DEVICE.type)
    registry.use(quant_kernels.KERNELS[DEVICE.type])
    return net, state


@COMPILED
@pytest.mark.parametrize("changes", WIRED[:2], ids=wired_id)
@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_models_of_integers_compute_what_float64_does(quant, changes, compile):
    net, state = quantized(quant, **changes)
    tokens, lengths = unequal_rows(net.config)
    exact = expected(net.config, state, tokens, lengths)
    result = logits(net, tokens, lengths, compile)
    assert (result - exact).norm() < 0.03 * exact.norm()  # bfloat16
    assert (result[0] - exact[1]).norm() > 0.3 * exact.norm() / len(exact) ** 0.5  # so that rows differ by far more


def generate_on_two_gpus(*args, **environment):
    done = script("generate.py", *args, ranks=2, CUDA_VISIBLE_DEVICES="0,1", **environment)
    if "reach one another's memory" in done.stderr:
        pytest.skip("these GPUs do not reach one another's memory")
    assert done.returncode == 0, done.stderr


@two_gpus
@pytest.mark.parametrize("comm", ["library", "one-shot"])
def test_captured_steps_on_two_gpus_choose_what_eager_ones_do(comm, tmp_path):
    """With a draft, too, and where the host waits for each kernel: a race would show."""
    flags = f"--model 1b:2 --dtype float32 --temperature 0 --prompt-length 200 --max-new-tokens 80 --comm {comm} --json"
    ways = [("", "0"), ("", "1"), ("--compile", "0"), ("--compile --draft ngram", "0")]
    for way, blocking in ways:
        args = *flags.split(), tmp_path / "out.jsonl", *way.split()
        generate_on_two_gpus(*args, CUDA_LAUNCH_BLOCKING=blocking)
    lines = read_lines(tmp_path / "out.jsonl")
    assert all(line["tokens"] == lines[0]["tokens"] for line in lines)
    assert len(lines[2]["graph_bytes"]) == 2 and sum(lines[2]["graph_bytes"]) < 2e8


@two_gpus
@pytest.mark.parametrize("wiring", ["standard", "ladder"])
def test_one_shot_sums_are_nccls(wiring, tmp_path):
    """Of two numbers there is one rounded sum, so the texts are equal; the prompt's sums are two-shot ones."""
    flags = f"--model 1b:2 --dtype float32 --compile --wiring {wiring} --prompt-length 200 --max-new-tokens 30 --json"
    for comm in ("library", "one-shot"):
        args = *flags.split(), tmp_path / "out.jsonl", "--comm", comm
        generate_on_two_gpus(*args)
    nccl, own = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert nccl["tokens"] == own["tokens"] and own["comm"] == "one-shot"


EAGER = [(quant, rows, False) for quant in ("int8", "int4") for rows in (1, 3, 16, 17, 300)]
COMPILED_ROWS = [*(("int8", rows, True) for rows in (1, 2, 5, 16)), ("int4", 300, True)]


@pytest.mark.parametrize("quant, rows, compile", EAGER + COMPILED_ROWS)
def test_the_kernels_for_integers_multiply_what_they_stand_for(quant, rows, compile):
    """Compiled, few rows go through the Triton kernels."""
    net, state = quantized(quant)
    for name in ("layers.0.attention.wqkv", "layers.1.feed_forward.w2", "output"):
        linear = net.get_submodule(name)
        assert ON_CPU or quant == "int8" or linear.layout is integers.LAYOUT
        multiply = torch.compile(linear, dynamic=False) if compile else linear
        x = randn(rows, linear.in_features, seed=rows).bfloat16().to(DEVICE)
        weight = state[f"{name}.weight"]
        size = F.linear(x.double().abs(), weight.abs())  # of what is added up: each product may be off by a rounding
        with torch.inference_mode():
            assert ((multiply(x) - F.linear(x.double(), weight)).abs() <= 2**-7 * size).all()


@pytest.mark.parametrize("rows, compile", [(1, False), (3, False), (16, False), (300, False), (1, True), (16, True)])
def test_fp8_multiplies_as_it_does_on_a_cpu(rows, compile):
    """Of the same bytes, by PyTorch's kernel where the GPU has one: the order of sums and one rounding may differ."""
    net, _ = quantized("fp8")
    for name in ("layers.0.attention.wqkv", "layers.1.feed_forward.w2"):
        linear = net.get_submodule(name)
        used = not ON_CPU and torch.cuda.get_device_capability() >= integers.FP8_CAPABILITY
        x = randn(rows, linear.in_features, seed=rows).bfloat16().to(DEVICE)
        with torch.inference_mode():
            y = (torch.compile(linear, dynamic=False) if compile else linear)(x).float()
            assert (integers.multiply_fp8(linear, x) is not None) == used
            expected = quant_linear.multiply_fp8(x, linear).float()
        # an activation that lies between two numbers of e4m3 may become the other one
        assert (y - expected).norm() < 0.01 * expected.norm()


@two_gpus
def test_a_rank_that_is_killed_in_a_replay_takes_all_others_and_their_memory_with_it():
    free = torch.cuda.mem_get_info(1)[0]
    said, seconds = end_a_rank(signal.SIGKILL, "--compile", CUDA_VISIBLE_DEVICES="0,1")
    assert "has died in decode step" in said and seconds < 5 and torch.cuda.mem_get_info(1)[0] > free - 2**28


@two_gpus
def test_a_second_turn_of_a_chat_compiles_for_its_prompt():
    chat_of_two_turns("--compile", "all", CUDA_VISIBLE_DEVICES="0,1", LADDER_TIMEOUT="5")


@COMPILED
@pytest.mark.parametrize("changes", WIRED[2:], ids=wired_id)
def test_every_other_wiring_computes_what_float64_does(changes, compile):
    test_a_model_computes_what_float64_does(changes, compile)
