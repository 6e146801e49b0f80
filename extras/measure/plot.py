"""Tables and figures of what bench.sh measured.

python -m extras.measure.plot bench.jsonl --out figures              # tables, also on the terminal; figures
python -m extras.measure.plot --front-page docs/speedup-by-link.png  # the first page's figure

results.py says what a cell of a table is. A figure shows the same medians, with bars from the lowest to the
highest repeat. Without --out and --front-page nothing imports matplotlib.
"""

import json
import re
import statistics
from collections import defaultdict
from pathlib import Path

from extras.measure import results
from formats.checkpoint import read_text
from model import WIRINGS
from runtime import cli, launch, writing
from runtime.errors import InputError

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
COLORS = [  # of wirings, in the order of model.WIRINGS; told apart by those who see no red or no green too
    "#D55E00", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#882255", "#999933", "#332288", "#AA4499",
    "#44AA99",
]  # fmt: skip
GREYS = {"standard": "black", "upper-bound": "darkgrey"}  # what the others are seen against
DASHES = ["-", "--", ":", "-."]
RATIO = "decode, tok/s over standard's"


def look(wiring, others=()):
    """Return the colour, marker, dashes and layer of a wiring, the same everywhere.

    The dashes tell ladder:2 from ladder:8, and drafts apart. others: the wirings beside it.
    """
    name = results.base(wiring)
    colored = [w for w in WIRINGS if w not in GREYS]
    index = colored.index(name) if name in colored else len(colored)
    color = GREYS.get(name, COLORS[index % len(COLORS)])
    marker = {"standard": "o", "upper-bound": "D"}.get(name, "s^vPX*<>pd"[index % 10])
    kin = sorted({w for w in (*others, wiring) if results.base(w) == name}, key=results.wiring_order)
    above = 2 if name in GREYS else 3  # where a wiring reaches the upper bound, it is the wiring that is seen
    return {"color": color, "marker": marker, "linestyle": DASHES[kin.index(wiring) % len(DASHES)], "zorder": above}


# ---- Parts of figures ------------------------------------------------------------------------------------------------


def panels(count, width, height, title, columns=4, **options):
    """Return (a figure with so many panels of that size in inches, at most so many columns of them; its axes)."""
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot: it has state, and may look for a screen

    matplotlib.rcParams.update({"font.size": 9, "axes.titlesize": 9, "text.parse_math": False})
    columns = min(columns, count)
    rows = -(-count // columns)
    size = max(5.5, 0.8 + width * columns), 1.2 + height * rows
    figure = Figure(layout="constrained", figsize=size)
    axes = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for axis in axes[count:]:
        axis.set_visible(False)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=9, wrap=True)
    return figure, axes[:count]


def labelled(figure, axes, inches=1.3):
    """Draw one legend for all panels, below them; a label takes so many inches."""
    found = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    columns = max(1, min(len(found), int(figure.get_figwidth() / inches)))
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=columns, frameon=False)


def curves(axis, series, others, name_tick, apart=0.0):
    """Draw a line for each wiring of {wiring: {x: (y, low, high)}}, with ticks at even distances.

    others: the wirings of the whole figure. apart: the distance between lines, so that their bars stand side by side.
    """
    ticks = sorted({x for points in series.values() for x in points})
    widths = {"capsize": 2, "markersize": 4, "linewidth": 1.2, "elinewidth": 0.8}
    for i, wiring in enumerate(sorted(series, key=results.wiring_order)):
        points, shift = series[wiring], apart * (i - (len(series) - 1) / 2)
        xs = [x for x in ticks if x in points]
        ys = [points[x][0] for x in xs]
        errors = [[points[x][0] - points[x][1] for x in xs], [points[x][2] - points[x][0] for x in xs]]
        bars = errors if any(map(any, errors)) else None
        places = [ticks.index(x) + shift for x in xs]
        axis.errorbar(places, ys, yerr=bars, label=wiring, **widths, **look(wiring, others))
    axis.set_xticks(range(len(ticks)), map(name_tick, ticks))
    axis.grid(axis="y", color="0.92")
    axis.set_axisbelow(True)


def middle(values):
    """Return (median, lowest, highest)."""
    return statistics.median(values), min(values), max(values)


