"""Measurements with a page each; run them from the repository's root, as `python -m benchmarks.NAME`."""

import ladder.openmp  # noqa: F401 (before torch loads)
