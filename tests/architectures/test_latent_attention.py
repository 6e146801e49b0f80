"""Latent attention, DeepSeek's routers and Instella-MoE: against transformers and float64, on ranks, in integers."""

import dataclasses
import itertools
import re

import pytest
import torch
import torch.nn as nn
from cases import refused, slow_case
from configs import ANY_TP, BASE, LINEAR_SETTINGS, change
from decoding_runs import answer_in_turns, runner_with_draft
from file_edits import change_tensors, edit_config
from helpers import greedy_tokens, load_random, randn, random_model, seeded, unequal_rows
from hf_folders import (
    YARN_ROPE,
    check_config_as_on_the_hub,
    check_family,
    check_parity,
    convert_hf,
    hf_model,
)
from parity import SPLITS, check_few_rows_in_bfloat16, check_ranks_against_one_device
from quantized_folders import BLOCKS, fp8, write_quantized
from quantized_models import check_quantized_twin
from running import run_main, run_ranks

import generate
from extras.export import to_hf
from extras.measure import advise
from generate import Runner
from ladder.architectures.mixture import Mixture, MoE
from ladder.checkpoints import checkpoint
from ladder.decoding.batch import Sampler
from ladder.kernels import compiling
from ladder.kernels.cpu import skinny_gemm
from ladder.layers.attention_inputs import attention_metadata
from ladder.memory import step_bytes
from ladder.sources.huggingface import config_from_hf

# ---------------------------------------------------------------------------------------------------------------------
# Parity with transformers

ROPE = {**YARN_ROPE, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.7}
DEEPSEEK = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": None, "v_head_dim": 16,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "n_shared_experts": 2, "moe_intermediate_size": 20, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
    "rope_parameters": ROPE,
}  # fmt: skip
ONE_GROUP = {"n_group": 1, "topk_group": 1}
FAMILIES = {
    "deepseek v3": ("DeepseekV3Config", {**DEEPSEEK, "q_lora_rank": 20}),
    "deepseek v3, as pairs": ("DeepseekV3Config", {**DEEPSEEK, "rope_interleave": False, "norm_topk_prob": False}),
    "deepseek v2": ("DeepseekV2Config", {
        **DEEPSEEK, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5}),
    "deepseek v2 lite": ("DeepseekV2Config", {**DEEPSEEK, "topk_method": "greedy", "n_group": None}),
    "glm-4.5": ("Glm4MoeConfig", {
        **{key: DEEPSEEK[key] for key in DEEPSEEK if "lora" not in key and not key.startswith(("qk", "v_", "rope"))},
        **ONE_GROUP, "num_key_value_heads": 2, "head_dim": 16, "use_qk_norm": True, "attention_bias": True}),
    "glm-4.7-flash": ("Glm4MoeLiteConfig", {**DEEPSEEK, **ONE_GROUP, "q_lora_rank": 20}),
}  # fmt: skip


def balanced(net):
    """Return a model of transformers whose routers' biases matter."""
    for name, buffer in net.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.2, generator=seeded(len(name)))
    return net


@pytest.mark.parametrize("family", FAMILIES)
def test_parity_with_transformers(family, tmp_path):
    """TOKENS are 20, beyond the 16 of YARN's original context."""
    ours = check_family(balanced(hf_model(FAMILIES[family])), tmp_path)
    check_config_as_on_the_hub(tmp_path / "hf", ours)
    refused("has no Hugging Face form", run_main, to_hf, tmp_path / "ours", "--out", tmp_path / "back")


