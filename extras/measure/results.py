"""Tables of bench.sh's results: its lines read, grouped into settings and cases, and written in markdown.

A cell is the median of the repeats. Speed-ups are medians too, of the ratios that each repeat shows: its runs were
next to one another in time. Noise is marked, see LEGEND.
"""

import csv
import json
import re
import statistics
import sys
from collections import defaultdict
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from formats.checkpoint import read_text
from formats.wiring_text import wiring_name
from model import WIRINGS
from runtime.errors import InputError
from runtime.report import bandwidth_share
from runtime.timing import hidden_share, overlapping, quartiles

PAPER = Path(__file__).parents[2] / "benchmarks" / "results" / "paper.csv"
SETTING = ["model", "n_layers", "quant", "dtype", "device", "hardware", "prompt_tokens", "new_tokens", "simulated"]
LEGEND = {
    "~": "`~`: within noise, the quartiles of its repeats and of standard's overlap",
    "^": "`^`: above the upper bound, which no wiring can be: noise",
    "(one run)": "`(one run)`: no repeats that say how far it wanders",
}


# ---- Lines into cases ------------------------------------------------------------------------------------------------


def mean_accepted(counts):
    """Return the mean number of accepted proposals; counts[n]: how often n were accepted."""
    return sum(n * times for n, times in enumerate(counts)) / (sum(counts) or 1)


class Case(NamedTuple):
    ranks: int
    link: str
    wiring: str  # and the draft, if any: ladder + ngram@4
    batch: int


def read(path):
    """Return the lines of a file of bench.sh, as dicts that know their file. One that was cut off is left out."""
    lines = []
    for n, text in enumerate(read_text(path).splitlines(), 1):
        if not text.startswith("{"):
            raise InputError(f"{path} line {n} was not written by bench.sh")
        try:
            lines.append({"repeat": 1, "command": "", **json.loads(text), "file": str(path)})
        except ValueError:
            print(f"{path} line {n} was cut off, and is left out", file=sys.stderr)
    if any("wiring" in line and "exposed" not in line for line in lines):  # of another benchmark
        raise InputError(f"{path} was not written by bench.sh")
    return lines


def title(setting):
    """Return what a setting is, in words."""
    how = "PREDICTED by one rank alone: " if setting["simulated"] else ""
    new = setting["new_tokens"]
    words = [setting["model"], f"{setting['n_layers']} layers", setting["quant"] or setting["dtype"]]
    words += [f"prompt {setting['prompt_tokens']}, {new} new token{'s' * (new > 1)}", setting["hardware"]]
    return how + ", ".join(word for word in words if word)


def case(line):
    """Return the Case of a line."""
    draft = f" + {line['draft']}@{line['speculate']}" if line.get("draft") else ""
    return Case(line["tp"], link(line), wired(line) + draft, line["batch"])


