"""Files that are truncated, misplaced or a stranger's: no code in them runs, and each ends in one line."""

import json
import os
import re
from types import SimpleNamespace

import torch
from cases import refused
from configs import BASE
from file_edits import write_json
from helpers import ROOT, random_model
from safetensors.torch import save_file

import complete
import convert_hf_checkpoint
from ladder.checkpoints import checkpoint, writing
from ladder.checkpoints.compare import digest
from ladder.command_line.prompts import read_prompts
from ladder.text.tokenizer import load_tokenizer

DEMO = ROOT / "demo"


# ---------------------------------------------------------------------------------------------------------------------
# Configs


TEXTS = {
    "{": "is not valid JSON", "[]": "config.json", "\udcff": "not valid UTF-8",
    '{"n_layers": 2}': "json: no key 'dim'", '{"layers": 2}': "config.json: unknown key 'layers'",
    '{"model_type": "llama"}': "a Hugging Face folder: run convert_hf_checkpoint.py",
}  # fmt: skip
VALUES = [
    ({"architecture": {"heads": {"nope_layers": [99, -1]}}}, "nope_layers is (99, -1) but must be tuple[int, ...]"),
    ({"architecture": {"heads": {"nope_layers": [3]}}}, "nope_layers takes layers from 0 to 2, not (3,)"),
    ({"eos_ids": ["2"]}, "eos_ids is ('2',) but must be tuple[int, ...]"),
    ({"architecture": {"heads": {"window_layers": [True], "sliding_window": 4}}}, "window_layers is (True,)"),
    ({"bos_id": -1}, "bos_id is -1 but must be a whole number or null"),
    ({"bos_id": {"{dim}": None}}, "bos_id is {'{dim}': null} but must be a whole number or null"),
    ({"wiring": 3}, "wiring is 3 but must be str"),
    ({"dim": 10**30}, "dim is 1000000000000000000000000000000 but must be a whole number above 0"),
    ({"head_dim": 7}, "head_dim 7 is odd"),
    ({"norm_eps": float("nan")}, "norm_eps is nan but must be a number above 0"),
    ({"rope_scaling": {"factor": 2.0, "mscale": 1.0}}, "rope_scaling has the keys ['factor', 'mscale'], not "),
    ({"rope_scaling": {"factor": "2"}}, "rope_scaling is {'factor': '2'}, but its values are numbers above 0"),
    ({"desync_period": 2}, "desync_period"),
]


def test_our_config_refuses(tmp_path):
    for text, message in TEXTS.items():
        (tmp_path / "config.json").write_text(text, errors="surrogateescape")
        refused(re.escape(message), checkpoint.read_config, tmp_path)
    for changes, message in VALUES:
        values = json.loads(json.dumps(writing.config_values(BASE) | changes))
        refused(re.escape(message), checkpoint.make_config, values)


def test_a_byte_order_mark_is_no_text_and_prompts_are_split_at_newlines_only(tmp_path):
    (tmp_path / "config.json").write_text((DEMO / "config.json").read_text(), encoding="utf-8-sig")
    assert checkpoint.read_config(tmp_path) == checkpoint.read_config(DEMO)
    (tmp_path / "prompts").write_bytes("\ufeffone\u2028line\x0c\r\n\nanother\n".encode())
    args = SimpleNamespace(prompt=[f"@{tmp_path}/prompts"], prompt_length=None, batch=None, chat=None)
    tokenizer = SimpleNamespace(encode=lambda text: [len(text)])
    assert read_prompts(args, BASE, tokenizer) == [[len("one\u2028line\x0c")], [len("another")]]


