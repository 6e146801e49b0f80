"""Kernels for a CPU, which --compile takes there; those for integers are added to the table of the core."""

from extras.cpu.few_rows import use_integers
from extras.cpu.modules import use_few_rows
from kernels.int_linear import KERNELS

__all__ = ["use_few_rows"]

KERNELS |= {("int8", "few_rows"): use_integers, ("int4", "few_rows"): use_integers}
