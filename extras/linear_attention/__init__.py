"""Layers of linear attention (Qwen3-Next, Qwen3.5 and 3.6), which the core imports for a config with linear_layers."""

from extras.linear_attention.layer import GatedDeltaNet, LinearWeights, check, row_ranges, state_bytes, values_from_hf

__all__ = ["GatedDeltaNet", "LinearWeights", "check", "row_ranges", "state_bytes", "values_from_hf"]
