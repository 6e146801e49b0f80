"""What bench.sh measured, as tables: its lines read, grouped into settings and cases, and written in markdown.

A cell is the median of the repeats. Speed-ups are medians too, of the ratios that each repeat shows: its runs were
next to one another in time. What may be noise is marked as that, see LEGEND.
"""

import csv
import json
import re
import statistics
from collections import defaultdict
from operator import itemgetter
from pathlib import Path

from formats.checkpoint import has_type, read_text
from measure.report import bandwidth_share, mean_accepted
from measure.timing import hidden_share, overlapping, quartiles
from model import WIRINGS, InputError, wiring_name

PAPER = Path(__file__).parent.parent / "benchmarks" / "results" / "paper.csv"
SETTING = ["model", "n_layers", "quant", "dtype", "device", "hardware", "prompt_tokens", "new_tokens", "simulated"]
MEASURED = ["tok_s", "tok_s_user", "tpot_ms", "ttft_ms", "prefill_s", "decode_s", "mbu", "exposed"]
LEGEND = {
    "~": "`~`: within noise, the quartiles of its repeats and of standard's overlap",
    "^": "`^`: above the upper bound, which no wiring can be: noise",
    "(one run)": "`(one run)`: no repeats that say how far it wanders",
    "within noise": "within noise: what it would hide is less than the quartiles of the step lie apart",
    "none": "none: in the step all-reduces cost more than on their own",
    "-": "`-`: a wiring that waits for each sum before it goes on, so it can hide none",
}


# ---------------------------------------------------------------------------------------------------------------------
# Lines into cases


def is_word(value):
    return isinstance(value, str) and value.isprintable() and len(value) <= 1000


def is_text(value):
    return isinstance(value, str) and all(map(is_word, value.splitlines()))


def is_finite(value):
    return type(value) in (int, float) and abs(value) <= 1e30


def is_from_0(value):
    return is_finite(value) and value >= 0


def is_bool(value):
    return isinstance(value, bool)


def one(kind):
    """A check of what checkpoint.has_type takes: whole and other numbers are positive."""
    return lambda value: has_type(value, kind)


def each(check, count=None):
    return lambda value: isinstance(value, list) and all(map(check, value)) and count in (None, len(value))


def has(checks):
    return lambda value: isinstance(value, dict) and all(key in value and checks[key](value[key]) for key in checks)


def maybe(*checks):
    return lambda value: value is None or any(check(value) for check in checks)


REPORTED = {  # by --exposed, of a kind of step
    **dict.fromkeys(("step_ms", "silent_ms", "all_reduces", "all_reduce_ms"), is_from_0),
    "quartiles_ms": each(is_from_0, 2), "exposed_ms": is_finite, "hidden": maybe(is_finite), "limit_ms": is_finite,
}  # fmt: skip
ALL_REDUCE = {"bytes": one(int), "us": is_from_0, "gbps": is_from_0}
KINDS = {  # what the values that are read of a line must be, where it has them
    "command": maybe(is_text), "topology": maybe(lambda value: isinstance(value, str)),  # printable() is for that
    **dict.fromkeys(("error", "wiring", "torch", "model"), is_word),
    **dict.fromkeys(("commit", "quant", "dtype", "device", "hardware"), maybe(is_word)),
    **dict.fromkeys(("repeat", "prompt_tokens", "step_bytes"), is_from_0),
    **dict.fromkeys(("batch", "tp", "new_tokens"), one(int)),
    **dict.fromkeys(("tok_s", "tok_s_user", "tpot_ms"), maybe(one(float))),
    **dict.fromkeys(("ttft_ms", "prefill_s", "decode_s", "mbu"), maybe(is_from_0)),
    "simulated": is_bool, "n_layers": maybe(one(int)),
    "draft": maybe(is_word), "speculate": maybe(one(int), is_word), "accepted": maybe(each(is_from_0)),
    "ladder_layers": maybe(one(int), is_word, each(is_from_0)), "link": maybe(has({"name": is_word})),
    "settings": has({}), "probe": has({"bandwidth": each(is_from_0), "all_reduce": each(has(ALL_REDUCE))}),
    "exposed": lambda value: value is None or (has({})(value) and all(map(has(REPORTED), value.values()))),
}  # fmt: skip


