"""Files that are truncated, misplaced or a stranger's: no code in them runs, and each ends in one line."""

import json
import os

import pytest
import torch
from helpers import BASE, ROOT, random_model, script
from safetensors.torch import save_file

import complete
import convert_hf_checkpoint
import generate
from benchmarks.fuzz import TINY
from formats import checkpoint
from formats.huggingface import config_from_hf
from formats.sources import Llama2cWeights, PickledWeights
from formats.tokenizer import Tokenizer, load_tokenizer
from measure import results
from model import InputError
from runtime import terminal

DEMO = ROOT / "demo"


def refused(message, call, *args, **more):
    """Raise unless the call ends in an InputError with the message."""
    with pytest.raises(InputError) as caught:
        call(*args, **more)
    assert message in str(caught.value)


# ---------------------------------------------------------------------------------------------------------------------
# Configs


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "is not valid JSON"), ("[]", "config.json"), ("\udcff", "not valid UTF-8"),
        ('{"n_layers": "two"}', "config.json"), ('{"n_layers": 2}', "config.json"), ('{"layers": 2}', "config.json"),
        ('{"model_type": "llama"}', "is a Hugging Face folder: run convert_hf_checkpoint.py"),
    ],
    ids=["truncated", "a list", "no text", "no number", "a lost field", "a field too many", "another family"],
)  # fmt: skip
def test_our_config_refuses(text, message, tmp_path):
    (tmp_path / "config.json").write_text(text, errors="surrogateescape")
    refused(message, checkpoint.read_config, tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "gpt2"}', '{"model_type": "llama"}'])
def test_their_config_refuses(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    refused("config.json", config_from_hf, tmp_path / "config.json")


def test_wrong_paths(tmp_path):
    refused("there is no such folder", complete.load, "nowhere")
    refused("it has no config.json", complete.load, tmp_path)
    refused("is a file", complete.load, DEMO / "config.json")
    refused("is no folder, no file", convert_hf_checkpoint.main, ["nowhere", "--out", "x"])
    refused("no such file", convert_hf_checkpoint.main, ["demo", "--out", "x", "--tokenizer", "nowhere"])


@pytest.mark.slow
def test_a_broken_config_ends_a_script_with_one_line(tmp_path):
    (tmp_path / "config.json").write_text("{")
    done = script("generate.py", "--checkpoint", tmp_path, "--prompt", "a")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert "config.json is not valid JSON" in done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Weights


@pytest.mark.parametrize("file", ["../secret", "/etc/passwd", "a/b", "..", ""])
def test_an_index_names_files_of_its_own_folder_alone(file, tmp_path):
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / "of").mkdir()
    for name in "model.safetensors.index.json", "pytorch_model.bin.index.json":
        (tmp_path / "of" / name).write_text(json.dumps({"weight_map": {"a": file}}))
    for weights in checkpoint.Weights, PickledWeights:
        refused("index.json", weights, tmp_path / "of")


def test_an_index_without_a_weight_map(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    refused("has no weight_map", checkpoint.Weights, tmp_path)


@pytest.mark.parametrize("length", [0, 5, 100, -1000])
def test_a_truncated_safetensors_file(length, tmp_path):
    state = random_model(TINY).state_dict()
    save_file(state, tmp_path / "model.safetensors")
    os.truncate(tmp_path / "model.safetensors", length % (tmp_path / "model.safetensors").stat().st_size)
    refused("model.safetensors is truncated", checkpoint.Weights, tmp_path)


def test_weights_that_are_no_floats(tmp_path):
    state = {name: torch.zeros_like(w, dtype=torch.int8) for name, w in random_model(BASE).state_dict().items()}
    checkpoint.write_config(tmp_path, BASE)
    save_file(state, tmp_path / "model.safetensors")
    refused("tensor norm.weight holds int8: give --dtype, one of float32, bfloat16, float16", complete.load, tmp_path)
    refused("holds int8, but the config says bfloat16", complete.load, tmp_path, dtype="bfloat16")


def test_a_truncated_llama2c_file(tmp_path):
    (tmp_path / "m.bin").write_bytes(b"".join(i.to_bytes(4, "little") for i in (16, 24, 2, 2, 1, 20, 8)) + bytes(99))
    refused("m.bin", Llama2cWeights, tmp_path / "m.bin")


class Called:
    """Calls a function when its pickle is read."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("value", [Called(os.mkdir, "ran"), {"a": Called(os.mkdir, "ran")}, [1]])
def test_a_pickle_holds_tensors_and_runs_nothing(value, zipped, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(value, "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    refused("pytorch_model.bin", PickledWeights, tmp_path)
    assert not (tmp_path / "ran").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers and templates


@pytest.fixture
def tokenizer_folder(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes((DEMO / "tokenizer.model").read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    "settings",
    [
        {"added_tokens_decoder": {"1": {}}}, {"added_tokens_decoder": {"x": {"content": "a"}}},
        {"added_tokens_decoder": [1]}, {"chat_template": [{"name": "default"}]},
    ],
)  # fmt: skip
def test_settings_that_are_refused(settings, tokenizer_folder):
    (tokenizer_folder / "tokenizer_config.json").write_text(json.dumps(settings))
    refused("tokenizer.model cannot be read, or a file of settings beside it", load_tokenizer, tokenizer_folder)


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ messages.__class__.__mro__ }}", "is unsafe"), ("{{ messages.append(1) }}", "is unsafe"),
        ("{{ raise_exception.__globals__['os'] }}", "is unsafe"), ("{% include '/etc/passwd' %}", "loader"),
        ("{{ raise_exception('no') }}", "refuses this conversation: no"), ("{% if %}", "Expected an expression"),
        ("{{ tools[0].name }}", "has no element 0"), ("{{ messages[0].content + 1 }}", "str"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    ],
)  # fmt: skip
def test_templates_that_are_refused(template, message):
    tokenizer = Tokenizer()
    tokenizer.template = template
    refused(message, tokenizer.render, [{"role": "user", "content": "hi"}])


# ---------------------------------------------------------------------------------------------------------------------
# Prompts and results


@pytest.mark.parametrize("content, message", [(b"a\xff", "is not valid UTF-8"), (b" \n", "--prompt is empty")])
def test_prompts_that_are_refused(content, message, tmp_path):
    (tmp_path / "prompts.txt").write_bytes(content)
    refused(message, prompts_of, f"@{tmp_path / 'prompts.txt'}")
    refused("prompts", prompts_of, f"@{tmp_path}/prompts")
    refused(str(tmp_path), prompts_of, f"@{tmp_path}")


def prompts_of(prompt):
    args = generate.parse(["--checkpoint", str(DEMO), "--prompt", prompt])
    return terminal.read_prompts(args, checkpoint.read_config(DEMO), load_tokenizer(DEMO))


@pytest.mark.parametrize("line", ["{", "[]"])
def test_results_that_are_refused(line, tmp_path):
    first = (ROOT / "benchmarks" / "results" / "bench-demo.jsonl").read_text().splitlines()[0]
    (tmp_path / "bench.jsonl").write_text(f"{first}\n{line}\n{first}\n")
    refused("line 2", results.read, tmp_path / "bench.jsonl")
