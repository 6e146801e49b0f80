"""Retraining for adapt.py: documents in packed windows, sharded weights, runs that resume after they were killed."""

from extras.training.adapt import main

__all__ = ["main"]