def is_complete(line):
    """Whether a line has what bench.sh writes."""
    if not has({key: KINDS[key] for key in KINDS.keys() & line.keys()})(line):
        return False
    if "probe" in line:
        return line.keys() >= {"hardware", "tp", "settings", "torch", "commit"}
    if "wiring" not in line:  # another node's
        return line.keys() == {"repeat", "command"}
    if "error" in line:
        return bool(case(line)) and line.keys() >= {"model", "new_tokens", "simulated"}
    if not line.keys() >= {*SETTING, *MEASURED} or (line.get("draft") and line["accepted"] is None):
        return False
    together = [line[key] is None for key in ("tok_s", "tok_s_user", "tpot_ms")]
    times = len({*together}) == 1 and (line["prefill_s"] is None) == (line["decode_s"] is None)
    emulated = not line.get("link") or is_from_0(line["link"].get("latency_us"))
    return bool(case(line)) and times and emulated


def read(path):
    """The lines of a file of bench.sh, as dicts that know their file. Raises InputError for other files."""
    text, lines = read_text(path), []
    try:
        for line in map(json.loads, text.splitlines()):
            if not is_complete(line):
                raise ValueError
            lines.append({"repeat": 1, "command": "", **line, "file": str(path)})
    except (ValueError, TypeError, KeyError, AttributeError):
        raise InputError(f"{path} line {len(lines) + 1} was not written by bench.sh") from None
    if not lines:
        raise InputError(f"{path} is empty: it takes lines of bench.sh")
    return lines


def setting(line):
    """What is the same in a table: everything but the wiring, the draft, the batch, the ranks and the link."""
    return {key: line[key] for key in SETTING if key in line}


def machine_name(setting):
    """What it ran on, as far as its lines say."""
    hardware = setting.get("hardware")
    if hardware in (None, "hardware not recorded"):
        return {"cpu": "a CPU", "cuda": "a GPU"}.get(setting.get("device"), "a machine")
    return hardware


def title(setting):
    kind = setting.get("quant") or setting.get("dtype") or ""
    how = "PREDICTED by one rank alone: " if setting["simulated"] else ""
    new = setting["new_tokens"]
    tokens = f"prompt {setting.get('prompt_tokens', 'of a file')}, {new} new token{'s' * (new > 1)}"
    words = [setting["model"], f"{setting.get('n_layers', 'all')} layers", kind, tokens, machine_name(setting)]
    return how + ", ".join(word for word in words if word)


def case(line):
    """(ranks, link, wiring, batch); the wiring as wired says, and behind it the draft, if any: ladder + ngram@4."""
    draft = f" + {line['draft']}@{line['speculate']}" if line.get("draft") else ""
    return line["tp"], link(line), wired(line) + draft, line["batch"]


def wired(line):
    """The wiring as parse_wiring reads it, also of lines from before a wiring was one word: ladder:8 of a hybrid."""
    name = line["wiring"].replace("hybrid", "ladder")
    value = line.get("desync_period") if name == "desync" else line.get("ladder_layers")
    return name if ":" in name else wiring_name(name, value)


def link(line):
    if line.get("link"):
        return line["link"]["name"]
    if line["tp"] == 1:
        return "none"
    return "no-p2p" if line.get("settings", {}).get("NCCL_P2P_DISABLE") == "1" else "real"


def base(wiring):
    """The name of a wiring without its parameter and draft."""
    return wiring.partition(" + ")[0].partition(":")[0]


def draft_of(wiring):
    """The draft that a case's wiring ends with, or ""."""
    return wiring.partition(" + ")[2]


def columns(cases):
    """(the heading of (ranks, link, wiring), a function from a case to its cells); drafts have one where any is."""
    if not any(draft_of(c[2]) for c in cases):
        return ["ranks", "link", "wiring"], lambda c: [str(c[0]), *c[1:3]]
    return ["ranks", "link", "wiring", "draft"], lambda c: [
        str(c[0]),
        c[1],
        c[2].partition(" + ")[0],
        draft_of(c[2]) or "none",
    ]


def wiring_order(wiring):
    """Where a wiring stands in tables and figures: as in model.WIRINGS, then by its parameter."""
    names = list(WIRINGS)
    return (names.index(base(wiring)) if base(wiring) in names else len(names)), len(wiring), wiring


