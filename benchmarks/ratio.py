"""Steps of real ranks where an all-reduce takes as much of a sublayer as in the paper's 70B, beside what it measured.

torchrun --standalone --nproc_per_node=2 -m benchmarks.ratio --json benchmarks/results/ratio.jsonl
python -m benchmarks.ratio --show benchmarks/results/ratio.jsonl --figure benchmarks/results/ratio.png

For each link and batch of results/paper.csv the emulated link's latency is the paper's ratio times a
sublayer of this machine, as the upper bound takes it in a first short run. All the rest is benchmarks/overlap.py's.
"""

import dataclasses
import itertools
import sys

from benchmarks import overlap
from benchmarks.lines import command, written_by
from benchmarks.paper import published_rates, reckoned
from measure import link
from measure.clock import count_all_reduces
from measure.plot import labelled, look, panels, save
from measure.report import environment
from measure.results import markdown
from model import InputError
from runtime import cli, launch, writing

WIRINGS = "standard,ladder,parallel,parallel-ladder,upper-bound"
KEYS = [*overlap.KEYS, "paper"]


def ratios():
    """{(link, batch): all-reduce : sublayer} of the paper's 70B."""
    found, rates = {}, published_rates()
    for case in dict.fromkeys(key[:2] for key in rates):
        layer, all_reduce = reckoned(*case, rates)
        found[case] = all_reduce / (layer / 2)
    return found


def parse(argv):
    p = cli.Parser(__doc__)
    p.add_argument("--rounds", type=cli.number(int, 3), default=20, help="steps of each wiring over each link")
    p.add_argument("--seconds", type=cli.number(float, 0, above=True), default=400, help="... or fewer")
    p.add_argument("--wirings", default=WIRINGS, metavar="A,B,...", help="standard and upper-bound among them")
    p.add_argument("--model", default="small", help="as benchmarks/overlap.py knows it")
    p.add_argument("--n-layers", type=cli.count, metavar="N", help="take only so many layers of it")
    p.add_argument("--eager", action="store_true", help="do not compile")
    cli.add_json_flag(p, "a line for each wiring and link")
    show = written_by("this script", *KEYS)
    p.add_argument("--show", type=show, metavar="FILE", nargs="+", help="print the table of such files, and no more")
    p.add_argument("--figure", metavar="PNG", help="draw the lines of --show, too")
    args = p.parse_args(argv)
    if not {"standard", "upper-bound"} <= {*args.wirings.split(",")}:
        raise InputError(f"--wirings {args.wirings} must have standard and upper-bound, to compare with")
    if args.figure and not args.show:
        raise InputError("--figure draws the lines of --show FILE")
    return args


def measure(args, argv):
    """The lines, on rank 0."""
    joined = launch.join("cpu")
    world = link.emulate(joined, link.FREE)  # refuses a single rank

    def run(wirings, links, rounds, seconds):
        flags = ["--model", args.model, "--wirings", wirings, "--rounds", str(rounds), "--seconds", str(seconds)]
        flags += (["--n-layers", str(args.n_layers)] if args.n_layers else []) + ["--eager"] * args.eager
        how = overlap.parse(flags)
        how.links = links
        return how, overlap.measure(how, world, links)

    how, first = run("standard,upper-bound", {"free": link.FREE}, 30, 40)
    sublayer_us = max(world.gather(1e3 * first["free", "upper-bound"]["step_ms"] / count_all_reduces(how.config)))
    links = {
        f"{name}, batch {batch}": link.choose(latency_us=sublayer_us * ratio)
        for (name, batch), ratio in ratios().items()
    }
    how, reports = run(args.wirings, links, args.rounds, args.seconds)
    lines = []
    for (n, wiring), report in reports.items() if world.rank == 0 else ():
        name, _, batch = n.rpartition(", batch ")
        lines.append({
            "model": args.model, "n_layers": how.config.n_layers, "kind": "decode",
            "compiled": not args.eager, "batch": 1,
            "tokens": how.prompt_length, "dtype": how.dtype, **environment(world),
            "command": command("ratio", argv, world), "link": {**dataclasses.asdict(links[n]), "name": n},
            "paper": {"link": name, "batch": int(batch)}, "wiring": wiring, **report,
        })  # fmt: skip
        if args.json:
            writing.append_line(args.json, lines[-1])
    return lines


