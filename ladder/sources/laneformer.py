"""Reads Hugging Face folders of Kog's Laneformer: its config.json as a Ministral's, its tensors under Llama's names."""

import re

import torch

from ladder.errors import InputError
from ladder.layers.attention_inputs import unpaired
from ladder.sources.config_values import check_values
from ladder.sources.matrices import Renamed

LANEFORMER_KEYS = {  # keys of config.json that only a Laneformer has, with the defaults of its code
    "norm_eps": 1e-5, "num_lanes": 1, "broadcast_delay": 1, "use_comm": True, "use_attention_comm": None,
    "use_mlp_comm": None, "use_early_comm": True, "lm_head_type": "replicate", "pre_norm_lane_agg": False,
    "replicated_rmsn_scale": True, "sliding_window_n_layers": 0, "swa_layers": None, "unclamped_layers": None,
    "attn_mask_type": "causal", "multiple_of": None, "depth_init": None, "use_flex_attn": None,
}  # fmt: skip
LLAMA_NAMES = {  # {the name of a module in its files: Llama's}
    "model.tok_embeddings": "model.embed_tokens",
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj", "attention_norm": "input_layernorm",
    "feed_forward.w1": "mlp.gate_proj", "feed_forward.w3": "mlp.up_proj", "feed_forward.w2": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}  # fmt: skip


def as_ministral(values):
    """Return a Laneformer's config.json as a Ministral's, with one more key, "laneformer": {field of Config: value}."""
    check_values(values, LANEFORMER_KEYS)
    own = LANEFORMER_KEYS | values
    hf = {k: v for k, v in values.items() if k not in LANEFORMER_KEYS}
    own = {k: LANEFORMER_KEYS.get(k) if v is None else v for k, v in own.items()}
    lanes = own["num_lanes"]
    layers = range(own.get("num_hidden_layers") or 0)
    first = own["sliding_window_n_layers"]
    scaling = hf.get("rope_scaling") or hf.get("rope_parameters")  # before transformers 5, and since
    heads = ("replicate",) if own["pre_norm_lane_agg"] else ("replicate", "vocab_parallel")
    for key, known in (("lm_head_type", heads), ("attn_mask_type", ("causal",))):
        if own[key] not in known:
            raise InputError(f"{key} {own[key]!r} is not supported here, only {' and '.join(known)}")
    windowed = (layers[:first] if first >= 0 else layers[first:]) if own["swa_layers"] is None else own["swa_layers"]
    windowed = {*windowed} - {*(own["unclamped_layers"] or ())}
    if isinstance(scaling, dict) and not {"rope_type", "type"} & scaling.keys():  # TorchTitan's keys
        factor = scaling.get("scaling_factor")
        scaling = {"rope_type": "llama3", "factor": factor} | {k: scaling[k] for k in scaling if k != "scaling_factor"}
    comm = {f"{kind}_comm": own[f"use_{kind}_comm"] for kind in ("early", "attention", "mlp")}
    settings = {key: own["use_comm"] if value is None else value for key, value in comm.items()}
    settings |= {"lane_head": "sum" if own["pre_norm_lane_agg"] else own["lm_head_type"]}
    settings |= {"lane_norms": not own["replicated_rmsn_scale"]}
    return {
        "bos_token_id": None, "eos_token_id": 0, "sliding_window": None, **hf,
        "rms_norm_eps": own["norm_eps"], "rope_scaling": scaling,
        "layer_types": ["sliding_attention" if i in windowed else "full_attention" for i in layers],
        "laneformer": {"wiring": f"laneformer-{2 * own['broadcast_delay']}/{lanes}", "laneformer": settings},
    }  # fmt: skip


class LaneformerWeights(Renamed):
    """The tensors of such a folder under Llama's names, joined over the lanes, for rotations of pairs (i, i + H/2).

    The folder stores each linear lane by lane, (L, out, in) for L lanes: o_proj and down_proj are cut by columns, the
    others by rows.
    """

    def __init__(self, source, head_dim):
        self.head_dim = head_dim
        places = {}
        for name in source.names():
            match = re.fullmatch(r"(model\.layers\.\d+\.)?(.*)\.(?:weight|scale)", name)
            layer, module = match.groups("") if match else ("", name)
            if module != "model.freqs_cis":  # rotary embeddings, which are computed instead
                places[f"{layer}{LLAMA_NAMES.get(module, module)}.weight"] = [name]
        super().__init__(source, places)

    def join(self, name, tensor):
        if name.endswith("norm.weight"):
            return tensor.flatten()
        if tensor.dim() == 3:
            tensor = torch.cat([*tensor], dim=1 if "o_proj" in name or "down_proj" in name else 0)
        return unpaired(tensor, self.head_dim) if re.search("[qk]_proj", name) else tensor
