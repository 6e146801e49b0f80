"""Quantized sources: each format laid out by hand, or by gguf, against its twin dequantized by hand in float64."""

import json
import math
import random
import re
import shutil
import struct
import sys
import types
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from cases import refused
from file_edits import changed_bytes, changed_json, edit_config, edit_state, read_json, write_json
from gguf import GGMLQuantizationType as Type
from helpers import folder_logits, gguf_types, last_logits, train_tokenizer, unequal_rows
from hf_folders import (
    FOLDED,
    HF_FAMILIES,
    LLAMA3_ROPE,
    TOKENS,
    YARN_ROPE,
    check_parity,
    config_from_values,
    convert,
    convert_hf,
    hf_model,
    randomize_vectors,
)
from quantized_folders import (
    BLOCKS,
    COMPRESSED,
    FORMATS,
    fp8,
    mxfp4,
    pack_quantized,
    write_quantized,
)
from quantized_models import E4M3_VALUES
from running import run_main, run_ranks
from safetensors.torch import load, load_file, save, save_file

import convert_hf_checkpoint
from ladder.architectures.heads import Heads
from ladder.checkpoints import checkpoint
from ladder.errors import InputError
from ladder.kernels.quant_linear import dequantize, unpack
from ladder.sources import gguf_file
from ladder.text.byte_pairs import LLAMA3_PATTERN
from ladder.text.tokenizer import load_tokenizer

