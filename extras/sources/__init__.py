"""Older files: the checkpoints of llama2.c, tiktoken's rank files, and vocab.json with merges.txt."""

from extras.sources.byte_pairs import byte_pairs
from extras.sources.llama2c import Llama2cWeights
from extras.sources.tiktoken_ranks import TiktokenTokenizer

__all__ = ["Llama2cWeights", "TiktokenTokenizer", "byte_pairs"]
