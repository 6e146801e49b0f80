"""The tables and the figure of benchmarks/zeroshot.md, from the lines that benchmarks/zeroshot.py wrote.

python -m benchmarks.zeroshot_tables results/zeroshot.jsonl
python -m benchmarks.zeroshot_tables results/zeroshot.jsonl --speeds overlap.jsonl --retrained results/adapt.jsonl \
    --model stories260K --figure results/zeroshot.png
"""

import argparse

from benchmarks import overlap
from benchmarks.lines import written_by
from benchmarks.zeroshot import HALF
from measure import plot
from measure.results import markdown, wiring_order
from model import WIRINGS, InputError
from runtime import cli, launch

KEYS = "model", "tp", "wiring", "layers", "nats", "wired_layers", "desync_period", "sensitivity", "n_layers"
SHARES = 0.2, 1.0  # of the tokens at hand: the retrained models of the figure
TICKS = 1.4, 1.6, 1.8, 2.0, 2.5, 3.0, 4.0, 5.0  # nats per token


def standard(lines, tp):
    """The line of the standard wiring on so many ranks."""
    found = [line for line in lines if (line["tp"], line["wiring"]) == (tp, "standard")]
    if not found:
        raise InputError(f"{lines[0]['model']} has no line of the standard wiring on {tp} ranks")
    return found[0]


def called(line):
    """A wiring as bench.sh and measure/plot.py name it."""
    return f"desync:{line['desync_period']}" if line["wiring"] == "desync" else line["wiring"]


def losses(lines):
    """The table of one model's losses: a row a wiring and its layers, a column a number of ranks; the halves chosen."""
    tps, cells = sorted({line["tp"] for line in lines}), {}
    for line in lines:
        base, half = standard(lines, line["tp"]), line["layers"] == HALF
        excess = f", {100 * (line['nats'] / base['nats'] - 1):+.1f} %" if line is not base else ""
        text = f"{line['nats']:.3f}{excess}" + f" ({', '.join(map(str, line['wired_layers']))})" * half
        cells.setdefault((called(line), line["layers"]), {})[line["tp"]] = text
    rows = [[*key, *(row.get(tp, "") for tp in tps)] for key, row in cells.items()]
    return markdown(["wiring", "layers", *("any number of ranks" if tp == 1 else f"{tp} ranks" for tp in tps)], rows)


def sensitivities(lines):
    """The table of what each layer alone costs one model, in nats per token, on the text that layers are chosen on."""
    rows = []
    for line in sorted((x for x in lines if x["sensitivity"]), key=lambda x: list(WIRINGS).index(x["wiring"])):
        base = standard(lines, line["tp"])["select_nats"]
        ranks = str(line["tp"]) if WIRINGS[line["wiring"]].tp_bound else "any"
        rows.append([line["wiring"], ranks, *(f"{nats - base:+.3f}" for nats in line["sensitivity"])])
    return markdown(["wiring", "ranks", *(f"layer {i}" for i in range(lines[0]["n_layers"]))], rows)


# ---------------------------------------------------------------------------------------------------------------------
# The figure


def speeds(path):
    """An argparse type: {link, as plot.by_link has it: {wiring, or "wiring, half": (times standard's, low, high)}}."""
    lines = written_by("benchmarks/overlap.py", *overlap.KEYS)(path)
    lines = [line for line in lines if line["kind"] == "decode" and line["compiled"]]
    if len({line["n_layers"] for line in lines}) != 1 or not all("latency_us" in line["link"] for line in lines):
        raise argparse.ArgumentTypeError(f"{path} has not compiled decode steps of one model over emulated links")
    for name in {line["link"]["name"] for line in lines}:
        if (name, "standard") not in {(line["link"]["name"], line["wiring"]) for line in lines}:
            raise argparse.ArgumentTypeError(f"{path} has no standard wiring over the link {name}")
    found, half = {}, lines[0]["n_layers"] // 2
    for wiring, row in plot.by_link(path, kind="decode", compiled=True).items():
        name = {"hybrid": "ladder, half", f"hybrid:{half}": "ladder, half"}.get(wiring, wiring)
        for link, ratios in row.items():
            found.setdefault(link, {})[name.replace(f":{half}", ", half")] = ratios
    return dict(sorted(found.items()))


