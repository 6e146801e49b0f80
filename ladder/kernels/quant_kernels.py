"""Which kernels multiply by the integers of a model's QuantLinears."""

import torch

from ladder.kernels import quant_linear
from ladder.kernels.cpu import skinny_gemm
from ladder.kernels.gpu import fp8, integers
from ladder.kernels.quant_linear import QuantLinear

# {(quant, set): function that gives a kernel to those of a list of QuantLinears that fit, and packs them for it}
KERNELS = {
    ("int8", "cpu"): quant_linear.use_int8,  # where skinny_gemm.cpp cannot be built
    ("int8", "skinny_gemm"): skinny_gemm.use_integers,
    ("int4", "skinny_gemm"): skinny_gemm.use_integers,
    ("int8", "cuda"): integers.use_int8,
    ("int4", "cuda"): integers.use_int4,
    ("fp8", "cuda"): fp8.use_scaled_mm,
}


def use_kernels(model, kernel_set):
    """Let the QuantLinears of a model in bfloat16 use the kernels of a set, where there are any."""
    linears = [module for module in model.modules() if type(module) is QuantLinear]
    for quant in ("int8", "int4", "fp8"):
        own = [linear for linear in linears if linear.quant == quant]
        if own and (quant, kernel_set) in KERNELS and model.dtype == torch.bfloat16:
            KERNELS[quant, kernel_set](own)
