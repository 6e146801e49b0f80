"""Reads the tensors of a mixture's experts, which families name and store in several ways, as one tensor for all."""

import re

import torch

from runtime.errors import InputError

QWEN = {  # parts of names in Mixtral's and GraniteMoE's files: the same parts in Qwen's
    "block_sparse_moe.": "mlp.", "router.layer.": "gate.", "input_linear.weight": "experts.gate_up_proj",
    "output_linear.weight": "experts.down_proj", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj.",
}  # fmt: skip


class ExpertWeights:
    """The tensors of a source with names() and read(name), under Qwen's names, those of a layer's experts stacked.

    mlp.experts.gate_proj and up_proj are (E, I, D), down_proj is (E, D, I), whether the source has a tensor for each
    expert or a fused gate_up_proj. Raises InputError where an expert is missing, or a tensor is there twice.
    """

    def __init__(self, source):
        self.source, self.places = source, {}  # name: [(expert or 0, the source's name, which half of it or None)]
        for name in source.names():
            new = name
            for theirs, qwen in QWEN.items():
                new = new.replace(theirs, qwen) if "block_sparse_moe" in name else new
            expert, places = 0, {new: None}
            if one := re.fullmatch(r"(.*\.experts)\.(\d+)(\.\w+\.weight)", new):
                expert, places = int(one[2]), {one[1] + one[3]: None}
            elif new.endswith("experts.gate_up_proj"):
                places = {new.replace("gate_up_proj", f"{m}_proj.weight"): i for i, m in enumerate(("gate", "up"))}
            elif new.endswith("experts.down_proj"):
                places = {f"{new}.weight": None}
            for place, half in places.items():
                self.places.setdefault(place, []).append((expert, name, half))
        for parts in self.places.values():
            parts.sort()
            for i, (expert, name, _) in enumerate(parts):
                if expert > i:
                    raise InputError(f"the source has {name}, but no expert {i}")
                if expert < i:
                    raise InputError(f"the source has both {parts[i - 1][1]} and {name}: drop one")

    def names(self):
        return list(self.places)

    def read(self, name):
        parts = self.places[name]
        tensors = [self.source.read(source_name) for _, source_name, _ in parts]
        _, first, half = parts[0]
        if re.search(r"experts\.\d", first):
            return torch.stack(tensors)
        return tensors[0] if half is None else tensors[0].chunk(2, dim=1)[half]
