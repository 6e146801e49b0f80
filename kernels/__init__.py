"""Modules, operators and CUDA graphs. They import nothing of the project."""
