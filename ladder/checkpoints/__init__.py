"""Checkpoints: their folders, families, tokenizers and formats."""
