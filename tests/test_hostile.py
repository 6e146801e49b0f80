"""Files that are truncated, misplaced or a stranger's: no code in them runs, and each ends in one line."""

import dataclasses
import json
import os

import pytest
import torch
from helpers import BASE, ROOT, random_model
from safetensors.torch import save_file

import complete
import convert_hf_checkpoint
from extras.chat import template as chat_template
from extras.sources import Llama2cWeights, PickledWeights
from formats import checkpoint
from formats.tokenizer import Tokenizer, load_tokenizer
from runtime import terminal, writing
from runtime.errors import InputError

DEMO, PICKLED = ROOT / "demo", "pytorch_model.bin"


def refused(message, call, *args, **more):
    """Fail unless the call ends in an InputError of one line with the message."""
    with pytest.raises(InputError) as caught:
        call(*args, **more)
    assert message in str(caught.value) and "\n" not in str(caught.value)


# ---------------------------------------------------------------------------------------------------------------------
# Configs


TEXTS = {
    "{": "is not valid JSON", "[]": "config.json", "\udcff": "not valid UTF-8", '{"n_layers": 2}': "config.json",
    '{"layers": 2}': "config.json", '{"model_type": "llama"}': "a Hugging Face folder: run convert_hf_checkpoint.py",
}  # fmt: skip
VALUES = [
    ({"nope_layers": [99, -1]}, "nope_layers is (99, -1) but must be tuple[int, ...]"),
    ({"nope_layers": [3]}, "nope_layers takes layers from 0 to 2, not (3,)"),
    ({"eos_ids": ["2"]}, "eos_ids is ('2',) but must be tuple[int, ...]"),
    ({"window_layers": [True], "sliding_window": 4}, "window_layers is (True,)"),
    ({"bos_id": -1}, "bos_id is -1 but must be int | None"),
    ({"wiring": 3}, "wiring is 3 but must be str"),
    ({"kept": [2], "quant": "int8"}, "kept is (2,) but must be tuple[str, ...]"),
    ({"dim": 10**30}, "dim is 1000000000000000000000000000000 but must be int above 0"),
    ({"head_dim": 7}, "head_dim 7 is odd"),
    ({"norm_eps": float("nan")}, "norm_eps is nan but must be float above 0"),
    ({"rope_scaling": {"factor": 2.0, "mscale": 1.0}}, "rope_scaling has the keys ['factor', 'mscale'], not "),
    ({"rope_scaling": {"factor": "2"}}, "rope_scaling is {'factor': '2'}, but its values are numbers above 0"),
    ({"desync_period": 2}, "desync_period"),
]


def test_our_config_refuses(tmp_path):
    for text, message in TEXTS.items():
        (tmp_path / "config.json").write_text(text, errors="surrogateescape")
        refused(message, checkpoint.read_config, tmp_path)
    for changes, message in VALUES:
        values = json.loads(json.dumps(dataclasses.asdict(BASE) | changes))
        refused(message, checkpoint.make_config, values, "config.json")


def test_a_byte_order_mark_is_no_text_and_prompts_are_split_at_newlines_only(tmp_path):
    (tmp_path / "config.json").write_text((DEMO / "config.json").read_text(), encoding="utf-8-sig")
    assert checkpoint.read_config(tmp_path) == checkpoint.read_config(DEMO)
    (tmp_path / "prompts").write_bytes("\ufeffone\u2028line\x0c\r\n\nanother\n".encode())
    assert terminal.read_lines(tmp_path / "prompts") == ["one\u2028line\x0c", "", "another", ""]


