"""Several lanes on a rank, and Kog's Laneformer, which adds its wiring to the table of the core."""

from extras.lanes.laneformer import add_wiring
from extras.lanes.laneformer_folder import LaneformerWeights, laneformer_as_ministral
from extras.lanes.lanes import LaneSums, load_lanes
from formats.sizes import SIZES
from model import Config

add_wiring()
# The width is inferred from its 2.3 B parameters and an MLP of 4 D.
SIZES["laneformer-2b"] = Config(
    15, 32, 16, 96, 3072, 12288, 32000, 4096, bos_id=1, eos_ids=(2,), wiring="laneformer-4/8",
    sliding_window=512, window_layers=tuple(range(10)),
)  # fmt: skip

__all__ = ["LaneSums", "LaneformerWeights", "laneformer_as_ministral", "load_lanes"]