def draw(found, title, x_label, y_label, name_tick=str):
    """Return a figure of lines, found {panel: {wiring: {x: (y, low, high)}}}, or None where no line has two points."""
    found = {name: {w: points for w, points in series.items() if len(points) > 1} for name, series in found.items()}
    found = {name: series for name, series in found.items() if series}
    if not found:
        return None
    figure, axes = panels(len(found), 2.9, 2.5, title, sharey=True)
    wirings = {w for series in found.values() for w in series}
    for axis, (name, series) in zip(axes, found.items(), strict=True):
        ranges = any(low < high for points in series.values() for _, low, high in points.values())
        # of steep lines without ranges, a lower one beside a higher one would look like the higher
        curves(axis, series, wirings, name_tick, apart=0.04 * ranges)
        axis.set(title=name, xlabel=x_label)
        if name_tick is not str:
            axis.tick_params(axis="x", labelsize=7, rotation=30)
    for axis in axes[::4]:
        axis.set_ylabel(y_label)
    labelled(figure, axes, max(1.3, 0.085 * max(map(len, wirings))))  # a draft's name is long
    return figure


# ---- What there is to draw of a sweep --------------------------------------------------------------------------------


def speedups(sweep, panel, x):
    """Return {panel(case): {wiring: {x(case): tok/s over standard's}}} of several ranks; an x of None is left out."""
    found = defaultdict(lambda: defaultdict(dict))
    for c in sweep.cases:
        ratios = sweep.speedups(c, results.tok_s)
        if ratios and c[0] > 1 and x(c) is not None:
            found[panel(c)][c[2]][x(c)] = middle(ratios)
    return found


def scaling(sweep):
    """Return {panel: {wiring: {ranks: tok/s over those of the fewest ranks' standard wiring over the same link}}}.

    Without a draft all wirings cost one rank about the same: there their lines begin together.
    """
    found = defaultdict(lambda: defaultdict(dict))
    for ranks, over, wiring, batch in (c for c in sweep.cases if c[0] > 1):
        bases = [c for c in sweep.cases if c[2:] == ("standard", batch) and c[1] in (over, "none") and c in sweep.runs]
        ratios = sweep.ratios((ranks, over, wiring, batch), bases[0], results.tok_s) if bases else None
        if ratios:
            points = found[f"link {over}, batch {batch}"][wiring]
            points[ranks] = middle(ratios)
            alone = 1, bases[0][1], wiring if results.draft_of(wiring) else "standard", batch
            if on_one := sweep.ratios(alone, bases[0], results.tok_s):
                points[1] = middle(on_one)
    return found


def caption(sweep):
    """Return the title of a sweep's figures."""
    repeats = sweep.repeats
    return results.title(sweep.setting) + (f"; median and range of {repeats} repeats" if repeats > 1 else "")


# ---- The first page's figure -----------------------------------------------------------------------------------------


def by_link(path, **about):
    """Return {wiring: {(ms of an all-reduce, link): (standard's step / its step, by its quartiles)}}.

    path: lines of benchmarks/overlap.py; about: what a line must say of itself to count.
    """
    found, rows = defaultdict(dict), defaultdict(dict)
    for line in map(json.loads, read_text(path).splitlines()):
        if about.items() <= line.items():
            rows[results.link(line)][results.wired(line)] = line
    for link, row in rows.items():
        all_reduce = statistics.median(line["all_reduce_ms"] for line in row.values())
        for wiring, line in row.items():
            low, high = line["quartiles_ms"]
            ratios = [row["standard"]["step_ms"] / ms for ms in (line["step_ms"], high, low)]
            found[wiring][all_reduce, link] = tuple(ratios)
    return found


