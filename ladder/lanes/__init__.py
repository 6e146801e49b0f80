"""Weights made for a fixed number of lanes, their wirings, and Laneformer."""