SHAPE = {"hidden_size": 384, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 6, "head_dim": 64}
SHAPE |= {"num_key_value_heads": 2, "initializer_range": 0.06}
EXPERTS = {**SHAPE, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


def model(class_name="LlamaConfig", **changes):
    """A tiny model of transformers' whose matrices have columns in whole groups of 128."""
    return hf_model((class_name, {**SHAPE, **changes}))


# Each format: (W, seed) -> ({part of the name: tensor}, W in float64, q or None)


@pytest.mark.parametrize("name", FORMATS)
def test_formats_of_safetensors_folders(name, tmp_path, capsys):
    make, settings, group_size = FORMATS[name]
    theirs = model(tie_word_embeddings=name == "AWQ", attention_bias=name == "AWQ")
    integers = write_quantized(tmp_path / "hf", theirs, make, settings)
    check_parity(convert_hf(tmp_path, "float", "--to-float", "--dtype", "float32"), theirs)
    assert "dequantized to float32: " in capsys.readouterr().out
    ours = convert_hf(tmp_path, "ours")
    bound = {"fp8": 0.15, "fp8 anew": 0.2, None: 1e-5}.get(group_size, 3e-3)  # fp8 rounds activations, too
    check_logits(name, tmp_path / "hf", theirs, tmp_path, bound)
    if group_size is None:
        assert ours.config.quant is None and ours.config == checkpoint.read_config(tmp_path / "float")
        assert checkpoint.Weights(tmp_path / "ours").read("norm.weight").dtype == torch.bfloat16
        return
    if str(group_size).startswith("fp8"):
        assert (ours.config.quant, {*ours.config.not_quantized}) == ("fp8", {"tok_embeddings", "output"})
        return check_e4m3(tmp_path, theirs) if group_size == "fp8" else None
    quant, group_size = ("int4", group_size) if group_size in (32, 64, 128) else ("int8", int(group_size[8:]))
    assert (ours.config.quant, ours.config.group_size, ours.config.int8) == (quant, group_size, ())
    assert {*ours.config.not_quantized} == {"tok_embeddings", "output"} - ({"output"} if name == "AWQ" else set())
    check_integers(tmp_path / "ours", theirs, integers)


def check_e4m3(folder, theirs):
    """The same bytes, and scales as near as bfloat16 allows."""
    stored = load_file(folder / "hf" / "model.safetensors")
    ours = checkpoint.Weights(folder / "ours")
    for name, module in ("attention.wo", "self_attn.o_proj"), ("feed_forward.w2", "mlp.down_proj"):
        q, scales = (ours.read(f"layers.1.{name}.{part}") for part in ("weight", "scales"))
        assert q.view(torch.uint8).equal(stored[f"model.layers.1.{module}.weight"].view(torch.uint8))
        w = theirs.get_submodule(f"model.layers.1.{module}").weight.double()
        assert (q.double() * scales.double() - w).abs().max() <= 2**-8 * w.abs().max()
    q, scales = (ours.read(f"layers.1.attention.wqkv.{part}") for part in ("weight", "scales"))
    w = theirs.get_submodule("model.layers.1.self_attn.v_proj").weight.double()[-64:]  # of the last head
    assert (q[-64:].double() * scales[-64:].double() - w).abs().max() <= 2**-8 * w.abs().max()


@pytest.mark.parametrize("power_of_two", [False, True])
def test_blocks_of_e4m3_become_rows_and_the_line_says_what_that_changes(power_of_two, tmp_path, capsys):
    """Each number is the nearest one, by the definition of e4m3. The blocks do not divide the matrices."""
    theirs = model(hidden_size=360, intermediate_size=208)
    scale_of = (lambda least: 2 ** least.log2().ceil()) if power_of_two else lambda least: least

    def make(w, seed):
        return fp8(w * torch.logspace(-2, 0, len(w))[:, None], seed, 128, 128, "weight_scale_inv", None, scale_of)

    chosen = [f"layers.{i}.{name}" for i in range(2) for name in ("self_attn.", "mlp.gate", "mlp.up", "mlp.down")][:-1]
    write_quantized(
        tmp_path / "hf", theirs, make, BLOCKS, lambda name: "_proj" in name and any(part in name for part in chosen)
    )
    check_parity(convert_hf(tmp_path, "float", "--to-float", "--dtype", "float32"), theirs)
    capsys.readouterr()
    convert_hf(tmp_path, "ours", "--dtype", "float32")
    exact = checkpoint.Weights(tmp_path / "float")
    ours = checkpoint.Weights(tmp_path / "ours")
    squares = torch.zeros(2, dtype=torch.float64)
    for name in [name.removesuffix(".scales") for name in ours.names() if name.endswith(".scales")]:
        w, q, s = (weights.read(f"{name}.{part}").double()
                   for weights, part in ((exact, "weight"), (ours, "weight"), (ours, "scales")))  # fmt: skip
        assert (s >= w.abs().amax(1, keepdim=True) / 448).all()
        assert torch.equal((q * s - w).abs(), (E4M3_VALUES * s[..., None] - w[..., None]).abs().amin(-1))
        squares += torch.stack([(q * s - w).square().sum(), w.square().sum()])
    change = (squares[0] / squares[1]).sqrt().item()
    assert change < 1e-4 if power_of_two else 0.02 < change < 0.03
    line = f"8 matrices of e4m3 in blocks got a scale for each row, which changed them by {change:.1%} (root"
    assert line in capsys.readouterr().out
    w2 = "layers.0.feed_forward.w2.weight"  # that of layer 1 is not e4m3, so this one is no longer
    assert torch.equal(ours.read(w2), exact.read(w2))


def check_logits(name, source, theirs, tmp_path, bound):
    """Of what stays integers, beside floats. benchmarks/smollm2.md has the lines that this prints (pytest -s)."""
    ours = convert(source, tmp_path / "same", "--dtype", "float32")
    with torch.no_grad():
        exact = theirs(TOKENS).logits
        difference = ((ours(TOKENS) - exact).std() / exact.std()).item()
    size = sum(w.nbytes for w in load_file(tmp_path / "ours" / "model.safetensors").values())
    kept = ours.config.quant or "floats"
    kept += f" in groups of {ours.config.group_size}" if ours.config.group_size else ""
    print(f"\n{name}: {kept}, {difference:.1e} of the logits' deviation, {size:,} bytes in bfloat16")
    assert difference < bound


def check_integers(folder, theirs, integers):
    """The same integers, in the order of rows of wqkv, and scales and zeros as near as float16 allows."""
    weights = checkpoint.Weights(folder)
    H = 64
    G = 3
    heads = [[("q", h * G + i) for i in range(G)] + [("k", h), ("v", h)] for h in range(2)]
    for layer in range(2):
        module = f"model.layers.{layer}.self_attn."
        rows = [(f"{module}{letter}_proj", slice(i * H, (i + 1) * H)) for head in heads for letter, i in head]
        ours = {"attention.wqkv": rows, "attention.wo": [(f"{module}o_proj", slice(None))]}
        for name, hf in ("w1", "gate"), ("w3", "up"), ("w2", "down"):
            ours[f"feed_forward.{name}"] = [(f"model.layers.{layer}.mlp.{hf}_proj", slice(None))]
        for name, pieces in ours.items():
            stored = [weights.read(f"layers.{layer}.{name}.{part}") for part in ("weight", "scales", "zeros")]
            q = np.concatenate([integers[hf][rows] for hf, rows in pieces])
            bits, ours_q = (4, unpack(stored[0])) if stored[0].dtype == torch.uint8 else (8, stored[0])
            assert (ours_q.numpy() == q).all()
            w = torch.cat([theirs.get_submodule(hf).weight[rows] for hf, rows in pieces]).double()
            step = stored[1].double().abs().repeat_interleave(w.shape[1] // stored[1].shape[1], 1)
            error = (dequantize(stored[0], *(t.double() for t in stored[1:])) - w).abs() / step
            assert error.max() < 2**bits * 2**-10 and error.square().mean() < (0.004 if bits == 4 else 0.03) ** 2


def test_larger_groups_become_several_of_the_smallest(tmp_path):
    def make(w, seed):
        return pack_quantized(w, seed, False, size=(128, 64, 32)[seed % 3])

    integers = write_quantized(tmp_path / "hf", theirs := model(), make, COMPRESSED)
    ours = convert_hf(tmp_path, "ours")
    assert ours.config.group_size == 32 and {*ours.config.not_quantized} == {"tok_embeddings", "output"}
    check_integers(tmp_path / "ours", theirs, integers)


def test_what_is_not_quantized_alike_everywhere_is_dequantized(tmp_path, capsys):
    theirs = model()
    make, settings, _ = FORMATS["GPTQ"]
    reordered = FORMATS["GPTQ, act-order"][0]
    write_quantized(
        tmp_path / "hf", theirs, lambda w, i: (reordered if len(w) == 384 and i < 9 else make)(w, i), settings
    )
    ours = convert_hf(tmp_path, "ours", "--dtype", "float32")
    assert {*ours.config.not_quantized} == {"tok_embeddings", "output", "wqkv", "wo", "w2"}
    assert "dequantized to float32: 3 of GPTQ, all of wqkv, all of wo, all of w2\n" in capsys.readouterr().out
    check_parity(convert_hf(tmp_path, "float", "--to-float", "--dtype", "float32"), theirs)


@pytest.mark.parametrize("family", ["Qwen3MoeConfig", "MixtralConfig"])
@pytest.mark.parametrize("form, dtype", [
    ("AWQ", torch.uint8), ("FP8, rows", torch.float8_e4m3fn), ("FP8, blocks", torch.float8_e4m3fn),
])  # fmt: skip
def test_experts_one_by_one_or_together(form, dtype, family, tmp_path):
    theirs = randomize_vectors(hf_model((family, {**EXPERTS, "head_dim": 64})))
    theirs.save_pretrained(tmp_path / "plain")
    make, settings, _ = FORMATS[form]
    twin = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
    state = checkpoint.Weights(tmp_path / "plain")  # transformers writes experts one by one
    tensors = {name: state.read(name).clone() for name in state.names()}
    for seed, (name, w) in enumerate([*tensors.items()]):
        if w.dim() == 2 and name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")):
            parts, result, _ = make(w, seed)
            del tensors[name]
            tensors |= {name.removesuffix("weight") + part: tensor for part, tensor in parts.items()}
            put(twin, name, result)
    (tmp_path / "hf").mkdir()
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    values = read_json(tmp_path / "plain" / "config.json")
    write_json(tmp_path / "hf" / "config.json", {**values, "quantization_config": settings})
    check_parity(convert_hf(tmp_path, "float", "--to-float", "--dtype", "float32"), twin)
    ours = convert_hf(tmp_path, "ours")
    assert {*ours.config.not_quantized} == {"tok_embeddings", "output"}
    assert ours.layers[1].feed_forward.experts.w1.weight.dtype == dtype
    logits = last_logits(ours, *unequal_rows(ours.config))
    assert logits.isfinite().all()


def put(twin, name, w):
    """Put a matrix of a file into the model, whose experts are together."""
    theirs = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
    prefix, _, rest = name.partition(".experts.")
    with torch.no_grad():
        if not rest:
            twin.get_parameter(name).copy_(w)
            return
        expert = rest.split(".")[0]
        kind = theirs[rest.split(".")[1]]
        experts = twin.get_submodule(f"{prefix.replace('block_sparse_moe', 'mlp')}.experts")
        target = (experts.down_proj if kind == "down" else experts.gate_up_proj)[int(expert)]
        {"gate": target[: len(target) // 2], "up": target[len(target) // 2 :], "down": target}[kind].copy_(w)


# ---- GGUF ----


NARROW = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
NARROW |= {"num_key_value_heads": 2, "head_dim": 16}
NARROW_EXPERTS = {**NARROW, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
LONG = HF_FAMILIES["phi3, long"][1]["rope_parameters"]
LONG = {**LONG, "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5], "long_factor": [1.2, 3.0, 8.0, 9.0, 9.5, 10.0]}
ARCHITECTURES = {  # name in GGUF, what transformers has of it
    "llama": ("llama", "LlamaConfig", {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True}),
    "llama, yarn": ("llama", "LlamaConfig", {"rope_parameters": YARN_ROPE}),
    "mixtral": ("llama", "MixtralConfig", NARROW_EXPERTS),
    "qwen2": ("qwen2", "Qwen2Config", {"tie_word_embeddings": True}), "qwen3": ("qwen3", "Qwen3Config", {}),
    "qwen3moe": ("qwen3moe", "Qwen3MoeConfig", {**NARROW_EXPERTS, "moe_intermediate_size": 32, "norm_topk_prob": True}),
    "gemma2": ("gemma2", "Gemma2Config", {
        "query_pre_attn_scalar": 16, "sliding_window": 7, "attn_logit_softcapping": 2.0, "tie_word_embeddings": True,
        "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3", "Gemma3TextConfig", {
        "query_pre_attn_scalar": 16, "tie_word_embeddings": True, "num_hidden_layers": 7, "sliding_window": 7,
        "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
    "phi3": ("phi3", "Phi3Config", {"original_max_position_embeddings": 10, "rope_parameters": LONG}),
    "granite": ("granite", *FOLDED["granite, tied, biased"]), "olmo2": ("olmo2", "Olmo2Config", {}),
    "olmo3": ("olmo2", "Olmo3Config", {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}),
    "glm4": ("glm4", "Glm4Config", {"attention_bias": True}),
}  # fmt: skip


ADDERS = {  # attributes of transformers' configs: methods of GGUFWriter
    "max_position_embeddings": "context_length", "hidden_size": "embedding_length", "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length", "num_attention_heads": "head_count", "head_dim": "key_length",
    "num_key_value_heads": "head_count_kv", "rms_norm_eps": "layer_norm_rms_eps", "sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention_scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale", "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length",
}  # fmt: skip


def write_gguf(path, theirs, architecture, kind=Type.Q8_0, kinds=None, tokenizer=None):
    """Write a model of transformers' as llama.cpp's converter does, and dequantize what it quantizes in the model.

    kinds(name): the type of a matrix, if it is not `kind`.
    """
    c = theirs.config
    writer = gguf.GGUFWriter(path, architecture)
    rope = c.rope_parameters.get("full_attention", c.rope_parameters)
    absent = {"head_dim"} if architecture in ("granite", "phi3") else set()
    absent |= set() if architecture in ("gemma2", "gemma3", "olmo2") else {"sliding_window"}
    for key, add in ADDERS.items():
        if getattr(c, key, None) is not None and key not in absent:
            getattr(writer, f"add_{add}")(getattr(c, key))
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if architecture == "olmo2" and hasattr(c, "layer_types"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in c.layer_types])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope.get("original_max_position_embeddings", c.max_position_embeddings))
    if rope["rope_type"] == "longrope":
        scale = math.log(c.max_position_embeddings / c.original_max_position_embeddings)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + scale / math.log(c.original_max_position_embeddings)))
        writer.add_rope_scaling_orig_ctx_len(c.original_max_position_embeddings)
        for length in "long", "short":
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))
    if rope["rope_type"] == "llama3":
        plain = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2) / head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / theirs.model.rotary_emb.inv_freq).numpy())
    (tokenizer or (lambda writer: writer.add_eos_token_id(2)))(writer)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), c.num_hidden_layers)
    for name, w in theirs.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        stem, part = name.rsplit(".", 1) if name.endswith((".weight", ".bias")) else (name, "weight")
        pieces = {stem: w}
        if stem.endswith("experts.gate_up_proj"):
            gate, up = w.chunk(2, dim=1)
            pieces = {stem.replace("gate_up", "gate"): gate, stem.replace("gate_up", "up"): up}
        for each, piece in pieces.items():
            with torch.no_grad():
                store(writer, f"{names.get_name(each)}.{part}", piece, architecture, c, kinds and kinds(each) or kind)
    finish(writer)


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def store(writer, name, w, architecture, c, kind):
    """Write a tensor, and put into w what was written."""
    turns = ("attn_q.", "attn_k.") if architecture in ("llama", "granite") else ()
    heads = c.num_attention_heads if "attn_q." in name else c.num_key_value_heads
    stored = w + 1 if architecture.startswith("gemma") and "norm" in name else w
    stored = stored.numpy()
    if any(turn in name for turn in turns):  # (i, i + H / 2) become neighbours
        stored = stored.reshape(heads, 2, -1, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)
    if w.dim() == 1 or "gate_inp" in name:
        writer.add_tensor(name, np.ascontiguousarray(stored, np.float32))
        return
    data = random_blocks(stored, kind) if kind.name.endswith("_K") or "IQ" in kind.name else gguf.quantize(stored, kind)
    writer.add_tensor(name, data, raw_dtype=kind)
    back = gguf.dequantize(data, kind).reshape(w.shape)
    if any(turn in name for turn in turns):
        back = back.reshape(heads, -1, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)
    w.copy_(torch.from_numpy(back.copy()))


