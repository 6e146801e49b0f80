"""gpt-oss: attention sinks, experts with biases, MXFP4, against transformers; on ranks, in integers, in kernels."""

import time

import pytest
import torch
from cases import refused, slow_case
from configs import BASE, change
from decoding_runs import answer_in_turns, runner_with_draft
from file_edits import take_state
from gpu import OnAGpu
from helpers import (
    counted_kernels,
    greedy_tokens,
    last_logits,
    load_random,
    randn_bf16,
    random_model,
    seeded,
    unequal_rows,
)
from hf_folders import YARN_ROPE, check_config_as_on_the_hub, check_family, check_parity, convert, convert_hf, hf_model
from parity import SPLITS, check_ranks_against_one_device
from products import check_rounded
from quantized_folders import mxfp4, write_quantized
from quantized_models import check_quantized_twin
from reference import exact_attention
from running import run_main, run_ranks

import generate
from extras.export import to_hf
from ladder.architectures import experts, heads
from ladder.architectures.heads import Heads
from ladder.architectures.mixture import Mixture, MoE
from ladder.decoding.batch import Sampler
from ladder.kernels import compiling
from ladder.kernels.cpu import skinny_gemm
from ladder.kernels.gpu.split_attention import split_attend
from ladder.text.rendering import render
from ladder.text.tokenizer import Tokenizer

GPT_OSS = "GptOssConfig", {
    "head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 7, "intermediate_size": 32,
    "rope_parameters": {**YARN_ROPE, "truncate": False, "beta_fast": 2.0, "beta_slow": 0.3},
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "hidden_size": 64,
}  # fmt: skip


def gpt_oss():
    """Return a model of transformers whose sinks matter, and whose experts reach the limits of the clamped SwiGLU."""
    theirs = hf_model(GPT_OSS)
    generator = seeded(0)
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if name.endswith(("_bias", "sinks")):
                weight.normal_(0, 1 if "down" in name else 5, generator=generator)
    return theirs


def test_parity_with_transformers(tmp_path):
    """TOKENS are 20, beyond the window of 7 and the 16 of YARN's original context."""
    theirs = gpt_oss()
    theirs.generation_config.eos_token_id = [2, 5]
    ours = check_family(theirs, tmp_path)
    assert (ours.config.find(Heads).window_layers, ours.config.eos_ids) == ((0, 2), (2, 5))
    check_config_as_on_the_hub(tmp_path / "hf", ours)
    refused("sinks True has no Hugging Face form", run_main, to_hf, tmp_path / "ours", "--out", tmp_path / "back")


def test_mxfp4_is_what_its_numbers_say(tmp_path):
    """As published; in a folder of floats the matrices are the other way round."""
    theirs = gpt_oss()

    def chosen(name):
        return name.endswith(("up_proj", "down_proj"))

    def transposed(w, seed):
        parts, result, q = mxfp4(w.mT, seed)
        return parts, result.mT, q

    write_quantized(tmp_path / "hf", theirs, transposed, {"quant_method": "mxfp4"}, chosen)
    check_parity(convert_hf(tmp_path, "ours", "--dtype", "float32"), theirs)
    theirs.save_pretrained(tmp_path / "floats")
    convert(tmp_path / "floats", tmp_path / "same")
    same = take_state(tmp_path / "same")
    assert all(torch.equal(weight, same[name]) for name, weight in take_state(tmp_path / "ours").items())


CONFIG = change(
    BASE, n_heads=12, n_kv_heads=4, qkv_bias=True, wo_bias=True,
    mixture={"n_experts": 5, "experts_per_token": 2, "expert_size": 40, "clamped_swiglu": True},
    heads={"sinks": True, "sliding_window": 4, "window_layers": (0, 2)}, wiring="ladder",
)  # fmt: skip
FEW_KV_HEADS = change(CONFIG, n_kv_heads=2, wiring="farskip")  # of which several ranks have a copy
CONFIGS = [CONFIG, FEW_KV_HEADS, *(change(CONFIG, wiring=w) for w in ("standard", "parallel-ladder"))]
SLOW = pytest.mark.slow


@pytest.mark.parametrize("ranks, configs, how", [
    (2, CONFIGS, SPLITS), ((3, 1), [CONFIG], SPLITS), (3, [FEW_KV_HEADS], SPLITS),
    slow_case(4, CONFIGS, SPLITS),
    slow_case(1, [CONFIG], [{"compile": True, "compile_prefill": True}]),
    slow_case(2, [CONFIG], [{"compile": True}]),
])  # fmt: skip
def test_ranks_compute_what_one_device_does(ranks, configs, how):
    check_ranks_against_one_device(ranks, configs, how)


@pytest.mark.parametrize("mode, ranks", [("int8", 1), ("int8", 3), ("int4", 2)])
def test_integers_are_their_dequantized_twin(mode, ranks, tmp_path):
    config = change(CONFIG, dim=64, head_dim=16, n_heads=8, mixture={"expert_size": 96})
    names = check_quantized_twin(config, random_model(config).state_dict(), mode, ranks, tmp_path)
    assert "layers.0.feed_forward.experts.w2.bias" in names and "layers.0.feed_forward.router.scales" not in names


