"""Draws a sweep: how many times as fast as standard each wiring is, against the time of an all-reduce."""

import itertools
import statistics
from collections import defaultdict

from ladder import outputs
from ladder.errors import InputError

MARKERS = "osDv^<>pPX*hd"
GREYS = {"standard": "black", "upper-bound": "darkgrey"}  # what the others are compared with


def by_link(lines):
    """Return {wiring: {ms of an all-reduce: (times as fast as standard, how far down and up its quartiles are)}}."""
    series, rows = defaultdict(dict), defaultdict(dict)
    for line in lines:
        rows[line["link"]["name"]][line["wiring"]] = line
    for name, row in rows.items():
        if "standard" not in row:
            raise InputError(f"there is no line of standard over the link {name}")
        all_reduce, standard = statistics.median(line["all_reduce_ms"] for line in row.values()), row["standard"]
        for wiring, line in row.items():
            ratio, high, low = (standard["step_ms"] / ms for ms in (line["step_ms"], *line["quartiles_ms"]))
            series[wiring][all_reduce] = ratio, ratio - low, high - ratio
    return series


def draw(path, title, lines):
    """Draw results of one setting over several links into a .png or .svg file. Error bars show the quartiles."""
    from matplotlib.figure import Figure  # not pyplot, which has global state and may look for a screen

    series, figure = by_link(lines), Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    for (wiring, ratios), marker in zip(series.items(), itertools.cycle(MARKERS), strict=False):
        xs, ratios = zip(*sorted(ratios.items()), strict=True)
        ys, *bars = zip(*ratios, strict=True)
        axis.errorbar(xs, ys, bars, label=wiring, capsize=2, color=GREYS.get(wiring), marker=marker, markersize=4)
    axis.set(xlabel="one all-reduce, ms", ylabel="times as fast as standard")
    axis.grid(axis="y", color="0.92")
    save(figure, path, title)


def save(figure, path, title):
    """Write a figure with its title and legend into a .png or .svg file."""
    figure.suptitle(title, fontsize=9, wrap=True)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    with outputs.new_file(path) as unfinished:
        figure.savefig(unfinished, format="svg" if path.endswith(".svg") else "png", dpi=150)


def draw_losses(path, title, original, curves):
    """Draw {name: [(KL, nats) with 1, 2, ... layers rewired]} beside the original's nats into a .png or .svg file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    for (name, points), marker in zip(curves.items(), MARKERS, strict=False):
        axis.plot(range(len(points) + 1), [original, *(nats for _, nats in points)], label=name, marker=marker)
    axis.set(xlabel="layers rewired", ylabel="nats per token")
    save(figure, path, title)


def draw_curves(path, title, curves):
    """Draw {name: [(tokens, KL)]} on two logarithmic axes into a .png or .svg file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    for (name, points), marker in zip(curves.items(), itertools.cycle(MARKERS), strict=False):
        axis.plot(*zip(*points, strict=True), label=name, marker=marker, markersize=4)
    axis.set_xscale("symlog", linthresh=1000)  # the first validation is at 0 tokens
    axis.set(xlabel="tokens of retraining", ylabel="KL divergence, nats per token", yscale="log")
    save(figure, path, title)
