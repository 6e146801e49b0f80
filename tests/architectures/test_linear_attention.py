"""Linear attention: against a naive float64 recurrence and transformers, on ranks, compiled, in integers."""

import re

import numpy as np
import pytest
import torch
from cases import refused, slow_case
from configs import ANY_TP, BASE, LINEAR_ATTENTION, LINEAR_SETTINGS, change
from file_edits import change_tensors
from helpers import load_random, unequal_rows, write_model
from hf_folders import (
    SMALL,
    check_config_as_on_the_hub,
    check_family,
    check_parity,
    config_from_values,
    convert_hf,
    hf_model,
    multimodal_model,
)
from parity import SPLITS, check_few_rows_in_bfloat16, check_ranks_against_one_device, long_memory
from quantized_models import check_quantized_twin
from running import run_main

from extras.export import verify
from extras.measure import advise
from generate import Runner
from ladder.architectures.linear import gated_delta_rule, normalized
from ladder.checkpoints import checkpoint, writing
from ladder.command_line.draft_flag import read_draft
from ladder.kernels.cpu import skinny_gemm
from ladder.memory import step_bytes
from tp import shard_plan


def random_inputs(S, B=2, K=3, R=2, X=8, Y=5, decay=0.3):
    torch.manual_seed(S)
    q = torch.randn(B, K, S, X)
    k = torch.randn(B, K, S, X)
    state = torch.randn(B, K, R, X, Y)
    v = torch.randn(B, K, R, S, Y)
    rate = torch.rand(B, K, R, S)
    beta = torch.rand(B, K, R, S)
    return normalized(q), normalized(k), v, -decay * rate, beta, state


def recurrence(q, k, v, log_decay, beta, state):
    """The gated delta rule of one head in float64, token by token: q, k (S, X), v (S, Y), state (X, Y)."""
    q, k, v, log_decay, beta, state = (x.double().numpy() for x in (q, k, v, log_decay, beta, state))
    y = []
    for t in range(len(q)):
        state = np.exp(log_decay[t]) * state
        state = state + np.outer(k[t], beta[t] * (v[t] - state.T @ k[t]))
        y.append(state.T @ q[t])
    return torch.from_numpy(np.array(y)), torch.from_numpy(state)


@pytest.mark.parametrize("decay", [0.001, 0.3, 30.0])  # it hardly forgets; it forgets more than exp can say
@pytest.mark.parametrize("S", [1, 2, 63, 64, 65, 150])
def test_chunks_equal_the_naive_recurrence(S, decay):
    inputs = random_inputs(S, decay=decay)
    y, state = gated_delta_rule(*inputs)
    q, k, *by_head = inputs
    for b, h, r in np.ndindex(*inputs[-1].shape[:3]):
        expected = recurrence(q[b, h], k[b, h], *(x[b, h, r] for x in by_head))
        assert (y[b, h, r] - expected[0]).abs().max() < 1e-4
        assert (state[b, h, r] - expected[1]).abs().max() < 1e-4


# ---------------------------------------------------------------------------------------------------------------------
# Parity with transformers

LINEAR = {
    "head_dim": 16, "num_hidden_layers": 4, "layer_types": None, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4, "bos_token_id": None,
}  # fmt: skip
EXPERTS = {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 36, "shared_expert_intermediate_size": 28,
    "mlp_only_layers": [1],
}  # fmt: skip
FAMILIES = {
    "qwen3-next": ("Qwen3NextConfig", {**LINEAR, **EXPERTS}),
    "qwen3.5": ("Qwen3_5TextConfig", {
        **LINEAR, "layer_types": ["linear_attention", "full_attention"] * 2, "linear_conv_kernel_dim": 3,
        "linear_num_value_heads": 4, "rope_parameters": {**SMALL["rope_parameters"], "partial_rotary_factor": 0.5}}),
    "qwen3.5, experts": ("Qwen3_5MoeTextConfig", {**LINEAR, **EXPERTS}),
}  # fmt: skip


def forgetful(net):
    """Return the model with decays from hardly any to nearly all: those of transformers forget everything at once."""
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if name.endswith("A_log"):
                weight.uniform_(-5, 0)
    return net


@pytest.mark.parametrize("family", FAMILIES)
def test_parity_with_transformers(family, tmp_path):
    ours = check_family(forgetful(hf_model(FAMILIES[family])), tmp_path)
    run_main(verify, tmp_path / "hf", tmp_path / "ours")
    check_config_as_on_the_hub(tmp_path / "hf", ours)


