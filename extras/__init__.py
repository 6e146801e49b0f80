import ladder.openmp  # noqa: F401 (before torch loads)