class Instella(nn.Module):
    """DeepSeek V3 of transformers with gated attention and FarSkip's two streams, on whole texts.

    early: the layers whose attention misses the routed experts before it, and those whose MLP misses the attention.
    """

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.inputs = {}
        self.early = (range(9), range(9))
        self.gates = nn.ModuleList(nn.Linear(48, 64, bias=False) for _ in net.model.layers)
        for gate, layer in zip(self.gates, net.model.layers, strict=True):
            nn.init.normal_(gate.weight, 0, 0.3)
            layer.self_attn.o_proj.register_forward_pre_hook(lambda _, y, g=gate: y[0] * g(self.inputs["x"]).sigmoid())

    def forward(self, tokens):
        model = self.net.model
        S = tokens.shape[1]
        x = y = model.embed_tokens(tokens)
        rope = model.rotary_emb(x, torch.arange(S)[None])
        mask = torch.full((S, S), -torch.inf).triu(1)[None, None]
        for i, layer in enumerate(model.layers):
            self.inputs["x"] = layer.input_layernorm(y if i in self.early[0] else x)
            a, _ = layer.self_attn(self.inputs["x"], position_embeddings=rope, attention_mask=mask)
            m = layer.post_attention_layernorm(x if i in self.early[1] else x + a)
            if not hasattr(layer.mlp, "experts"):
                x = y = x + a + layer.mlp(m)
                continue
            _, weights, chosen = layer.mlp.gate(m)
            routed = layer.mlp.experts(m.flatten(0, 1), chosen, weights).view_as(m)
            y = x + a + layer.mlp.shared_experts(m)
            x = y + routed
        logits = self.net.lm_head(model.norm(x))
        return type("Output", (), {"logits": logits})


def instella(folder):
    """Save a tiny Instella-MoE and return its reference."""
    theirs = Instella(balanced(hf_model(("DeepseekV3Config", {**DEEPSEEK, **ONE_GROUP, "num_hidden_layers": 4}))))
    theirs.net.save_pretrained(folder)
    gates = {f"model.layers.{i}.self_attn.gate_proj.weight": g.weight.detach() for i, g in enumerate(theirs.gates)}
    change_tensors(folder, gates)
    edit_config(folder, architectures=["InstellaMoEForCausalLM"], gated_attention=True, farskip=True)
    return theirs


@pytest.mark.parametrize("family", ["deepseek v3", "deepseek v2"])  # with and without latents of queries
def test_e4m3_in_blocks_becomes_rows(family, tmp_path):
    theirs = balanced(hf_model(FAMILIES[family]))

    def make(w, seed):
        return fp8(w, seed, 16, 16, "weight_scale_inv", None, lambda least: 2 ** least.log2().ceil())

    def chosen(name):
        return name.endswith(("_proj.weight", "_with_mqa.weight")) and "experts." not in name

    write_quantized(tmp_path / "hf", theirs, make, {**BLOCKS, "weight_block_size": [16, 16]}, chosen)
    ours = convert_hf(tmp_path, "ours", "--dtype", "float32")
    kept = {name.split(".")[-2] for name in checkpoint.Weights(tmp_path / "ours").names() if name.endswith(".scales")}
    assert ours.config.quant == "fp8" and kept >= {"wkv_a", "wo"} | ({"wq_a", "wq_b"} if "v3" in family else {"wq"})
    check_parity(convert_hf(tmp_path, "float", "--to-float", "--dtype", "float32"), theirs)
    x = torch.arange(20)[None] % 60
    with torch.inference_mode():
        exact = theirs(x).logits
        rounded = ours(x)
    assert 0 < (rounded - exact).norm() < 0.2 * exact.norm()  # fp8 rounds activations, too


def test_instella_is_deepseek_with_gates_and_two_streams(tmp_path):
    theirs = instella(tmp_path / "hf")
    ours = convert_hf(tmp_path, "ours")
    assert ours.config.wiring == "farskip" and ours.config.find(Mixture).dense_layers == (0,)
    check_parity(ours, theirs)


@pytest.mark.parametrize("keys, attentions, mlps, wiring", [
    ({"farskip_start_idx": 2}, (2, 3), (2, 3), "farskip:2-3"),
    ({"farskip_start_idx": 1, "farskip_end_idx": 2}, (1, 2), (1, 2), "farskip:1-2"),
    ({"attn_only_farskip": True}, (0, 1, 2, 3), (), "farskip-attention"),
    ({"mlp_only_farskip": True, "farskip_end_idx": 2}, (), (0, 1, 2), "farskip-mlp:0-2"),
    ({"mlp_only_farskip": True, "attn_only_farskip": True}, (), (), "standard"),
    ({"farskip_start_idx": 3, "farskip_end_idx": 2}, (), (), "standard"),
])  # fmt: skip
def test_farskip_in_some_layers_or_of_some_sublayers(keys, attentions, mlps, wiring, tmp_path):
    theirs = instella(tmp_path / "hf")
    theirs.early = attentions, mlps
    edit_config(tmp_path / "hf", **keys)
    ours = convert_hf(tmp_path, "ours")
    assert ours.config.wiring == wiring
    check_parity(ours, theirs)


