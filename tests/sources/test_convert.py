"""Conversion: parity with transformers through the converter, and sources of every form."""

import copy
import dataclasses
import fnmatch
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys

import huggingface_hub
import pytest
import torch
import transformers
from cases import refused
from file_edits import change_tensors, edit_config, edit_state, take_state, write_json
from helpers import ROOT, shared_data, train_tokenizer
from hf_folders import (
    FOLDED,
    HF_FAMILIES,
    LINEAR_ROPE,
    LLAMA3_ROPE,
    LONG_ROPE,
    MULTIMODAL,
    MULTIPLIERS,
    SMALL,
    YARN_ROPE,
    check_config_as_on_the_hub,
    check_family,
    check_parity,
    config_from_values,
    convert,
    convert_hf,
    hf_model,
    multimodal_model,
)
from safetensors.torch import load_file, save_file

from ladder.architectures.heads import Heads
from ladder.architectures.mixture import Mixture
from ladder.checkpoints import checkpoint
from ladder.errors import InputError
from ladder.sources import config_values, families, huggingface
from ladder.sources.huggingface import config_from_hf


@pytest.mark.parametrize("family", [*HF_FAMILIES, *FOLDED])
def test_parity_with_transformers(family, tmp_path):
    # mistral's cache of no token at all transformers cuts wrongly
    ours = check_family(hf_model(family), tmp_path, greedy=family != "mistral")
    check_config_as_on_the_hub(tmp_path / "hf", ours)


@pytest.mark.parametrize("family", MULTIMODAL)
def test_the_language_model_beside_a_tower_for_pictures(family, tmp_path, capsys):
    outer, text = MULTIMODAL[family]
    theirs = multimodal_model(outer, text, tie_word_embeddings=outer == "Gemma3")
    theirs.save_pretrained(tmp_path / "hf")
    names = [*load_file(tmp_path / "hf" / "model.safetensors")]
    ours = convert_hf(tmp_path, "ours")
    towers = sum("language_model" not in name and "lm_head" not in name for name in names)
    said = re.findall(r"left out: (\d+) tensors of (\w+), since", capsys.readouterr().out)
    assert sum(int(n) for n, _ in said) == towers and {t for _, t in said} == {"vision_tower", "multi_modal_projector"}
    check_parity(ours, theirs)
    state = take_state(tmp_path / "hf")  # transformers 4 and 5 name these tensors in other ways
    state = {re.sub(r"^language_model\.(model|lm_head)", older, name): w for name, w in state.items()}
    save_file(state, tmp_path / "hf" / "model.safetensors")
    check_parity(convert_hf(tmp_path, "older"), theirs)


def older(match):
    return "lm_head" if match[1] == "lm_head" else "model.language_model"


def test_multipliers_are_rounded_once(tmp_path):
    theirs = hf_model("granite, tied, biased").bfloat16()
    theirs.save_pretrained(tmp_path / "hf")
    for dtype, tolerance in ("bfloat16", 0), ("float32", 1e-6):
        convert_hf(tmp_path, dtype, "--dtype", dtype)
        exact = theirs.model.layers[1].mlp.down_proj.weight.double() * MULTIPLIERS["residual_multiplier"]
        ours = checkpoint.Weights(tmp_path / dtype).read("layers.1.feed_forward.w2.weight")
        assert (ours - exact.to(ours.dtype)).abs().max() <= tolerance


OWN_CODE = {"llamaLadder", "ladder_residual", "instella_moe", "laneformer"}


NO_DEFAULT = {  # in some families
    "rms_norm_eps": 1e-5, "layer_norm_eps": 1e-4, "rope_theta": 500.0, "bos_token_id": 3, "eos_token_id": 4,
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}  # fmt: skip


