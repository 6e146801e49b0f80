"""Layers of linear attention (Qwen3-Next, Qwen3.5 and 3.6), which the core imports for a config with linear_layers."""

from extras.linear_attention.layer import GatedDeltaNet, LinearWeights, check, row_ranges, values_from_hf
from formats.sizes import SIZES
from model import Config

__all__ = ["GatedDeltaNet", "LinearWeights", "check", "row_ranges", "values_from_hf"]

SIZES["qwen3.6-27b"] = Config(
    64, 24, 4, 256, 5120, 17408, 248320, 262144, 1e-6, 1e7, rotary_dim=64, norm="rms+1", qk_norm=True,
    attention_gate=True, linear_layers=tuple(i for i in range(64) if (i + 1) % 4),
    linear_attention={"key_heads": 16, "value_heads": 48, "key_dim": 128, "value_dim": 128, "conv_width": 4},
)  # fmt: skip