class Sweep:
    """The results of one setting. runs {case: {(file, repeat): line}}, exposed {case: line}, errors {case: what}.

    latencies {(ranks, link): microseconds of a small all-reduce}, of real links as measure/probe.py found it.
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
            emulated = next(iter(runs.values())).get("link")
            if emulated:
                self.latencies[c[:2]] = emulated["latency_us"]

    def values(self, case, measure):
        """{(file, repeat): measure(line)} of a case."""
        return {key: v for key, line in self.runs.get(case, {}).items() if (v := measure(line)) is not None}

    def ratios(self, case, over, measure):
        """measure(case) / measure(over) of the repeats that have both."""
        mine, other = self.values(case, measure), self.values(over, measure)
        return [mine[repeat] / other[repeat] for repeat in mine.keys() & other.keys()]

    def speedups(self, case, measure):
        """The ratios over the standard wiring without a draft, all else alike."""
        return self.ratios(case, (*case[:2], "standard", case[3]), measure)

    def batches(self):
        return sorted({batch for *_, batch in self.cases})

    def repeats(self):
        """The largest number of runs of a case."""
        return max(map(len, self.runs.values()), default=0)

    def ran(self):
        """Whether commands measured it."""
        return any(line["command"] for runs in self.runs.values() for line in runs.values())


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


def prefill_rate(line):
    """Prefills per second."""
    return 1e3 / line["ttft_ms"] if line["ttft_ms"] else None


def request_tok_s(line):
    """New tokens of all rows per second of the whole request, the prefill included, as the paper counts."""
    return line["batch"] * line["new_tokens"] / (line["prefill_s"] + line["decode_s"]) if line["prefill_s"] else None


def published():
    """The paper's figures, from paper.csv, as dicts with numbers or None for tok_s and speedup."""
    lines = [line for line in PAPER.read_text().splitlines() if not line.startswith("#")]
    numbers = {"tp": int, "batch": int, "tok_s": float, "speedup": float}
    return [
        {k: (numbers[k](v) if v else None) if k in numbers else v for k, v in row.items()}
        for row in csv.DictReader(lines)
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Noise


def alike(some, others):
    """Whether the quartiles of two lists of numbers overlap: then their difference is within noise."""
    return overlapping(quartiles(some)[::2], quartiles(others)[::2])


def hidden(report, wiring):
    """The share of its communication that a step hid, in words."""
    if not report["all_reduces"] or report["hidden"] is None:
        return ""
    if base(wiring) in WIRINGS and not WIRINGS[base(wiring)].stale:
        return "-"
    return hidden_share(report)


def speedup(sweep, case, rate):
    """A case's speed over standard's as text, marked as LEGEND says; "" where there is none."""
    ratios = sweep.speedups(case, rate)
    if case[2] == "standard" or not ratios:
        return ""
    mine, standard, bound = (
        [*sweep.values((*case[:2], wiring, case[3]), rate).values()] for wiring in (case[2], "standard", "upper-bound")
    )
    text = f"{statistics.median(ratios):.2f}x"
    bounded = case[2] != "upper-bound" and not draft_of(case[2])
    above = bounded and bool(bound) and statistics.median(mine) > statistics.median(bound)
    if len(ratios) == 1:
        return f"{text}{'^' * above} (one run)"
    if alike(mine, standard):
        return f"~{text}{'^' * above}"
    return f"{text}^" if above else f"**{text}**"


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def markdown(head, rows):
    """A table: head a list of cells, rows lists of as many. All tables of the project are written by this."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


def explained(table, marks):
    """The table, and under it a line that says what those of the marks mean that it has."""
    found = [LEGEND[mark] for mark in marks if any(mark in cell for row in table[1] for cell in row)]
    return markdown(*table) + f"\n\n{'; '.join(found)}." * bool(found)


def number(x):
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def spread(values):
    """The median, and from lowest to highest where there are several."""
    text = number(statistics.median(values))
    return text + f" ({number(min(values))}-{number(max(values))})" * (len(values) > 1)


def by_batch(sweep, cell, cases=None):
    """A table with a row for each (ranks, link, wiring) of some cases, or of all, and a column for each batch size."""
    rows = dict.fromkeys(c[:3] for c in cases or sweep.cases)
    head, names = columns(rows)
    head += [f"batch {batch}" for batch in sweep.batches()]
    cells = [[*names(row), *(cell((*row, batch)) for batch in sweep.batches())] for row in rows]
    if sweep.repeats() < 2:  # said once, in the heading
        cells = [[cell.replace(" (one run)", "") for cell in row] for row in cells]
    return explained((head, cells), ("~", "^", "(one run)"))


def tables(sweep):
    """The tables of a sweep, as one text."""

    def measured(measure, rate):
        def cell(case):
            values = sweep.values(case, measure).values()
            if not values:
                return sweep.errors.get(case, "")
            return f"{spread(values)} {speedup(sweep, case, rate)}".rstrip()

        return cell

    def each(case):
        measures = itemgetter("tpot_ms"), itemgetter("tok_s_user"), bandwidth_share
        times, users, shares = (sweep.values(case, measure).values() for measure in measures)
        if not times:
            return ""
        text = f"{number(statistics.median(times))} ms, {number(statistics.median(users))} tok/s"
        return text + (f", {100 * statistics.median(shares):.0f} %" if shares else "")

    def accepted(case):
        values = sweep.values(case, lambda line: mean_accepted(line["accepted"]) or 0.0).values()
        return spread(values) if values else ""

    several = sweep.repeats() > 1
    how = " (lowest-highest of the repeats)" if several else ""
    parts = {
        f"Decode, tok/s of all rows{how} **times standard**": by_batch(sweep, measured(tok_s, tok_s)),
        "Decode: time per token, tok/s of each user, model bandwidth utilisation": by_batch(sweep, each),
    }
    if any(sweep.values(c, ttft) for c in sweep.runs):
        parts |= {
            "Prefill, ms to the first token **times as fast as standard**": by_batch(
                sweep, measured(ttft, prefill_rate)
            ),
            "Whole requests, tok/s with the prefill **times standard**": by_batch(
                sweep, measured(request_tok_s, request_tok_s)
            ),
        }
    if drafted := [c for c in sweep.runs if draft_of(c[2])]:
        parts["Proposals that stood, of a row in a pass with any (mean)"] = by_batch(sweep, accepted, drafted)
    if sweep.exposed:
        parts["Communication of a prefill in one pass, and of a decode step (ms)"] = communication(sweep)
    once = "" if several or not sweep.ran() else "Each number is of one run: it may be noise.\n\n"
    return f"## {title(sweep.setting)}\n\n{once}" + "\n\n".join(f"{name}:\n\n{table}" for name, table in parts.items())


def communication(sweep):
    """What the runs with --exposed report: a line for each case and kind of step."""
    head = "ranks, link, wiring, batch, , step, without all-reduces, all-reduces, each, exposed, hidden, limit"
    rows = []
    for c in (c for c in sweep.cases if c in sweep.exposed):
        for kind, r in sweep.exposed[c]["exposed"].items():
            low, high = r["quartiles_ms"]
            step = f"{r['step_ms']:.2f} ({low:.2f}-{high:.2f})"
            times = [step, f"{r['silent_ms']:.2f}", str(r["all_reduces"]), f"{r['all_reduce_ms']:.3f}"]
            hides = hidden(r, c[2])
            rows.append([*map(str, c), kind, *times, f"{r['exposed_ms']:.2f}", hides, f"{r['limit_ms']:.2f}"])
    found = [LEGEND[mark] for mark in ("within noise", "none", "-") if any(row[-2] == mark for row in rows)]
    return markdown(head.split(", "), rows) + f"\n\n{'; '.join(['step: the median (its quartiles)', *found])}."


def printable(text):
    """A text of several lines without what would steer a terminal: nvidia-smi underlines."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text).expandtabs()
    return "".join(c for c in text if c == "\n" or c.isprintable())


def machine(probes):
    """What measure/probe.py found."""
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
    return "## The machine\n\n" + "\n\n".join(parts + [f"```\n{printable(t).strip()}\n```" for t in topologies])


def report(lines):
    """All tables of the lines, as one text."""
    probes = [line for line in lines if "probe" in line]
    return "\n\n".join([machine(probes)] * bool(probes) + [tables(sweep) for sweep in sweeps(lines)])


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
    names, cells_of = columns(key[-1] for key in common)
    rows = []
    for key in common:
        cells = []
        for measure in (tok_s, ttft):
            a, b = ([*s.values(c, measure).values()] for s, c in (pairs[0][key], pairs[1][key]))
            cells += [spread(x) if x else s.errors.get(c, "") for x, (s, c) in ((a, pairs[0][key]), (b, pairs[1][key]))]
            cells.append(change(a, b, measure is tok_s))
        about = {k: v for k, v in pairs[0][key][0].setting.items() if k not in ("hardware", "device")}
        rows.append([title(about).removesuffix(", a machine"), *cells_of(key[-1]), str(key[-1][3]), *cells])
    head = f"setting, {', '.join(names)}, batch, tok/s before, after, times, prefill (ms) before, after, times as fast"
    machines = [", ".join(sorted({machine_name(s.setting) for s, _ in pair.values()})) for pair in pairs]
    marks = {"~": "`~`: within noise, the quartiles of the repeats before and after overlap", **LEGEND}
    found = [marks[m] for m in ("~", "(one run)") if any(m in cell for row in rows for cell in row)]
    text = f"before: {machines[0]}; after: {machines[1]}\n\n" + markdown(head.split(", "), rows)
    return text + f"\n\n{'; '.join(found)}." * bool(found)


def change(before, after, more_is_better):
    """How many times as good the median became, as text; "" where one is missing."""
    if not (before and after):
        return ""
    ratio = statistics.median(after) / statistics.median(before)
    text = f"{ratio if more_is_better else 1 / ratio:.2f}x"
    if len(before) == len(after) == 1:
        return f"{text} (one run)"
    return f"~{text}" if alike(before, after) else text
