"""Measurements with a page each; run them from the repository's root, as `python -m benchmarks.NAME`."""
