"""Reads the tensors of a mixture's experts, which families name and store in several ways, as one tensor for all."""

import re

import torch

QWEN = {  # of other families: Qwen's names, which transformers 5 uses for all
    "block_sparse_moe.": "mlp.", "router.layer.": "gate.", "input_linear.weight": "experts.gate_up_proj",
    "output_linear.weight": "experts.down_proj", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj.",
}  # fmt: skip


class ExpertWeights:
    """The tensors of a source with names() and read(name), and those of a layer's experts as mlp.experts.gate_proj,
    up_proj and down_proj (E, N, K), whether the source has a tensor for each expert or a fused gate_up_proj."""

    def __init__(self, source):
        self.source, self.places = source, {}  # name: (the source's names, one or E of them; the half of them, or None)
        for name in source.names():
            new = name
            for theirs, qwen in QWEN.items():
                new = new.replace(theirs, qwen) if "block_sparse_moe" in name else new
            if one := re.fullmatch(r"(.*\.experts)\.\d+\.(\w+\.weight)", new):
                self.places.setdefault(f"{one[1]}.{one[2]}", ([], None))[0].append(name)
            elif new.endswith("experts.gate_up_proj"):
                for half, module in enumerate(("gate_proj", "up_proj")):
                    self.places[new.replace("gate_up_proj", f"{module}.weight")] = [name], half
            elif new.endswith("experts.down_proj"):
                self.places[f"{new}.weight"] = [name], None
            else:
                self.places[new] = [name], None

    def names(self):
        return list(self.places)

    def read(self, name):
        names, half = self.places[name]
        if len(names) > 1 or re.search(r"experts\.\d", names[0]):
            by_number = sorted(names, key=lambda each: int(re.search(r"experts\.(\d+)", each)[1]))
            return torch.stack([self.source.read(each) for each in by_number])
        tensor = self.source.read(names[0])
        return tensor if half is None else tensor.chunk(2, dim=1)[half]
