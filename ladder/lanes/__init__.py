"""Models whose weights are made for a fixed number of lanes, their wirings, and Laneformer."""
