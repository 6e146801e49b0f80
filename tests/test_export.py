"""Exported folders in transformers: what they compute, how they load, what they become, and other people's trainers."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch
import transformers
from helpers import ANY_TP, BASE, random_model, shared_data, wired_id
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import checkpoint
import convert_hf_checkpoint
import eval as evaluation
import launch
import tp
from model import InputError

LLAMA3_ROPE = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16.0,
}  # fmt: skip
SHAPES = {
    "llama": {},
    "llama3": {"rope_theta": 5000.0, "rope_scaling": LLAMA3_ROPE, "head_dim": 16, "eos_ids": (2, 5)},
    "qwen2": {"qkv_bias": True, "tie_embeddings": True, "n_heads": 5, "n_kv_heads": 5, "norm_eps": 1e-3},
    "qwen3": {"qk_norm": True, "head_dim": 16, "bos_id": None, "eos_ids": ()},
    "all": {"qkv_bias": True, "qk_norm": True, "tie_embeddings": True, "rope_scaling": LLAMA3_ROPE},
}
OURS = [changes for changes in ANY_TP if changes["wiring"] != "standard"]
LADDER = {"wiring": "ladder"}


@pytest.fixture(autouse=True, scope="module")
def modules_cache(tmp_path_factory):
    """Where transformers copies the code that comes with a folder, and imports it from."""
    with pytest.MonkeyPatch.context() as m:
        cache = str(tmp_path_factory.mktemp("modules"))
        m.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", cache)
        m.setenv("HF_MODULES_CACHE", cache)
        yield


def write(folder, **changes):
    """A random checkpoint of ours at folder / "ours" and what --to-hf makes of it; returns (our model, the folder)."""
    config = dataclasses.replace(BASE, **changes)
    net = random_model(config)
    with checkpoint.new_folder(folder / "ours") as out:
        checkpoint.write_model(out, config, net.state_dict(), torch.float32)
    convert_hf_checkpoint.main([str(folder / "ours"), "--to-hf", str(folder / "hf")])
    return net, folder / "hf"


def load(folder, auto=AutoModelForCausalLM, **kwargs):
    return auto.from_pretrained(folder, trust_remote_code=True, **kwargs)


def check_back(folder, back):
    """That a Hugging Face folder becomes the checkpoint folder / "ours" again, bit by bit."""
    convert_hf_checkpoint.main([str(folder), "--out", str(back)])
    ours = back.parent / "ours"
    assert checkpoint.read_config(back) == checkpoint.read_config(ours)
    before, after = (load_file(f / "model.safetensors") for f in (ours, back))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


PROMPTS = [[5, 90, 7, 33, 120, 64, 9], [44, 3, 71], [12]]


def padded(prompts):
    """(tokens, attention mask), both (B, S), padded on the left."""
    S = max(map(len, prompts))
    return torch.tensor([[0] * (S - len(p)) + p for p in prompts]), torch.tensor(
        [[0] * (S - len(p)) + [1] * len(p) for p in prompts]
    )


@torch.no_grad()
def greedy(net, ids, steps):
    for _ in range(steps):
        ids = [*ids, int(net(torch.tensor([ids]))[0, -1].argmax())]
    return ids[-steps:]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("changes", OURS, ids=wired_id)
def test_an_exported_folder_computes_our_logits_and_comes_back(changes, shape, tmp_path):
    ours, folder = write(tmp_path, **SHAPES[shape], **changes)
    theirs = load(folder)
    assert theirs.dtype == torch.float32 and type(theirs).__name__ == "LadderForCausalLM"
    tokens, mask = padded(PROMPTS)
    with torch.no_grad():
        logits = theirs(tokens, attention_mask=mask).logits
        for row, prompt in zip(logits, PROMPTS, strict=True):
            expected = ours(torch.tensor([prompt]))[0]
            assert expected.std() > 0.1
            assert (row[-len(prompt) :] - expected).abs().max() < 1e-4
    theirs.generation_config.eos_token_id = None
    out = theirs.generate(tokens, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert out[:, tokens.shape[1] :].tolist() == [greedy(ours, prompt, 6) for prompt in PROMPTS]
    check_back(folder, tmp_path / "back")
