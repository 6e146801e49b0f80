"""Checkpoints that are no safetensors: pytorch_model.bin."""

from extras.sources.sources import PickledWeights

__all__ = ["PickledWeights"]
