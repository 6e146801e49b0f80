"""Checkpoints that are no safetensors: pytorch_model.bin, and the files of llama2.c."""

from extras.sources.sources import Llama2cWeights, PickledWeights

__all__ = ["Llama2cWeights", "PickledWeights"]
