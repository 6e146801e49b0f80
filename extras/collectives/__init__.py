"""Collectives beside those of the core: each file that is named here adds its own to ranks.COLLECTIVES."""

from extras.collectives import one_shot, shared_memory  # noqa: F401