def test_a_digest_sees_headers_small_files_and_changes_of_a_thousandth(tmp_path):
    weights = tmp_path / "model.safetensors"
    size = 30 * 2**20
    save_file({"a": torch.zeros(size, dtype=torch.uint8)}, weights, {"long": "a" * 2**21})
    before = digest(tmp_path)
    data = weights.read_bytes()
    changed = b"\1" * (size // 1000)
    unsampled = 50 * (len(data) // 1024) + 5000  # after 1 MB
    for at, new in (20, b"b"), (unsampled, b"b"), (size // 3, changed), (len(data) - len(changed), changed):
        weights.write_bytes(data[:at] + new + data[at + len(new) :])
        assert digest(tmp_path) != before
    weights.write_bytes(data)
    assert digest(tmp_path) == before
    for text in "a" * 2**23, "a" * (2**22 + 5000) + "b" + "a" * (2**22 - 5001):  # of 8192 bytes the first 4096 would be
        (tmp_path / "tokenizer.json").write_text(text)
        assert digest(tmp_path) != before
        before = digest(tmp_path)


def test_wrong_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    refused(r"it has no config\.json", complete.load, tmp_path)
    refused("is a file: give its folder", complete.load, DEMO / "config.json")
    names = "nowhere", f"{tmp_path}/nowhere", "demo/nowhere", "no.gguf", "no/no.gguf"
    for nowhere in names:  # the hub is not asked for what is no id of its
        refused("no such file or folder, and no hub id", convert_hf_checkpoint.main, [nowhere, "--out", "x"])
    (tmp_path / "m.gguf").touch()
    refused(r"m\.gguf is empty: copy it again", convert_hf_checkpoint.main, [f"{tmp_path}/m.gguf", "--out", "x"])
    refused("no such file", convert_hf_checkpoint.main, ["demo", "--out", "x", "--tokenizer", "nowhere"])


# ---------------------------------------------------------------------------------------------------------------------
# Weights


def test_an_index_says_which_tensors_a_folder_has(tmp_path):
    """Not a copy that another file replaces, nor a tensor without an entry."""
    for right, other in ("a", "b"), ("b", "a"):
        tensors = {right: torch.ones(2), other: torch.zeros(2), f"only in {right}": torch.zeros(2)}
        save_file(tensors, tmp_path / f"{right}.safetensors")
    index = {"weight_map": {"b": "b.safetensors", "a": "a.safetensors"}}
    write_json(tmp_path / "model.safetensors.index.json", index)
    weights = checkpoint.Weights(tmp_path)
    assert sorted(weights.names()) == ["a", "b"] and weights.read("a").all() and weights.read("b").all()
    index["weight_map"]["c"] = "a.safetensors"
    write_json(tmp_path / "model.safetensors.index.json", index)
    refused(r"a\.safetensors has no tensor 'c', which the index names", checkpoint.Weights, tmp_path)


def test_an_index_names_files_of_its_own_folder_alone(tmp_path):
    (tmp_path / "secret").write_bytes(b"x")
    (inner := tmp_path / "inner").mkdir()
    for file in "../secret", "/etc/passwd", "..":
        write_json(inner / "model.safetensors.index.json", {"weight_map": {"a": file}})
        refused(r"index\.json", checkpoint.Weights, inner)


def test_truncated_weights(tmp_path):
    save_file(random_model(BASE).state_dict(), path := tmp_path / "model.safetensors")
    os.truncate(path, path.stat().st_size - 1000)
    refused(r"model\.safetensors is missing, truncated", checkpoint.Weights, tmp_path)


def test_weights_that_are_cut_after_their_header_was_read(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(9000)}, path)
    weights = checkpoint.Weights(tmp_path)
    os.truncate(path, 5000)
    refused(r"model\.safetensors has changed since its header was read: ", weights.read, "a")


def test_a_mistyped_local_folder_is_not_taken_for_a_hub_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local").mkdir()
    refused("some-one/model: no such folder; if it is a hub model", checkpoint.read_config, "some-one/model")
    refused("^local/model: no such folder$", checkpoint.read_config, "local/model")


def test_weights_that_are_no_floats(tmp_path):
    state = {name: torch.zeros_like(w, dtype=torch.int32) for name, w in random_model(BASE).state_dict().items()}
    writing.write_config(tmp_path, BASE)
    save_file(state, tmp_path / "model.safetensors")
    refused(r"tensor norm\.weight holds int32: such quantized weights are not read", complete.load, tmp_path)
    refused("holds int32, but the config says bfloat16", complete.load, tmp_path, dtype="bfloat16")


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers


def test_settings_that_are_refused(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes((DEMO / "tokenizer.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"x": {"content": "a"}}}')
    refused(r"tokenizer\.model cannot be read, or a file of settings beside it", load_tokenizer, tmp_path)
