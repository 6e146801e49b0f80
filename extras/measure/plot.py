"""Draw how many times as fast as standard each wiring is, by the time of an all-reduce; bars reach to the quartiles.

python -m extras.measure.plot sweep.jsonl --wiring standard ladder --out speedup.png  # lines of extras.measure.sweep
"""

import itertools
import statistics
from collections import defaultdict

from extras.measure import results, sweep
from runtime import cli, launch, writing
from runtime.errors import InputError

MARKERS = "osDv^<>pPX*hd"  # of wirings, in the order of model.WIRINGS, as their colors
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


def draw(lines):
    """Return a figure of the lines of one setting over several links."""
    from matplotlib.figure import Figure  # not pyplot, which has global state and may look for a screen

    settings, series = {sweep.setting(line) for line in lines}, by_link(lines)
    if len(settings) != 1:
        raise InputError(f"a figure takes lines of one setting; these have {len(settings)}")
    figure = Figure(figsize=(6, 4), layout="constrained")
    axis, dashes = figure.subplots(), defaultdict(lambda: itertools.cycle(["-", "--", ":", "-."]))
    for wiring in sorted(series, key=results.wiring_order):
        xs, ratios = zip(*sorted(series[wiring].items()), strict=True)
        ys, *bars = zip(*ratios, strict=True)
        index, _, _ = results.wiring_order(wiring)  # the same look in every figure; dashes tell ladder:2 from ladder:8
        look = {"color": GREYS.get(wiring, f"C{index}"), "marker": MARKERS[index % len(MARKERS)], "markersize": 4}
        axis.errorbar(xs, ys, bars, label=wiring, capsize=2, linestyle=next(dashes[index]), **look)
    axis.set(xlabel="one all-reduce, ms", ylabel="times as fast as standard")
    axis.grid(axis="y", color="0.92")
    figure.suptitle(settings.pop(), fontsize=9, wrap=True)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
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
    figure = draw([x for x in lines if not args.link or x["link"]["name"] in args.link])
    with writing.new_file(args.out) as unfinished:
        figure.savefig(unfinished, format="svg" if args.out.endswith(".svg") else "png", dpi=150)


if __name__ == "__main__":
    launch.run(main)