def random_blocks(w, kind):
    """Blocks of a type that gguf only reads: any bytes, but scales about as large as the weights ask."""
    columns, width = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(w.size).integers(0, 256, (w.size // columns, width), np.uint8)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(kind.name, (0,))
    blocks[:, sum(([at, at + 1] for at in places), [])] = 0
    ones = np.zeros((1, width), np.uint8) + blocks
    for at in places:
        ones[:, at : at + 2] = np.frombuffer(np.float16(1e-3).tobytes(), np.uint8)
    size = gguf.dequantize(ones, kind).std() / 1e-3
    for i, at in enumerate(places):
        blocks[:, at : at + 2] = np.frombuffer(np.float16(w.std() / size * (1, 4)[i]).tobytes(), np.uint8)
    return blocks.reshape(*w.shape[:-1], -1)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_of_gguf(name, tmp_path):
    architecture, family, changes = ARCHITECTURES[name]
    theirs = hf_model((family, {**NARROW, **changes}))
    write_gguf(tmp_path / "m.gguf", theirs, architecture)
    # float16 rounds scales that granite's multipliers multiply
    to_float = ["--to-float"] * (architecture == "granite")
    ours = convert(tmp_path / "m.gguf", tmp_path / "ours", "--dtype", "float32", *to_float)
    check_parity(ours, theirs)
    assert ours.config.eos_ids == (2,) and ours.config.quant == (None if to_float else "int8")


def test_a_multiplier_multiplies_scales_not_integers(tmp_path):
    architecture, family, changes = ARCHITECTURES["granite"]
    theirs = hf_model((family, {**NARROW, **changes}))
    write_gguf(tmp_path / "m.gguf", theirs, architecture, Type.Q4_1)
    ours = convert(tmp_path / "m.gguf", tmp_path / "ours", "--dtype", "float32")
    with torch.no_grad():
        expected = theirs(TOKENS).logits
        assert (ours(TOKENS) - expected).square().mean() < 0.05**2 * expected.var()
    assert ours.config.not_quantized == ()


TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"]


GROUPS = dict.fromkeys(TYPES, 32) | dict.fromkeys(("Q2_K", "Q3_K", "Q6_K"), 16)  # columns
ROUNDED = {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"}  # whose scales are products, which float16 rounds


@pytest.mark.parametrize("kind", [*TYPES, "F16", "BF16", "F32"])
def test_types_of_gguf(kind, tmp_path, capsys):
    theirs = hf_model(("LlamaConfig", {**SHAPE, "hidden_size": 256, "num_attention_heads": 4, "head_dim": 64}))
    write_gguf(tmp_path / "m", theirs, "llama", Type[kind], lambda name: Type.Q8_0 if "lm_head" in name else None)
    check_parity(convert(tmp_path / "m", tmp_path / "float", "--to-float", "--dtype", "float32"), theirs)
    said = capsys.readouterr().out
    ours = convert(tmp_path / "m", tmp_path / "ours")
    check_logits(f"GGUF {kind}", tmp_path / "m", theirs, tmp_path, 1e-3 if kind in ROUNDED else 1e-5)
    assert " of " not in said.split("dequantized to float32: ")[1].replace("all of", "").splitlines()[0]
    config = ours.config
    if kind not in TYPES:
        assert (config.quant, config.group_size, config.int8) == ("int8", 32, ()) and "wo" in config.not_quantized
        return
    quant = "int4" if kind in ("Q4_0", "Q4_1", "Q4_K") else "int8"
    listed = () if (quant, GROUPS[kind]) == ("int8", 32) else ("output:32",)
    assert (config.quant, config.group_size, config.int8, config.not_quantized) == (quant, GROUPS[kind], listed, ())
    weights = checkpoint.Weights(tmp_path / "ours")
    for name, hf in ("feed_forward.w2", "mlp.down_proj"), ("attention.wo", "self_attn.o_proj"):
        stored = [weights.read(f"layers.1.{name}.{part}") for part in ("weight", "scales", "zeros")]
        w = theirs.get_submodule(f"model.layers.1.{hf}").weight.double()
        error = (dequantize(stored[0], *(t.double() for t in stored[1:])) - w).abs()
        zeros = stored[2].double().abs().repeat_interleave(GROUPS[kind], 1)
        bound = 2**-11 * (w.abs() + 2 * zeros) + 1e-6  # half a unit in the last place of float16; below 2^-14 more
        assert (error <= (bound if kind in ROUNDED else 0)).all()


def test_a_file_of_several_types_stays_integers(tmp_path, capsys):
    """As llama.cpp's Q4_K_M: in some layers the values and w2 have more bits than the rest, as has the table."""
    shape = {**SHAPE, "hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "num_hidden_layers": 3}
    theirs = hf_model(("LlamaConfig", {**shape, "tie_word_embeddings": True}))
    more = {"0.self_attn.v_proj": "Q6_K", "0.mlp.down_proj": "Q6_K", "1.self_attn.v_proj": "Q8_0", "embed_": "Q6_K"}

    def kinds(name):
        return next((Type[kind] for part, kind in more.items() if part in name), None)

    write_gguf(tmp_path / "m", theirs, "llama", Type.Q4_K, kinds)
    ours = convert(tmp_path / "m", tmp_path / "ours", "--dtype", "float32")
    assert "dequantized" not in capsys.readouterr().out
    c = ours.config
    assert (c.quant, c.group_size, c.not_quantized) == ("int4", 32, ())
    of_layers = "layers.0.attention.wqkv:16", "layers.1.attention.wqkv:32", "layers.0.feed_forward.w2:16"
    assert {*c.int8} == {"tok_embeddings:16", *of_layers}
    assert ours.layers[0].attention.wqkv.weight.dtype == torch.int8 != ours.layers[2].attention.wqkv.weight.dtype
    with torch.no_grad():
        exact = theirs(TOKENS).logits
        assert (ours(TOKENS) - exact).std() < 1e-3 * exact.std()
    (whole,), *shards = (run_ranks(n, folder_logits, tmp_path / "ours") for n in (1, 2, 3))
    assert whole.std() > 0.1 and all((logits - whole).abs().max() < 1e-4 for ranks in shards for logits in ranks)


def own_tokenizer(path, pre):
    """A byte-level BPE that was trained, and what a GGUF file says of it."""
    t = tokenizers.Tokenizer(tokenizers.models.BPE())
    own = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre != "llama-bpe")
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(LLAMA3_PATTERN), "isolated")
    first = {"smollm": [tokenizers.pre_tokenizers.Digits(True)], "llama-bpe": [split], "gpt-2": []}[pre]
    t.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([*first, own])
    t.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>", "<|im_end|>"], initial_alphabet=alphabet, show_progress=False
    )  # fmt: skip
    t.train_from_iterator([TEXT * 9], trainer)
    model = json.loads(t.to_str())["model"]

    def add(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(sorted(model["vocab"], key=model["vocab"].get))
        writer.add_token_types([3] * 3 + [1] * (len(model["vocab"]) - 3))
        writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_chat_template("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")

    return t, add


TEXT = "In 2024 there  were 12345 dogs, weren't THEY?  They'LL  play\n\n\t 77 é 十二 <|im_end|>   "


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "gpt-2"])
def test_byte_level_tokenizers_of_gguf(pre, tmp_path):
    theirs, add = own_tokenizer(tmp_path, pre)
    size = theirs.get_vocab_size()
    write_gguf(tmp_path / "m.gguf", hf_model(("LlamaConfig", {**NARROW, "vocab_size": size})), "llama", tokenizer=add)
    ours = convert(tmp_path / "m.gguf", tmp_path / "ours")
    assert ours.config.eos_ids == (1, 2) and ours.config.bos_id == 0
    tokenizer = load_tokenizer(tmp_path / "ours", size)
    assert tokenizer.encode_markup(TEXT) == theirs.encode(TEXT).ids
    assert tokenizer.prefix == ([0] if pre == "llama-bpe" else [])
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.chat([{"role": "user", "content": "a"}])[-1] == 2


