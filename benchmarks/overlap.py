"""Step times of several wirings over several links, in turns, beside what order and arithmetic allow.

torchrun --standalone --nproc_per_node=2 -m benchmarks.overlap --links 0,1000,3000 --json overlap.jsonl
python -m benchmarks.overlap --simulate-tp 8 --model 8b --links nvlink,pcie --json overlap.jsonl
python -m benchmarks.overlap --wirings standard ladder upper-bound --show overlap.jsonl

Each line of the result is one wiring over one link, of a prefill in so many parts: the median step, its quartiles, the
same model's step without all-reduces, one all-reduce on its own, and the limit (extras/measure/exposed.py). All wirings
share one set of random weights.
"""

import copy
import dataclasses
import itertools
import statistics
import sys
from pathlib import Path

import torch

from benchmarks.lines import about, add_show_flag
from extras.measure import exposed, link
from extras.measure.clock import variants
from extras.measure.results import explained
from formats.sizes import SIZES, RandomWeights, named_size
from generate import Runner, make_cache, pad
from model import Config, rewired
from runtime import cli, launch, watch, writing
from runtime.cli import count, number
from runtime.errors import InputError
from runtime.timing import overlapping
from tp import TensorParallel, load_shard

# On two ranks 26 MB in either sublayer: some 2 ms for a core that reads 12 GB/s
SMALL = Config(8, 40, 40, 64, 2560, 3456, 4096, 4096)
KEYS = ["model", "n_layers", "dtype", "device", "threads", "tp", "simulated", "batch", "tokens", "kind", "compiled"]
KEYS += ["link", "wiring", "step_ms", "quartiles_ms", "all_reduce_ms", "limit_ms"]


def links(text):
    """Return {name: Link} of microseconds and of what --link takes, with commas between."""
    names = text.split(",")
    return {name: link.parse(f"{name}us" if name.replace(".", "").isdigit() else name) for name in names}


