"""Our checkpoint as a Hugging Face folder."""

import json

import numpy as np

import checkpoint
from checkpoint import dtype_name
from formats.huggingface import family_of, hf_names, rope_kind, ungroup
from model import WIRINGS, InputError, attention_then_mlp, residual_stream
from tokenizer import SentencePieceTokenizer


def config_to_hf(config, dtype):
    """A Hugging Face config.json, as a dict; a ladder model's has ladder_layers in it."""
    wiring = WIRINGS[config.wiring]
    if (wiring.split, wiring.stream) != (attention_then_mlp, residual_stream):
        raise InputError(
            f"a model in wiring {config.wiring} has no Hugging Face form: give --wiring standard or --ladder"
        )
    family = family_of(config)
    if family is None:
        raise InputError("no Hugging Face family has these biases, norms and layers without rotary embeddings together")
    hf = {
        **family, "hidden_act": "silu",
        "num_hidden_layers": config.n_layers, "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads, "head_dim": config.head_dim, "hidden_size": config.dim,
        "intermediate_size": config.intermediate_size, "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len, "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta, "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id, "eos_token_id": list(config.eos_ids) or None,
        "torch_dtype": dtype_name(dtype),
    }  # fmt: skip
    if config.rope_scaling:
        hf["rope_scaling"] = {"rope_type": rope_kind(config.rope_scaling), **config.rope_scaling}
    if config.stale_layers:
        hf["ladder_layers"] = list(config.stale_layers)
    return hf


def convert_to_hf(source, config, folder, dtype, shard_bytes):
    """Write a Hugging Face folder from our checkpoint, one shard in memory at a time."""
    ours = {}  # Hugging Face's name: (our name, which of its parts)
    for name in checkpoint.shapes(config):
        ours.update({n: (name, i) for i, n in enumerate(hf_names(name))})

    def read(hf_name):
        name, part = ours[hf_name]
        tensor = source.read(name).to(dtype)
        return ungroup(tensor, config)[part] if ".wqkv." in name else tensor

    def size(name, part):
        numel = int(np.prod(source.shape(name)))
        if ".wqkv." in name:
            rows = config.head_dim * (config.n_heads if part == 0 else config.n_kv_heads)
            numel = numel // source.shape(name)[0] * rows
        return numel * dtype.itemsize

    checkpoint.write_weights(folder, {n: size(*o) for n, o in ours.items()}, read, shard_bytes)
    (folder / "config.json").write_text(json.dumps(config_to_hf(config, dtype), indent=2) + "\n")


def name_tokenizer(folder, tokenizer):
    """Say that a SentencePiece model without further settings is a Llama one: transformers asks."""
    if (folder / "tokenizer_config.json").exists():
        return
    if isinstance(tokenizer, SentencePieceTokenizer) and len(tokenizer.special) == 2:
        bos, eos = tokenizer.special
        settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": bos, "eos_token": eos, "add_bos_token": True}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
