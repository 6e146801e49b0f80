"""Older files: pytorch_model.bin, the checkpoints of llama2.c, and tiktoken's rank files."""

from extras.sources.sources import Llama2cWeights, PickledWeights
from extras.sources.tiktoken_ranks import TiktokenTokenizer

__all__ = ["Llama2cWeights", "PickledWeights", "TiktokenTokenizer"]