def rows(lines):
    """{(link, batch): {wiring: (this machine's line, the paper's tok/s or None)}}"""
    rates, found = published_rates(), {}
    for line in lines:
        key = line["paper"]["link"], line["paper"]["batch"]
        found.setdefault(key, {})[line["wiring"]] = line, rates.get((*key, line["wiring"]))
    return found


def recovered(step, standard, bound):
    """The share that a step has of what the upper bound's speed is above standard's."""
    return (1 / step - 1 / standard) / (1 / bound - 1 / standard)


def table(lines):
    """Markdown: a line for each link, batch and wiring but standard and the bound."""
    cells = []
    for (name, batch), row in rows(lines).items():
        (standard, paper_standard), (bound, paper_bound) = row["standard"], row["upper-bound"]
        ours = standard["all_reduce_ms"] * standard["all_reduces"] / bound["step_ms"]
        ends = standard["step_ms"], bound["step_ms"]
        for wiring, (line, rate) in row.items():
            if wiring in ("standard", "upper-bound"):
                continue
            share = f"{recovered(line['step_ms'], *ends):.0%} of {recovered(line['limit_ms'], *ends):.0%}"
            if rate:
                share += f" ({recovered(1 / rate, 1 / paper_standard, 1 / paper_bound):.0%})"
            low, high = line["quartiles_ms"]
            above = f"{100 * (line['step_ms'] / line['limit_ms'] - 1):+.1f} %"
            cells.append([
                name, str(batch), f"{ours:.2f} ({ratios()[name, batch]:.2f})", wiring,
                f"{line['step_ms']:.1f} ({low:.1f}-{high:.1f})", above,
                f"{ends[0] / line['step_ms']:.2f}" + (f" ({rate / paper_standard:.2f})" if rate else ""), share,
            ])  # fmt: skip
    head = ["link", "batch", "all-reduce : sublayer", "wiring", "step, ms (quartiles)", "from its limit"]
    return markdown([*head, "times standard", "of the upper bound's gain"], cells)


def draw(lines):
    """A figure: for each link a panel, times standard by batch: this machine's, its limit, and the paper's."""
    found = rows(lines)
    links = list(dict.fromkeys(name for name, _ in found))
    title = "Speed over standard where an all-reduce takes as much of a sublayer as in the paper's 70B"
    figure, axes = panels(len(links), 4.4, 3.2, title, sharey=True)
    for axis, name in zip(axes, links, strict=True):
        batches = [batch for n, batch in found if n == name]
        names = [w for w in found[name, batches[0]] if w != "standard"]
        for i, wiring in enumerate(names):
            style, shift = look(wiring), 0.16 * (i - (len(names) - 1) / 2)
            for place, batch in enumerate(batches):
                row = found[name, batch]
                line, rate = row[wiring]
                standard, paper_standard = row["standard"]
                low, high = (standard["step_ms"] / ms for ms in reversed(line["quartiles_ms"]))
                ours, limit = standard["step_ms"] / line["step_ms"], standard["step_ms"] / line["limit_ms"]
                label = wiring if (place, name) == (0, links[0]) else None
                bars = [[ours - min(low, ours)], [max(high, ours) - ours]]
                axis.errorbar(
                    place + shift, ours, yerr=bars, capsize=2, fmt=style["marker"], color=style["color"], label=label
                )
                axis.hlines(limit, place + shift - 0.06, place + shift + 0.06, color=style["color"])
                if rate:
                    hollow = {"markerfacecolor": "none", "markersize": 9}
                    axis.plot(place + shift, rate / paper_standard, style["marker"], color=style["color"], **hollow)
        ticks = [f"{batch}\n{ratios()[name, batch]:.2f}" for batch in batches]
        axis.set_xticks(range(len(batches)), ticks)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set(title=f"the ratios of {name}", xlabel="the paper's batch; all-reduce : sublayer")
    axes[0].set_ylabel("times standard\nfull: here; dash: its limit; hollow: the paper's H100s")
    labelled(figure, axes)
    return figure


def main(argv=None):
    args = parse(argv)
    lines = [*itertools.chain(*args.show)] if args.show else measure(args, argv)
    if not lines:
        return
    print(table(lines))
    if args.figure:
        try:
            save(args.figure, draw(lines))
        except OSError as e:
            raise InputError(f"--figure {args.figure} cannot be written: {e.strerror}") from None
        print(f"figure in {args.figure}", file=sys.stderr)


if __name__ == "__main__":
    launch.run(main)
