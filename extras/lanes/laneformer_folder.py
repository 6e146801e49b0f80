"""Reads the Hugging Face folders of Kog's Laneformers (kogai/laneformer-2b-it) for the converter.

Each linear is stored lane by lane, (L, out, in) for L lanes: wq, wk, wv, w1, w3 and a head in parts of the vocabulary
by rows, wo and w2 by columns.
"""

import re

import torch

from formats.huggingface import unpaired
from runtime.errors import InputError

KEYS = {  # with the defaults of their own code
    "num_key_value_heads": None, "head_dim": None, "norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 0, "num_lanes": 1, "broadcast_delay": 1,
    "use_comm": True, "use_attention_comm": None, "use_mlp_comm": None, "use_early_comm": True,
    "lm_head_type": "replicate", "pre_norm_lane_agg": False, "replicated_rmsn_scale": True, "sliding_window": None,
    "sliding_window_n_layers": 0, "swa_layers": None, "unclamped_layers": None, "attn_mask_type": "causal",
}  # fmt: skip
KNOWN = {  # keys that mean the same in a Llama's config, or do not change what a model computes
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size",
    "max_position_embeddings", "hidden_act", "attention_bias", "mlp_bias", "rope_parameters", "pad_token_id",
    "multiple_of", "depth_init", "use_flex_attn", "use_cache", "attention_dropout", "initializer_range",
    "architectures", "auto_map", "torch_dtype", "dtype", "transformers_version", "_name_or_path",
}  # fmt: skip
LLAMA = {
    "model.tok_embeddings": "model.embed_tokens",
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj", "attention_norm": "input_layernorm",
    "feed_forward.w1": "mlp.gate_proj", "feed_forward.w3": "mlp.up_proj", "feed_forward.w2": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}  # fmt: skip


def laneformer_as_ministral(values):
    """Return a Laneformer's config.json as a Ministral's, with one more key, "laneformer": {field of Config: value}.

    Raises InputError for unknown keys, because each may change what the model computes.
    """
    hf = {**KEYS, **values}
    for key in sorted(hf.keys() - KEYS.keys() - KNOWN):
        raise InputError(f"{key} {hf[key]!r} is not supported: it is unknown what a Laneformer computes with it")
    lanes, n_layers, first = hf["num_lanes"], hf["num_hidden_layers"], hf["sliding_window_n_layers"]
    scaling = hf["rope_scaling"] or hf.get("rope_parameters")  # before transformers 5, and since
    heads = ("replicate",) if hf["pre_norm_lane_agg"] else ("replicate", "vocab_parallel")
    for key, known in (("lm_head_type", heads), ("attn_mask_type", ("causal",))):
        if hf[key] not in known:
            raise InputError(f"{key} {hf[key]!r} is not supported here, only {' and '.join(known)}")
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if hf[key] is not None and hf[key] % lanes:
            raise InputError(f"{key} {hf[key]} is no multiple of num_lanes {lanes}")
    windowed = hf["swa_layers"]
    if windowed is None:
        windowed = [i for i in range(n_layers) if i < first or i >= n_layers + first]
    windowed = {*windowed} - {*(hf["unclamped_layers"] or ())}
    if isinstance(scaling, dict) and not {"rope_type", "type"} & scaling.keys():  # TorchTitan's keys
        scaling = {"rope_type": "llama3", "factor": scaling.get("scaling_factor"), **scaling}
    comm = {name: hf[f"use_{name}"] for name in ("attention_comm", "mlp_comm")}
    settings = {
        "early_comm": hf["use_early_comm"],
        **{name: hf["use_comm"] if on is None else on for name, on in comm.items()},
        "lane_head": "sum" if hf["pre_norm_lane_agg"] else hf["lm_head_type"],
        "lane_norms": not hf["replicated_rmsn_scale"],
    }
    types = ["sliding_attention" if i in windowed else "full_attention" for i in range(n_layers)]
    return {
        **hf, "rms_norm_eps": hf["norm_eps"], "rope_scaling": scaling, "layer_types": types,
        "laneformer": {"wiring": f"laneformer-{2 * hf['broadcast_delay']}/{lanes}", "laneformer": settings},
    }  # fmt: skip


class LaneformerWeights:
    """The tensors of such a folder under Llama's names, joined over the lanes, for rotations of pairs (i, i + H/2)."""

    def __init__(self, source, head_dim):
        self.source, self.head_dim, self.theirs = source, head_dim, {}
        for name in source.names():
            match = re.fullmatch(r"(model\.layers\.\d+\.)?(.*)\.(?:weight|scale)", name)
            layer, module = match.groups("") if match else ("", name)
            if module != "model.freqs_cis":  # the rotations, which are computed here
                self.theirs[f"{layer}{LLAMA.get(module, module)}.weight"] = name

    def names(self):
        return list(self.theirs)

    def read(self, name):
        tensor = self.source.read(self.theirs[name])
        if name.endswith("norm.weight"):
            return tensor.flatten()
        if tensor.dim() == 3:
            tensor = torch.cat([*tensor], dim=1 if "o_proj" in name or "down_proj" in name else 0)
        return unpaired(tensor, self.head_dim) if re.search("[qk]_proj", name) else tensor
