"""The function of skinny_gemm.cpp that stands in for that of experts. Shape letters: architectures/experts.py."""

import torch

from ladder.architectures.experts import ExpertMatrices, multiply
from ladder.kernels.cpu import skinny_gemm
from ladder.kernels.cpu.skinny_gemm import bits_of
from ladder.kernels.cpu.stand_ins import BF16, is_bf16
from ladder.kernels.quant_linear import PLAIN_STORED, QuantLinear
from ladder.kernels.registry import Kernel


def experts(self, x, chosen):
    """Compute what architectures/experts.py does. skinny_gemm.cpp reads the weights of each chosen expert once."""
    if self.compute is not multiply or not is_bf16(x) or len(self._modules) != 3:
        return None
    weights = []
    bits = []
    biases = []
    for name in ("w1", "w3", "w2"):
        matrices = self._modules[name]
        packed_bits = bits_of(matrices) if type(matrices) is QuantLinear else None
        if packed_bits is None and type(matrices) is not ExpertMatrices:
            return None
        weights.append(matrices._parameters["weight" if packed_bits is None else "packed"])
        bits.append(packed_bits or 16)
        if matrices.bias is not None:
            biases.append(matrices.bias)
    if len(biases) not in (0, 3) or any(w.dtype is not BF16 for w, n in zip(weights, bits, strict=True) if n == 16):
        return None
    if bits == [16] * 3 and chosen.numel() > skinny_gemm.SKINNY_ROWS * len(weights[0]):
        return None
    neurons = self._modules["w2"].in_features
    return torch.ops.ladder.skinny_gemm_experts(x, chosen, *weights, neurons, x.shape[1], bits, biases)


PLAIN = "ladder.architectures.experts"
CALLS = f"{PLAIN}.multiply", f"{PLAIN}.experts", PLAIN_STORED
KERNELS = [Kernel(f"{PLAIN}.Experts.forward", experts, "each chosen expert is read once", CALLS)]