def test_a_layer_that_predicts_more_tokens_is_left_out(tmp_path, capsys):
    theirs = hf_model(FAMILIES["deepseek v3"])
    theirs.save_pretrained(tmp_path / "hf")
    change_tensors(tmp_path / "hf", {"model.layers.3.eh_proj.weight": torch.zeros(2)})
    check_parity(convert_hf(tmp_path, "ours"), theirs)
    assert "left out: 1 tensors of the layers that predict more tokens" in capsys.readouterr().out


BAD = [
    ({"architectures": ["InstellaMoEForCausalLM"]}, {}, "has no tensor .*layers.0.self_attn.gate_proj.weight"),
    ({"gated_attention": True}, {}, "gated_attention True is not supported, only False is"),
    ({"farskip": True}, {}, "farskip True is not supported, only False is"),
    (
        {"architectures": ["InstellaMoEForCausalLM"], "farskip_start_idx": -1}, {},
        "farskip_start_idx is -1 but must be a number, 0 or more",
    ),
    ({"attention_bias": True}, {}, "attention_bias True is not supported"),
    ({"moe_layer_freq": 2}, {}, "moe_layer_freq 2 is not supported, only 1 is"),
    ({"num_key_value_heads": 2}, {}, "num_key_value_heads must be num_attention_heads"),
    ({"head_dim": 16}, {}, "head_dim 16 is neither qk_rope_head_dim nor"),
    ({"n_group": 3}, {}, "n_group 3, of which 2 are chosen, do not divide num_experts 8"),
    ({"n_group": 8}, {}, "n_group 8, of which 2 are chosen, do not divide num_experts 8"),
    ({"topk_group": 1, "num_experts_per_tok": 3}, {}, "num_experts_per_tok 3 are more than 1 groups have"),
    ({"kv_lora_rank": None}, {}, "kv_lora_rank is null but must be a whole number above 0"),
    ({"moe_intermediate_size": None}, {}, "moe_intermediate_size is null but must be a number above 0"),
    ({"n_routed_experts": None}, {}, "n_routed_experts is null but must be a number above 0"),
    ({"scoring_func": "softmax"}, {}, "scoring_func 'softmax' is not supported, only 'sigmoid' is"),
    ({"topk_method": "greedy"}, {}, "topk_method 'greedy' is not supported, only 'noaux_tc' is"),
    ({"rope_parameters": {"rope_type": "yarn", "mscale_all_dim": 1.0, "rope_theta": 500.0}}, {}, "mscale_all_dim nee"),
    ({"architectures": ["InstellaMoEForCausalLM"], "new_key": 1}, {}, "new_key 1 is unknown"),
    (
        {"architectures": ["InstellaMoEForCausalLM"], "farskip": True, "ladder_layers": [1]}, {},
        "both farskip and ladder_layers",
    ),
    ({"kv_lora_rank": 16}, {}, r"kv_a_proj_with_mqa.weight: .*the config makes it \(24, 48\)"),
    ({"num_attention_heads": 8, "num_key_value_heads": 8}, {}, r"does not make the \(160, 48\) of the config"),
    ({}, {"model.layers.1.mlp.gate.e_score_correction_bias": None}, "has no tensor .*expert_bias"),
]  # fmt: skip


@pytest.mark.parametrize("values, tensors, words", BAD)
def test_bad_folders_are_one_line(values, tensors, words, tmp_path):
    hf_model(("DeepseekV3Config", DEEPSEEK)).save_pretrained(tmp_path / "hf")
    edit_config(tmp_path / "hf", **values)
    change_tensors(tmp_path / "hf", tensors)
    refused(words, convert_hf, tmp_path, "ours")


