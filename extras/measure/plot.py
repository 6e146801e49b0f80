"""Draw how many times as fast as standard each wiring is, by the time of an all-reduce.

python -m extras.measure.plot sweep.jsonl --out speedup.png          # lines of extras.measure.sweep
python -m extras.measure.plot --front-page docs/speedup-by-link.png  # the README's figure, of benchmarks/results

Bars reach to the quartiles of the step.
"""

import statistics
from collections import defaultdict
from pathlib import Path

from extras.measure import results, sweep
from model import WIRINGS
from runtime import cli, launch, writing
from runtime.errors import InputError

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
COLORS = [  # of wirings, in the order of model.WIRINGS; people who see no red or no green can tell them apart too
    "#D55E00", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#882255", "#999933", "#332288", "#AA4499",
    "#44AA99",
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
        all_reduce = statistics.median(line["all_reduce_ms"] for line in row.values())
        for wiring, line in row.items():
            low, high = line["quartiles_ms"]
            series[wiring][all_reduce] = tuple(row["standard"]["step_ms"] / ms for ms in (line["step_ms"], high, low))
    return series


def draw(lines, title):
    """Return a figure of the lines of one setting over several links."""
    figure, (axis,) = panels(1, 5.2, 3.4, title)
    series = by_link(lines)
    for wiring in sorted(series, key=results.wiring_order):
        xs = sorted(series[wiring])
        ys, lows, highs = zip(*(series[wiring][x] for x in xs), strict=True)
        errors = [[y - low for y, low in zip(ys, lows, strict=True)], [h - y for y, h in zip(ys, highs, strict=True)]]
        axis.errorbar(xs, ys, errors, label=wiring, capsize=2, markersize=4, linewidth=1.2, **look(wiring, series))
    axis.set(xlabel="one all-reduce, ms", ylabel="times as fast as standard")
    axis.grid(axis="y", color="0.92")
    axis.set_axisbelow(True)
    labelled(figure, [axis])
    return figure


def front_page():
    """Return the README's figure, of decode steps of two CPU ranks over emulated links."""
    shown = "standard", "ladder", "parallel-ladder", "upper-bound"
    lines = results.read(RESULTS / "overlap-memory.jsonl", *results.STEP_KEYS)
    wanted = [x for x in lines if x["kind"] == "decode" and x["compiled"] and x["wiring"] in shown]
    near = [x for x in wanted if x["link"]["latency_us"] <= 5000]
    return draw(near, "Decode on 2 CPU ranks over emulated links, 8 layers of dim 2560, batch 1")


def main(argv=None):
    p = cli.Parser(__doc__)
    p.add_argument("files", metavar="FILE", nargs="*", help="lines of extras.measure.sweep, of one setting")
    p.add_argument("--out", metavar="FILE", help="the figure, .png or .svg")
    p.add_argument("--front-page", metavar="FILE", help="draw the README's figure")
    args = p.parse_args(argv)
    if bool(args.files and args.out) == bool(args.front_page):
        raise InputError("give files of extras.measure.sweep and --out FILE, or --front-page FILE")
    if args.front_page:
        return save(args.front_page, front_page())
    lines = [line for file in args.files for line in results.read(file, *results.STEP_KEYS)]
    with results.well_formed(", ".join(args.files)):
        settings = {sweep.setting(line) for line in lines}
        if len(settings) != 1:
            raise InputError(f"a figure takes lines of one setting; these have {len(settings)}")
        save(args.out, draw(lines, settings.pop()))


if __name__ == "__main__":
    launch.run(main)