@pytest.mark.parametrize("outer, family", [("Qwen3_5", "qwen3.5"), ("Qwen3_5Moe", "qwen3.5, experts")])
def test_the_language_model_beside_a_tower_for_pictures(outer, family, tmp_path, capsys):
    """With layers that predict several tokens, which transformers leaves out, too."""
    vision = {"depth": 1, "num_heads": 2, "out_hidden_size": 48, "num_position_embeddings": 16}
    theirs = forgetful(multimodal_model(outer, FAMILIES[family][1], vision))
    theirs.save_pretrained(tmp_path / "hf")
    change_tensors(tmp_path / "hf", {"mtp.fc.weight": torch.zeros(2)})
    ours = convert_hf(tmp_path, "ours")
    said = capsys.readouterr().out
    assert "1 tensors of mtp" in said and re.search(r"\d tensors of visual", said)
    check_parity(ours, theirs)
    run_main(verify, tmp_path / "hf", tmp_path / "ours")


# ---------------------------------------------------------------------------------------------------------------------
# Wirings, ranks, compiled

MIXTURE = change(
    LINEAR_ATTENTION, mixture={
        "n_experts": 5, "experts_per_token": 2, "expert_size": 36, "shared_expert_size": 28, "shared_expert_gate": True,
    },
    wiring="farskip", tie_embeddings=False, n_kv_heads=4,
)  # fmt: skip
CONFIGS = [*(change(LINEAR_ATTENTION, **changes) for changes in ANY_TP), MIXTURE]
LANES = change(LINEAR_ATTENTION, wiring="spd/4")  # each has states of its own


@pytest.mark.parametrize("ranks, configs", [
    (1, [LANES]), (2, [*CONFIGS, LANES]),
    *(slow_case(*how) for how in ((3, CONFIGS), (4, [*CONFIGS, LANES]))),
    ((2, 1), [MIXTURE]),  # which has KV heads for such shares
])  # fmt: skip
def test_ranks_compute_what_one_device_does(ranks, configs):
    check_ranks_against_one_device(ranks, configs, SPLITS)


@pytest.mark.slow
@pytest.mark.parametrize("ranks, prefill", [(1, False), (1, True), (3, True)])
def test_compiled_ranks_compute_it_too(ranks, prefill):
    config = change(LINEAR_ATTENTION, n_layers=2, linear={"layers": (0,)}, wiring="ladder")
    check_ranks_against_one_device(ranks, [config], [{"compile": True, "compile_prefill": prefill}])


@pytest.mark.parametrize("part", [1, 4, 5, 100])
def test_a_prefill_in_parts_passes_the_state_on(part):
    """A row ends in the first part, one in a later part: what is padding in a part changes no state."""
    net = long_memory(LINEAR_ATTENTION)
    lengths = torch.tensor([14, 9, 3])
    tokens = unequal_rows(LINEAR_ATTENTION, length=14)[0]
    runner = Runner(net, net.new_cache(3, 16))
    runner.chunk_tokens = 3 * part
    with torch.no_grad():
        expected = torch.stack([net(row[None, :n])[0, -1] for row, n in zip(tokens, lengths, strict=True)])
        longer = [torch.cat((row[:n], torch.tensor([7]))) for row, n in zip(tokens, lengths, strict=True)]
        further = torch.stack([net(row[None])[0, -1] for row in longer])
    for cached in 0, 2:  # a state cannot go back to two tokens, so all are read again
        assert (runner.prefill(tokens, lengths, cached) - expected).abs().max() < 1e-4
        assert (runner.decode(torch.full((3, 1), 7), lengths, 15)[:, 0] - further).abs().max() < 1e-4


# ---------------------------------------------------------------------------------------------------------------------
# Integers, kernels, reports


