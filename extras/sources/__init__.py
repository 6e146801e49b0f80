"""Older files: the checkpoints of llama2.c, and tiktoken's rank files."""

from extras.sources.llama2c import Llama2cWeights
from extras.sources.tiktoken_ranks import TiktokenTokenizer

__all__ = ["Llama2cWeights", "TiktokenTokenizer"]
