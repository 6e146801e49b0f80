"""Draw the README's picture: when sublayers compute and all-reduces travel, in a standard model and in a ladder.

python -m extras.measure.timeline docs/timeline.svg

The times are those of model.py's own loop, run on the clock of clock.py.
"""

import dataclasses

from extras.measure.clock import run_layers
from extras.measure.plot import panels, save
from formats.sizes import SIZES
from model import rewired
from runtime import cli, launch

COLORS = {"attention": "#0072B2", "mlp": "#56B4E9", "all-reduce": "#D55E00"}
ROWS = {"standard": 3.0, "ladder": 0.8}  # wiring: height of its row of sublayers; that of its all-reduces is 0.8 lower


def draw(n_layers=3, sublayer=1.0, all_reduce=0.9):
    """Return the figure, of so many layers whose sublayers and all-reduces take so many units of time."""
    figure, (axis,) = panels(1, 8.2, 2.3)
    ends = {}
    for wiring, y in ROWS.items():
        config = rewired(dataclasses.replace(SIZES["1b"], n_layers=n_layers), wiring)
        clock = run_layers(config, sublayer, sublayer, all_reduce)
        for name, start, end in clock.spans:
            low = y - 0.8 * (name == "all-reduce")
            axis.barh(low, end - start, 0.7, start, color=COLORS[name], edgecolor="white")
            axis.text((start + end) / 2, low, name, ha="center", va="center", color="white", fontsize=7)
        ends[wiring] = clock.now
        faster = f": {ends['standard'] / clock.now:.2f} times as fast" * (wiring != "standard")
        axis.text(0, y + 0.45, wiring + faster, fontsize=9, fontweight="bold", va="bottom")
    axis.set_xlim(0, max(ends.values()))
    axis.set_ylim(-0.5, 4.1)
    axis.axis("off")
    return figure


def main(argv=None):
    p = cli.Parser(__doc__)
    p.add_argument("file", metavar="FILE", help="the picture, .svg or .png")
    save(p.parse_args(argv).file, draw())


if __name__ == "__main__":
    launch.run(main)