def front_page():
    """Return a figure of the speed-up by link: of CPU ranks over emulated links and, apart, of the paper's H100s."""
    decode = {"kind": "decode", "compiled": True}
    ranks = by_link(RESULTS / "overlap-memory.jsonl", **decode)
    shown = "standard", "ladder", "ladder:4", "parallel", "parallel-ladder", "spd", "upper-bound"
    ranks = {wiring: points for wiring, points in ranks.items() if wiring in shown}
    alone = by_link(RESULTS / "overlap-tp8.jsonl", model="8b", **decode)
    title = "Speed-up over standard by link, of decode steps and (right) whole requests. Unlike machines and models."
    figure, axes = panels(3, 4, 3.4, title)
    two = "measured: 2 ranks on 2 cores of an AMD EPYC,\n8 layers of dim 2560, batch 1"
    one = "measured: 1 rank of 8, alone, on 2 such cores,\n8b, batch 1"
    for axis, series, name, name_tick in ((axes[0], ranks, two, "{:.2g}"), (axes[1], alone, one, "{1}\n{0:.2g}")):
        curves(axis, series, series, lambda x, text=name_tick: text.format(*x))
        axis.set(title=name, xlabel="one all-reduce over the emulated link, ms")
    axes[0].set_yscale("log")
    axes[0].set_yticks([1, 1.5, 2, 3, 5], ["1", "1.5", "2", "3", "5"])
    axes[0].minorticks_off()
    axes[0].set_ylabel("standard's step / step (bars: quartiles)")
    axes[1].tick_params(axis="x", labelsize=7, rotation=35)
    rates = {(r["wiring"], r["link"]): r["tok_s"] for r in results.published() if r["batch"] == 4}
    links = [link for wiring, link in rates if wiring == "standard"]
    wirings = sorted({wiring for wiring, _ in rates} - {"standard"}, key=results.wiring_order)
    for i, wiring in enumerate(wirings):
        places = [place + (i - (len(wirings) - 1) / 2) * 0.26 for place in range(len(links))]
        heights = [rates[wiring, link] / rates["standard", link] for link in links]
        bars = axes[2].bar(places, heights, 0.24, label=wiring, color=look(wiring)["color"])
        axes[2].bar_label(bars, fmt="%.2f", fontsize=8)
    axes[2].axhline(1, color="black", linewidth=1)
    axes[2].set_xticks(range(len(links)), [f"link {link}" for link in links])
    axes[2].set_title("published (arXiv 2501.06589): 8 H100s,\n70b, batch 4, whole requests")
    axes[2].set_ylabel("tok/s over standard's")
    labelled(figure, axes[:2])
    return figure


# ---- The command line ------------------------------------------------------------------------------------------------


def figures(found):
    """Yield (name, figure or None) of all that there is to draw."""
    names = defaultdict(int)
    for sweep in found:
        s, title = sweep.setting, caption(sweep)
        name = f"{s['model']}-{s['n_layers']}-{s['quant'] or s['dtype']}-{s['device']}" + "-predicted" * s["simulated"]
        name = re.sub(r"[^\w.-]", "_", name)
        names[name] += 1
        name += f"-{names[name]}" * (names[name] > 1)
        batches = speedups(sweep, lambda c: f"{c.ranks} ranks, link {c.link}", lambda c: c.batch)
        yield f"{name}-by-batch", draw(batches, title, "batch", RATIO)
        yield f"{name}-by-ranks", draw(scaling(sweep), title, "ranks", "tok/s over standard's on the fewest ranks")
        delays = {key: (us, key[1]) for key, us in sweep.latencies.items()}
        links = speedups(sweep, lambda c: f"{c.ranks} ranks, batch {c.batch}", lambda c, d=delays: d.get(c[:2]))
        label = "link, and its small all-reduce in us"
        yield f"{name}-by-link", draw(links, title, label, RATIO, lambda x: f"{x[1]}\n{x[0]:.0f}")


def save(path, figure):
    """Write a figure as PNG, whole."""
    with writing.new_file(path) as unfinished:
        # without the version of matplotlib, so that the same lines make the same file
        figure.savefig(unfinished, format="png", dpi=150, metadata={"Software": None})


def main(argv=None):
    p = cli.Parser(__doc__)
    p.add_argument("files", metavar="FILE", nargs="*", help="lines of bench.sh")
    p.add_argument("--out", metavar="DIR", help="write tables.md and the figures into this folder")
    p.add_argument("--front-page", metavar="PNG", help="draw the README's figure, of benchmarks/results")
    args = p.parse_args(argv)
    if bool(args.files) == bool(args.front_page):
        raise InputError("give files of bench.sh (and --out), or --front-page PNG")
    if args.front_page:
        return save(args.front_page, front_page())
    lines = [line for file in args.files for line in results.read(file)]
    print(text := results.report(lines))
    if args.out is None:
        return
    folder = Path(args.out)
    writing.write_text(folder / "tables.md", text + "\n")
    for name, figure in figures(results.sweeps(lines)):
        if figure is not None:
            save(folder / f"{name}.png", figure)
    print(f"\ntables and figures in {folder}")


if __name__ == "__main__":
    launch.run(main)
