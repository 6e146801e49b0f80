"""Draw how many times as fast as standard each wiring is, by the time of an all-reduce.

python -m extras.measure.plot sweep.jsonl --wiring standard ladder --out speedup.png  # lines of extras.measure.sweep

Bars reach to the quartiles of the step.
"""

import itertools
import statistics
from collections import defaultdict

import torch

from extras.measure import results, sweep
from model import WIRINGS
from runtime import cli, launch, writing
from runtime.errors import InputError

COLORS = [  # of wirings, in the order of model.WIRINGS; people who see no red or no green can tell them apart too
    "#D55E00", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#882255", "#999933", "#332288", "#AA4499",
    "#44AA99", "#117733",
]  # fmt: skip
GREYS = {"standard": "black", "upper-bound": "darkgrey"}  # what the others are compared with
DASHES = ["-", "--", ":", "-."]


def look(wiring, others=()):
    """Return the keyword arguments that draw a wiring, the same in every figure.

    Dashes tell ladder:2 from ladder:8. others: all wirings of the figure.
    """
    name = results.base(wiring)
    colored = [w for w in WIRINGS if w not in GREYS]
    index = colored.index(name) if name in colored else len(colored)
    color = GREYS.get(name, COLORS[index % len(COLORS)])
    marker = {"standard": "o", "upper-bound": "D"}.get(name, "s^vPX*<>pd"[index % 10])
    kin = sorted({w for w in (*others, wiring) if results.base(w) == name}, key=results.wiring_order)
    above = 2 if name in GREYS else 3  # a wiring that reaches the upper bound is drawn over it
    return {"color": color, "marker": marker, "linestyle": DASHES[kin.index(wiring) % len(DASHES)], "zorder": above}


def panels(count, width, height, title=None, **options):
    """Return (a figure of `count` panels side by side, each of that size in inches; its axes)."""
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot, which has global state and may look for a screen

    matplotlib.rcParams.update(
        {"font.size": 9, "axes.titlesize": 9, "svg.hashsalt": "", "svg.fonttype": "none", "text.parse_math": False}
    )
    figure = Figure(layout="constrained", figsize=(0.8 + width * count, 0.6 * bool(title) + height))
    axes = list(figure.subplots(1, count, squeeze=False, **options).flat)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=9, wrap=True)
    return figure, axes


def labelled(figure, axes, inches=1.3):
    """Draw one legend for all panels below them, of labels `inches` wide."""
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    columns = max(1, min(len(handles), int(figure.get_figwidth() / inches)))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns, frameon=False)


def save(path, figure):
    """Write a figure whole or not at all, as SVG or PNG; equal data give an equal file."""
    kind = "svg" if str(path).endswith(".svg") else "png"
    with writing.new_file(path) as unfinished:
        figure.savefig(unfinished, format=kind, dpi=150, metadata={"Date" if kind == "svg" else "Software": None})


def middle(values):
    """Return (median, lowest, highest)."""
    return statistics.median(values), min(values), max(values)


def by_link(lines):
    """Return {wiring: {ms of an all-reduce: standard's step / its step, of its median and of its quartiles}}."""
    series, rows = defaultdict(dict), defaultdict(dict)
    for line in lines:
        rows[line["link"]["name"]][line["wiring"]] = line
    for name, row in rows.items():
        if "standard" not in row:
            raise InputError(f"there is no line of standard over the link {name}")
        all_reduce, standard = statistics.median(line["all_reduce_ms"] for line in row.values()), row["standard"]
        for wiring, line in row.items():
            low, high = line["quartiles_ms"]
            series[wiring][all_reduce] = tuple(standard["step_ms"] / ms for ms in (line["step_ms"], high, low))
    return series


def draw(lines):
    """Return a figure of the lines of one setting over several links."""
    settings, series = {sweep.setting(line) for line in lines}, by_link(lines)
    if len(settings) != 1:
        raise InputError(f"a figure takes lines of one setting; these have {len(settings)}")
    figure, (axis,) = panels(1, 5.2, 3.4, settings.pop())
    for wiring in sorted(series, key=results.wiring_order):
        xs = sorted(series[wiring])
        ys, lows, highs = torch.tensor([series[wiring][x] for x in xs]).T
        errors = torch.stack((ys - lows, highs - ys))
        axis.errorbar(xs, ys, errors, label=wiring, capsize=2, markersize=4, linewidth=1.2, **look(wiring, series))
    axis.set(xlabel="one all-reduce, ms", ylabel="times as fast as standard")
    axis.grid(axis="y", color="0.92")
    axis.set_axisbelow(True)
    labelled(figure, [axis])
    return figure


def main(argv=None):
    p = cli.Parser(__doc__)
    lines = results.lines_of(*results.STEP_KEYS)
    p.add_argument("files", type=lines, metavar="FILE", nargs="+", help="lines of extras.measure.sweep, of one setting")
    p.add_argument("--wiring", metavar="NAME", nargs="+", help="only these")
    p.add_argument("--link", metavar="NAME", nargs="+", help="only these")
    p.add_argument("--out", metavar="FILE", required=True, help="the figure, .png or .svg")
    args = p.parse_args(argv)
    lines = [x for x in itertools.chain(*args.files) if not args.wiring or x["wiring"] in args.wiring]
    save(args.out, draw([x for x in lines if not args.link or x["link"]["name"] in args.link]))


if __name__ == "__main__":
    launch.run(main)