def test_a_digest_sees_headers_small_files_and_changes_of_a_thousandth(tmp_path):
    weights, size = tmp_path / "model.safetensors", 30 * 2**20
    save_file({"a": torch.zeros(size, dtype=torch.uint8)}, weights)
    before, data, changed = checkpoint.digest(tmp_path), weights.read_bytes(), b"\1" * (size // 1000)
    for at, new in (20, b"b"), (size // 3, changed), (len(data) - len(changed), changed):
        weights.write_bytes(data[:at] + new + data[at + len(new) :])
        assert checkpoint.digest(tmp_path) != before
    weights.write_bytes(data)
    assert checkpoint.digest(tmp_path) == before
    (tmp_path / "tokenizer.json").write_text("{}")
    assert checkpoint.digest(tmp_path) != before


def test_wrong_paths(tmp_path):
    refused("it has no config.json", complete.load, tmp_path)
    refused("is a file", complete.load, DEMO / "config.json")
    refused("is no folder, no file", convert_hf_checkpoint.main, ["nowhere", "--out", "x"])
    refused("no such file", convert_hf_checkpoint.main, ["demo", "--out", "x", "--tokenizer", "nowhere"])


# ---------------------------------------------------------------------------------------------------------------------
# Weights


def test_an_index_names_files_of_its_own_folder_alone(tmp_path):
    (tmp_path / "secret").write_bytes(b"x")
    (folder := tmp_path / "folder").mkdir()
    for file in "../secret", "/etc/passwd", "..":
        for name in "model.safetensors.index.json", "pytorch_model.bin.index.json":
            (folder / name).write_text(json.dumps({"weight_map": {"a": file}}))
        for weights in checkpoint.Weights, PickledWeights:
            refused("index.json", weights, folder)


def test_truncated_weights(tmp_path):
    state, (single, pickled) = random_model(BASE).state_dict(), (tmp_path / n for n in ("model.safetensors", PICKLED))
    save_file(state, single)
    torch.save(state, pickled)
    for path in single, pickled:
        os.truncate(path, path.stat().st_size - 1000)
    refused("model.safetensors is truncated", checkpoint.Weights, tmp_path)
    refused("pytorch_model.bin is truncated", PickledWeights, tmp_path)
    header = b"".join(i.to_bytes(4, "little") for i in (16, 24, 2, 2, 1, 20, 8))
    for data, message in (header[:20], "its header reads"), (header + bytes(99), "its header asks for"):
        (tmp_path / "m.bin").write_bytes(data)
        refused(message, Llama2cWeights, tmp_path / "m.bin")


def test_weights_that_are_no_floats(tmp_path):
    state = {name: torch.zeros_like(w, dtype=torch.int8) for name, w in random_model(BASE).state_dict().items()}
    writing.write_config(tmp_path, BASE)
    save_file(state, tmp_path / "model.safetensors")
    refused("tensor norm.weight holds int8: give --dtype, one of float32, bfloat16, float16", complete.load, tmp_path)
    refused("holds int8, but the config says bfloat16", complete.load, tmp_path, dtype="bfloat16")


class Called:
    """Calls a function when its pickle is read."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def test_a_pickle_holds_tensors_and_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for value in Called(os.mkdir, "ran"), {"a": Called(os.mkdir, "ran")}:
        for zipped in True, False:
            torch.save(value, PICKLED, _use_new_zipfile_serialization=zipped)
            refused("pytorch_model.bin", PickledWeights, tmp_path)
    assert not (tmp_path / "ran").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers and templates


def test_settings_that_are_refused(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes((DEMO / "tokenizer.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"x": {"content": "a"}}}')
    refused("tokenizer.model cannot be read, or a file of settings beside it", load_tokenizer, tmp_path)


TEMPLATES = {
    "{{ messages.__class__.__mro__ }}": "is unsafe",
    "{{ messages.append(1) }}": "is unsafe",
    "{{ raise_exception.__globals__['os'] }}": "is unsafe",
    "{% include '/etc/passwd' %}": "loader",
    "{{ raise_exception('no') }}": "refuses this conversation: no",
    "{% if %}": "Expected an expression",
    "{% for i in range(10**9) %}{% endfor %}": "Range too big",
    "{{ 'a' * 10**10 }}": "MemoryError",
    "{{ 'a' * 10**7 }}b": "its text has 10,000,001 characters",
    "{{ 10**(10**10) }}": "it takes more than 0.3 s or 512 MB",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "more than 0.3 s",
}


def test_templates_that_are_refused(monkeypatch):
    monkeypatch.setattr(chat_template, "renderer", chat_template.Renderer())
    monkeypatch.setattr(chat_template.Renderer, "seconds", 0.3)
    tokenizer, messages = Tokenizer(), [{"role": "user", "content": "hi"}]
    for tokenizer.template, message in TEMPLATES.items():
        refused(message, tokenizer.render, messages)
        tokenizer.template = "{{ messages[0]['content'] }}"  # also after a process was ended
        assert tokenizer.render(messages) == "hi"
