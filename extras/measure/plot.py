"""Draws figures: of a sweep, how many times as fast as standard each wiring is, against the time of an all-reduce."""

import itertools
import statistics
from collections import defaultdict

from ladder import outputs
from ladder.errors import InputError

MARKERS = "osDv^<>pPX*hd"
GREYS = {"standard": "black", "upper-bound": "darkgrey"}  # what the others are compared with


def by_link(lines):
    """Return {wiring: [(ms of an all-reduce, times as fast as standard, how far down and up its quartiles are)]}."""
    series = defaultdict(list)
    rows = defaultdict(dict)
    for line in lines:
        rows[line["link"]["name"]][line["wiring"]] = line
    for name, row in rows.items():
        if "standard" not in row:
            raise InputError(f"there is no line of standard over the link {name}")
        all_reduce = statistics.median(line["all_reduce_ms"] for line in row.values())
        standard = row["standard"]
        for wiring, line in row.items():
            ratio, high, low = (standard["step_ms"] / ms for ms in (line["step_ms"], *line["quartiles_ms"]))
            series[wiring].append((all_reduce, ratio, ratio - low, high - ratio))
    return series


def draw(path, title, series, **axes):
    """Draw {name: [(x, y)]}, or [(x, y, how far down and up an error bar is)], into a .png or .svg file.

    axes: what matplotlib's Axes.set takes, such as xlabel.
    """
    from matplotlib.figure import Figure  # not pyplot, which has global state and may look for a screen

    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    axis.set(**axes)
    for (name, points), marker in zip(series.items(), itertools.cycle(MARKERS), strict=False):
        xs, ys, *bars = zip(*sorted(points), strict=True)
        axis.errorbar(xs, ys, bars or None, label=name, capsize=2, color=GREYS.get(name), marker=marker, markersize=4)
    axis.grid(axis="y", color="0.92")
    figure.suptitle(title, fontsize=9, wrap=True)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    with outputs.new_file(path) as unfinished:
        figure.savefig(unfinished, format="svg" if path.endswith(".svg") else "png", dpi=150)
