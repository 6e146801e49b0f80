"""Our own format: config.json, weights, writing, sizes of random weights, and how numbers are rounded."""
