"""Tables and figures of what bench.sh measured.

python plot.py bench.jsonl --out bench               # tables on the terminal and in bench/tables.md, figures in bench
python plot.py --compare before.jsonl after.jsonl     # one table of ratios

A cell is the median of the repeats. Speed-ups are medians too, of the ratios that each repeat shows: its runs were
next to one another in time.
"""

import csv
import json
import os
import re
import statistics
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt

import checkpoint
import tp
from model import InputError

PAPER = Path(__file__).parent / "benchmarks" / "paper.csv"
STYLES = {  # of lines, told apart without colours too
    "standard": {"color": "black", "linestyle": "-", "marker": "o"},
    "ladder": {"color": "tab:red", "linestyle": "-", "marker": "s"},
    "parallel": {"color": "tab:blue", "linestyle": "--", "marker": "^"},
    "upper-bound": {"color": "darkgrey", "linestyle": ":", "marker": "D"},
}
OTHER_STYLES = [
    {"color": c, "linestyle": "-.", "marker": m}
    for c, m in zip(("tab:green", "tab:purple", "tab:brown"), "vPX", strict=False)
]


# ---------------------------------------------------------------------------------------------------------------------
# Lines into cases


def read(path):
    """The lines of a file of bench.sh, as dicts."""
    text = checkpoint.read_text(path)
    try:
        lines = [json.loads(line) for line in text.splitlines()]
        if lines and all("probe" in line or case(line) for line in lines if line.keys() - {"command", "repeat"}):
            return lines
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    raise InputError(f"{path} holds something else than lines of bench.sh")


def setting(line):
    """What is the same in a table: everything but the wiring, the batch, the ranks and the link."""
    keys = ["model", "n_layers", "quant", "dtype", "device", "hardware", "prompt_tokens", "new_tokens", "simulated"]
    return {key: line[key] for key in keys if key in line}


def title(setting):
    kind = setting["quant"] or setting["dtype"]
    how = "PREDICTED by one rank alone: " if setting["simulated"] else ""
    tokens = f"prompt {setting['prompt_tokens']}, {setting['new_tokens']} new tokens"
    return f"{how}{setting['model']}, {setting['n_layers']} layers, {kind}, {tokens}, {setting['hardware']}"


def case(line):
    """(ranks, link, wiring, batch)"""
    wiring, link = line["wiring"], "real" if line["tp"] > 1 else "none"
    parameter = {"hybrid": "ladder_layers", "desync": "desync_period"}.get(wiring)
    if parameter:
        wiring += f":{line[parameter]}"
    if line["link"]:
        link = line["link"]["name"]
    elif line.get("settings", {}).get("NCCL_P2P_DISABLE") == "1":
        link = "no-p2p"
    return line["tp"], link, wiring, line["batch"]


class Sweep:
    """The results of one setting. runs {case: {repeat: line}}, exposed {case: line}, errors {case: what happened}."""

    def __init__(self, setting, lines):
        self.setting, self.runs, self.exposed, self.errors = setting, defaultdict(dict), {}, {}
        for line in lines:
            if "error" in line:
                self.errors[case(line)] = line["error"]
            elif line.get("exposed"):
                self.exposed[case(line)] = line
            else:
                self.runs[case(line)][line.get("repeat", 1)] = line
        self.cases = sorted(
            {*self.runs, *self.exposed, *self.errors}, key=lambda c: (c[0], c[1], self.rank(c[2]), c[3])
        )

    @staticmethod
    def rank(wiring):
        """Where a wiring stands in tables: as in STYLES, others behind them."""
        return (list(STYLES).index(wiring) if wiring in STYLES else len(STYLES)), wiring

    def values(self, case, measure):
        return {repeat: v for repeat, line in self.runs.get(case, {}).items() if (v := measure(line)) is not None}

    def ratio(self, case, over, measure):
        """The median of measure(case) / measure(over) of the repeats that have both, or None."""
        mine, other = self.values(case, measure), self.values(over, measure)
        ratios = [mine[repeat] / other[repeat] for repeat in mine.keys() & other.keys()]
        return statistics.median(ratios) if ratios else None

    def batches(self):
        return sorted({batch for *_, batch in self.cases})


