"""Our checkpoint as a Hugging Face folder."""

import json
import math
import shutil
from pathlib import Path

from formats import checkpoint
from formats.checkpoint import dtype_name
from formats.huggingface import ROPE_KINDS, family_of, hf_names, no_rope_layers, ungroup
from formats.tokenizer import SentencePieceTokenizer
from runtime.errors import InputError

CODE = Path(__file__).with_name("exported")  # the files that such a folder brings along, and what they compute:
KNOWN = [
    "standard", "ladder", "parallel", "parallel-ladder", "pair", "pair-ladder", "spd", "spd-ladder", "delayed", "desync"
]  # fmt: skip
OWN_FAMILY = {
    "model_type": "ladder_residual", "architectures": ["LadderForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_ladder.LadderConfig",
        "AutoModel": "modeling_ladder.LadderModel",
        "AutoModelForCausalLM": "modeling_ladder.LadderForCausalLM",
    },
}  # fmt: skip


def family_to_hf(config):
    """Return the keys of a config.json that name transformers' model, one of its own or the one in exported/.

    A wiring other than standard gets a model_type that transformers does not know: without that code it must not load.
    """
    name, layers, *_ = config.parsed
    if name not in KNOWN:
        raise InputError(f"wiring {config.wiring} has no Hugging Face form: only {', '.join(KNOWN)} have one")
    family = family_of(config)
    if family and name == "standard":
        return family
    if config.window_layers:
        forms = "a standard model with the biases and norms of Mistral, Qwen2, Qwen3 or SmolLM3"
        raise InputError(f"sliding_window {config.sliding_window} has no Hugging Face form here: only {forms} has one")
    stale, alike, parallel = config.named_wiring.stale, len(set(config.wirings)) == 1, name.startswith("parallel")
    keys = {"wiring": config.wiring}
    if stale <= 1 and (name in ("standard", "ladder") or parallel and alike):  # the keys of published configs
        keys = {"parallel_blocks": parallel, "ladder_layers": stale and (config.n_layers if alike else layers)}
    return {
        **OWN_FAMILY, **keys,
        "attention_bias": config.qkv_bias, "attention_out_bias": config.wo_bias, "mlp_bias": config.mlp_bias,
        "qk_norm": config.qk_norm, "no_rope_layers": no_rope_layers(config), "attention_dropout": 0.0,
        "pad_token_id": None,
    }  # fmt: skip


def config_to_hf(config, dtype):
    """Return a Hugging Face config.json as a dict."""
    hf = {
        **family_to_hf(config), "hidden_act": "silu",
        "num_hidden_layers": config.n_layers, "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads, "head_dim": config.head_dim, "hidden_size": config.dim,
        "intermediate_size": config.intermediate_size, "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len, "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta, "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id, "eos_token_id": list(config.eos_ids) or None,
        "torch_dtype": dtype_name(dtype),
    }  # fmt: skip
    if config.rope_scaling:
        [kind] = [kind for kind, keys in ROPE_KINDS.items() if set(keys) == config.rope_scaling.keys()]
        hf["rope_scaling"] = {"rope_type": kind, **config.rope_scaling}
    return hf


def convert_to_hf(source, config, folder, dtype, shard_bytes):
    """Write a Hugging Face folder from our checkpoint, one shard in memory at a time."""
    hf = config_to_hf(config, dtype)
    ours, sizes = {}, {}  # by Hugging Face's name: (our name, which part of ours), bytes
    for name, shape in checkpoint.shapes(config).items():
        heads = [config.n_heads, config.n_kv_heads, config.n_kv_heads] if ".wqkv." in name else [1]
        for i, hf_name in enumerate(hf_names(name)):
            ours[hf_name] = name, i
            sizes[hf_name] = math.prod(shape) * heads[i] // sum(heads) * dtype.itemsize

    def read(hf_name):
        name, part = ours[hf_name]
        tensor = source.read(name).to(dtype)
        return ungroup(tensor, config)[part] if ".wqkv." in name else tensor

    checkpoint.write_weights(folder, sizes, read, shard_bytes)
    (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
    if "auto_map" in hf:
        for path in CODE.glob("*.py"):
            shutil.copyfile(path, folder / path.name)


def name_tokenizer(folder, tokenizer):
    """Say that a SentencePiece model without further settings is a Llama one: transformers asks."""
    path = folder / "tokenizer_config.json"
    if isinstance(tokenizer, SentencePieceTokenizer) and len(tokenizer.special) == 2 and not path.exists():
        bos, eos = tokenizer.special
        settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": bos, "eos_token": eos, "add_bos_token": True}
        path.write_text(json.dumps(settings, indent=2) + "\n")
