"""ladder/sources and ladder/text: rank files and the files of llama2.c, also those of strangers."""

import numpy as np
import pytest
import torch
from cases import refused, slow_case
from file_edits import SECONDS, check_changes
from helpers import greedy_tokens, shared_data
from hf_folders import check_parity, convert, hf_model

from ladder.sources.llama2c import Llama2cWeights
from ladder.text.tokenizer import load_tokenizer

LLAMA2C = {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}


def write_llama2c(path, tied):
    """Write a llama2.c legacy file, whose rotary embeddings turn neighbours; returns transformers' model of it."""
    theirs = hf_model(("LlamaConfig", {**LLAMA2C, "tie_word_embeddings": tied}))
    state = theirs.state_dict()
    c = theirs.config

    def rows(tensor):  # (i, i + H/2) as neighbours
        return tensor.unflatten(0, (-1, 2, c.head_dim // 2)).transpose(1, 2).flatten(0, 2)

    def stacked(name):
        layers = [state[f"model.layers.{i}.{name}.weight"] for i in range(c.num_hidden_layers)]
        return torch.stack([rows(w) if name.endswith(("q_proj", "k_proj")) else w for w in layers])

    parts = [state["model.embed_tokens.weight"], stacked("input_layernorm")]
    parts += [stacked(f"self_attn.{letter}_proj") for letter in "qkvo"] + [stacked("post_attention_layernorm")]
    parts += [stacked(f"mlp.{name}_proj") for name in ("gate", "down", "up")] + [state["model.norm.weight"]]
    parts += [torch.zeros(2, c.max_position_embeddings, c.head_dim // 2)] + [state["lm_head.weight"]] * (not tied)
    header = [c.hidden_size, c.intermediate_size, c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads]
    header += [c.vocab_size if tied else -c.vocab_size, c.max_position_embeddings]
    path.write_bytes(b"".join([np.array(header, np.int32).tobytes(), *(t.numpy().tobytes() for t in parts)]))
    return theirs


@pytest.mark.parametrize("tied", [True, False])
def test_llama2c_files(tied, tmp_path):
    theirs = write_llama2c(tmp_path / "m.bin", tied)
    check_parity(convert(tmp_path / "m.bin", tmp_path / "ours"), theirs)


def test_stories260k_greedy_ids(tmp_path):
    net = convert(shared_data("stories260K.bin"), tmp_path / "ours", "--tokenizer", shared_data("tok512.model"))
    assert greedy_tokens(net, [1], 11) == [403, 407, 261, 378, 432, 383, 286, 261, 376, 298, 315]


def test_llama3s_rank_file():
    ours = load_tokenizer(shared_data("llama3-tokenizer.model"))
    assert ours.encode("Hello world") == [128000, 9906, 1917]
    assert ours.vocab_size == 128256
    special = {"<|begin_of_text|>": 128000, "<|reserved_special_token_0|>": 128002, "<|eot_id|>": 128009}
    special |= {"<|python_tag|>": 128010, "<|reserved_special_token_247|>": 128255}
    assert {name: ours.special[name] for name in special} == special
    assert ours.encode_markup("<|start_header_id|>user<|end_header_id|>\n\nHello") == [128006, 882, 128007, 271, 9906]


def test_truncated_weights(tmp_path):
    header = b"".join(i.to_bytes(4, "little") for i in (16, 24, 2, 2, 1, 20, 8))
    for data, message in (header[:20], "its header reads"), (header + bytes(99), "its header asks for"):
        (tmp_path / "m.bin").write_bytes(data)
        refused(message, Llama2cWeights, tmp_path / "m.bin")


@pytest.mark.parametrize("seconds", [SECONDS, slow_case(20)])
def test_changed_llama2c_files_work_or_are_refused_in_one_line(seconds, tmp_path):
    write_llama2c(tmp_path / "m.bin", tied=True)
    files = {"m.bin": (tmp_path / "m.bin").read_bytes()}
    check_changes(lambda folder: Llama2cWeights(folder / "m.bin"), files, tmp_path, seconds)
