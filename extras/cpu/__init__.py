"""Kernels for a CPU: what --compile takes there."""

from extras.cpu.modules import use_kernels

__all__ = ["use_kernels"]