def sweeps(lines):
    """A Sweep for each setting of the lines. An error belongs to every setting that it does not contradict."""
    results = [line for line in lines if "wiring" in line]
    settings = {json.dumps(setting(line)): setting(line) for line in results if "error" not in line}
    return [Sweep(s, [line for line in results if setting(line).items() <= s.items()]) for s in settings.values()]


def tok_s(line):
    return line["tok_s"]


def request_tok_s(line):
    """New tokens of all rows per second of the whole request, the prefill included, as the paper counts."""
    return line["batch"] * line["new_tokens"] / (line["prefill_s"] + line["decode_s"]) if line["prefill_s"] else None


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def markdown(head, rows):
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


def number(x):
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def by_batch(sweep, cell):
    """A table with a row for each (ranks, link, wiring) and a column for each batch size."""
    rows = dict.fromkeys(c[:3] for c in sweep.cases if c in sweep.runs or c in sweep.errors)
    head = ["ranks", "link", "wiring", *(f"batch {batch}" for batch in sweep.batches())]
    return markdown(head, [[*map(str, row), *(cell((*row, batch)) for batch in sweep.batches())] for row in rows])


def tables(sweep):
    """The tables of a sweep, as one text."""

    def measured(measure, faster_is_more=True):
        def cell(case):
            values = sweep.values(case, measure).values()
            if not values:
                return sweep.errors.get(case, "")
            text = number(statistics.median(values))
            if len(values) > 1:
                text += f" ({number(min(values))}-{number(max(values))})"
            ratio = sweep.ratio(case, (*case[:2], "standard", case[3]), measure) if case[2] != "standard" else None
            return text if ratio is None else text + f" **{ratio if faster_is_more else 1 / ratio:.2f}x**"

        return cell

    def each(case):
        lines = [line for line in sweep.runs.get(case, {}).values() if line["tpot_ms"]]
        if not lines:
            return ""
        text = f"{number(statistics.median(line['tpot_ms'] for line in lines))} ms"
        text += f", {number(statistics.median(line['tok_s_user'] for line in lines))} tok/s"
        mbu = [line["mbu"] for line in lines if line.get("mbu")]
        return text + (f", {100 * statistics.median(mbu):.0f} %" if mbu else "")

    parts = [
        (
            "Decode, tok/s of all rows (lowest-highest of the repeats) **times standard**",
            by_batch(sweep, measured(tok_s)),
        ),
        ("Decode: time per token, tok/s of each user, model bandwidth utilisation", by_batch(sweep, each)),
    ]
    if any(line["ttft_ms"] for runs in sweep.runs.values() for line in runs.values()):
        prefill = by_batch(sweep, measured(lambda line: line["ttft_ms"], faster_is_more=False))
        parts += [
            ("Prefill, ms to the first token (lowest-highest) **times as fast as standard**", prefill),
            ("Whole requests, tok/s with the prefill **times standard**", by_batch(sweep, measured(request_tok_s))),
        ]
    if sweep.exposed:
        parts.append(("Communication of a decode step", communication(sweep)))
    return f"## {title(sweep.setting)}\n\n" + "\n\n".join(f"{name}:\n\n{table}" for name, table in parts)


def communication(sweep):
    head = "ranks, link, wiring, batch, step (ms), without all-reduces, all-reduces, each (ms), exposed, hidden, limit"
    rows = []
    for key in sweep.cases:
        if key in sweep.exposed:
            r = sweep.exposed[key]["exposed"]["decode"]
            hidden = "" if r["hidden"] is None else f"{100 * r['hidden']:.0f} %"
            times = [f"{r[k]:.2f}" for k in ("step_ms", "silent_ms")] + [
                str(r["all_reduces"]),
                f"{r['all_reduce_ms']:.3f}",
            ]
            rows.append([*map(str, key), *times, f"{r['exposed_ms']:.2f}", hidden, f"{r['limit_ms']:.2f}"])
    return markdown(head.split(", "), rows)


