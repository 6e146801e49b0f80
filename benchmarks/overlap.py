"""Step times of several wirings over several links, interleaved in one run, beside what order and arithmetic allow.

torchrun --standalone --nproc_per_node=2 benchmarks/overlap.py --links 0,1000,3000 --json benchmarks/overlap-cpu.jsonl
python benchmarks/overlap.py --simulate-tp 8 --model 8b --links nvlink,pcie --json ...

Each line of the result is one wiring over one link: the median step, its quartiles, the same model's step without
all-reduces, one all-reduce on its own, and the limit (exposed.py). All wirings share one set of random weights.
"""

import copy
import dataclasses
import itertools
import json
import math
import shlex
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import checkpoint
import exposed
import generate
import link
import tp
from model import SIZES, Config, InputError
from report import environment

# On two ranks 26 MB in either sublayer: some 2 ms for a core that reads 12 GB/s
SMALL = Config(8, 40, 40, 64, 2560, 3456, 4096, 4096)
WIRINGS = {
    "standard": {"wiring": "standard"},
    "ladder": {"wiring": "ladder"},
    "hybrid": {"wiring": "hybrid"},  # the last half of the layers
    "parallel": {"wiring": "parallel"},
    "desync-2": {"wiring": "desync", "desync_period": 2},
    "desync-4": {"wiring": "desync", "desync_period": 4},
    "upper-bound": {"wiring": "upper-bound"},
}


