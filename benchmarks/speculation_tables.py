"""The tables and the figure of docs/speculation.md, from lines of benchmarks/acceptance.py and speculation.py.

cd benchmarks/results && python -m benchmarks.speculation_tables speculation-acceptance.jsonl speculation-speed.jsonl \
    --figure ../../docs/speculation.png
"""

import statistics

from benchmarks.adapt_tables import grouped
from benchmarks.lines import written_by
from benchmarks.speculation import seconds_per_token
from measure import plot
from measure.report import mean_accepted
from measure.results import markdown
from model import WIRINGS
from runtime import cli, launch

RATES = 0.6, 0.7, 0.8, 0.9, 0.95
DRAWN = "stories260K", "standard-1.7M"  # whose acceptance the figure takes
SAMPLED = 0.8  # and at which temperature


def rate(counts):
    """The share of the tried proposals that stood: those behind the first that did not have not been tried."""
    most = len(counts) - 1
    tried = sum(min(n + 1, most) * count for n, count in enumerate(counts))
    return sum(n * count for n, count in enumerate(counts)) / tried if tried else 0.0


def shares(counts):
    return " / ".join(f"{100 * count / sum(counts):.0f}" for count in counts)


def ranks(line):
    """On how many ranks this draft of this model is the function that was measured, as a word."""
    bound = WIRINGS[line["wiring"]].tp_bound
    if line["draft"].startswith("wiring:"):
        bound = bound or WIRINGS[line["draft"].split(":")[1]].tp_bound
    return str(line["tp"]) if bound else "any"


def target(line):
    """The model that verifies, as a title."""
    if line["wiring"] == "hybrid":
        return f"{line['model']}, layers {', '.join(map(str, line['layers']))} as ladder"
    return f"{line['model']}, {line['wiring']}"


def acceptance(lines):
    """{title of a model: table}: a row a draft on a number of ranks, and at each temperature what of it stood."""
    tables = {}
    for (title,), same in grouped([{**x, "title": target(x)} for x in lines], "title").items():
        temperatures, rows = sorted({x["temperature"] for x in same}), []
        for (draft, _), runs in grouped(same, "draft", "tp").items():
            cells, accepted = [draft, ranks(runs[0])], {x["temperature"]: x["accepted"] for x in runs}
            for counts in map(accepted.get, temperatures):
                cells += [f"{mean_accepted(counts):.2f}", f"{rate(counts):.2f}", shares(counts)] if counts else [""] * 3
            rows.append(cells)
        most = len(same[0]["accepted"]) - 1
        head = ["draft", "ranks"]
        for t in temperatures:
            drawn = f"temperature {t:g}" if t else "greedy"
            head += [f"{drawn}: accepted of {most}", "rate", f"% of passes: 0 / ... / {most}"]
        tables[title] = markdown(head, rows)
    return tables


def looked_up(lines):
    """The table of n-grams, of one row at a time: how many passes had proposals, and what a pass yields in the mean."""
    rows = []
    for line in lines:
        counts, drawn = line["accepted"], f"temperature {line['temperature']:g}" if line["temperature"] else "greedy"
        prompts = "begin a story that they have quoted" if line["quote"] else "begin a story"
        found = f"{100 * sum(counts) / line['passes']:.0f} %", f"{mean_accepted(counts):.2f}", f"{rate(counts):.2f}"
        rows.append([line["model"], prompts, drawn, *found, f"{line['longest_rows'] / line['passes']:.2f}"])
    head = ["model", "prompts", "", "passes with proposals", "accepted in these", "rate", "tokens of a pass"]
    return markdown(head, rows)


# ---------------------------------------------------------------------------------------------------------------------
# Speed


class Times:
    """Milliseconds over one link: step, draft {name: a step's}, verification {K: ...}, whole {(name, K): a pass's}."""

    def __init__(self, lines):
        of = grouped(sorted(lines, key=lambda x: x["speculate"]), "part")
        self.step = of[("step",)][0]["ms"]
        self.draft = {x["draft"]: x["ms"] for x in of[("draft step",)]}
        self.verification = {x["speculate"]: x["ms"] for x in of[("verification",)]}
        self.whole = {(x["draft"], x["speculate"]): x["ms"] for x in of[("pass",)]}

    def gain(self, draft, a, count):
        """Times standard's speed, by the formula. draft: a name, or None for one that takes no time."""
        d = 0.0 if draft is None else self.draft[draft]
        return self.step / seconds_per_token(d, self.verification[count], a, count)

    def best(self, draft, a):
        """(times standard's speed, K) of the best K."""
        return max((self.gain(draft, a, count), count) for count in self.verification)


def by_link(lines):
    """{name of a link: Times}, the fastest link first."""
    found = grouped([{**x, "name": x["link"]["name"]} for x in lines if x["part"] != "generation"], "name")
    ordered = sorted(found.items(), key=lambda item: item[1][0]["link"]["latency_us"])
    return {name: Times(same) for (name,), same in ordered}


def parts(links):
    """A row for each link: milliseconds of a step, of each draft's, and of each verification."""
    first = next(iter(links.values()))
    head = ["link, us", "standard step", *first.draft, *(f"verification, K = {n}" for n in first.verification)]
    rows = [
        [name, *(f"{ms:.1f}" for ms in (times.step, *times.draft.values(), *times.verification.values()))]
        for name, times in links.items()
    ]
    return markdown(head, rows)


def passes(links):
    """A row for each link: a whole pass of each draft, and how far it is from K d + v."""
    first = next(iter(links.values()))
    rows = []
    for name, times in links.items():
        cells = [name]
        for (draft, n), ms in times.whole.items():
            cells.append(f"{ms:.1f} ({100 * (ms / (n * times.draft[draft] + times.verification[n]) - 1):+.1f} %)")
        rows.append(cells)
    return markdown(["link, us", *(f"{draft}, K = {n}" for draft, n in first.whole)], rows)