def machine(probes):
    """What probe.py found, a table a machine."""
    parts = []
    for line in probes:
        rates = ", ".join(f"{rate / 1e9:.1f}" for rate in line["probe"]["bandwidth"])
        link = "NCCL_P2P_DISABLE=1, " * (line["settings"].get("NCCL_P2P_DISABLE") == "1")
        text = f"{line['hardware']}, {line['tp']} {'ranks' if line['tp'] > 1 else 'rank'}, {link}torch {line['torch']}, commit {line['commit']}"
        text += f": each rank reads {rates} GB/s" + "." * (not line["probe"]["all_reduce"])
        if line["probe"]["all_reduce"]:
            rows = [[f"{r['bytes']:,}", f"{r['us']:,.1f}", f"{r['gbps']:.2f}"] for r in line["probe"]["all_reduce"]]
            text += "; an all-reduce:\n\n" + markdown(["bytes", "us", "Gbit/s"], rows)
        parts.append(text)
    return "## The machine\n\n" + "\n\n".join(parts)


def comparison(before, after):
    """One table: what the same cases took in two files. Machines, commits and versions may differ."""
    pairs = []
    for sweep in (sweeps(before), sweeps(after)):
        pairs.append({})
        for s in sweep:
            about = {k: v for k, v in s.setting.items() if k not in ("hardware", "device")}
            pairs[-1] |= {(json.dumps(about), c): (s, c) for c in s.cases if c in s.runs}
    common = [key for key in pairs[0] if key in pairs[1]]
    if not common:
        raise InputError("--compare: the two files have no case in common (model, tokens, ranks, link, wiring, batch)")
    head = (
        "model, ranks, link, wiring, batch, before (tok/s), after, after / before, prefill (ms), after, before / after"
    )
    rows = []
    for key in common:
        cells = []
        for measure in (tok_s, lambda line: line["ttft_ms"]):
            a, b = ([*s.values(c, measure).values()] for s, c in (pairs[0][key], pairs[1][key]))
            if not a or not b:
                cells += ["", "", ""]
                continue
            a, b = statistics.median(a), statistics.median(b)
            cells += [number(a), number(b), f"{b / a if measure is tok_s else a / b:.2f}x"]
        about = json.loads(key[0])
        rows.append([f"{about['model']} {about['quant'] or about['dtype']}", *map(str, key[1]), *cells])
    machines = [sorted({s.setting["hardware"] for s, _ in pair.values()}) for pair in pairs]
    return f"before: {', '.join(machines[0])}; after: {', '.join(machines[1])}\n\n" + markdown(head.split(", "), rows)


# ---------------------------------------------------------------------------------------------------------------------
# Figures


def style(name, others):
    """The style of a series; `others`: the names that STYLES lacks."""
    return STYLES.get(name) or OTHER_STYLES[others.index(name) % len(OTHER_STYLES)]


def draw(panels, x_label, y_label, log_x=False):
    """A figure of lines: panels {title: {series: {x: y}}}, side by side; or None where no series has two points."""
    panels = {name: {s: p for s, p in series.items() if len(p) > 1} for name, series in panels.items()}
    panels = {name: series for name, series in panels.items() if series}
    if not panels:
        return None
    figure, axes = subplots(len(panels))
    others = sorted({s for series in panels.values() for s in series} - STYLES.keys())
    for axis, (name, series) in zip(axes, panels.items(), strict=True):
        ticks = sorted({x for points in series.values() for x in points})
        # sizes double or so: their places are even
        place = {x: x if log_x else i for i, x in enumerate(ticks)}
        for s, points in sorted(series.items(), key=lambda item: Sweep.rank(item[0])):
            xs = sorted(points)
            axis.plot([place[x] for x in xs], [points[x] for x in xs], label=s, **style(s, others))
        if log_x:
            axis.set_xscale("log")
        else:
            axis.set_xticks(range(len(ticks)), ticks)
        axis.set(title=name, xlabel=x_label)
        axis.grid(axis="y", color="0.9")
    axes[0].set_ylabel(y_label)
    labelled(figure, axes)
    return figure


def subplots(count):
    figure, axes = plt.subplots(
        1, count, figsize=(1.2 + 3.2 * count, 3.4), sharey=True, squeeze=False, layout="constrained"
    )
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes[0]


def labelled(figure, axes):
    """One legend, for all panels, above them."""
    found = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(found.values(), found.keys(), loc="outside upper center", ncols=min(len(found), 5), frameon=False)