def test_sentencepiece_tokenizers_of_gguf(tmp_path):
    train_tokenizer(["Once upon a time there was a little dog in 2024. "] * 30, 300, tmp_path / "tokenizer.model")
    theirs = load_tokenizer(tmp_path / "tokenizer.model")

    def add(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list([theirs.model.id_to_piece(i) for i in range(300)])
        writer.add_token_scores([theirs.model.get_score(i) for i in range(300)])
        writer.add_token_types(gguf_types(theirs.model))
        for i, name in enumerate(("unk", "bos", "eos")):
            getattr(writer, f"add_{name}_token_id")(i)

    write_gguf(tmp_path / "m.gguf", hf_model(("LlamaConfig", {**NARROW, "vocab_size": 300})), "llama", tokenizer=add)
    convert(tmp_path / "m.gguf", tmp_path / "ours")
    ours = load_tokenizer(tmp_path / "ours", 300)
    for text in TEXT, " Once  upon a dog", "", "\n":
        assert ours.encode(text) == theirs.encode(text) and ours.decode(ours.encode(text)) == text
    assert ours.encode_markup("</s>a") == theirs.encode_markup("</s>a")


def test_split_gguf_files(tmp_path):
    theirs = hf_model(("LlamaConfig", NARROW))
    write_gguf(tmp_path / "m.gguf", theirs, "llama")
    whole = gguf.GGUFReader(tmp_path / "m.gguf")
    for i in range(2):
        writer = gguf.GGUFWriter(tmp_path / f"m-0000{i + 1}-of-00002.gguf", "llama")
        for key, field in whole.fields.items():
            if i == 0 and not key.startswith("GGUF.") and key != "general.architecture":
                writer.add_key_value(key, field.contents(), field.types[0])
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", 2)
        for tensor in whole.tensors[i * 7 : (i + 1) * 7 if i == 0 else None]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        finish(writer)
    check_parity(convert(tmp_path / "m-00002-of-00002.gguf", tmp_path / "ours", "--dtype", "float32"), theirs)
    (tmp_path / "m-00001-of-00002.gguf").rename(tmp_path / "alone.gguf")
    refused("is one of 2 files", convert, tmp_path / "alone.gguf", tmp_path / "other")
    refused(r"m-00001-of-00002\.gguf: No such file", convert, tmp_path / "m-00002-of-00002.gguf", tmp_path / "other")


def test_mxfp4_of_all_experts_together(tmp_path):
    """gpt-oss's layout, of experts whose gate and up are one after the other."""
    theirs = randomize_vectors(hf_model(("Qwen3MoeConfig", {**NARROW_EXPERTS, "moe_intermediate_size": 32})))
    write_quantized(tmp_path / "hf", theirs, mxfp4, {"quant_method": "mxfp4"}, lambda name: ".experts." in name)
    check_parity(convert_hf(tmp_path, "ours", "--dtype", "float32"), theirs)


# ---- Bad input ----


Q = "model.layers.1.self_attn.q_proj."
AWQ = FORMATS["AWQ"][1]
GPTQ = FORMATS["GPTQ"][1]
ASYMMETRIC = {"weights": {"symmetric": False}}


def as_bare_integers(state):
    state[f"{Q}weight"] = state[f"{Q}weight"].to(torch.int8)
    del state[f"{Q}weight_scale"]


def halved(name):
    return lambda state: state.update({Q + name: state[Q + name][: len(state[Q + name]) // 2].clone()})


BAD = {  # (format, another quantization_config or an edit of the state dict, message)
    "another method": ("AWQ", {"quant_method": "hqq"}, "'hqq' is not read, only awq,"),
    "bitsandbytes": ("AWQ", {"quant_method": "bitsandbytes"}, r"m.dequantize\(\)"),
    "no object": ("AWQ", [4], "quant_method None is not read"),
    "AWQ's other version": ("AWQ", {**AWQ, "version": "gemv"}, "only version 'gemm'"),
    "3 bits": ("GPTQ", {**GPTQ, "bits": 3}, "of bits is 4, but .* says 3"),
    "marlin": ("GPTQ", {**GPTQ, "checkpoint_format": "marlin"}, "'marlin' of GPTQ"),
    "no scales": ("AWQ", lambda s: s.pop(f"{Q}scales"), "q_proj has no scales"),
    "no FP8 scales": ("FP8, rows", lambda s: s.pop(f"{Q}weight_scale"), "but its scales are missing"),
    "no int8 scales": ("FP8, rows", as_bare_integers, "but its scales are missing"),
    "no block size": ("FP8, blocks", {"quant_method": "fp8"}, "_size is missing"),
    "no order": ("GPTQ, act-order", lambda s: s.pop(f"{Q}g_idx"), "q_proj: has no g_idx"),
    "rotated": (
        "pack-quantized", {**COMPRESSED, "transform_config": {"a": 1}}, "rotates",
    ),
    "no zero points": (
        "pack-quantized", {**COMPRESSED, "config_groups": {"0": ASYMMETRIC}},
        "has no weight_zero_point",
    ),
    "huge shape": ("pack-quantized", lambda s: s[f"{Q}weight_shape"].fill_(2**31 - 1), "do not fit"),
    "NaN scales": ("AWQ", lambda s: s[f"{Q}scales"].fill_(math.nan), "q_proj.scales, .*NaN or infinite"),
    "half the columns": ("GPTQ", halved("qweight"), "q_proj"),
    "infinite scales": (
        "FP8, blocks", lambda s: s[f"{Q}weight_scale_inv"].fill_(math.inf), "NaN or infinite"
    ),
    "half of FP8's scales": ("FP8, blocks", halved("weight_scale_inv"), r"scales \(1, 3\) do not fit a weight"),
    "half of the zero points": ("AWQ", halved("qzeros"), "do not fit scales"),
    "one scale more": (
        "pack-quantized", lambda s: s.update({f"{Q}weight_global_scale": torch.ones(1)}),
        "weight_global_scale that is no part",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_folders_are_one_line_and_leave_nothing(case, tmp_path):
    name, wrong, message = BAD[case]
    write_quantized(tmp_path / "hf", model(), *FORMATS[name][:2])
    if callable(wrong):
        edit_state(tmp_path / "hf", wrong)
    else:
        edit_config(tmp_path / "hf", quantization_config=wrong)
    refused(message, convert_hf, tmp_path, "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_zeros_that_autogptq_adds_as_biases_are_dropped(tmp_path):
    write_quantized(tmp_path / "hf", theirs := model(), *FORMATS["GPTQ"][:2])
    edit_state(tmp_path / "hf", lambda s: s.update({f"{Q}bias": torch.zeros(384)}))
    check_parity(convert_hf(tmp_path, "ours", "--to-float", "--dtype", "float32"), theirs)
    edit_state(tmp_path / "hf", lambda s: s[f"{Q}bias"].fill_(1))
    refused(r"q_proj\.bias that is no part", convert_hf, tmp_path, "other")


def test_a_quantized_head_is_tied_if_all_of_it_is_the_embedding_table(tmp_path, capsys):
    def quantized(name):
        return name.endswith("_proj.weight") or "embed_tokens" in name

    def copy_the_table(state):
        for part in "weight_packed", "weight_scale", "weight_shape":
            state[f"lm_head.{part}"] = state[f"model.embed_tokens.{part}"].clone()

    theirs = model(tie_word_embeddings=True)
    write_quantized(tmp_path / "hf", theirs, *FORMATS["pack-quantized"][:2], quantized)
    edit_state(tmp_path / "hf", copy_the_table)
    tied = convert_hf(tmp_path, "tied")
    assert tied.config.tie_embeddings and tied.config.not_quantized == ()
    edit_state(tmp_path / "hf", lambda s: s["lm_head.weight_scale"].mul_(2))
    untied = convert_hf(tmp_path, "untied")
    assert not untied.config.tie_embeddings and untied.config.not_quantized == ()
    assert "lm_head.weight is a tensor of its own" in capsys.readouterr().out
    assert torch.equal(untied(TOKENS), 2 * tied(TOKENS))


@pytest.mark.parametrize("key, value, message", [
    ("attention.causal", False, "llama.attention.causal is false"), ("block_count", 2**32 - 1, "must be 1 to 1000"),
    ("attention.value_length", 8, "llama.attention.value_length is not 4"),
    ("context_length", 0, "it has no llama.context_length"), ("expert_count", 4, "it has no llama.expert_used_count"),
])  # fmt: skip
def test_values_of_gguf_that_are_not_computed(key, value, message):
    refused(message, gguf_config, "llama", **{key: value, "attention.sliding_window_pattern": 2})


def gguf_config(architecture, **more):
    """Return the config.json of a file that has only what llama.cpp needs, and more."""
    least = {**dict.fromkeys(gguf_file.NEEDED, 8), "attention.head_count": 2, "block_count": 2, **more}
    values = {f"{architecture}.{name}": value for name, value in least.items()}
    table = types.SimpleNamespace(shape=(8, 8))
    return gguf_file.config({"general.architecture": architecture, **values}, {"token_embd.weight": table})


@pytest.mark.parametrize("architecture", [*gguf_file.GGUF_ARCHITECTURES, "mixtral"])
def test_absent_values_of_gguf_have_the_defaults_of_llama_cpp(architecture, tmp_path):
    """Not those that transformers has for a family, such as Gemma 3's rope_theta and Granite's attention_multiplier."""
    more = {"expert_count": 4, "expert_used_count": 2} if architecture in ("mixtral", "qwen3moe") else {}
    more |= {"expert_feed_forward_length": 8} if architecture == "qwen3moe" else {}
    more |= {"logit_scale": 1.0, "rope.scaling.factor": 4.0} if architecture == "granite" else {}
    values = gguf_config("llama" if architecture == "mixtral" else architecture, **more)
    config = config_from_values(tmp_path, values)
    assert (config.rope_theta, config.n_kv_heads, config.head_dim, config.max_seq_len) == (
        1e4, 2, 4, 32 if architecture == "granite" else 8,
    )  # fmt: skip
    assert (config.rope_scaling or {}) == ({"factor": 4.0} if architecture == "granite" else {})
    heads = config.find(Heads) or Heads()
    assert heads.sliding_window is None and (heads.query_scale or 1.0) == 1.0
    if architecture == "granite":
        assert values["attention_multiplier"] == 0.5


def test_bad_gguf_files_are_one_line_and_leave_nothing(tmp_path, monkeypatch):
    theirs = hf_model(("LlamaConfig", NARROW))
    write_gguf(path := tmp_path / "m.gguf", theirs, "llama")
    good = path.read_bytes()

    def replaced(old, new):
        assert good.count(old) and len(old) == len(new)
        return good.replace(old, new)

    cases = {
        "copy it again": good[:-999], "it is truncated, or no GGUF file": good[:300], "no GGUF file": b"GGUF",
        "architecture 'lhama' is not supported; llama, ": replaced(b"llama", b"lhama"),
        "/m.gguf: num_attention_heads 3 is not a multiple": replaced(
            b"head_count" + struct.pack("<2I", 4, 4), b"head_count" + struct.pack("<2I", 4, 3)
        ),
        "no GGUF file of version 2 or 3": good[:4] + b"\1" + good[5:],
        "llama.attention.head_count_kw 2 is unknown": replaced(b"head_count_kv", b"head_count_kw"),
        "tensor blk.0.attn_w.weight is no part": replaced(b"blk.0.attn_q.", b"blk.0.attn_w."),
        "not a valid GGMLQuantizationType": replaced(struct.pack("<QI", 131, 8), struct.pack("<QI", 131, 77)),
        "does not fit blocks of 256": replaced(struct.pack("<QI", 131, 8), struct.pack("<QI", 131, 12)),
    }  # fmt: skip
    for message, data in cases.items():
        path.write_bytes(data)
        refused(re.escape(message), convert, path, tmp_path / "ours")
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    refused("is a Git LFS pointer: git lfs pull", convert, path, tmp_path / "ours")
    path.write_bytes(good)
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(r"pip install gguf==0\.19\.0", convert, path, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def spoil_tensors(draw, data):
    """Drop, cut, turn, reshape, retype or fill one tensor."""
    state = load(data)
    name = draw.choice(sorted(n for n in state if "_proj" in n))
    t = state[name]
    small = t.dtype.itemsize == 1
    whole = t.dim() == 2
    ways = [
        lambda: state.pop(name), lambda: t[: len(t) // 2] if t.dim() else t, lambda: t.T.contiguous() if whole else t,
        lambda: t.flatten(), lambda: t[:0] if small else t.sum(), lambda: torch.zeros(0), lambda: t.float(),
        lambda: t.float().to(torch.int8) if small else t.long(), lambda: t[None], lambda: t.float() * math.nan,
        lambda: torch.full(t.shape, draw.choice([0, -1, 7, 2**31 - 1])).to(t.dtype),
    ]  # fmt: skip
    new = draw.choice(ways)()
    if name in state:
        state[draw.choice([name, name, name + "s"])] = new.clone()
    return save(state)


def peak_memory(reset=False):
    """Return the most memory that this process had, in kB, on Linux, or forget it: whatever other tests took."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])


SPOILED = ["AWQ", "GPTQ", "GPTQ, act-order", "pack-quantized, asymmetric", "FP8, blocks", "FP8, rows", "GGUF", "GGUF"]


@pytest.mark.parametrize("number", range(len(SPOILED)))
def test_changed_files_work_or_are_refused_in_one_line(number, tmp_path):
    """25 changes each: no other error, nothing half-written, and little memory."""
    name = SPOILED[number]
    tiny = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
    theirs = model(**tiny, num_attention_heads=2, vocab_size=40)
    source = tmp_path / "hf"
    file = "model.safetensors"
    if name == "GGUF":
        source = tmp_path / "m.gguf"
        file = "m.gguf"
        train = own_tokenizer(tmp_path, "smollm")[1] if number % 2 else None
        write_gguf(source, theirs, "llama", Type.Q4_1, tokenizer=train)
    else:
        write_quantized(source, theirs, *FORMATS[name][:2])
    files = (
        {f: (source / f).read_bytes() for f in (file, "config.json")}
        if source.is_dir()
        else {file: source.read_bytes()}
    )
    peak_memory(reset=True)
    before = peak_memory()
    refusals = 0
    for i in range(25):
        draw = random.Random(100 * number + i)
        for f, data in files.items():
            (source / f if source.is_dir() else source).write_bytes(data)
        if name == "GGUF":
            source.write_bytes(changed_bytes(draw, files[file]))
        elif i % 3:
            (source / file).write_bytes(spoil_tensors(draw, files[file]))
        else:
            values = json.loads(files["config.json"])
            settings = json.loads(changed_json(draw, json.dumps({"q": values["quantization_config"]}).encode()))
            write_json(source / "config.json", {**values, "quantization_config": settings.get("q", 3)})
        try:
            run_main(convert_hf_checkpoint, source, "--out", tmp_path / "ours")
            shutil.rmtree(tmp_path / "ours")
        except InputError as e:
            assert "\n" not in str(e)
            refusals += 1
        assert {path.name for path in tmp_path.iterdir()} == {source.name}
    assert refusals > 5
    assert peak_memory() - before < 100_000
