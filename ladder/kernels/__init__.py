"""Kernels for CPUs and GPUs, their compilers, and how --compile uses torch.compile."""