def gains(links):
    """A row for each link and draft: times standard's speed at each rate, with the best K."""
    rows = []
    for name, times in links.items():
        for draft in (*times.draft, None):
            cells = (f"{gain:.2f} ({n})" for gain, n in (times.best(draft, a) for a in RATES))
            d = f"{times.draft[draft]:.1f}" if draft else "0"
            rows.append([name, draft or "one that takes no time", d, *cells])
    return markdown(["link, us", "draft", "d, ms", *(f"a = {a:g}" for a in RATES)], rows)


def generations(lines, links):
    """A row for each link, draft and rate: whole generations against the formula."""
    rows, found = [], grouped([{**x, "name": x["link"]["name"]} for x in lines if x["part"] == "generation"], "name")
    for (name,), same in found.items():
        plain = statistics.median(x["ms_per_token"] for x in same if x["draft"] is None)
        rows.append([name, "none", "", "", "1.00", f"{plain:.1f}", f"{links[name].step:.1f}", "", ""])
        for (draft, n, a), runs in grouped([x for x in same if x["draft"]], "draft", "speculate", "rate").items():
            ms, times = statistics.median(x["ms_per_token"] for x in runs), links[name]
            yielded = sum(x["tokens"] - 1 for x in runs) / sum(x["passes"] for x in runs)
            by_hand = seconds_per_token(times.draft[draft], times.verification[n], a, n)
            speeds = f"{plain / ms:.2f}", f"{times.step / by_hand:.2f}"
            rows.append([name, draft, str(n), f"{a:g}", f"{yielded:.2f}", f"{ms:.1f}", f"{by_hand:.1f}", *speeds])
    head = ["link, us", "draft", "K", "a", "tokens of a pass", "ms per token", "formula", "times standard", "formula"]
    return markdown(head, rows)


# ---------------------------------------------------------------------------------------------------------------------
# The figure


def measured(lines, model, draft):
    """The rate of a draft of all layers, or of the last half, on a model's text, or None where nobody measured it."""
    for line in lines:
        if (line["model"], line["wiring"], line["temperature"]) == (model, "standard", SAMPLED):
            name, _, half = draft.removeprefix("wiring:").partition(":")
            same = f"wiring:{name}" + f":{len(line['layers']) // 2}" * bool(half)
            if line["draft"] == same and (line["tp"] == 2 or not WIRINGS[name].tp_bound):
                return rate(line["accepted"])
    return None


def draw(lines, links, path):
    """A panel for each model whose acceptance is taken: times standard's speed over the link."""
    title = (
        "Times the speed of the standard wiring, by the formula from measured times; each draft at its best K and at "
    )
    title += f"the rate a that it had on a small model on 2 ranks at temperature {SAMPLED:g}. "
    title += "Dotted: retrained into this wiring, without a draft"
    models = [model for model in DRAWN if any(line["model"] == model for line in lines)]
    figure, axes = plot.panels(len(models), 4.2, 3.6, title, columns=2, sharey=True)
    ticks = list(range(len(links)))
    for axis, model in zip(axes, models, strict=True):
        stood = ["a of the drafts:"]
        for draft in next(iter(links.values())).draft:
            wiring = draft.removeprefix("wiring:")
            style, a = {**plot.look(wiring), "markersize": 5}, measured(lines, model, draft)
            if a is not None:
                ys = [times.best(draft, a)[0] for times in links.values()]
                axis.plot(ticks, ys, **{**style, "linestyle": "-"}, label=f"draft {wiring}")
                stood.append(f"{wiring} {a:.2f}")
            known = WIRINGS[wiring.partition(":")[0]]
            if known.stale and not known.tp_bound:
                ys = [times.step / times.draft[draft] for times in links.values()]
                axis.plot(ticks, ys, **{**style, "linestyle": ":"}, label=f"{wiring}, retrained")
        axis.text(0.02, 0.98, "\n".join(stood), va="top", fontsize=7, transform=axis.transAxes)
        axis.axhline(1, color="0.6", linewidth=0.8)
        axis.set_xticks(ticks, [f"{int(name) / 1000:g}" for name in links])
        axis.set(title=f"acceptance of {model}", xlabel="link: ms of an all-reduce")
        axis.grid(color="0.92")
        axis.set_axisbelow(True)
    axes[0].set_ylabel("times standard's speed")
    plot.labelled(figure, axes, 1.9)
    plot.save(path, figure)


def parse(argv):
    p = cli.Parser(__doc__)
    keys = "model", "wiring", "layers", "draft", "accepted", "temperature", "quote", "passes", "longest_rows", "tp"
    p.add_argument("acceptance", type=written_by("benchmarks/acceptance.py", *keys), help="lines of acceptance.py")
    keys = "link", "draft", "speculate", "part"
    p.add_argument("speed", type=written_by("benchmarks/speculation.py", *keys), help="lines of speculation.py")
    p.add_argument("--figure", metavar="PNG", help="draw speeds over links into this file")
    return p.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    ngrams = [line for line in args.acceptance if line["draft"] == "ngram"]
    models = [line for line in args.acceptance if line["draft"] != "ngram"]
    for title, table in acceptance(models).items():
        print(f"{title}\n\n{table}\n")
    links = by_link(args.speed)
    print(looked_up(ngrams), parts(links), passes(links), generations(args.speed, links), gains(links), sep="\n\n")
    if args.figure:
        draw(models, links, args.figure)


if __name__ == "__main__":
    launch.run(main)
