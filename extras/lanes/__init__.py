"""Wirings whose function depends on lanes, and Kog's Laneformers."""

from extras.lanes.laneformer import LaneformerWeights, laneformer_as_ministral

__all__ = ["LaneformerWeights", "laneformer_as_ministral"]
