"""Kernels for integers on a GPU."""

from extras.gpu.modules import use_kernels

__all__ = ["use_kernels"]