def speedups(sweep, panel, x):
    """{panel(case): {wiring: {x(case, a line of it): how many times the standard wiring's tok/s}}}"""
    panels = defaultdict(lambda: defaultdict(dict))
    for c in sweep.cases:
        ratio = sweep.ratio(c, (*c[:2], "standard", c[3]), tok_s)
        if ratio is not None and c[0] > 1 and x(c, sweep) is not None:
            panels[panel(c)][c[2]][x(c, sweep)] = ratio
    return panels


def scaling(sweep):
    """{panel: {wiring: {ranks: how many times the tok/s of the fewest ranks' standard wiring}}}"""
    fewest, panels = min(c[0] for c in sweep.cases), defaultdict(lambda: defaultdict(dict))
    for ranks, link, wiring, batch in sweep.cases:
        for base in (c for c in sweep.cases if c[0] == fewest and c[2:] == ("standard", batch)):
            ratio = sweep.ratio((ranks, link, wiring, batch), base, tok_s)
            if ratio is not None and (ranks > fewest or base[1] in (link, "none")):
                panels[f"{link}, batch {batch}"][wiring][ranks] = ratio
                panels[f"{link}, batch {batch}"][wiring].setdefault(fewest, 1.0)
    return panels


def latency(c, sweep):
    """Microseconds of the emulated link, or None for a real one."""
    link = next(iter(sweep.runs[c].values()))["link"]
    return link and max(link["latency_us"], 1.0)


