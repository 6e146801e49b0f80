"""Experts in Hugging Face folders: their keys in config.json, and tensors that families name and store in many ways."""

import re

import torch

from ladder.errors import InputError

QWEN_NAMES = {  # {a part of a tensor's name in Mixtral's and GraniteMoE's files: the same part in Qwen's}
    "block_sparse_moe.": "mlp.", "router.layer.": "gate.", "input_linear.": "experts.gate_up_proj.",
    "output_linear.": "experts.down_proj.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj.",
}  # fmt: skip
DEEPSEEK_NAMES = {"mlp.shared_experts.": "mlp.shared_expert.", "mlp.gate.e_score_correction_bias": "mlp.expert_bias"}


class ExpertWeights:
    """The tensors of a source with names() and read(name), under Qwen's names; the experts of a layer are stacked.

    Then mlp.experts.gate_proj and up_proj are (E, I, D), or a fused gate_up_proj (E, 2 I, D); down_proj is (E, D, I).
    Raises InputError if an expert is missing.
    """

    def __init__(self, source):
        self.source, self.places = source, {}  # name: [(expert or 0, the source's name)]
        for name in source.names():
            new = re.sub(r"experts\.\w+_proj$", r"\g<0>.weight", name)
            for theirs, qwen in QWEN_NAMES.items():
                new = new.replace(theirs, qwen) if "block_sparse_moe" in name else new
            for theirs, qwen in DEEPSEEK_NAMES.items():
                new = new.replace(theirs, qwen)
            one = re.fullmatch(r"(.*\.experts)\.(\d+)(\.\w+\.\w+)", new)
            place, expert = (one[1] + one[3], int(one[2])) if one else (new, 0)
            self.places.setdefault(place, []).append((expert, name))
        for place, parts in self.places.items():
            parts.sort()
            if (experts := [expert for expert, _ in parts]) != [*range(len(parts))]:
                raise InputError(f"the source's {place} has the experts {experts}")

    def names(self):
        return list(self.places)

    def read(self, name):
        names = [source_name for _, source_name in self.places[name]]
        tensors = [self.source.read(source_name) for source_name in names]
        return torch.stack(tensors) if re.search(r"experts\.\d", names[0]) else tensors[0]


class GptOssWeights:
    """gpt-oss's tensors under Qwen's names, in Qwen's form, like their source with names() and read(name).

    Rows of the gate and of up, which alternate in one matrix and one bias, are taken apart. Matrices that are floats in
    the source are transposed there; those that were in MXFP4 are not, and end in ".weight".
    """

    def __init__(self, source):
        self.source, self.places = source, {}  # name: (the source's name, which rows)
        for name in source.names():
            new = re.sub(r"(experts\.\w+_proj)_bias$", r"\1.bias", name).replace(".mlp.router.", ".mlp.gate.")
            new = re.sub(r"experts\.\w+_proj$", r"\g<0>.weight", new)
            parts = {"gate_proj": 0, "up_proj": 1} if ".gate_up_proj." in new else {"": None}
            for part, first in parts.items():
                rows = slice(None) if first is None else slice(first, None, 2)
                self.places[new.replace("gate_up_proj", part)] = name, rows

    def names(self):
        return list(self.places)

    def read(self, name):
        source_name, rows = self.places[name]
        tensor = self.source.read(source_name)
        tensor = tensor.mT if source_name.endswith("_proj") else tensor
        return tensor[:, rows] if ".experts." in name else tensor


def values_from_hf(hf, n_experts):
    """Return the fields of Config about n_experts experts, from the result of huggingface.read_hf."""
    if "n_routed_experts" in hf:
        return deepseek_values_from_hf(hf)
    layers, step, dense = range(hf["num_hidden_layers"]), hf.get("decoder_sparse_step") or 1, hf.get("mlp_only_layers")
    return {
        "n_experts": n_experts, "experts_per_token": hf["num_experts_per_tok"],
        "expert_size": hf.get("moe_intermediate_size", hf["intermediate_size"]),
        "renormalize_experts": hf.get("norm_topk_prob", True),
        "shared_expert_size": hf.get("shared_expert_intermediate_size"),
        "shared_expert_gate": "shared_expert_intermediate_size" in hf,
        "dense_layers": tuple(i for i in layers if i in (dense or ()) or (i + 1) % step),
    }  # fmt: skip


def deepseek_values_from_hf(hf):
    """Return what values_from_hf does for DeepSeek's keys, which GLM and Instella-MoE share."""
    layers, types = range(hf["num_hidden_layers"]), hf.get("mlp_layer_types")
    if types and (len(types) != len(layers) or not {*types} <= {"dense", "sparse"}):
        raise InputError(f"mlp_layer_types must name dense or sparse for each of {len(layers)} layers")
    for key in "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "routed_scaling_factor":
        if hf[key] is None:
            raise InputError(f"{key} is null but must be a number above 0")
    method = hf.get("topk_method", "group_limited_greedy")  # only DeepSeek V2 has another one
    if method not in ("greedy", "group_limited_greedy"):
        raise InputError(f"topk_method {method!r} is not supported, only greedy and group_limited_greedy are")
    groups = hf["n_group"] if method != "greedy" and (hf["n_group"] or 1) > 1 else None
    n_dense = hf.get("first_k_dense_replace", 1) or 0
    return {
        "n_experts": hf["n_routed_experts"], "experts_per_token": hf["num_experts_per_tok"],
        "expert_size": hf["moe_intermediate_size"], "renormalize_experts": hf["norm_topk_prob"],
        "shared_expert_size": (hf["n_shared_experts"] or 0) * hf["moe_intermediate_size"] or None,
        "dense_layers": tuple(i for i in layers if (types[i] == "dense" if types else i < n_dense)),
        "expert_groups": groups, "chosen_groups": hf["topk_group"] if groups else None,
        "expert_scale": hf["routed_scaling_factor"],
    }  # fmt: skip