@pytest.mark.parametrize("family", sorted(huggingface.FAMILIES.keys() - OWN_CODE))
def test_absent_keys_are_what_transformers_takes_them_for(family, tmp_path):
    shape = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "max_position_embeddings")
    values = {"model_type": family, "num_attention_heads": 32, "pad_token_id": 0, **dict.fromkeys(shape, 64)}
    has_head_dim = family != "stablelm" and "kv_lora_rank" not in huggingface.FAMILIES[family].keys
    values |= {"num_key_value_heads": 32, **({"head_dim": 8} if has_head_dim else {})}
    values |= {key: value for key, value in NO_DEFAULT.items() if huggingface.FAMILIES[family].keys.get(key, 0) is None}
    ours = config_from_values(tmp_path, values)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    rope = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
    norm_eps = theirs.layer_norm_eps if family == "stablelm" else theirs.rms_norm_eps
    assert (ours.norm_eps, ours.rope_theta) == (norm_eps, rope["rope_theta"])
    part = rope.get("partial_rotary_factor", 1.0)
    latent = getattr(theirs, "qk_rope_head_dim", None)
    assert ours.rotary_dim == (latent or (None if part == 1.0 else int(ours.head_dim * part)))
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    ends = theirs.eos_token_id if isinstance(theirs.eos_token_id, list) else [theirs.eos_token_id]
    ends = tuple(end for end in ends if end is not None)
    assert (ours.bos_id, ours.eos_ids) == (theirs.bos_token_id, ends)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(theirs)
    biases = {name.rpartition("_proj")[0][-1] for name in theirs.state_dict() if re.search("proj.bias$", name)}
    mlp_bias = ours.mlp_bias or getattr(ours.find(Mixture), "clamped_swiglu", False)
    assert ours.qkv_bias == ("q" in biases) and ours.wo_bias == ("o" in biases) and mlp_bias == ("n" in biases)
    turned = getattr(theirs.config, "no_rope_layers", None) or ()
    heads = ours.find(Heads) or Heads()
    assert heads.nope_layers == tuple(i for i, t in enumerate(turned) if not t)
    windows = [i for i, kind in enumerate(getattr(theirs.config, "layer_types", None) or ()) if "sliding" in kind]
    if theirs.config.max_position_embeddings > (getattr(theirs.config, "sliding_window", None) or 1e9):
        assert heads.window_layers == tuple(windows)


ASKED = {  # by transformers' code, although not every family's class has these
    "sliding_window",  # only of layers with a window
    "ignore_keys_at_rope_validation",  # of warnings
}


@pytest.mark.parametrize("family", sorted(huggingface.FAMILIES.keys() - OWN_CODE))
def test_all_that_transformers_reads_is_computed_or_refused_or_harmless(family):
    """That is, every attribute of its class, and every name that its code asks for with a default."""
    config_class = transformers.CONFIG_MAPPING[family]
    modules = [config_class.__module__, config_class.__module__.replace("configuration", "modeling")]
    config_code, model_code, mask_code, rope_code = (
        inspect.getsource(importlib.import_module(name))
        for name in (*modules, "transformers.masking_utils", "transformers.modeling_rope_utils")
    )
    names = {name for name in vars(config_class()) if not name.startswith("_")} - ASKED
    names |= {*re.findall(r'kwargs\.\w+\(\s*"(\w+)"', config_code)}
    names |= {*re.findall(r'attr\(\s*(?:self\.)?config, "(\w+)"', model_code + mask_code)} - ASKED
    own = huggingface.FAMILIES[family]
    known = {*own.keys, *own.only, *families.ONLY_VALUES, *families.REQUIRED, *families.HARMLESS, *families.REMEDIES}
    assert names - known <= {"rope_parameters", "rope_scaling", "model_type"}
    rope_names = {*re.findall(r'rope_parameters(?:_dict)?(?:\.get\(|\[)"(\w+)"', rope_code)}
    assert len(rope_names) > 10 and rope_names <= known | huggingface.ALL_ROPE_KEYS


def test_what_transformers_does_not_read_is_ignored_and_named(hf_folder, tmp_path, capsys):
    plain = convert(hf_folder, tmp_path / "plain").config
    assert "ignored" not in capsys.readouterr().out
    others = {"qk_norm": True, "a_key_that_nobody_would_want_to_see_abbreviated": 1, "num_experts": 8, "none": None}
    rope = {"finetuned": True, "llama_4_scaling_beta": 0.3, "rope_theta": 500.0}
    edit_config(hf_folder, **others, rope_parameters=rope, unk_token_id=0, eos_token_id=[2, -1], bos_token_id=-1)
    assert convert(hf_folder, tmp_path / "ours").config == dataclasses.replace(plain, bos_id=None)
    names = f"{', '.join([*others][:3])}, unk_token_id, rope_parameters.finetuned, rope_parameters.llama_4_scaling_beta"
    assert f"ignored in config.json, since transformers does not read it: {names}\n" in capsys.readouterr().out