def wired(line):
    """Return the wiring of a line as parse_wiring reads it; older lines have hybrid, desync and desync-2."""
    if line["wiring"] == "hybrid":  # in benchmarks/overlap.py half of the layers
        return wiring_name("ladder", line.get("ladder_layers") or line.get("layers") or line["n_layers"] // 2)
    if line["wiring"] == "desync":
        return wiring_name("desync", line.get("desync_period"))
    return re.sub(r"^desync-(\d+)$", r"desync:\1", line["wiring"])


def link(line):
    """Return the name of a line's link: of an emulated one, or none, real or no-p2p."""
    if line.get("link"):
        return line["link"]["name"]
    if line["tp"] == 1:
        return "none"
    return "no-p2p" if line.get("settings", {}).get("NCCL_P2P_DISABLE") == "1" else "real"


def base(wiring):
    """Return the name of a wiring without its numbers and draft."""
    return re.sub(r"(-\d+)?([:/].*)?$", "", wiring.partition(" + ")[0])


def draft_of(wiring):
    """Return the draft that a case's wiring ends with, or ""."""
    return wiring.partition(" + ")[2]


def wiring_order(wiring):
    """Return the key that sorts wirings in tables and figures: as in model.WIRINGS, then by the parameter."""
    names = list(WIRINGS)
    return (names.index(base(wiring)) if base(wiring) in names else len(names)), len(wiring), wiring


class Sweep:
    """The results of one setting. runs {Case: {(file, repeat): line}}, exposed {Case: line}.

    latencies {(ranks, link): microseconds of a small all-reduce}, of emulated links.
    """

    def __init__(self, setting, lines):
        self.setting, self.runs, self.exposed, self.latencies = setting, defaultdict(dict), {}, {}
        for line in lines:
            c, key = case(line), (line["file"], line["repeat"])
            if line["link"]:
                self.latencies[c[:2]] = line["link"]["latency_us"]
            if line["exposed"]:
                self.exposed[c] = line
            elif key in self.runs[c]:
                which = f"{line['file']} has two results of {', '.join(map(str, c))} in repeat {line['repeat']}"
                raise InputError(f"{which}: give each file once; a sweep with other FLAGS needs an OUT of its own")
            else:
                self.runs[c][key] = line
        cases = {*self.runs, *self.exposed}
        self.cases = sorted(cases, key=lambda c: (c.ranks, c.link, wiring_order(c.wiring), c.batch))
        self.batches = sorted({c.batch for c in cases})
        self.repeats = max(map(len, self.runs.values()), default=0)

    def values(self, case, measure):
        """Return {(file, repeat): measure(line)} of a case."""
        return {key: v for key, line in self.runs.get(case, {}).items() if (v := measure(line)) is not None}

    def ratios(self, case, over, measure):
        """Return [measure(case) / measure(over)] of the repeats that have both."""
        mine, other = self.values(case, measure), self.values(over, measure)
        return [mine[repeat] / other[repeat] for repeat in mine.keys() & other.keys()]

    def speedups(self, case, measure):
        """Return the ratios over the standard wiring without a draft, all else alike."""
        return self.ratios(case, case._replace(wiring="standard"), measure)


def sweeps(lines):
    """Return a Sweep for each setting of the lines."""
    found = defaultdict(list)
    for line in lines:
        if "wiring" in line:
            found[tuple(line[key] for key in SETTING)].append(line)
    return [Sweep(dict(zip(SETTING, values, strict=True)), same) for values, same in found.items()]


tok_s = itemgetter("tok_s")


def prefill_rate(line):
    """Return prefills per second."""
    return 1e3 / line["ttft_ms"]


def published():
    """Return the rows of paper.csv that have a rate, as dicts."""
    rows = csv.DictReader(line for line in PAPER.read_text().splitlines() if not line.startswith("#"))
    return [row | {"batch": int(row["batch"]), "tok_s": float(row["tok_s"])} for row in rows if row["tok_s"]]


# ---- Tables ----------------------------------------------------------------------------------------------------------


def speedup(sweep, case, rate):
    """Return a case's speed over standard's as text, marked as LEGEND says; "" where there is none."""
    ratios = sweep.speedups(case, rate)
    if case.wiring == "standard" or not ratios:
        return ""
    mine, standard, bound = (
        [*sweep.values(case._replace(wiring=wiring), rate).values()]
        for wiring in (case.wiring, "standard", "upper-bound")
    )
    text = f"{statistics.median(ratios):.2f}x"
    bounded = case.wiring != "upper-bound" and not draft_of(case.wiring)
    above = "^" if bounded and bound and statistics.median(mine) > statistics.median(bound) else ""
    if len(ratios) == 1:
        return f"{text}{above} (one run)"
    if overlapping(quartiles(mine)[::2], quartiles(standard)[::2]):
        return f"~{text}{above}"
    return f"{text}^" if above else f"**{text}**"


def load(lines):
    """Return a sentence on other programs of the machine, or "". The sweep itself is a load of about one per core."""
    busy = [line["load"] for line in lines if line.get("load", 0) > 1.25 * line.get("cores", 0)]
    if not busy:
        return ""
    when = f"when {len(busy)} of {len(lines)} commands began (load average up to {max(busy)})"
    return f"Expect noise: other programs used the cores {when}."


def markdown(head, rows):
    """Return a table: head a list of cells, rows lists of as many. All tables of the project are written by this."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


def explained(table, marks):
    """Return the table, and below it a line on the meaning of the marks that it has."""
    found = [LEGEND[mark] for mark in marks if any(mark in cell for row in table[1] for cell in row)]
    return markdown(*table) + f"\n\n{'; '.join(found)}." * bool(found)


def three_digits(x):
    """Return a number as text with three digits, or all of them before the point."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def spread(values):
    """Return the median, and the range where there are several, as text."""
    text = three_digits(statistics.median(values))
    return text + f" ({three_digits(min(values))}-{three_digits(max(values))})" * (len(values) > 1)


def by_batch(sweep, cell, cases=None):
    """Return a table with a row for each (ranks, link, wiring) of some cases, or all, and a column for each batch."""
    places = dict.fromkeys(c[:3] for c in cases or sweep.cases)
    head = ["ranks", "link", "wiring", *(f"batch {batch}" for batch in sweep.batches)]
    rows = [[str(place[0]), *place[1:], *(cell(Case(*place, batch)) for batch in sweep.batches)] for place in places]
    return explained((head, rows), ("~", "^", "(one run)"))


def tables(sweep):
    """Return the tables of a sweep, as one text."""

    def measured(measure, rate):
        def cell(case):
            values = sweep.values(case, measure).values()
            return f"{spread(values)} {speedup(sweep, case, rate)}".rstrip() if values else ""

        return by_batch(sweep, cell)

    def each(case):
        measures = itemgetter("tpot_ms"), itemgetter("tok_s_user"), bandwidth_share
        times, users, shares = (sweep.values(case, measure).values() for measure in measures)
        if not times:
            return ""
        text = f"{three_digits(statistics.median(times))} ms, {three_digits(statistics.median(users))} tok/s"
        return text + (f", {100 * statistics.median(shares):.0f} %" if shares else "")

    def accepted(case):
        values = sweep.values(case, lambda line: mean_accepted(line["accepted"])).values()
        return spread(values) if values else ""

    how = " (lowest-highest of the repeats)" if sweep.repeats > 1 else ""
    parts = {
        f"Decode, tok/s of all rows{how} **times standard**": measured(tok_s, tok_s),
        "Decode: time per token, tok/s of each user, model bandwidth utilisation": by_batch(sweep, each),
        "Prefill, ms to the first token **times as fast as standard**": measured(itemgetter("ttft_ms"), prefill_rate),
    }
    if drafted := [c for c in sweep.runs if draft_of(c.wiring)]:
        parts["Accepted proposals, of a row in a pass with any (mean)"] = by_batch(sweep, accepted, drafted)
    if sweep.exposed:
        parts["Communication of a prefill in one pass, and of a decode step (ms)"] = communication(sweep)
    return f"## {title(sweep.setting)}\n\n" + "\n\n".join(f"{name}:\n\n{table}" for name, table in parts.items())


def communication(sweep):
    """Return the table of the runs with --exposed: a row for each case and kind of step."""
    head = "ranks, link, wiring, batch, , step, without all-reduces, all-reduces, each, exposed, hidden, limit"
    rows = []
    for c in (c for c in sweep.cases if c in sweep.exposed):
        for kind, r in sweep.exposed[c]["exposed"].items():
            low, high = r["quartiles_ms"]
            step = f"{r['step_ms']:.2f} ({low:.2f}-{high:.2f})"
            alone = [f"{r['silent_ms']:.2f}", str(r["all_reduces"]), f"{r['all_reduce_ms']:.3f}"]
            hides = hidden_share(r) if r["all_reduces"] else ""
            limit = "" if r["limit_ms"] is None else f"{r['limit_ms']:.2f}"
            rows.append([*map(str, c), kind, step, *alone, f"{r['exposed_ms']:.2f}", hides, limit])
    return markdown(head.split(", "), rows) + "\n\nstep: the median (its quartiles); docs/measuring.md has the rest."


def machine(probes):
    """Return the results of extras/measure/probe.py, as text."""
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
    return "## The machine\n\n" + "\n\n".join(parts)


def report(lines):
    """Return all tables of the lines, as one text."""
    probes = [line for line in lines if "probe" in line]
    failed = dict.fromkeys(f"- {line['error']}: `{line['command']}`" for line in lines if "error" in line)
    parts = [load(lines), machine(probes) if probes else "", *map(tables, sweeps(lines)), "\n".join(failed)]
    return "\n\n".join(part for part in parts if part)