def breakdown(sweep):
    """Bars: what a decode step computes, alone or with communication hidden behind it, and what it waits."""
    panels = defaultdict(dict)
    for c, line in sweep.exposed.items():
        if "decode" in line["exposed"]:
            panels[f"{c[0]} ranks, {c[1]}, batch {c[3]}"][c[2]] = line["exposed"]["decode"]
    if not panels:
        return None
    figure, axes = plt.subplots(
        -(-len(panels) // 4), min(4, len(panels)), squeeze=False, layout="constrained",
        figsize=(1 + 3 * min(4, len(panels)), 0.8 + 1.6 * -(-len(panels) // 4)),
    )  # fmt: skip
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (name, reports) in zip(axes.flat, panels.items(), strict=False):
        for wiring in sorted(reports, key=Sweep.rank, reverse=True):
            r = reports[wiring]
            exposed = max(0.0, r["exposed_ms"])
            hidden = min(r["silent_ms"], max(0.0, r["all_reduces"] * (r["all_reduce_ms"] or 0) - exposed))
            left = 0.0
            for label, width, look in (
                ("computing", r["silent_ms"] - hidden, {"color": "0.35"}),
                ("computing, communication hidden", hidden, {"color": "0.65", "hatch": "///", "edgecolor": "0.35"}),
                ("waiting for communication", exposed, {"color": "tab:red", "hatch": "xx", "edgecolor": "white"}),
            ):
                axis.barh(wiring, width, left=left, label=label, linewidth=0, **look)
                left += width
        axis.set_title(name, fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("ms of a decode step")
    labelled(figure, axes.flat)
    return figure


def beside_paper(all_sweeps):
    """Ladder's speed-up over standard, ours and the paper's: by batch (its 70B), and by model size at batch 4."""
    paper = published()
    by_batch, by_size = defaultdict(dict), defaultdict(dict)
    rates = {(r["link"], r["wiring"], r["batch"]): r["tok_s"] for r in paper if r["tok_s"]}
    for (link, wiring, batch), rate in rates.items():
        if wiring == "ladder":
            by_batch[f"paper, 70b, {link}"][batch] = rate / rates[link, "standard", batch]
    for r in paper:
        if r["speedup"]:
            by_size[f"paper, {r['link']}"][r["model"]] = r["speedup"]
    sizes = list(dict.fromkeys(r["model"] for r in sorted(paper, key=lambda r: float(r["model"][:-1]))))
    ours = False
    for sweep in all_sweeps:
        for c in sweep.cases:
            ratio = sweep.ratio(c, (*c[:2], "standard", c[3]), tok_s) if c[2] == "ladder" and c[0] > 1 else None
            if ratio is None:
                continue
            ours, kind = True, "predicted" if sweep.setting["simulated"] else "measured"
            if sweep.setting["model"] == "70b" or not sweep.setting["simulated"]:
                by_batch[f"{kind}, {sweep.setting['model']}, {c[0]} ranks, {c[1]}"][c[3]] = ratio
            if c[3] == 4 and sweep.setting["model"] in sizes and sweep.setting["simulated"]:
                by_size[f"{kind}, {c[1]}"][sweep.setting["model"]] = ratio
    if not ours:
        return None
    figure, axes = subplots(2)
    for axis, series, ticks, label in (
        (axes[0], by_batch, sorted({b for points in by_batch.values() for b in points}), "batch"),
        (axes[1], by_size, sizes, "model, batch 4, 8 ranks (405b: 16)"),
    ):
        for i, (name, points) in enumerate(series.items()):
            look = {
                "color": f"C{i}",
                "marker": "osv^DPX*"[i % 8],
                "linestyle": "--" if name.startswith("paper") else "-",
            }
            xs = [x for x in ticks if x in points]
            axis.plot([ticks.index(x) for x in xs], [points[x] for x in xs], label=name, **look)
        axis.set_xticks(range(len(ticks)), ticks)
        axis.set_xlabel(label)
        axis.grid(axis="y", color="0.9")
        axis.legend(frameon=False, fontsize=7)
    axes[0].set_ylabel("ladder's speed / standard's")
    return figure


def published():
    """The paper's figures, from benchmarks/paper.csv, as dicts with numbers or None for tok_s and speedup."""
    lines = [line for line in PAPER.read_text().splitlines() if not line.startswith("#")]
    numbers = {"tp": int, "batch": int, "tok_s": float, "speedup": float}
    return [
        {k: (numbers[k](v) if v else None) if k in numbers else v for k, v in row.items()}
        for row in csv.DictReader(lines)
    ]


def figures(all_sweeps):
    """(name, figure) of everything that there is to draw."""
    for sweep in all_sweeps:
        s = sweep.setting
        slug = f"{s['model']}-{s['n_layers']}-{s['quant'] or s['dtype']}-{s['device']}" + "-predicted" * s["simulated"]
        slug = re.sub(r"[^\w.-]", "_", slug)
        ratio = "tok/s / standard's"
        by_batch = speedups(sweep, lambda c: f"{c[0]} ranks, {c[1]}", lambda c, sweep: c[3])
        by_link = speedups(sweep, lambda c: f"{c[0]} ranks, batch {c[3]}", latency)
        yield f"{slug}-by-batch", draw(by_batch, "batch", ratio)
        yield f"{slug}-by-ranks", draw(scaling(sweep), "ranks", "tok/s / fewest ranks', standard")
        yield f"{slug}-by-link", draw(by_link, "link's latency, us", ratio, log_x=True)
        yield f"{slug}-breakdown", breakdown(sweep)
    yield "beside-paper", beside_paper(all_sweeps)


def save(folder, name, figure):
    """Write the figure as PNG and SVG, neither of them in parts."""
    for kind in ("png", "svg"):
        path = folder / f"{name}.{kind}"
        figure.savefig(folder / f"{name}.tmp", format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
        os.replace(folder / f"{name}.tmp", path)
    plt.close(figure)


def main(argv=None):
    p = tp.Parser(__doc__)
    p.add_argument("files", metavar="FILE", nargs="*", help="lines of bench.sh")
    p.add_argument("--out", metavar="DIR", help="write tables.md and the figures into this folder")
    p.add_argument("--compare", metavar=("BEFORE", "AFTER"), nargs=2, help="print the ratios between two files")
    args = p.parse_args(argv)
    if bool(args.files) == bool(args.compare):
        raise InputError("give either files of bench.sh or --compare BEFORE AFTER")
    if args.compare:
        if args.out:
            raise InputError("--compare prints one table: it does not go with --out")
        return print(comparison(*map(read, args.compare)))
    lines = [line for file in args.files for line in read(file)]
    found, probes = sweeps(lines), [line for line in lines if "probe" in line]
    text = "\n\n".join([machine(probes)] * bool(probes) + [tables(sweep) for sweep in found])
    print(text)
    if args.out is None:
        return
    plt.rcParams |= {"svg.hashsalt": "ladder-fast", "font.size": 9}
    folder = Path(args.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tables.md").write_text(text + "\n")
        for name, figure in figures(found):
            if figure is not None:
                save(folder, name, figure)
    except OSError as e:
        raise InputError(f"--out {folder} cannot be written: {e.strerror}") from None
    print(f"\ntables and figures in {folder}")


if __name__ == "__main__":
    tp.run(main)
