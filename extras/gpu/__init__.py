"""Kernels for integers on a GPU, which are added to the table of the core."""

from extras.gpu.modules import use_int4, use_int8
from kernels.int_linear import KERNELS

KERNELS |= {("int8", "cuda"): use_int8, ("int4", "cuda"): use_int4}