def parse(argv):
    p = cli.Parser(__doc__)
    p.add_argument("--model", choices=["small", *SIZES], default="small", help="small: 8 layers of dim 2560")
    p.add_argument("--n-layers", type=number(int, 2), metavar="N", help="take only so many layers of it")
    cli.add_rank_flags(p)
    cli.add_comm_flag(p)
    p.add_argument("--batch", type=count, default=1, metavar="B")
    p.add_argument("--prompt-length", type=count, default=64, metavar="S", help="filled slots, or the prompt's tokens")
    words = "time the prefill, in so many parts (1), not a decode step; with --eager, or they do not overlap"
    p.add_argument("--prefill", nargs="*", type=count, metavar="PARTS", help=words)
    p.add_argument("--eager", action="store_true", help="do not compile")
    names = " ".join(variants(SMALL.n_layers))
    p.add_argument("--wirings", metavar="NAME[:N|:I,J,...]", nargs="+", help=f"default: of 8 layers {names}")
    p.add_argument("--links", default="0", metavar="A,B,...", help=f"microseconds, or of {link.FORMS}")
    p.add_argument("--simulate-tp", type=number(int, 2), metavar="N", help="one rank of so many, alone")
    p.add_argument("--rounds", type=number(int, 3), default=30, help="steps of each wiring over each link")
    seconds = number(float, 0, 1e6, above=True)
    p.add_argument("--seconds", type=seconds, default=300, help="... or fewer, to end in about this time")
    p.add_argument("--label", help="what to call the real link that --links free measures")
    p.add_argument("--profile", metavar="DIR", help="write a trace of a step of each wiring into DIR/LINK-WIRING")
    cli.add_json_flag(p, "a line for each wiring and link")
    add_show_flag(p, tables, *KEYS, only="wiring")
    args = p.parse_args(argv)
    args.links = links(args.links)
    args.config = SMALL if args.model == "small" else SIZES[args.model]
    if (args.n_layers or 2) > args.config.n_layers:
        raise InputError(f"--n-layers is {args.n_layers} but {args.model} has {args.config.n_layers}")
    parts = max(args.prefill or [1])
    if (parts > 1 and not args.eager) or parts > args.prompt_length:
        raise InputError(f"--prefill is {parts}: parts need --eager, and a token each of --prompt-length")
    if args.prompt_length >= args.config.max_seq_len:
        raise InputError(f"--prompt-length is {args.prompt_length} but must be below {args.config.max_seq_len}")
    args.kind = "decode" if args.prefill is None else "prefill"
    n_layers = args.n_layers or args.config.n_layers
    config = args.config if args.model == "small" else named_size(f"{args.model}:{n_layers}")
    args.config = dataclasses.replace(config, n_layers=n_layers, max_seq_len=args.prompt_length + 1)
    args.ways = {  # what to compare: {name: (its Config, parts of the prefill)}
        name + f" in {parts} parts" * (parts > 1): (rewired(args.config, name), parts)
        for name in args.wirings or variants(n_layers)
        for parts in args.prefill or [1]
    }
    if args.label and [*args.links] != ["free"]:
        raise InputError("--label says that there is a real link: it goes with --links free")
    return args


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def measure(args, world):
    """Return {(name of a link, name of a way): (exposed.Case, its report)}, all measured in turns."""
    weights = RandomWeights(args.config, world.device)
    place, bases = (torch.bfloat16, world.device, world.rank, world.tp_size), {}  # by the number of lanes
    for config, _ in args.ways.values():
        if config.lanes not in bases:
            model = load_shard(config if config.lanes else rewired(config, "standard"), weights, *place)
            bases[config.lanes] = model, make_cache(model, args.batch, args.prompt_length + 2)
    watch.at("measurement", timed=False)  # a step never reads the last slot of a cache
    prompts = pad([[1 + row] * args.prompt_length for row in range(args.batch)], world.device)
    tokens = args.prompt_length if args.kind == "prefill" else 1
    torch._dynamo.config.recompile_limit = 1000  # every wiring is a graph of its own, with and without its all-reduces
    if world.rank == 0:
        print(f"links {', '.join(args.links)}: {', '.join(args.ways)} ...", file=sys.stderr)
    found = {}
    for name, (config, parts) in args.ways.items():
        base, cache = bases[config.lanes]
        model = copy.copy(base)
        model.config = config
        model.comm = TensorParallel(model.config, world.shares, world.group)
        how = not args.eager, not args.eager, parts
        runners = (Runner(m, cache, *how) for m in (model, exposed.silenced(model, world)))
        partial = torch.zeros(args.batch, -(-tokens // parts), config.dim, device=base.device, dtype=base.dtype)
        steps = [exposed.replays(runner, *prompts)[args.kind] for runner in runners]
        found[name] = exposed.Case(config, *steps, model.comm, partial, link.FREE, parts)
    over = itertools.product(args.links.items(), found.items())
    cases = {(n, name): case._replace(link=one) for (n, one), (name, case) in over}
    reports = exposed.measure(world, cases, args.rounds, args.seconds)
    return {key: (case, reports[key]) for key, case in cases.items()}


def main(argv=None):
    args = parse(argv)
    joined, lines = launch.join(args.device, vars(args)), []
    first = max(args.links.values(), key=lambda one: one.seconds(1, 2))  # a free one if there is no other
    world = link.emulate(joined, first, args.simulate_tp)
    measured = measure(args, world)
    for (n, name), (_, report) in measured.items() if world.rank == 0 else ():
        emulated = {} if args.label else dataclasses.asdict(args.links[n])
        lines.append({
            "model": args.model, "n_layers": args.config.n_layers, "kind": args.kind,
            "compiled": not args.eager, "batch": args.batch, "tokens": args.prompt_length, "dtype": "bfloat16",
            **about("overlap", argv, world), "link": {**emulated, "name": args.label or n}, "wiring": name,
            **report, "comm": args.comm,
        })  # fmt: skip
        if args.json:
            writing.append_line(args.json, lines[-1])
    if lines:
        print(tables(lines), flush=True)
    for key, (case, _) in measured.items() if args.profile is not None else ():
        world.group.link = case.link
        exposed.profile(Path(args.profile) / "-".join(key), world, {args.kind: case.step})


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def tables(lines):
    """Markdown, a table for each setting: a row a link, a column a wiring; see cell."""
    settings = {}
    for line in lines:
        how = "compiled" if line["compiled"] else "eager"
        how = f"{line['comm']} sums, {how}" if line.get("comm", "auto") != "auto" else how
        size = f"tp {line['tp']}{', one rank alone' if line['simulated'] else ''}, batch {line['batch']}"
        model = f"{line['model']}, {line['n_layers']} layers, {line['dtype']}, {line['device']}"
        ranks = f"{line['threads']} threads a rank"
        setting = f"{model}, {how} {line['kind']}, {line['tokens']} tokens, {size}, {ranks}; ms:"
        settings.setdefault(setting, []).append(line)
    return "\n\n".join(f"{setting}\n\n{table(lines)}" for setting, lines in settings.items())


def table(lines):
    names, rows = list(dict.fromkeys(line["wiring"] for line in lines)), {}
    for line in lines:
        rows.setdefault(line["link"]["name"], {})[line["wiring"]] = line
    whole = [name for name in names if not name.endswith(" parts")] or names
    cells = [
        [n, milliseconds(statistics.median(row[w]["all_reduce_ms"] for w in whole if w in row), 2, lines[0]["device"])]
        + [cell(row[name], row) if name in row else "" for name in names]
        for n, row in rows.items()
    ]
    return explained((["link", "one all-reduce, ms", *names], cells), ("~", "^"))


def milliseconds(ms, digits, device):
    """Return them with so many digits behind the point, on a GPU with three."""
    return f"{ms:.{digits if device == 'cpu' else 3}f}"


def cell(line, row):
    """Milliseconds, how far above the limit, and how many times as fast as standard; with the marks of results.LEGEND.

    row: the lines {wiring: line} over the same link.
    """
    above, standard, bound = line["step_ms"] / line["limit_ms"] - 1, row.get("standard"), row.get("upper-bound")
    text = f"{milliseconds(line['step_ms'], 1, line['device'])} ({100 * above:+.0f}%"
    if standard in (None, line):
        return f"{text})"
    alike = overlapping(line["quartiles_ms"], standard["quartiles_ms"])
    faster = bound is not None and line["step_ms"] < bound["step_ms"]
    return f"{text}, {'~' * alike}{standard['step_ms'] / line['step_ms']:.2f}x{'^' * faster})"


if __name__ == "__main__":
    launch.run(main)