def test_a_prefill_in_chunks_a_server_and_a_draft_compute_the_same():
    net = random_model(CONFIG)
    ids = [[1, 5, 6, 7, 1, 5], [1, 9, 3, 9, 3]]
    runner = runner_with_draft(net, random_model(change(BASE, n_layers=1)), 3, 2, 30)
    runner.chunk_tokens = 4
    assert generate.generate(runner, ids, 6, Sampler(0)).rows == [greedy_tokens(net, row, 6) for row in ids]
    ends = [greedy_tokens(net, row, 6, end=2) for row in ids]
    requests = [(i, {"ids": row, "max_tokens": 6}) for i, row in enumerate(ids)]
    assert run_ranks(1, answer_in_turns, CONFIG, requests, 2)[0][0] == ends


@pytest.mark.parametrize("G", [1, 2, 7])
def test_few_positions_with_sinks_against_float64(G):
    """A sink is a key more, of value 0; the last of these is far above all scores."""
    skinny_gemm.build()
    q = randn_bf16(3, 2, 2, G, 64)
    keys = randn_bf16(3, 2, 40, 64)
    values = randn_bf16(3, 2, 40, 64)
    positions = torch.tensor([[38, 39], [0, 1], [20, 21]])
    sinks = torch.linspace(-3, 9, 2 * G).bfloat16()
    for window in 100, 7:
        at = torch.arange(40)
        last = positions[..., None]
        mask = (at <= last) & (at > last - window)
        exact = exact_attention(q, keys, values, mask, sinks)
        y = torch.ops.ladder.decode_attention(q, keys, values, mask, 0.125, sinks)
        check_rounded(y, exact, 1e-5)
        arguments = q.transpose(2, 3).double(), keys.double(), values.double(), mask
        split = split_attend(*arguments, sinks).unflatten(2, (G, 2))  # of a GPU, here without a compiler
        for other in heads.attend_with_sinks(*arguments, sinks), split:
            assert (other.transpose(2, 3) - exact).abs().max() < 1e-6


@pytest.mark.parametrize("quant", [None, "int8", "int4"])
def test_the_kernels_for_few_rows_compute_a_bfloat16_step(quant):
    more = {"int8": {"not_quantized": ("w2",)}, "int4": {"group_size": 32}, None: {}}[quant]
    config = change(CONFIG, head_dim=64, dim=64, mixture={"expert_size": 64}, quant=quant, **more)
    dtypes = torch.float32, torch.bfloat16, torch.bfloat16
    nets = [load_random(config, dtype) for dtype in dtypes]
    for name, weight in (pair for net in nets for pair in net.named_parameters()):
        if name.endswith(("bias", "sinks")):
            weight.data.normal_(0, 1, generator=seeded(len(name)))
        elif name.endswith("router.weight"):
            weight.data *= 30  # rounding must not choose other experts
    steps = []
    prefills = []
    for net in nets:
        if net is nets[2]:
            compiling.use_decode_kernels(net)
        with torch.inference_mode(), counted_kernels() as counts:
            steps.append(last_logits(net, *unequal_rows(config)).float())
            prefills.append(net(torch.arange(80).view(2, 40) % 50).float())  # more than FEW_POSITIONS
    assert {
        "ladder.architectures.heads.attend_with_sinks",
        "ladder.architectures.experts.Experts.forward",
    } <= counts.keys()
    for exact, plain, fast in steps, prefills:
        assert (fast - exact).abs().mean() < 1.2 * (plain - exact).abs().mean()


def captured(x, *arguments):
    """What a GPU computes while a graph is captured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        return experts.experts_on_a_gpu(x.as_subclass(OnAGpu), *arguments).as_subclass(torch.Tensor)


@pytest.mark.parametrize("way", [experts.experts_on_a_gpu, experts.gathered, experts.every, captured])
def test_products_for_a_gpu_know_biases(way):
    moe = MoE(CONFIG.dim, CONFIG.find(Mixture))
    x = torch.randn(8, 48)
    for weight in moe.parameters():
        torch.nn.init.normal_(weight, 0, 0.5)
    three = (moe.experts.w1, moe.experts.w3, moe.experts.w2)
    _, chosen = moe.choose(x)
    y = way(x, chosen, *([w.weight] for w in three), experts.list_biases(*three))
    torch.testing.assert_close(y, moe.experts(x, chosen), rtol=1e-4, atol=1e-4)


HARMONY = """
{%- macro typed(kind, nullable=false) -%}{{ kind ~ (" | null" if nullable else "") }}{%- endmacro -%}
{%- set ns = namespace(answers=0) -%}
{{- "<|start|>system<|message|>Current date: " + strftime_now("%Y-%m-%d") + "\\n" }}
{%- for tool in tools or [] %}{{ tool.name ~ ": " ~ typed("string", true) }}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == "assistant" %}{% set ns.answers = ns.answers + 1 %}{% endif -%}
<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{{ ns.answers }}{%- endif -%}
"""


def test_a_template_with_harmonys_features():
    tokenizer = Tokenizer()
    tokenizer.template = HARMONY
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    system = f"<|start|>system<|message|>Current date: {time.strftime('%Y-%m-%d')}\nf: string | null"
    talk = "<|start|>user<|message|>hi<|end|><|start|>assistant<|message|>ho<|end|><|start|>assistant1"
    assert render(tokenizer, messages, variables={"tools": [{"name": "f"}]}) == system + talk


@pytest.mark.parametrize("changes, words", [
    ({"mixture": {"shared_expert_size": 8}}, "clamped_swiglu is not for shared experts"),
    ({"heads": {"score_cap": 3.0}}, "sinks are not for score_cap"),
    ({"rope_scaling": {"factor": 2.0, "truncate": False}}, "truncate False, which only yarn has"),
])  # fmt: skip
def test_bad_configs_are_one_line(changes, words):
    refused(words, change, CONFIG, **changes)
