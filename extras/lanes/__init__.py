"""Several lanes on a rank, and Kog's Laneformer, which adds its wiring to the table of the core."""

from extras.lanes.laneformer import LaneformerWeights, laneformer_as_ministral
from extras.lanes.lanes import LaneSums, load_lanes

__all__ = ["LaneSums", "LaneformerWeights", "laneformer_as_ministral", "load_lanes"]