CONTEXTS = [  # a config with a max_position_embeddings of 64, and how many tokens it takes
    ({"rope_parameters": {**YARN_ROPE, "factor": 8.0}}, 128),
    ({"rope_parameters": YARN_ROPE}, 64),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 3.0}}, 192),
    ({"rope_scaling": {"type": "linear", "factor": 2.5}}, 160),
    ({"rope_scaling": {"type": "linear", "factor": 2.5}, "model_type": "gemma3_text"}, 64),
    ({"rope_parameters": {**LLAMA3_ROPE, "factor": 32.0}}, 64),
    ({"rope_parameters": LONG_ROPE, "model_type": "phi3", "original_max_position_embeddings": 40}, 64),
]


def test_yarn_and_linear_factors_extend_the_context(tmp_path, hf_folder, capsys):
    for values, context in CONTEXTS:
        config = config_from_values(tmp_path, {"model_type": "mistral", **SMALL, **values})
        assert config.max_seq_len == context, values
    for rope, said in (LLAMA3_ROPE, False), (LINEAR_ROPE, True):
        edit_config(hf_folder, rope_parameters=rope)
        convert(hf_folder, tmp_path / f"ours {said}")
        line = "the context is 160 tokens: scaling extends config.json's 64\n"
        assert (line in capsys.readouterr().out) == said


LONG_YARN = {"rope_type": "yarn", "factor": 4.0}
THETA = {"rope_type": "default", "rope_theta": 1e6}
TWO_PLACES = [  # what a config.json says of rope, and rope_theta with the kind of scaling, or what the refusal says
    ({"rope_parameters": THETA, "rope_scaling": LONG_YARN}, (1e6, "beta_fast")),
    ({"rope_parameters": THETA, "rope_scaling": {"type": "linear", "factor": 2.0}}, (1e6, "factor")),
    ({"rope_parameters": THETA | LONG_YARN, "rope_scaling": {"rope_type": "default"}}, (1e6, "beta_fast")),
    ({"rope_parameters": THETA, "rope_theta": 1e6}, (1e6, None)),
    ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 2e5}, (2e5, None)),
    ({"rope_scaling": LONG_YARN, "rope_theta": 2e5}, (2e5, "beta_fast")),
    (
        {"rope_parameters": THETA, "rope_theta": 2e5},
        "rope_theta is 200000.0, but 1000000.0 in rope_parameters",
    ),
    (
        {"rope_parameters": LINEAR_ROPE, "rope_scaling": LONG_YARN},
        "rope_parameters and rope_scaling have another 'factor'",
    ),
    (
        {"rope_parameters": THETA, "rope_scaling": {"rope_theta": 1.0e4}},
        "rope_parameters and rope_scaling have another",
    ),
    ({"rope_scaling": {**LONG_YARN, "type": "linear"}}, "both rope_type and type, which differ: 'linear' and 'yarn'"),
    (
        {"rope_parameters": {"full_attention": THETA, "sliding_attention": {}}, "rope_scaling": LONG_YARN},
        "rope_parameters and rope_scaling differ",
    ),
    ({"model_type": "mistral3", "text_config": {**SMALL}, "rope_scaling": LONG_YARN}, "stands beside text_config"),
    ({"model_type": "mistral3", "text_config": {**SMALL}, "rope_theta": 1e6}, "rope_theta stands beside text_config"),
]


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_rope_may_be_said_in_two_places_that_agree(model_type, tmp_path):
    for values, right in TWO_PLACES:
        values = {"model_type": model_type, **SMALL, "rope_parameters": None, **values}
        if isinstance(right, str):
            refused(rf"config.json: .*{right}", config_from_values, tmp_path, values)
            continue
        config = config_from_values(tmp_path, values)
        assert config.rope_theta == right[0] and (not right[1] or right[1] in config.rope_scaling), values


