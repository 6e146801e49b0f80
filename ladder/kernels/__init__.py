"""Kernels for CPUs and GPUs, and torch.compile."""