def points(lines, retrained):
    """{wiring, or "wiring, half": {share of the tokens that it was distilled on, or 0: nats per token}}.

    Of lines of one model, on 2 ranks in the wirings that are bound to their number; retrained: lines of adapt.py.
    """
    found = {}
    for line in lines:
        if line["tp"] == 1 + WIRINGS[line["wiring"]].tp_bound:
            found.setdefault(called(line) + ", half" * (line["layers"] == HALF), {})[0] = line["nats"]
    for name, layers in ("ladder", "all"), ("ladder, half", "last half"):
        for share in SHARES:
            nats = [
                x["nats"] for x in retrained if (x["layers"], x["method"], x["share"]) == (layers, "distilled", share)
            ]
            if nats:
                found.setdefault(name, {})[share] = sum(nats) / len(nats)
    return found


def draw(found, timed, model, path):
    """A panel for each link: nats per token over times standard's speed; found: of points(), timed: of speeds().

    A wiring without a speed is left out.
    """
    title = f"{model} without retraining on 2 ranks: loss over speed. Filled: all layers, hollow: half of them. "
    title += "Below a dotted line: distilled on so much of the text."
    figure, axes = plot.panels(len(timed), 3.6, 3.6, title, columns=3, sharey=True)
    for axis, ((_, link, all_reduce), row) in zip(axes, timed.items(), strict=True):
        for name in sorted(found.keys() & row.keys(), key=lambda name: (wiring_order(name.partition(",")[0]), name)):
            speed, low, high = row[name]
            wiring, _, half = name.partition(", ")
            style = {key: value for key, value in plot.look(wiring).items() if key != "linestyle"}
            style |= {"markerfacecolor": "white" if half else style["color"], "markersize": 6, "linestyle": ""}
            axis.plot([speed] * len(found[name]), found[name].values(), ":", color=style["color"], linewidth=1)
            for share, nats in found[name].items():
                if share:
                    axis.plot(speed, nats, **style)
                    axis.annotate(f"{100 * share:g} %", (speed, nats), (6, -3), textcoords="offset points", fontsize=7)
                else:
                    bars = [[speed - low], [high - speed]]
                    axis.errorbar(speed, nats, xerr=bars, capsize=2, elinewidth=0.6, label=name, **style)
        axis.set(title=f"link {link}, one all-reduce {all_reduce:.2g} ms", xlabel="times standard's decoding speed")
        axis.set_yscale("log")
        axis.grid(color="0.92")
        axis.set_axisbelow(True)
    low, high = axes[0].get_ylim()
    ticks = [tick for tick in TICKS if low <= tick <= high]
    axes[0].set_yticks(ticks, map(str, ticks))
    axes[0].minorticks_off()
    axes[0].set_ylabel("nats per token")
    plot.labelled(figure, axes)
    plot.save(path, figure)


def parse(argv):
    p = cli.Parser(__doc__)
    p.add_argument("lines", type=written_by("benchmarks/zeroshot.py", *KEYS), help="lines of benchmarks/zeroshot.py")
    p.add_argument("--figure", metavar="PNG", help="draw loss over speed into this file")
    p.add_argument("--speeds", type=speeds, metavar="FILE", help="of it: lines of benchmarks/overlap.py")
    p.add_argument("--links", metavar="A,B,...", help="of those lines only these links, e.g. 300,1000,3000")
    retrained = written_by("the plan retrain", "layers", "method", "share", "nats")
    p.add_argument(
        "--retrained", type=retrained, default=[], metavar="FILE", help="and of it: lines of that model's plans"
    )
    p.add_argument("--model", metavar="NAME", help="and its model")
    args = p.parse_args(argv)
    if bool(args.figure) != bool(args.speeds and args.model):
        raise InputError("--figure goes with --speeds and --model")
    if args.links and args.speeds:
        wanted = args.links.split(",")
        args.speeds = {key: row for key, row in args.speeds.items() if key[1] in wanted}
        if len(args.speeds) < len(wanted):
            raise InputError(f"--links {args.links}: --speeds has no such lines of all of them")
    models = dict.fromkeys(line["model"] for line in args.lines)
    if args.model and args.model not in models:
        raise InputError(f"--model {args.model} has no line; known: {', '.join(models)}")
    return args


def main(argv=None):
    args = parse(argv)
    for model in dict.fromkeys(line["model"] for line in args.lines):
        lines = [line for line in args.lines if line["model"] == model]
        print(f"{model}\n\n{losses(lines)}\n\n{sensitivities(lines)}\n")
        if args.model == model:
            draw(points(lines, args.retrained), args.speeds, model, args.figure)


if __name__ == "__main__":
    launch.run(main)
