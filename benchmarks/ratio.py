"""Steps of real ranks where an all-reduce takes as much of a sublayer as in the paper's 70B, beside what it measured.

torchrun --standalone --nproc_per_node=2 -m benchmarks.ratio --json benchmarks/results/ratio.jsonl
python -m benchmarks.ratio --show benchmarks/results/ratio.jsonl

For each link and batch of results/paper.csv the emulated link's latency is the paper's ratio times a
sublayer of this machine, as the upper bound takes it in a first short run. All the rest is benchmarks/overlap.py's.
"""

import dataclasses

from benchmarks import overlap
from benchmarks.lines import about, add_show_flag, grouped
from benchmarks.paper import published_rates, reckoned
from measure import link
from measure.clock import count_all_reduces
from measure.results import markdown
from runtime import cli, launch, writing

WIRINGS = ["standard", "ladder", "parallel", "parallel-ladder", "upper-bound"]


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
    p.add_argument("--n-layers", type=cli.count, default=overlap.SMALL.n_layers, metavar="N", help="of the model")
    p.add_argument("--eager", action="store_true", help="do not compile")
    cli.add_json_flag(p, "a line for each wiring and link")
    add_show_flag(p, table, *overlap.KEYS, "paper")
    return p.parse_args(argv)


def measure(args, argv):
    """The lines, on rank 0."""
    joined = launch.join("cpu")
    world = link.emulate(joined, link.FREE)  # refuses a single rank

    def run(wirings, links, rounds, seconds):
        flags = ["--rounds", str(rounds), "--seconds", str(seconds), "--n-layers", str(args.n_layers)]
        how = overlap.parse([*flags, *["--eager"] * args.eager, "--wirings", *wirings])
        how.links = links
        return how, overlap.measure(how, world, links)

    how, first = run(["standard", "upper-bound"], {"free": link.FREE}, 30, 40)
    sublayer_us = max(world.gather(1e3 * first["free", "upper-bound"]["step_ms"] / count_all_reduces(how.config)))
    cases = {f"{name}, batch {batch}": (name, batch, ratio) for (name, batch), ratio in ratios().items()}
    links = {n: link.custom(sublayer_us * ratio) for n, (*_, ratio) in cases.items()}
    how, reports = run(WIRINGS, links, args.rounds, args.seconds)
    lines = []
    for (n, wiring), report in reports.items() if world.rank == 0 else ():
        lines.append({
            "model": "small", "n_layers": how.config.n_layers, "kind": "decode", "compiled": not args.eager, "batch": 1,
            "tokens": how.prompt_length, "dtype": "bfloat16", **about("ratio", argv, world),
            "link": {**dataclasses.asdict(links[n]), "name": n},
            "paper": {"link": cases[n][0], "batch": cases[n][1]}, "wiring": wiring, **report,
        })  # fmt: skip
        if args.json:
            writing.append_line(args.json, lines[-1])
    return lines


def recovered(step, standard, bound):
    """The share that a step has of what the upper bound's speed is above standard's."""
    return (1 / step - 1 / standard) / (1 / bound - 1 / standard)


def table(lines):
    """Markdown: a line for each link, batch and wiring but standard and the bound."""
    cells, rates = [], published_rates()
    cases = grouped([{**line, "case": (line["paper"]["link"], line["paper"]["batch"])} for line in lines], "case")
    for (case,), row in cases.items():
        by_wiring = {line["wiring"]: line for line in row}
        standard, ends = by_wiring["standard"], [by_wiring[end]["step_ms"] for end in ("standard", "upper-bound")]
        ours = standard["all_reduce_ms"] * standard["all_reduces"] / ends[1]
        paper_ends = [1 / rates[(*case, end)] for end in ("standard", "upper-bound")]
        for line in row:
            if (wiring := line["wiring"]) in ("standard", "upper-bound"):
                continue
            rate, above = rates.get((*case, wiring)), line["step_ms"] / line["limit_ms"] - 1
            share = f"{recovered(line['step_ms'], *ends):.0%} of {recovered(line['limit_ms'], *ends):.0%}"
            if rate:
                share += f" ({recovered(1 / rate, *paper_ends):.0%})"
            low, high = line["quartiles_ms"]
            cells.append([
                case[0], str(case[1]), f"{ours:.2f} ({ratios()[case]:.2f})", wiring,
                f"{line['step_ms']:.1f} ({low:.1f}-{high:.1f})", f"{100 * above:+.1f}%",
                f"{ends[0] / line['step_ms']:.2f}" + (f" ({rate * paper_ends[0]:.2f})" if rate else ""), share,
            ])  # fmt: skip
    head = ["link", "batch", "all-reduce : sublayer", "wiring", "step, ms (quartiles)", "from its limit"]
    return markdown([*head, "times standard", "of the upper bound's gain"], cells)


def main(argv=None):
    args = parse(argv)
    if lines := measure(args, argv):
        print(table(lines))


if __name__ == "__main__":
    launch.run(main)
