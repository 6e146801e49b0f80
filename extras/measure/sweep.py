"""Measure steps of several wirings over several emulated links, in turns, and the least time that each could take.

torchrun --standalone --nproc_per_node=2 -m extras.measure.sweep --link 0us 1000us 3000us --json sweep.jsonl
python -m extras.measure.sweep --simulate-tp 8 --model 8b --link nvlink pcie --json sweep.jsonl
python -m extras.measure.sweep --wiring standard ladder upper-bound --show sweep.jsonl --plot sweep.png

By default, it measures all wirings of a small random model, which share one set of weights. A line of the result is for
a wiring at a batch size over a link. It has the times of a step, of the same step without all-reduces and of one
all-reduce, and the limit, which exposed.py explains.
"""

import itertools
import statistics
from collections import defaultdict
from pathlib import Path

import bench
from extras.measure import exposed, link, plot, results
from extras.measure.clock import variants
from generate import Runner
from ladder import benchmarking, outputs
from ladder.checkpoints import checkpoint
from ladder.command_line import flags
from ladder.command_line.flags import count, number
from ladder.decoding.batch import make_cache, pad
from ladder.errors import InputError, naming
from ladder.progress import progress
from ladder.ranks import launch
from model import Config, rewired

# On two ranks each sublayer reads 26 MB, which takes a core with 12 GB/s about 2 ms.
SMALL_CONFIG = Config(8, 40, 40, 64, 2560, 3456, 4096, 4096)


def parse(argv):
    p = flags.Parser(__doc__)
    bench.add_flags(p)
    p.set_defaults(model="small", batch=[1], prompt_length=64)
    words = "measure the prefill in so many overlapping parts (1 with --compile; default: 1), not a step"
    p.add_argument("--prefill", nargs="*", type=count, metavar="PARTS", help=words)
    p.add_argument("--link", nargs="+", type=link.parse, metavar="LINK", help=f"default: free; of {link.LINK_FORMS}")
    p.add_argument("--simulate-tp", type=number(int, 2), metavar="N", help="run one rank of N alone")
    words = "measure for about S seconds, but at least three steps of each wiring over each link"
    p.add_argument("--seconds", type=number(float, 0, 1e6), default=60, metavar="S", help=words)
    p.add_argument("--label", help="what to call the real link that --link free measures")
    p.add_argument("--profile", metavar="DIR", help="write a trace of a step of each wiring into DIR/LINK-WIRING")
    p.add_argument("--show", nargs="+", metavar="FILE", help="measure nothing: print the tables of such files")
    p.add_argument("--plot", metavar="FILE", help="draw the table, too, as a .png or .svg")
    args = p.parse_args(argv)
    if args.show:
        return args
    args.eager = bench.is_eager(args)
    is_small = args.model == "small" and not args.checkpoint
    args.name, args.config = ("small", SMALL_CONFIG) if is_small else flags.read_config(args)
    args.link = args.link or [link.FREE]
    args.kind, args.splits = ("decode", [1]) if args.prefill is None else ("prefill", args.prefill or [1])
    if max(args.splits) > 1 and not args.eager or max(args.splits) > args.prompt_length:
        raise InputError(f"--prefill is {max(args.splits)}: several parts need no --compile and as many tokens")
    if args.prompt_length >= args.config.max_seq_len:
        raise InputError(f"--prompt-length is {args.prompt_length} but must be below {args.config.max_seq_len}")
    args.wiring = list(dict.fromkeys(args.wiring or variants(args.config)))
    for wiring in args.wiring:
        with naming("--wiring"):
            rewired(args.config, wiring)  # raises InputError
    if args.profile and Path(args.profile).is_file():
        raise InputError(f"--profile {args.profile} is a file: give a folder")
    return args


def make_cases(args, world):
    """Return {(link, wiring and parts, batch): exposed.Case}, whose models share their weights and caches."""
    models = bench.load_models(args.config, args.wiring, args, world)
    progress.at("measurement", timed=False)
    caches = {}
    cases = {}
    for (wiring, model), batch, splits in itertools.product(models.items(), args.batch, args.splits):
        key = model.config.named_wiring.shards(world.shares), batch
        caches[key] = caches.get(key) or make_cache(model, batch, args.prompt_length + 1)
        prompts = pad([[1 + row] * args.prompt_length for row in range(batch)], world.device)
        runner = Runner(model, caches[key], not args.eager, not args.eager, splits)
        case = exposed.make_case(args.kind, runner, *prompts, world)
        for one in args.link:
            cases[one, wiring + f" in {splits} parts" * (splits > 1), batch] = case._replace(link=one)
    return cases


