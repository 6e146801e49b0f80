"""Which kernels multiply by the integers of a model's QuantLinears, and the orders in which these want them."""

import torch

from ladder.kernels import registry
from ladder.kernels.cpu import skinny_gemm
from ladder.kernels.gpu import integers
from ladder.kernels.quant_linear import PLAIN_FORWARD, PLAIN_STORED, QuantLinear, multiply_int8, multiply_packed
from ladder.kernels.registry import Kernel

PACKED = Kernel(PLAIN_FORWARD, multiply_packed, "integers are read as such, not made floats of", (PLAIN_STORED,))
INT8 = Kernel(PLAIN_FORWARD, multiply_int8, "a few rows take PyTorch's int8 kernel", (PLAIN_STORED,))
KERNELS = {  # {set: its Kernels}
    "cpu": [INT8],  # without skinny_gemm.cpp
    "skinny_gemm": [PACKED],
    "cuda": [PACKED, *integers.KERNELS],
}
# {set: function that packs those of a list of QuantLinears that fit}
PACKERS = {"skinny_gemm": skinny_gemm.pack_all, "cuda": integers.pack_int4}


def use_on_gpu(model):
    """Let the kernels for integers and experts stand in on a GPU, and pack integers for them."""
    if registry.is_off():
        return
    for each in model.config.architecture:
        registry.use(each.kernels("cuda"))
    if model.config.quant and model.dtype == torch.bfloat16:
        pack(model, "cuda")
        registry.use(KERNELS["cuda"])


def pack(model, kernel_set):
    """Pack the QuantLinears of a model for the kernels of a set, which are for bfloat16."""
    if model.dtype == torch.bfloat16:
        PACKERS[kernel_set]([module for module in model.modules() if type(module) is QuantLinear])
    table = getattr(model, "tok_embeddings", None)
    head = getattr(model, "output", None)
    if model.config.tie_embeddings and isinstance(table, QuantLinear) and head.layout:
        # past nn.Module, to which neither is a part of the other: whoever reads one reads, or changes, both
        table.__dict__["head"], head.__dict__["table"] = head, table
