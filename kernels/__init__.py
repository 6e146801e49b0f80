"""Modules, operators and CUDA graphs, which know nothing of models and ranks."""