def measure(args, world):
    """Measure all cases in turns and return a dict of results for each."""
    world.say(f"{args.kind} of {', '.join(args.wiring)} ...")
    cases = make_cases(args, world)
    reports = exposed.measure(world, cases, args.seconds)
    made = benchmarking.environment(world)
    lines = []
    for (one, name, batch), case in cases.items():
        lines.append({
            "model": args.name, "n_layers": args.config.n_layers, "kind": args.kind, "compiled": not args.eager,
            "batch": batch, "tokens": args.prompt_length, "dtype": checkpoint.dtype_name(case.partial.dtype), **made,
            "link": one._asdict() | ({"name": args.label} if args.label else {}), "wiring": name,
            **reports[one, name, batch], "comm": args.comm,
            "all_reduce_bytes": link.message_bytes(world.group, case.partial),
        })  # fmt: skip
        if args.profile is not None:
            world.group.set_link(one)
            exposed.profile(Path(args.profile) / f"{one.name}-{name}-{batch}", world, args.kind, case.step)
    return lines


def setting(line):
    """Return in words what all lines of one table have in common."""
    how = "compiled" if line["compiled"] else "eager"
    how = f"{line['comm']} sums, {how}" if line.get("comm", "auto") != "auto" else how
    size = f"tp {line['tp']}{', one rank alone' if line['simulated'] else ''}, batch {line['batch']}"
    model = f"{line['model']}, {line['n_layers']} layers, {line['dtype']}, {line['device']}"
    return f"{model}, {how} {line['kind']}, {line['tokens']} tokens, {size}, {line['threads']} threads a rank"


def show(lines, figure):
    """Print a table for each setting, with a row for each link and a column for each wiring; draw it into `figure`."""
    settings = defaultdict(list)
    for line in lines:
        settings[setting(line)].append(line)
    for title, some in settings.items():
        print(f"{title}; ms:\n\n{table(some)}\n")
    print("(+n %): above the limit. `~`: within noise.")
    if figure and len(settings) > 1:
        raise InputError(f"--plot draws lines of one setting; these have {len(settings)}")
    if figure:
        axes = {"xlabel": "one all-reduce, ms", "ylabel": "times as fast as standard"}
        plot.draw(figure, title, plot.by_link(lines), **axes)


def table(lines):
    def row(line):
        mine = [one for one in lines if one["link"]["name"] == line["link"]["name"]]
        whole = [one for one in mine if not one["wiring"].endswith(" parts")] or mine
        ms = statistics.median(one["all_reduce_ms"] for one in whole)
        return line["link"]["name"], f"{ms:.{2 if line['device'] == 'cpu' else 3}f}"

    return benchmarking.pivot(["link", "one all-reduce, ms"], lines, row, lambda line: line["wiring"], cell)


def cell(line, row):
    """Return the milliseconds, how far they are above the limit, and how many times as fast as standard that is.

    `~` means that the quartiles of both overlap. row: {wiring: line} over the same link.
    """
    standard = row.get("standard")
    above = line["step_ms"] / line["limit_ms"] - 1
    text = f"{line['step_ms']:.{1 if line['device'] == 'cpu' else 3}f} ({100 * above:+.0f}%"
    if standard in (None, line):
        return f"{text})"
    low, high = line["quartiles_ms"]
    alike = low <= standard["quartiles_ms"][1] and standard["quartiles_ms"][0] <= high
    return f"{text}, {'~' * alike}{standard['step_ms'] / line['step_ms']:.2f}x)"


def main(argv=None):
    args = parse(argv)
    if args.show:
        lines = results.read(args.show, "limit_ms")
        return show([line for line in lines if not args.wiring or line["wiring"] in args.wiring], args.plot)
    joined = launch.join(args.device, vars(args))
    first = max(args.link, key=lambda one: one.seconds(1, 2))  # a free one if there is no other
    world = link.emulate(joined, first, args.simulate_tp)
    lines = measure(args, world)
    if world.rank == 0:
        for line in lines if args.json else ():
            outputs.append_line(args.json, line)
        show(lines, args.plot)


if __name__ == "__main__":
    launch.run(main)
