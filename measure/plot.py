"""Tables and figures of what bench.sh measured.

python plot.py bench.jsonl --out figures              # tables on the terminal and in figures/tables.md, and figures
python plot.py --compare before.jsonl after.jsonl     # one table of ratios

A cell is the median of the repeats. Speed-ups are medians too, of the ratios that each repeat shows: its runs were
next to one another in time.
"""

import csv
import itertools
import json
import os
import re
import statistics
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt

import checkpoint
import tp
from model import SIZES, InputError

PAPER = Path(__file__).parent / "benchmarks" / "paper.csv"
STYLES = {  # of lines, told apart without colours too
    "standard": {"color": "black", "linestyle": "-", "marker": "o"},
    "ladder": {"color": "tab:red", "linestyle": "-", "marker": "s"},
    "parallel": {"color": "tab:blue", "linestyle": "--", "marker": "^"},
    "upper-bound": {"color": "darkgrey", "linestyle": ":", "marker": "D"},
}
OTHERS = list(itertools.product(("-.", (0, (1, 1, 4, 1))), zip("vPX*", ("C2", "C4", "C5", "C6"), strict=True)))


# ---------------------------------------------------------------------------------------------------------------------
# Lines into cases

SETTING = ["model", "n_layers", "quant", "dtype", "device", "hardware", "prompt_tokens", "new_tokens", "simulated"]
MEASURED = ["tok_s", "tok_s_user", "tpot_ms", "ttft_ms", "prefill_s", "decode_s", "mbu", "exposed"]


def read(path):
    """The lines of a file of bench.sh, as dicts that know their file. Raises InputError for other files."""
    text, lines = checkpoint.read_text(path), []
    try:
        for line in map(json.loads, text.splitlines()):
            if "probe" in line:
                complete = {"hardware", "tp", "settings"} <= line.keys()
            elif "wiring" in line:
                complete = bool(case(line)) and ("error" in line or line.keys() >= {*SETTING, *MEASURED})
            else:  # another node's
                complete = line.keys() == {"repeat", "command"}
            if not complete:
                raise KeyError
            lines.append({"repeat": 1, "command": "", **line, "file": str(path)})
    except (ValueError, TypeError, KeyError, AttributeError):
        raise InputError(f"{path} line {len(lines) + 1} is none of bench.sh's") from None
    if not lines:
        raise InputError(f"{path} is empty: it takes lines of bench.sh")
    return lines


def setting(line):
    """What is the same in a table: everything but the wiring, the batch, the ranks and the link."""
    return {key: line[key] for key in SETTING if key in line}


def title(setting):
    kind = setting.get("quant") or setting.get("dtype") or ""
    how = "PREDICTED by one rank alone: " if setting["simulated"] else ""
    tokens = f"prompt {setting['prompt_tokens']}, {setting['new_tokens']} new tokens"
    words = [setting["model"], f"{setting.get('n_layers', 'all')} layers", kind, tokens, setting.get("hardware", "")]
    return how + ", ".join(word for word in words if word)


def case(line):
    """(ranks, link, wiring, batch)"""
    wiring = line["wiring"]
    parameter = {"hybrid": "ladder_layers", "desync": "desync_period"}.get(wiring)
    if parameter:
        wiring += f":{line[parameter]}"
    return line["tp"], link(line), wiring, line["batch"]


def link(line):
    if line.get("link"):
        return line["link"]["name"]
    if line["tp"] == 1:
        return "none"
    return "no-p2p" if line.get("settings", {}).get("NCCL_P2P_DISABLE") == "1" else "real"


