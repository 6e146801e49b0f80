"""Lets the kernels for a CPU stand in when a model is loaded."""

import functools

import torch

from ladder.errors import InputError
from ladder.kernels import quant_kernels, registry
from ladder.kernels.cpu import skinny_gemm, stand_ins
from ladder.ranks.world import say


@functools.cache
def is_built():
    """Return whether there is skinny_gemm.cpp, which is compiled once on a machine; else rank 0 prints why not."""
    try:
        skinny_gemm.build()
        return True
    except InputError as e:
        say(f"{e}: PyTorch's kernels, slower")
        return False


def use_on_cpu(model):
    """Let skinny_gemm.cpp stand in where a model in bfloat16 is to run, or PyTorch's kernels where it cannot be built.

    The matrices of a quantized model are packed, which frees the integers as the checkpoint stores them.
    """
    if registry.is_off():
        return
    if model.dtype != torch.bfloat16:
        if model.config.quant == "int4":
            say(f"int4 in {str(model.dtype)[6:]} has no kernels: bfloat16 is many times faster")
        return
    if not is_built():
        registry.use(quant_kernels.KERNELS["cpu"])
        if not skinny_gemm.HAS_ONEDNN_BF16:
            registry.use(stand_ins.WITHOUT_CPP)
        return
    quant_kernels.pack(model, "skinny_gemm")
    registry.use(quant_kernels.KERNELS["skinny_gemm"] + stand_ins.KERNELS)
    for each in model.config.architecture:
        registry.use(each.kernels("cpu"))
