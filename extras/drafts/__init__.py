"""Speculative decoding: generate.py reaches it by --draft, complete() by its argument `draft`."""

from extras.drafts.named import build, of_model, read_draft

__all__ = ["build", "of_model", "read_draft"]