class Sweep:
    """The results of one setting. runs {case: {(file, repeat): line}}, exposed {case: line}, errors {case: what}.

    latencies {(ranks, link): microseconds of a small all-reduce}, of real links as probe.py found it.
    """

    def __init__(self, setting, lines, probes=()):
        self.setting, self.runs, self.exposed, self.errors = setting, defaultdict(dict), {}, {}
        for line in lines:
            key = line["file"], line["repeat"]
            if "error" in line:
                self.errors[case(line)] = line["error"]
            elif line["exposed"]:
                self.exposed[case(line)] = line
            elif key in self.runs[case(line)]:
                raise InputError(
                    f"{line['file']} has two results of {', '.join(map(str, case(line)))} in repeat {line['repeat']}: "
                    "give each file once; a sweep with other FLAGS needs an OUT of its own"
                )
            else:
                self.runs[case(line)][key] = line
        cases = {*self.runs, *self.exposed, *self.errors}
        self.cases = sorted(cases, key=lambda c: (c[0], c[1], wiring_order(c[2]), c[3]))
        self.latencies = {
            (line["tp"], link(line)): line["probe"]["all_reduce"][0]["us"]
            for line in probes
            if line["hardware"] == setting.get("hardware") and line["probe"]["all_reduce"]
        }
        for c, runs in self.runs.items():
            emulated = next(iter(runs.values()))["link"]
            if emulated:
                self.latencies[c[:2]] = emulated["latency_us"]

    def values(self, case, measure):
        return {key: v for key, line in self.runs.get(case, {}).items() if (v := measure(line)) is not None}

    def ratio(self, case, over, measure):
        """The median of measure(case) / measure(over) of the repeats that have both, or None."""
        mine, other = self.values(case, measure), self.values(over, measure)
        ratios = [mine[repeat] / other[repeat] for repeat in mine.keys() & other.keys()]
        return statistics.median(ratios) if ratios else None

    def speedup(self, case, measure):
        """The ratio over the standard wiring, all else alike."""
        return self.ratio(case, (*case[:2], "standard", case[3]), measure)

    def batches(self):
        return sorted({batch for *_, batch in self.cases})


def wiring_order(wiring):
    """Where a wiring stands in tables: as in STYLES, others behind them."""
    return (list(STYLES).index(wiring) if wiring in STYLES else len(STYLES)), wiring


def sweeps(lines):
    """A Sweep for each setting of the lines. An error belongs to every setting that it does not contradict, or to one
    of its own."""
    results, probes = [line for line in lines if "wiring" in line], [line for line in lines if "probe" in line]
    settings = []
    for line in sorted(results, key=lambda line: "error" in line):
        own = setting(line)
        if own not in settings and not ("error" in line and any(own.items() <= s.items() for s in settings)):
            settings.append(own)
    return [Sweep(s, [r for r in results if setting(r).items() <= s.items()], probes) for s in settings]


def tok_s(line):
    return line["tok_s"]


def ttft(line):
    return line["ttft_ms"]


def request_tok_s(line):
    """New tokens of all rows per second of the whole request, the prefill included, as the paper counts."""
    return line["batch"] * line["new_tokens"] / (line["prefill_s"] + line["decode_s"]) if line["prefill_s"] else None


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def markdown(head, rows):
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


def number(x):
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def spread(values):
    """The median, and from lowest to highest where there are several."""
    text = number(statistics.median(values))
    return text + f" ({number(min(values))}-{number(max(values))})" * (len(values) > 1)


def by_batch(sweep, cell):
    """A table with a row for each (ranks, link, wiring) and a column for each batch size."""
    rows = dict.fromkeys(c[:3] for c in sweep.cases)
    head = ["ranks", "link", "wiring", *(f"batch {batch}" for batch in sweep.batches())]
    return markdown(head, [[*map(str, row), *(cell((*row, batch)) for batch in sweep.batches())] for row in rows])


def tables(sweep):
    """The tables of a sweep, as one text."""

    def measured(measure, faster_is_more=True):
        def cell(case):
            values = sweep.values(case, measure).values()
            if not values:
                return sweep.errors.get(case, "")
            ratio = sweep.speedup(case, measure) if case[2] != "standard" else None
            if ratio is None:
                return spread(values)
            return f"{spread(values)} **{ratio if faster_is_more else 1 / ratio:.2f}x**"

        return cell

    def each(case):
        times, users, shares = (
            sweep.values(case, lambda line, key=key: line[key]).values() for key in ("tpot_ms", "tok_s_user", "mbu")
        )
        if not times:
            return ""
        text = f"{number(statistics.median(times))} ms, {number(statistics.median(users))} tok/s"
        return text + (f", {100 * statistics.median(shares):.0f} %" if shares else "")

    decode = "Decode, tok/s of all rows (lowest-highest of the repeats) **times standard**"
    parts = {
        decode: by_batch(sweep, measured(tok_s)),
        "Decode: time per token, tok/s of each user, model bandwidth utilisation": by_batch(sweep, each),
    }
    if any(sweep.values(c, ttft) for c in sweep.runs):
        parts |= {
            "Prefill, ms to the first token **times as fast as standard**": by_batch(sweep, measured(ttft, False)),
            "Whole requests, tok/s with the prefill **times standard**": by_batch(sweep, measured(request_tok_s)),
        }
    if sweep.exposed:
        parts["Communication of a prefill in one pass, and of a decode step (ms)"] = communication(sweep)
    return f"## {title(sweep.setting)}\n\n" + "\n\n".join(f"{name}:\n\n{table}" for name, table in parts.items())


