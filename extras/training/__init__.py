"""What adapt.py trains with: documents as packed windows, weights in shards, runs that go on where they were killed."""

from extras.training.adapt import main

__all__ = ["main"]