def parse():
    p = tp.Parser(__doc__)
    p.add_argument("--model", default="small", help=f"small (8 layers of dim 2560), {', '.join(SIZES)}")
    p.add_argument("--n-layers", type=int, help="take only so many layers of it")
    p.add_argument("--dtype", choices=checkpoint.DTYPES, default="bfloat16")
    p.add_argument("--device", help="cpu or cuda")
    p.add_argument("--batch", type=int, default=1)
    p.add_argument("--prompt-length", type=int, default=64, help="filled cache slots; the prompt of --prefill")
    p.add_argument("--prefill", action="store_true", help="time the prefill, not a decode step")
    p.add_argument("--eager", action="store_true", help="do not compile")
    p.add_argument("--wirings", default=",".join(WIRINGS), help="of these")
    p.add_argument("--links", default="0", help="names of link.py or microseconds, a comma between")
    p.add_argument("--simulate-tp", type=int, help="one rank of so many, alone")
    p.add_argument("--rounds", type=int, default=30, help="steps of each wiring over each link, 3 or more")
    p.add_argument("--seconds", type=float, default=300, help="... or fewer, to end in about this time")
    p.add_argument("--label", help="what to call the real link that --links free measures")
    p.add_argument("--command", help="what to record as the command, where a script runs this one")
    p.add_argument("--json", metavar="FILE", help="append the lines to this file")
    p.add_argument("--show", metavar="FILE", nargs="+", help="print the tables of such files, and measure nothing")
    args = p.parse_args()
    if args.show:
        return args
    if args.model not in ("small", *SIZES):
        raise InputError(f"unknown --model {args.model!r}; known: small, {', '.join(SIZES)}")
    config = model_config(args)
    if args.n_layers is not None and not 2 <= args.n_layers <= config.n_layers:
        raise InputError(f"--n-layers is {args.n_layers} but must be from 2 to {config.n_layers}")
    if not 1 <= args.prompt_length < config.max_seq_len:
        raise InputError(f"--prompt-length is {args.prompt_length} but must be from 1 to {config.max_seq_len - 1}")
    if not 0 < args.seconds < math.inf:
        raise InputError(f"--seconds is {args.seconds} but must be a finite number above 0")
    unknown = [w for w in args.wirings.split(",") if w not in WIRINGS]
    if unknown:
        raise InputError(f"unknown wiring {unknown[0]!r}; known: {', '.join(WIRINGS)}")
    for name, least in (("batch", 1), ("rounds", 3), ("simulate_tp", 2)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            raise InputError(f"--{name.replace('_', '-')} is {getattr(args, name)} but must be at least {least}")
    if args.label and args.links != "free":
        raise InputError(f"--links {args.links} emulates one, but --label (or netns.sh) says that there is a real link")
    if args.json is not None:
        checkpoint.check_appendable(args.json, "--json")
    return args


def read_lines(file, key="limit_ms", flag="--show ", writer="this script"):
    """The lines, with this key in each, that an earlier run of the writer appended to a file, which the flag named."""
    text = checkpoint.read_text(file, flag)
    try:
        lines = [json.loads(line) for line in text.splitlines()]
        if lines and all(key in line for line in lines):
            return lines
    except (ValueError, TypeError):
        pass
    raise InputError(f"{flag}{file} has lines that {writer} did not write")


def model_config(args):
    return SMALL if args.model == "small" else SIZES[args.model]


def custom(n):
    """The link of so many microseconds."""
    try:
        return link.choose(latency_us=float(n))
    except ValueError:
        known = ", ".join(link.LINKS)
        raise InputError(f"--links {n!r} is neither a number of microseconds nor one of {known}") from None


def main():
    args = parse()
    if args.show:
        return print(tables([line for file in args.show for line in read_lines(file)]))
    links = {n: link.choose(n) if n in link.LINKS else custom(n) for n in args.links.split(",")}
    world = tp.join(args.device, next(iter(links.values())), args.simulate_tp)
    config = model_config(args)
    config = dataclasses.replace(config, n_layers=args.n_layers or config.n_layers, max_seq_len=args.prompt_length + 1)
    dtype = checkpoint.DTYPES[args.dtype]
    weights = checkpoint.RandomWeights(config, world.device)
    base = tp.load_shard(config, weights, dtype, world.device, world.rank, world.tp_size)
    prompts = [[1 + row] * args.prompt_length for row in range(args.batch)]
    cache = generate.make_cache(base, args.batch, args.prompt_length + 2)  # a step never reads the last slot
    kind = "prefill" if args.prefill else "decode"
    partial = base.norm.weight.new_zeros(args.batch, args.prompt_length if args.prefill else 1, config.dim)
    args.compile = args.compile_prefill = not args.eager
    torch._dynamo.config.recompile_limit = 100  # every wiring is a graph of its own, with and without its collectives

    models, names = {}, args.wirings.split(",")
    for name in names:
        changes = dict(WIRINGS[name])
        if name == "hybrid":
            changes["ladder_layers"] = config.n_layers // 2
        model = copy.copy(base)
        model.config = dataclasses.replace(config, **changes)
        model.comm = tp.TensorParallel(config, world.tp_size, world.group)
        both = model, tp.silenced(model, world)
        steps = (generate.steps(prompts, *generate.compiled(m, args), cache)[kind] for m in both)
        models[name] = model.config, *steps, partial
    cases = {(n, name): exposed.Case(*models[name], links[n]) for n, name in itertools.product(links, names)}
    if world.rank == 0:
        print(f"{len(cases)} cases: compiling {len(names)} wirings ...", file=sys.stderr)
    reports = exposed.measure(world, cases, args.rounds, args.seconds)
    if world.rank > 0:
        return
    about = {
        "model": args.model, "n_layers": config.n_layers, "kind": kind, "compiled": not args.eager, "batch": args.batch,
        "tokens": args.prompt_length, "dtype": args.dtype, **environment(world),
        "command": args.command or command(world),
    }  # fmt: skip
    lines = []
    for (n, name), report in reports.items():
        emulated = {} if args.label else dataclasses.asdict(links[n])
        lines.append({**about, "link": {**emulated, "name": args.label or n}, "wiring": name, **report})
    if args.json:
        with open(args.json, "a") as f:
            f.writelines(json.dumps(line) + "\n" for line in lines)
    print(tables(lines))


def command(world):
    """The command line of this run."""
    threads = f"OMP_NUM_THREADS={torch.get_num_threads()}"
    ranks = "python" if world.alone else f"torchrun --standalone --nproc_per_node={world.tp_size}"
    return shlex.join([threads, *ranks.split(), *sys.argv])


def tables(lines):
    """Markdown, a table a setting: a line a link, a column a wiring; see cell."""
    settings = {}
    for line in lines:
        how = "compiled" if line["compiled"] else "eager"
        size = f"tp {line['tp']}{', one rank alone' if line['simulated'] else ''}, batch {line['batch']}"
        model = f"{line['model']}, {line['n_layers']} layers, {line['dtype']}, {line['device']}"
        setting = (
            f"{model}, {how} {line['kind']}, {line['tokens']} tokens, {size}, {line['threads']} threads a rank; ms:"
        )
        settings.setdefault(setting, []).append(line)
    return "\n\n".join(f"{setting}\n\n{table(lines)}" for setting, lines in settings.items())


def table(lines):
    names = list(dict.fromkeys(line["wiring"] for line in lines))
    rows = {}
    for line in lines:
        rows.setdefault(line["link"]["name"], {})[line["wiring"]] = line
    head = ["| link | one all-reduce, ms | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for link_name, row in rows.items():
        cells = [f"{statistics.median(line['all_reduce_ms'] for line in row.values()):.2f}"]
        cells += [cell(row[name], row.get("standard")) if name in row else "" for name in names]
        head.append(f"| {link_name} | " + " | ".join(cells) + " |")
    return "\n".join(head)


def cell(line, standard):
    """Milliseconds, how far above the limit, and how much faster than standard."""
    above = f"{line['step_ms']:.1f} ({100 * (line['step_ms'] / line['limit_ms'] - 1):+.0f} %"
    if standard in (None, line):
        return above + ")"
    return above + f", {standard['step_ms'] / line['step_ms']:.2f}x)"


if __name__ == "__main__":
    tp.run(main)