def communication(sweep):
    head = "ranks, link, wiring, batch, , step, without all-reduces, all-reduces, each, exposed, hidden, limit"
    rows = []
    for c in (c for c in sweep.cases if c in sweep.exposed):
        for kind, r in sweep.exposed[c]["exposed"].items():
            hidden = "" if r["hidden"] is None else f"{100 * r['hidden']:.0f} %"
            times = [f"{r['step_ms']:.2f}", f"{r['silent_ms']:.2f}", str(r["all_reduces"]), f"{r['all_reduce_ms']:.3f}"]
            rows.append([*map(str, c), kind, *times, f"{r['exposed_ms']:.2f}", hidden, f"{r['limit_ms']:.2f}"])
    return markdown(head.split(", "), rows)


def machine(probes):
    """What probe.py found."""
    parts = []
    for line in probes:
        rates = ", ".join(f"{rate / 1e9:.1f}" for rate in line["probe"]["bandwidth"])
        ranks = "one rank" if line["tp"] == 1 else f"{line['tp']} ranks, link {link(line)}"
        text = f"{line['hardware']}, torch {line['torch']}, commit {line['commit']}; {ranks}. "
        text += f"Each reads so many GB/s from memory: {rates}."
        if line["probe"]["all_reduce"]:
            rows = [[f"{r['bytes']:,}", f"{r['us']:,.1f}", f"{r['gbps']:.2f}"] for r in line["probe"]["all_reduce"]]
            text += "\n\n" + markdown(["all-reduce of (bytes)", "us", "Gbit/s"], rows)
        parts.append(text)
    topologies = {line["topology"] for line in probes if line.get("topology")}
    return "## The machine\n\n" + "\n\n".join(parts + [f"```\n{t.strip()}\n```" for t in topologies])


def comparison(before, after):
    """One table: what the same cases took in two files. Machines, commits and versions may differ."""
    pairs = []
    for found in map(sweeps, (before, after)):
        pairs.append({})
        for s in found:
            about = [s.setting.get(k) for k in SETTING if k not in ("hardware", "device")]
            for c in (c for c in s.cases if c in s.runs or c in s.errors):
                if pairs[-1].setdefault((*about, c), (s, c)) != (s, c):
                    raise InputError("--compare: one of the files has results of several machines")
    common = [key for key in pairs[0] if key in pairs[1]]
    if not common:
        raise InputError("--compare: the two files have no case in common (model, tokens, ranks, link, wiring, batch)")
    rows = []
    for key in common:
        cells = []
        for measure in (tok_s, ttft):
            a, b = ([*s.values(c, measure).values()] for s, c in (pairs[0][key], pairs[1][key]))
            cells += [spread(x) if x else s.errors.get(c, "") for x, (s, c) in ((a, pairs[0][key]), (b, pairs[1][key]))]
            ratio = statistics.median(b) / statistics.median(a) if a and b else None
            cells.append("" if ratio is None else f"{ratio if measure is tok_s else 1 / ratio:.2f}x")
        rows.append([title({**pairs[0][key][0].setting, "hardware": ""}), *map(str, key[-1]), *cells])
    head = "setting, ranks, link, wiring, batch, tok/s before, after, times, prefill (ms) before, after, times as fast"
    machines = [", ".join(sorted({s.setting.get("hardware", "?") for s, _ in pair.values()})) for pair in pairs]
    return f"before: {machines[0]}; after: {machines[1]}\n\n" + markdown(head.split(", "), rows)


# ---------------------------------------------------------------------------------------------------------------------
# Figures