WINDOWS = [  # a config of three layers and a context of 64, and the layers with a window of 40
    ({"model_type": "mistral"}, (0, 1, 2)),
    ({"model_type": "mistral", "sliding_window": 64}, ()),
    ({"model_type": "qwen2", "max_window_layers": 1}, ()),
    ({"model_type": "qwen2", "max_window_layers": 1, "use_sliding_window": True}, (1, 2)),
    ({"model_type": "qwen3", "use_sliding_window": True}, ()),  # which begins with layer 28
    ({"model_type": "ministral"}, (0, 1, 2)),
    ({"model_type": "qwen3_moe", "use_sliding_window": True, "max_window_layers": 2}, (0, 1, 2)),
    ({"model_type": "gemma3_text", "sliding_window_pattern": 2, "_sliding_window_pattern": 3}, (0, 2)),
]


def test_sliding_windows_are_where_transformers_has_them(tmp_path):
    for values, layers in WINDOWS:
        config = config_from_values(tmp_path, SMALL | {"sliding_window": 40} | values)
        heads = config.find(Heads) or Heads()
        assert (config.max_seq_len, heads.window_layers, heads.sliding_window) == (64, layers, 40 if layers else None)


def test_a_generation_config_has_more_ends(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert config_from_values(tmp_path, {**SMALL, "model_type": "llama"}).eos_ids == (2, 7)


def only_the_head(folder):
    """As some folders of tied models are."""
    edit_state(folder, lambda state: state.update({"lm_head.weight": state.pop("model.embed_tokens.weight")}))


def test_a_folder_with_only_the_head_becomes_several_files(tmp_path):
    theirs = hf_model("llama3.2-tied")
    theirs.save_pretrained(tmp_path / "hf")
    only_the_head(tmp_path / "hf")
    check_parity(convert_hf(tmp_path, "ours", "--shard-gb", 1e-4), theirs)
    files = sorted((tmp_path / "ours").glob("model-*.safetensors"))
    assert len(files) > 2 and all(f.stat().st_size < 1e5 + 5000 for f in files)


@pytest.mark.parametrize("family", ["gemma", "granite, tied, biased"])
def test_a_tied_model_with_a_head_of_its_own_is_not_tied(family, tmp_path, capsys):
    hf_model(family).save_pretrained(tmp_path / "hf")
    change_tensors(tmp_path / "hf", {"lm_head.weight": torch.randn(131, 48) / 4})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    check_parity(convert_hf(tmp_path, "ours"), theirs)
    assert "lm_head.weight is a tensor of its own: it is used, as in transformers\n" in capsys.readouterr().out


@pytest.mark.parametrize("wrap", ["_orig_mod.{}", "module.{}", "module._orig_mod.{}", "_orig_mod.module.{}"])
def test_what_wraps_a_module_is_no_part_of_a_tensors_name(wrap, hf_folder, tmp_path):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(hf_folder)
    state = {wrap.format(name): w for name, w in take_state(hf_folder).items()}
    save_file(state, hf_folder / "model.safetensors")
    check_parity(convert(hf_folder, tmp_path / "ours"), theirs)


def test_the_wiring_is_the_configs_or_the_flags(hf_folder, tmp_path):
    for layers, wiring in (2, "ladder:2"), ([1], "ladder:1,"), ([0, 1, 2], "ladder"), (0, "standard"):
        edit_config(hf_folder, model_type="llamaLadder", ladder_layers=layers)
        assert convert(hf_folder, tmp_path / wiring).config.wiring == wiring
    assert convert(hf_folder, tmp_path / "ours", "--wiring", "spd:1/2").config.wiring == "spd:1/2"
    names = dict(convert(hf_folder, tmp_path / "parallel", "--wiring", "parallel").named_parameters())
    assert "layers.0.attention_norm.weight" in names and "layers.0.ffn_norm.weight" not in names
    refused("name them, e.g. spd/8", convert, hf_folder, tmp_path / "other", "--wiring", "spd")
    assert not (tmp_path / "other").exists()


# Real configs


def test_real_configs_are_read():
    expected = {  # family: n_layers, n_heads, n_kv_heads, head_dim, tied
        "llama2_7b": (32, 32, 32, 128, False), "llama3_2_1b": (16, 32, 8, 64, True),
        "mistral_7b_v03": (32, 32, 8, 128, False), "qwen3_0.6b": (28, 16, 8, 128, True),
    }  # fmt: skip
    for path in sorted(shared_data("../configs/llama3_1_8b.json").parent.glob("*.json")):
        config = config_from_hf(path)
        c = (config.n_layers, config.n_heads, config.n_kv_heads, config.head_dim, config.tie_embeddings)
        assert c == expected.get(path.stem, c), path
        assert config.qkv_bias == ("qwen2" in path.stem) and bool(config.find(Heads)) == ("qwen3" in path.stem)
        assert config.wiring == ("ladder:16" if "ladder" in path.stem else "standard")


# Bad input


@pytest.fixture
def hf_folder(tmp_path):
    hf_model("mistral").save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


BAD_CONFIGS = [
    ({"model_type": "deepseek_v4"}, "model_type 'deepseek_v4' is not supported"),
    ({"is_causal": False}, "is_causal False is not supported, only True is"),
    ({"intermediate_size": None}, "intermediate_size is missing"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5 is not supported"),
    ({"rope_parameters": {"rope_type": "longrope", "long_factor": [1.5]}}, "rope type 'longrope' needs short_factor"),
    ({"rms_norm_eps": None}, "rms_norm_eps is null but must be a number above 0"),
    (
        {"model_type": "phi3", "rope_parameters": {**LONG_ROPE, "long_factor": [1.5]}},
        "long_factor has 1 numbers, not 3",
    ),
    ({"quantization": {"bits": 4}}, "quantization is not supported; such quantized weights are not read"),
    (
        {"rope_parameters": {**YARN_ROPE, "attn_factor": 0.9}},
        "attn_factor is not .*: write attention_factor, attn_fact",
    ),
    ({"rope_parameters": {**YARN_ROPE, "truncate": 1}}, "rope_parameters.truncate is 1 but must be true or false"),
    ({"dual_chunk_attention_config": {"chunk_size": 9}}, "without it the model computes full attention"),
    ({"model_type": "mistral3"}, "model_type is mistral3, but text_config is null"),
    (
        {"model_type": "mistral3", "rope_parameters": None, "text_config": {"model_type": "mamba"}},
        "'mamba' is not supported",
    ),
    ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported"),
    ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention True is not"),
    ({"model_type": "stablelm", "qk_layernorm": True}, "qk_layernorm True is not supported"),
    ({"model_type": "gpt_oss", "sliding_window": 9}, "needs layer_types in this family"),
    ({"model_type": "gpt_oss", "swiglu_limit": 6.0}, "swiglu_limit 6.0 is not supported, only 7.0 is"),
    ({"model_type": "glm4", "partial_rotary_factor": 0.4}, r"partial_rotary_factor \* head_dim 3 is odd"),
    (
        {"model_type": "ministral3", "rope_parameters": {"llama_4_scaling_beta": 0.1}},
        "llama_4_scaling_beta needs a rope_scaling",
    ),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope type 'llama3' needs low_freq_factor"),
    ({"model_type": "qwen2_moe", "sliding_window": 9, "use_sliding_window": True}, "needs layer_types in this family"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ({"tie_word_embeddings": None}, "tie_word_embeddings is null but must be true or false"),
    (
        {"model_type": "qwen2_moe", "num_experts_per_tok": 1, "qkv_bias": None},
        "qkv_bias is null but must be true or fal",
    ),
    ({"is_causal": [None]}, r"is_causal \[null\] is not supported"),
    ({"mlp_bias": "no"}, "mlp_bias is 'no' but must be true or false"),
    ({"model_type": "ministral", "sliding_window": 9, "layer_types": ["full_attention"]}, "for each of 3 layers"),
    ({"model_type": "mistral", "sliding_window": 0}, "a sliding_window of 1 or more tokens"),
    ({"num_hidden_layers": 2**31}, "is 2147483648 but must be a whole number from 1 to 1000"),
    ({"num_attention_heads": 0}, "num_attention_heads is 0 but must be a whole number from 1 to 16777216"),
    ({"num_key_value_heads": 4}, "num_attention_heads 6 is not a multiple of num_key_value_heads 4"),
    ({"model_type": "gemma3_text", "sliding_window_pattern": None}, "sliding_window_pattern is null but must be a who"),
    ({"rope_parameters": {**LLAMA3_ROPE, "low_freq_factor": 4}}, "high_freq_factor 4.0 must be above low_freq_fac"),
    ({"ladder_layers": [3]}, "from 0 to 2"),
]


def test_configs_that_are_not_supported_are_one_clear_line(tmp_path):
    for changes, message in BAD_CONFIGS:
        refused(rf"config.json: .*{message}", config_from_values, tmp_path, {**SMALL, "model_type": "llama", **changes})


def places(values):
    """Yield (a part of a config.json, a key) of each value in it."""
    for key, value in values.items():
        yield values, key
        yield from places(value) if isinstance(value, dict) else ()


@pytest.mark.parametrize("family", ["llama3.2-tied", "gemma3", "phi3, long", "ministral3", "smollm3", "olmo3"])
def test_a_wrong_value_is_told_by_its_own_key(family, tmp_path):
    """And neither by a field of our Config nor by an error of Python's."""
    class_name, changes = HF_FAMILIES[family]
    config = getattr(transformers, class_name)(**copy.deepcopy({**SMALL, **changes})).to_dict()
    good = json.loads(json.dumps(config))
    path = tmp_path / "config.json"
    ours = {field.name for field in dataclasses.fields(checkpoint.Config)} - config_values.KIND_OF.keys()
    for part, key in places(good):
        value = part[key]
        for part[key] in None, "x", -1, 0, 1.5, [], {}, True, [None]:
            write_json(path, good)
            try:
                config_from_hf(path)
            except InputError as e:
                words = set(re.findall(r"\w+", str(e).removeprefix(str(path))))
                assert not words & (ours | {"NoneType", "operand"}) and "Error" not in str(e), str(e)
        part[key] = value


UP = "model.layers.1.mlp.up_proj.weight"
BIAS = "model.layers.0.self_attn.q_proj.bias"


def lose_a_shard(folder):
    index = {"weight_map": dict.fromkeys(take_state(folder), "model-00001-of-00001.safetensors")}
    write_json(folder / "model.safetensors.index.json", index)


def only(name):
    """Return a function that empties a folder, but for a file of that name."""

    def spoil(folder):
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / name).write_text("{}")

    return spoil


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
FP8 = {"model.layers.0.self_attn.v_proj.weight": torch.zeros(16, 48).to(torch.float8_e4m3fn)}
BAD = {
    "an adapter": (only("adapter_config.json"), "adapter_config.json is an adapter's: merge it: peft"),
    "GGUF": (only("a.gguf"), "hf cannot be converted: give the file itself: .*hf/a.gguf"),
    "Meta's own": (only("params.json"), "params.json is in Meta's or Mistral's own format: take"),
    "a pickle": (only("consolidated.00.pth"), "consolidated.00.pth is a pickle: take"),
    "an old one": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "a pickle: transformers makes"),
    "PEFT's": (lambda f: change_tensors(f, {"x.base_layer.weight": torch.ones(1)}), "x.base_layer.weight is of a P"),
    "FP8": (lambda f: change_tensors(f, FP8), "holds float8_e4m3fn: such quantized weights are not read"),
    "a wrapped twin": (lambda f: change_tensors(f, {"module.lm_head.weight": torch.ones(1)}), "a second lm_h"),
    "a pointer": (lambda f: (f / "model.safetensors").write_text(POINTER), "is a Git LFS pointer: git lfs pull"),
    "a tokenizer's": (lambda f: (f / "tokenizer.json").write_text(POINTER), "tokenizer.json is a Git LFS pointer"),
    "our own config": (lambda f: edit_config(f, model_type=None, n_layers=3), "is a checkpoint of this project alread"),
    "no config": (lambda f: (f / "config.json").unlink(), "hf cannot be converted: it has no config.json"),
    "no weights": (take_state, "has no model.safetensors"),
    "a lost shard": (lose_a_shard, "model-00001-of-00001.safetensors is missing, truncated"),
    "a missing tensor": (lambda f: change_tensors(f, {UP: None}), "no tensor model.layers.1.mlp"),
    "an extra tensor": (lambda f: change_tensors(f, {BIAS: torch.ones(48)}), "q_proj.bias that is no part"),
    "a wrong shape": (lambda f: edit_config(f, intermediate_size=99), r"does not make the \(99, 48\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_sources_are_one_clear_line_and_leave_nothing(case, hf_folder, tmp_path):
    spoil, message = BAD[case]
    spoil(hf_folder)
    refused(message, convert, hf_folder, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_pickle_by_itself_is_said_to_be_one(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(100))
    words = "pytorch_model.bin is a pickle: transformers makes safetensors of it"
    refused(words, convert, tmp_path / "pytorch_model.bin", tmp_path / "ours")


def test_hub_models_are_downloaded_by_pattern(hf_folder, tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **how: asked.update(how) or str(hf_folder))
    convert("someone/model", tmp_path / "ours", "--revision", "abc")
    assert asked["revision"] == "abc"
    assert "model*.safetensors" in asked["allow_patterns"]
    unwanted = "original/consolidated.00.pth", "pytorch_model.bin", "pytorch_model-00001-of-00002.bin"
    assert not any(fnmatch.fnmatch(name, pattern) for name in unwanted for pattern in asked["allow_patterns"])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: 1 / 0)
    words = "model is not a local folder, and could not be downloaded: division by zero"
    refused(words, convert, "someone/model", tmp_path / "other")


def test_a_given_tokenizer_replaces_the_sources_and_must_fit(hf_folder, tmp_path):
    (hf_folder / "tokenizer.json").write_text("not one")
    train_tokenizer(["Once upon a time there was a little dog. "] * 30, 300, file := tmp_path / "large.model")
    words = "has 300 tokens, but the model's vocab_size is 131"
    refused(words, convert, hf_folder, tmp_path / "ours", "--tokenizer", file)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SMALL, "vocab_size": 300})).save_pretrained(hf_folder)
    convert(hf_folder, tmp_path / "ours", "--tokenizer", file)
    assert (tmp_path / "ours" / "tokenizer.model").read_bytes() == file.read_bytes()
    assert not (tmp_path / "ours" / "tokenizer.json").exists()


