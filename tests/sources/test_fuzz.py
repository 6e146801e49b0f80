"""Good files with changes drawn by chance: each works, or ends in an InputError of one line.

A case is a good file with changes drawn by its number, a fixed seed. Each target takes SECONDS; the slow tests take 20.
"""

import base64
import json

import pytest
import torch
from cases import slow_case
from configs import change
from file_edits import SECONDS, check_changes
from helpers import ROOT, write_model
from hf_folders import SMALL

import tp
from ladder.checkpoints import checkpoint
from ladder.sources.huggingface import config_from_hf
from ladder.text import tiktoken_ranks
from ladder.text.tokenizer import load_tokenizer
from model import Config, Transformer

DEMO = ROOT / "demo"
TEXT = "Once upon a time\n\tthere were 12 (twelve) little dogs. Zwölf? 十二! \x00 \ufffd <|eot|>"
TINY = Config(2, 4, 2, 8, 32, 48, 60, 64, bos_id=1, eos_ids=(2,), wiring="spd:1/2")
TINY = change(TINY, heads={"nope_layers": (0,), "qk_norm": True})


def use_tokenizer(folder):
    tokenizer = load_tokenizer(folder)
    tokenizer.decode(tokenizer.encode(TEXT) + tokenizer.encode_markup(TEXT))
    if tokenizer.template is not None:
        tokenizer.chat([{"role": "user", "content": TEXT}])


def encoded(value):
    return json.dumps(value).encode()


def targets(folder):
    """Return {name: (a reader of a folder, {file: bytes})}; the first file is the one to change."""
    torch.manual_seed(0)
    state = {name: torch.rand(weight.shape) for name, weight in Transformer(TINY).state_dict().items()}
    write_model(folder, TINY, state)
    config, ours = ((folder / name).read_bytes() for name in ("config.json", "model.safetensors"))
    theirs = {**SMALL, "model_type": "llama", "rms_norm_eps": 1e-5, "hidden_act": "silu", "ladder_layers": [0]}
    theirs["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True, "legacy": False}
    settings["added_tokens_decoder"] = {"1": {"content": "<s>"}, "1000": {"content": "<|eot|>", "special": True}}
    settings["chat_template"] = "{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}{% endfor %}"
    characters = {c: i for i, c in enumerate(["<unk>", *map(chr, range(32, 127)), "th"])}
    bpe = {"type": "BPE", "vocab": characters, "merges": [["t", "h"]], "unk_token": "<unk>"}
    tiktoken = [base64.b64encode(bytes([i])) + f" {i}\n".encode() for i in range(256)]
    index = {"weight_map": dict.fromkeys(state, "part.safetensors")}
    pieces = {"tokenizer.model": (DEMO / "tokenizer.model").read_bytes()}

    def load(folder):
        tp.load_shard(TINY, checkpoint.Weights(folder), torch.float32, "cpu")

    return {
        "our config": (checkpoint.read_config, {"config.json": config}),
        "Hugging Face config": (lambda at: config_from_hf(at / "config.json"), {"config.json": encoded(theirs)}),
        "safetensors": (load, {"model.safetensors": ours}),
        "index": (load, {"model.safetensors.index.json": encoded(index), "part.safetensors": ours}),
        "SentencePiece": (use_tokenizer, pieces),
        "tokenizer.json": (use_tokenizer, {"tokenizer.json": encoded({"version": "1.0", "model": bpe})}),
        "tiktoken": (use_tokenizer, {"tokenizer.model": b"".join(tiktoken)}),
        "settings and template": (use_tokenizer, {"tokenizer_config.json": encoded(settings), **pieces}),
    }


@pytest.mark.parametrize("seconds", [SECONDS, slow_case(20)])
def test_changed_files_work_or_are_refused_in_one_line(seconds, tmp_path, monkeypatch):
    monkeypatch.setattr(tiktoken_ranks, "LLAMA3_RANKS", 256)
    for name, (read, files) in targets(tmp_path).items():
        (tmp_path / name).mkdir()
        check_changes(read, files, tmp_path / name, seconds)