def subplots(count, width, height, **options):
    """A figure of so many panels, at most four in a row."""
    columns = min(4, count)
    rows = -(-count // columns)
    size = 1 + width * columns, 0.7 + height * rows  # inches
    figure, axes = plt.subplots(rows, columns, squeeze=False, layout="constrained", figsize=size, **options)
    for axis in axes.flat[count:]:
        axis.set_visible(False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes.flat[:count])


def labelled(figure, axes, inches=1.9):
    """One legend, for all panels, above them; a label takes so many inches."""
    found = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    columns = int(figure.get_figwidth() / inches)
    figure.legend(found.values(), found.keys(), loc="outside upper center", ncols=columns, frameon=False)


def curve(axis, points, ticks, **look):
    """A line through {x: y}; the ticks are at even distances."""
    xs = [x for x in ticks if x in points]
    axis.plot([ticks.index(x) for x in xs], [points[x] for x in xs], **look)
    axis.set_xticks(range(len(ticks)), ticks)
    axis.grid(axis="y", color="0.9")


def draw(panels, x_label, y_label):
    """A figure of lines: panels {title: {wiring: {x: y}}}; or None where no line has two points."""
    panels = {name: {s: p for s, p in series.items() if len(p) > 1} for name, series in panels.items()}
    panels = {name: series for name, series in panels.items() if series}
    if not panels:
        return None
    figure, axes = subplots(len(panels), 3, 2.7, sharey=True)
    others = sorted({s for series in panels.values() for s in series} - STYLES.keys())
    for axis, (name, series) in zip(axes, panels.items(), strict=True):
        ticks = sorted({x for points in series.values() for x in points})
        for wiring in sorted(series, key=wiring_order):
            look = STYLES.get(wiring)
            if look is None:
                dashes, (marker, color) = OTHERS[others.index(wiring) % len(OTHERS)]
                look = {"color": color, "linestyle": dashes, "marker": marker}
            curve(axis, series[wiring], ticks, label=wiring, **look)
        axis.set_title(name, fontsize=9)
        axis.set_xlabel(x_label)
    axes[0].set_ylabel(y_label)
    labelled(figure, axes)
    return figure


def speedups(sweep, panel, x):
    """{panel(case): {wiring: {x(case): tok/s over standard's}}}, of several ranks; an x of None is left out."""
    panels = defaultdict(lambda: defaultdict(dict))
    for c in sweep.cases:
        ratio = sweep.speedup(c, tok_s)
        if ratio is not None and c[0] > 1 and x(c) is not None:
            panels[panel(c)][c[2]][x(c)] = ratio
    return panels


def scaling(sweep):
    """{panel: {wiring: {ranks: tok/s over those of the fewest ranks' standard wiring over the same link}}}.

    All wirings cost one rank about the same: there their lines begin together.
    """
    panels = defaultdict(lambda: defaultdict(dict))
    for ranks, over, wiring, batch in (c for c in sweep.cases if c[0] > 1):
        bases = [c for c in sweep.cases if c[2:] == ("standard", batch) and c[1] in (over, "none") and c in sweep.runs]
        ratio = sweep.ratio((ranks, over, wiring, batch), bases[0], tok_s) if bases else None
        if ratio is not None:
            points = panels[f"{over}, batch {batch}"][wiring]
            points[ranks] = ratio
            if bases[0][0] == 1:
                points[1] = 1.0
    return panels


def breakdown(sweep):
    """Bars: what a decode step computes, alone or with communication hidden behind it, and what is exposed of that."""
    panels = defaultdict(dict)
    for c in (c for c in sweep.cases if c in sweep.exposed):
        panels[f"{c[0]} ranks, {c[1]}, batch {c[3]}"][c[2]] = sweep.exposed[c]["exposed"]["decode"]
    if not panels:
        return None
    figure, axes = subplots(len(panels), 3, 0.6 + 0.25 * max(map(len, panels.values())))
    for axis, (name, reports) in zip(axes, panels.items(), strict=True):
        for wiring in sorted(reports, key=wiring_order, reverse=True):
            r = reports[wiring]
            exposed = max(0.0, r["exposed_ms"])
            # only these compute while they wait; what others seem to hide is noise
            hides = wiring.startswith(("ladder", "hybrid"))
            hidden = min(r["silent_ms"], max(0.0, r["all_reduces"] * r["all_reduce_ms"] - exposed)) if hides else 0.0
            left = 0.0
            for label, width, look in (
                ("computing", r["silent_ms"] - hidden, {"color": "0.35"}),
                ("computing, hidden communication", hidden, {"color": "0.75", "hatch": "///", "edgecolor": "0.35"}),
                ("exposed communication", exposed, {"color": "tab:red", "hatch": "xx", "edgecolor": "white"}),
            ):
                axis.barh(wiring, width, left=left, label=label, linewidth=0, **look)
                left += width
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("ms of a decode step")
    labelled(figure, axes, inches=2.7)
    return figure


def beside_paper(found):
    """Ladder's tok/s over standard's, ours and the paper's: by batch (its 70b), and by model size at batch 4.

    Whole requests, as the paper counts; decode alone where no prefill was measured.
    """
    by_batch, by_size, rates = defaultdict(dict), defaultdict(dict), {}
    for r in published():
        if r["speedup"]:
            by_size[f"paper, {r['link']}"][r["model"]] = r["speedup"]
        else:
            rates[r["link"], r["wiring"], r["batch"]] = r["tok_s"]
    for (over, wiring, batch), rate in rates.items():
        if wiring == "ladder":
            by_batch[f"paper, {over}"][batch] = rate / rates[over, "standard", batch]
    papers = len(by_batch)
    for sweep in found:
        s, kind = sweep.setting, "predicted" if sweep.setting["simulated"] else "measured"
        whole = s["model"] in SIZES and s.get("n_layers") == SIZES[s["model"]].n_layers and s.get("quant") is None
        for c in (c for c in sweep.cases if c[2] == "ladder" and c[0] > 1):
            ratio = sweep.speedup(c, request_tok_s) or sweep.speedup(c, tok_s)
            if ratio is None or not whole:
                continue
            ranks = 16 if s["model"] == "405b" else 8
            if c[3] == 4 and c[0] == ranks:
                by_size[f"{kind}, {c[1]}, {s.get('hardware')}"][s["model"]] = ratio
            if s["model"] == "70b" or c[0] != ranks:
                by_batch[f"{kind}, {s['model']}, {c[0]} ranks, {c[1]}, {s.get('hardware')}"][c[3]] = ratio
    if len(by_batch) == papers == len(by_size):
        return None
    figure, axes = subplots(2, 4.5, 4.5, sharey=True)
    for axis, series, ticks, name in (
        (axes[0], by_batch, sorted({b for points in by_batch.values() for b in points}), "70b, 8 ranks, if not said"),
        (axes[1], by_size, list(SIZES), "batch 4, 8 ranks (405b: 16)"),
    ):
        for i, (label, points) in enumerate(series.items()):
            dashes = "--" if label.startswith("paper") else "-"
            curve(axis, points, ticks, label=label, color=f"C{i}", marker="osv^DPX*"[i % 8], linestyle=dashes)
        axis.set_title(name, fontsize=9)
        axis.legend(frameon=False, fontsize=6, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    axes[0].set(ylabel="ladder's tok/s / standard's", xlabel="batch")
    axes[1].set_xlabel("model")
    return figure


def published():
    """The paper's figures, from benchmarks/paper.csv, as dicts with numbers or None for tok_s and speedup."""
    lines = [line for line in PAPER.read_text().splitlines() if not line.startswith("#")]
    numbers = {"tp": int, "batch": int, "tok_s": float, "speedup": float}
    return [
        {k: (numbers[k](v) if v else None) if k in numbers else v for k, v in row.items()}
        for row in csv.DictReader(lines)
    ]


def figures(found):
    """(name, figure or None) of all that there is to draw."""
    names = defaultdict(int)
    for sweep in found:
        s, ratio = sweep.setting, "tok/s / standard's"
        kind = s.get("quant") or s.get("dtype")
        name = f"{s['model']}-{s.get('n_layers')}-{kind}-{s['device']}" + "-predicted" * s["simulated"]
        name = re.sub(r"[^\w.-]", "_", name)
        names[name] += 1
        name += f"-{names[name]}" * (names[name] > 1)
        batches = speedups(sweep, lambda c: f"{c[0]} ranks, {c[1]}", lambda c: c[3])
        yield f"{name}-by-batch", draw(batches, "batch", ratio)
        yield f"{name}-by-ranks", draw(scaling(sweep), "ranks", "tok/s / fewest ranks', standard")
        delays = {key: round(us) for key, us in sweep.latencies.items()}
        links = speedups(sweep, lambda c: f"{c[0]} ranks, batch {c[3]}", lambda c, d=delays: d.get(c[:2]))
        yield f"{name}-by-link", draw(links, "a small all-reduce, us", ratio)
        yield f"{name}-breakdown", breakdown(sweep)
    yield "beside-paper", beside_paper(found)


def save(folder, name, figure):
    """Write the figure as PNG and SVG, neither of them in parts."""
    for kind in ("png", "svg"):
        # without the date, so that the same lines make the same file
        figure.savefig(folder / f"{name}.tmp", format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
        os.replace(folder / f"{name}.tmp", folder / f"{name}.{kind}")
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
    if args.out is None:
        return print(text)
    plt.rcParams |= {"svg.hashsalt": "ladder-fast", "font.size": 9}
    folder = Path(args.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        print(text)
        (folder / "tables.md").write_text(text + "\n")
        drawn = False
        for name, figure in figures(found):  # one at a time: an open one takes memory
            if figure is not None:
                save(folder, name, figure)
                drawn = True
    except OSError as e:
        raise InputError(f"--out {folder} cannot be written: {e.strerror}") from None
    print(f"\ntables{' and figures' * drawn} in {folder}")


if __name__ == "__main__":
    tp.run(main)