@pytest.mark.parametrize("values, words", [
    ({"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported, only greedy and group_limited_greedy are"),
    ({"rope_interleave": False}, "rope_interleave False is not supported, only True is"),
    ({"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported"),
])  # fmt: skip
def test_deepseek_v2_is_not_read_as_v3(values, words, tmp_path):
    hf_model(FAMILIES["deepseek v2"]).save_pretrained(tmp_path / "hf")
    edit_config(tmp_path / "hf", **values)
    refused(words, config_from_hf, tmp_path / "hf" / "config.json")


# ---------------------------------------------------------------------------------------------------------------------
# Routers


@pytest.mark.parametrize("router, groups", [*itertools.product(("sigmoid", "softmax in float32"), (None, 4))])
def test_experts_are_chosen_as_a_loop_in_float64_chooses_them(router, groups):
    """One expert after another, with ties: of equal scores the same number of experts is chosen."""
    routing = {"router": router, "expert_groups": groups, "chosen_groups": groups and 2}
    moe = MoE(MIXTURE.dim, dataclasses.replace(MIXTURE.find(Mixture), **routing))
    x = randn(50, 48)
    for weight in moe.parameters():
        nn.init.normal_(weight, 0, 0.3)
    x[0] = 0  # all logits are 0
    weights, chosen = moe.choose(x)
    assert chosen[0].unique().numel() == 3 and weights.dtype == torch.float32
    for row in range(1, 50):
        logits = moe.router.weight.double() @ x[row].double()
        scores = 1 / (1 + (-logits).exp()) if router == "sigmoid" else logits.exp() / logits.exp().sum()
        ranked = scores + (moe.expert_bias.double() if router == "sigmoid" else 0)
        allowed = list(range(8))
        if groups:
            best = 2 if router == "sigmoid" else 1
            value = {g: sum(sorted(ranked[2 * g : 2 * g + 2].tolist())[-best:]) for g in range(4)}
            kept = sorted(value, key=value.get)[-2:]
            allowed = [e for e in allowed if e // 2 in kept]
        expected = sorted(allowed, key=lambda e: -ranked[e])[:3]
        total = sum(scores[e] for e in expected)
        assert chosen[row].tolist() == expected
        for weight, e in zip(weights[row], expected, strict=True):
            assert abs(weight - 2.5 * scores[e] / total) < 1e-5


# ---------------------------------------------------------------------------------------------------------------------
# Two ways to compute, wirings, ranks, compiled, integers

SETTINGS = {"query_rank": None, "latent_dim": 24, "key_dim": 8, "rope_dim": 4, "value_dim": 10}
LATENT = {"n_kv_heads": 6, "head_dim": 12, "rotary_dim": 4, "latent": {**SETTINGS, "query_scale": 1.3}}
CONFIG = change(BASE, **{**LATENT, "latent": {**LATENT["latent"], "gate": True}})
MIXTURE = change(
    BASE, wiring="farskip", mixture={
        "n_experts": 8, "experts_per_token": 3, "expert_size": 40, "shared_expert_size": 28, "dense_layers": (0,),
        "expert_scale": 2.5, "router": "sigmoid",
    },
)  # fmt: skip
INSTELLA = change(
    MIXTURE,
    **{**LATENT, "latent": {**LATENT["latent"], "gate": True}},
    mixture={"expert_groups": 4, "chosen_groups": 2},
)
WITH_RANK = {**LATENT, "latent": {**LATENT["latent"], "query_rank": 20}}
CONFIGS = [*(change(CONFIG, **changes) for changes in ANY_TP), INSTELLA]
CONFIGS += [change(BASE, **WITH_RANK, wiring="ladder"), change(CONFIG, wiring="spd/6")]


@pytest.mark.parametrize("length, chunk_tokens", [(40, None), (40, 3 * 16), (9, 3)])
def test_the_absorbed_way_is_the_expanded_one(length, chunk_tokens):
    """In a whole prefill, in chunks with earlier keys, and in decode, of unequal rows."""
    net = random_model(CONFIG)
    tokens, lengths = unequal_rows(CONFIG, length=length)
    assert net.layers[0].attention.most_absorbed == 24 * 18 // (2 * 24 - 18)
    with torch.no_grad():
        whole = net(tokens)
    results = []
    for most in 0, 2**30:
        for block in net.layers:
            block.attention.most_absorbed = most
        runner = Runner(net, net.new_cache(3, length + 2))
        runner.chunk_tokens = chunk_tokens or runner.chunk_tokens
        first = runner.prefill(tokens[:, :-2], lengths - 2)
        second = runner.decode(tokens.gather(1, lengths[:, None] - 2), lengths - 2, length - 1)[:, 0]
        results.append(torch.stack((first, second), 1))
        for row, n in enumerate(lengths):
            assert (results[-1][row] - whole[row, n - 3 : n - 1]).abs().max() < 1e-4
    assert not torch.equal(*results)  # they are two ways


@pytest.mark.parametrize("ranks, configs", [
    (2, CONFIGS[:-1]), ((3, 1), [INSTELLA]),
    *(slow_case(ranks, CONFIGS[:-1]) for ranks in (3, 4)),
    slow_case(3, CONFIGS[-1:]),
])  # fmt: skip
def test_ranks_compute_what_one_device_does(ranks, configs):
    check_ranks_against_one_device(ranks, configs, SPLITS)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_s_rows_answer_as_if_alone(ranks):
    ids = [[1, 5, 6, 7], [1, 9, 3, 9, 3], [1, 5, 6, 8, 4]]  # the last finds its beginning in a cache
    requests = [(when, {"ids": row, "max_tokens": 6}) for when, row in zip([0, 1, 20], ids, strict=True)]
    expected = [greedy_tokens(random_model(CONFIG), row, 6, end=2) for row in ids]
    for answers, _ in run_ranks(ranks, answer_in_turns, CONFIG, requests, 2):
        assert answers == expected


def test_greedy_tokens_do_not_know_of_a_draft():
    net = random_model(CONFIG)
    ids = [[5, 6, 7, 8, 5, 6, 7], [9, 3, 9, 3]]
    runner = runner_with_draft(net, random_model(change(BASE, n_layers=1)), 3, 2, 30)
    assert generate.generate(runner, ids, 12, Sampler(0)).rows == [greedy_tokens(net, row, 12) for row in ids]


@pytest.mark.slow
@pytest.mark.parametrize("ranks, prefill", [(1, True), (2, False)])
def test_compiled_ranks_compute_it_too(ranks, prefill):
    check_ranks_against_one_device(ranks, [INSTELLA], [{"compile": True, "compile_prefill": prefill}])


@pytest.mark.parametrize("mode", ["int8", "int4"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_integers_are_their_dequantized_twin(mode, ranks, tmp_path):
    settings = {**SETTINGS, "value_dim": 16, "query_rank": 32}
    config = change(INSTELLA, dim=64, intermediate_size=96, latent=settings)
    config = change(config, mixture={"expert_size": 32, "shared_expert_size": 32})
    names = check_quantized_twin(config, random_model(config).state_dict(), mode, ranks, tmp_path)
    kept = {re.sub(r"layers\.\d+\.", "", name) for name in names}
    assert {f"attention.{w}.scales" for w in ("wq_a", "wq_b", "wkv_a", "wgate", "wo")} <= kept
    assert not kept & {"attention.wkv_b.scales", "feed_forward.router.scales"}


def test_routers_stay_float32_in_a_model_in_bfloat16():
    net = load_random(INSTELLA)
    assert {p.dtype for n, p in net.named_parameters() if "router" in n or "expert_bias" in n} == {torch.float32}
    assert {p.dtype for n, p in net.named_parameters() if "router" not in n and "expert_bias" not in n} == {net.dtype}


def test_the_kernels_for_few_rows_compute_a_bfloat16_step():
    _, counts = check_few_rows_in_bfloat16(change(CONFIG, wiring="ladder"))
    assert counts["ladder.architectures.latent.LatentAttention.to_values"]  # its latents are too short for attend's


@pytest.mark.parametrize("compile", [False, slow_case(True)])
@pytest.mark.parametrize("N, S", [(16, 1), (8, 3), (6, 16), (5, 2), (4, 5)])
def test_few_positions_attend_to_latents_as_in_float64(N, S, compile, monkeypatch):
    """A rank's N heads, three rows with unequal pasts; the cache is not a number where no row may look."""
    sizes = {"query_rank": None, "latent_dim": 128, "key_dim": 48, "rope_dim": 32, "value_dim": 20}
    shape = {"dim": 64, "n_heads": N, "n_kv_heads": N, "head_dim": 80, "rotary_dim": 32, "n_layers": 1}
    config = change(CONFIG, **shape, latent=sizes)
    exact, plain, fast = (load_random(config, dtype) for dtype in (torch.float64, torch.bfloat16, torch.bfloat16))
    for weight, rounded in zip(exact.parameters(), plain.parameters(), strict=True):
        weight.data = rounded.data.double()
    positions = torch.tensor([[20], [0], [7]]) + torch.arange(S)
    past = torch.randn(3, 1, 40, 160).bfloat16()
    x = torch.randn(3, S, 64).bfloat16()
    for row, first in enumerate(positions[:, 0]):
        past[row, :, first:] = torch.nan
    monkeypatch.setattr(skinny_gemm, "SKINNY_ROWS", 16)  # fewer than those of 16 positions
    step = torch.ops.ladder.latent_attention
    calls = []
    if not compile:  # the compiler looks through torch.ops
        monkeypatch.setattr(torch.ops.ladder, "latent_attention", lambda *a: calls.append(1) or step(*a))
    results = []
    caches = []
    for net in exact, plain, fast:
        cache = past.to(net.dtype, copy=True)
        attention = net.layers[0].attention
        if net is fast:
            compiling.use_decode_kernels(fast)
        else:
            cache.nan_to_num_(0)  # a mask multiplies by 0
        with torch.inference_mode():
            metadata = attention_metadata(net, positions, torch.arange(38))
            run = torch.compile(attention, fullgraph=True) if compile and net is fast else attention
            results.append(run(x.to(net.dtype), metadata, (cache, cache[..., :0])).double())
        caches.append(cache.double())
    assert len(calls) == (not compile and 3 * S <= 16)
    exact, plain, fast = results
    assert (fast - exact).norm() < 1.1 * (plain - exact).norm()
    assert (fast - exact).abs().max() < 0.03 * exact.abs().max()
    for row, first in enumerate(positions[:, 0]):
        ours, theirs = (cache[row, :, : first + S] for cache in (caches[2], caches[1]))
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-4)
        assert caches[2][row, :, first + S :].isnan().all()


def test_bytes_of_the_cache_are_those_of_latents():
    net = load_random(CONFIG)
    cache = net.new_cache(2, 9)
    assert sum(tensor.nbytes for layer in cache for tensor in layer) == 3 * 2 * 9 * (24 + 4) * 2
    assert step_bytes(net, cache, 3) - step_bytes(net, cache, 0) == 3 * 2 * 3 * (24 + 4) * 2
    one, two = (advise.decode_work(CONFIG, torch.bfloat16, 1, 2, n)["attention"].n_bytes for n in (9, 10))
    assert two - one == 2 * (24 + 4) * 2
    one, two = (advise.decode_work(CONFIG, torch.bfloat16, 2, 2, n)["attention"].flops for n in (9, 10))
    assert two - one == 2 * 2 * 3 * (24 + 24 + 4)  # of two rows and this rank's three heads


@pytest.mark.parametrize("changes, words", [
    ({"latent": {"query_rank": 0}}, "query_rank is 0 but must be above 0"),
    ({"linear": {"layers": (0,), **LINEAR_SETTINGS}}, "a model with latent has no linear"),
    ({"n_kv_heads": 3}, "needs head_dim 12, rotary_dim 4 and n_kv_heads 6, not 12, 4 and 3"),
    ({"heads": {"qk_norm": True}}, "a model with latent has no heads"),
])  # fmt: skip
def test_bad_configs_are_one_line(changes, words):
    refused(words, change, CONFIG, **changes)