@pytest.mark.parametrize("mode", ["int8", "int4"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_integers_are_their_dequantized_twin(mode, ranks, tmp_path):
    settings = {**LINEAR_SETTINGS, "key_dim": 32, "value_dim": 32}
    config = change(LINEAR_ATTENTION, dim=64, head_dim=16, intermediate_size=96, linear=settings)
    state = {name: w for name, w in long_memory(config).state_dict().items() if name != "output.weight"}  # tied
    names = check_quantized_twin(config, state, mode, ranks, tmp_path)
    assert {"layers.0.attention.wqkvz.scales", "layers.0.attention.wout.scales"} <= names
    assert "layers.0.attention.wba.scales" not in names  # how fast it forgets


@pytest.mark.slow
@pytest.mark.parametrize("quant", [None, "int8"])
def test_the_kernels_for_few_rows_compute_a_bfloat16_step(quant):
    fast, counts = check_few_rows_in_bfloat16(change(LINEAR_ATTENTION, head_dim=64, quant=quant))
    layer = fast.layers[0].attention
    gated = fast.layers[1].attention
    for linear in (layer.wqkvz, layer.wout, gated.wqkv, gated.wo) if quant else ():
        assert linear.layout is skinny_gemm.LAYOUT
    assert counts["model.attend"] and counts["model.Linear.forward"]


def test_bytes_of_a_step_and_of_the_advisor():
    config = change(LINEAR_ATTENTION, n_layers=4, linear={"layers": (0, 1, 2)})
    net = load_random(config)
    cache = net.new_cache(2, 9)
    attention = [sum(p.nbytes for n, p in b.attention.named_parameters() if "norm" not in n) for b in net.layers]
    caches = [sum(tensor.nbytes for tensor in layer) for layer in cache]
    assert step_bytes(net, cache, 3) - step_bytes(net, cache, 0) == caches[3] // 3
    assert step_bytes(net, cache, 0) >= sum(p.nbytes for p in net.layers.parameters()) + sum(caches[:3])
    work = advise.decode_work(config, torch.bfloat16, 1, 2, 9)
    assert work["attention"].n_bytes == (sum(attention) + sum(caches)) / 4


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize("changes, words", [
    ({"linear": {"layers": (3,)}}, "linear: layers are from 0 to 2, not .3,."),
    ({"linear": {"value_heads": 7}}, "value_heads 7 is no multiple of key_heads 5"),
    ({"quant": "int4", "group_size": 32, "dim": 64, "head_dim": 16, "not_quantized": ("w2",)}, "wout .120.: keep wout"),
])  # fmt: skip
def test_bad_configs_are_one_line(changes, words):
    refused(words, change, LINEAR_ATTENTION, **changes)


@pytest.mark.parametrize("settings, words", [
    (LINEAR_SETTINGS, "linear: no key 'layers'"),
    ({"layers": [0], **LINEAR_SETTINGS, "conv_width": 0}, "linear: conv_width is 0 but must be a whole number"),
    ({"layers": [0], **LINEAR_SETTINGS, "key_dim": 2**40}, "linear: key_dim is 1099511627776 but must be a who"),
    ({"layers": [0], **LINEAR_SETTINGS, "depth": 7}, "linear: unknown key 'depth'"),
    ([], "'linear' is unknown, or no object"),
])  # fmt: skip
def test_settings_of_the_wrong_type_are_one_line(settings, words):
    values = {**writing.config_values(BASE), "architecture": {"linear": settings}}
    refused(words, checkpoint.make_config, values)


@pytest.mark.parametrize("changes, words", [
    ({"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]}, "layer_types must name full_attention or lin"),
    ({"layer_types": ["linear_attention"] * 3}, "for each of 4 layers"),
    ({"linear_key_head_dim": None}, "linear: linear_key_head_dim is null but must be a whole number above 0"),
    ({"linear_num_key_heads": 3}, "linear_num_value_heads 32 is no multiple of linear_num_key_heads 3"),
])  # fmt: skip
def test_bad_folders_are_one_line(changes, words, tmp_path):
    values = {**SMALL, "model_type": "qwen3_5_text", "num_hidden_layers": 4, **changes}
    refused(words, config_from_values, tmp_path, values)


def test_more_ranks_than_key_heads_and_drafts_are_refused(tmp_path):
    refused("none of 5 key heads of linear attention", shard_plan, LINEAR_ATTENTION, 0, (1,) * 6)
    write_model(tmp_path / "small", LINEAR_ATTENTION, long_memory(LINEAR_ATTENTION).state_dict())
    for draft, config in ("ngram", LINEAR_ATTENTION), (str(tmp_path / "small"), BASE):
        refused(f"--draft {draft}: .* with linear attention neither drafts nor is", read_draft, draft, config, None)