def test_a_tokenizer_has_more_ends_and_fewer_tokens(hf_folder, tmp_path, capsys):
    """Its own eos_token, and what its template writes after an answer unless generation_config.json lists several.

    A token without a row in the embedding goes.
    """
    from tokenizers import AddedToken, Tokenizer, models

    model = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
    model.add_tokens([AddedToken(text, special=True) for text in ("<|im_end|>", "<eos>", "<x>", "[PAD]")])
    model.save(str(hf_folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    write_json(hf_folder / "tokenizer_config.json", {"eos_token": "<eos>", "chat_template": template})
    assert convert(hf_folder, tmp_path / "ours").config.eos_ids == (2, 129, 128)
    said = capsys.readouterr().out
    assert "left out: the tokens [PAD], for which" in said and "also ends at <eos>, <|im_end|>, which" in said
    (hf_folder / "generation_config.json").write_text('{"eos_token_id": [129, 2]}')  # of gpt-oss it names no <|end|>
    assert convert(hf_folder, tmp_path / "others").config.eos_ids == (2, 129)


@pytest.mark.slow
def test_memory_stays_near_one_shard(tmp_path):
    """160 MB of model in shards of 8 MB: the peak of the process hardly grows after a conversion of next to nothing."""
    source = "import resource, sys, convert_hf_checkpoint as c\nfor name in 'small', 'large':\n"
    source += " c.main([name, '--out', f'{name}-out', '--shard-gb', '0.008'])\n print(resource.getrusage(0).ru_maxrss)"
    for name, n_layers in ("small", 1), ("large", 18):
        shape = {"num_hidden_layers": n_layers, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
        config = transformers.LlamaConfig(**{**SMALL, **shape})
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / name, max_shard_size="8MB")
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
        stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    small, large = (int(line) * 1024 for line in done.stdout.splitlines() if line.isdigit())
    assert sum(f.stat().st_size for f in (tmp_path / "large-out").glob("*.safetensors")) > 150e6
    assert large - small < 40e6
