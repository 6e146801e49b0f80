"""Compare the speed of wirings at several batch sizes and numbers of ranks.

./bench.sh                                                                  # a comparison that suits this machine
./bench.sh --checkpoint demo --tp 1 2 --batch 1 4 --wiring standard ladder  # the same as: python bench.py ...
torchrun --nnodes=2 --nproc_per_node=8 ... bench.py --model 70b             # on each of several nodes

For each number of ranks, the ranks start once, load the weights once and compile each wiring at each batch size once.
In every round, each of these cells then generates once, one after another, so that other programs on the machine slow
all of them alike. A speed-up is the median of the ratios to the standard wiring within each round. On one rank only the
standard wiring runs, since all wirings cost about the same there.
"""

import copy
import json
import os
import shlex
import statistics
import subprocess
import sys
from typing import NamedTuple

if __name__ == "__main__":  # before torch loads OpenMP, whose spinning threads stall a busy machine
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch

import generate
from decoding.sampling import Sampler
from formats import checkpoint
from formats.sizes import named_size
from model import rewired
from runtime import cli, launch, report, watch, writing
from runtime.cli import count, number
from runtime.errors import InputError
from runtime.timing import in_turns, quartiles

# ---- The cells: a wiring at a batch size -----------------------------------------------------------------------------


class Cell(NamedTuple):
    runner: generate.Runner
    prompts: list
    compile_s: float


def read_config(args):
    """Return the name of the model that the flags give, and its Config."""
    if args.checkpoint:
        return checkpoint.name(args.checkpoint), checkpoint.read_config(args.checkpoint)
    return args.model.partition(":")[0], named_size(args.model, args.quant)


def load_models(config, wirings, args, world):
    """Return {wiring: model}. The models share their weights and collectives, per number of lanes."""
    configs = {wiring: rewired(config, wiring) for wiring in wirings}
    loaded = {}
    for one in sorted(configs.values(), key=norms, reverse=True):  # the first has the norms of the others
        if one.lanes not in loaded:
            loaded[one.lanes] = generate.load_model(one, args.checkpoint, args.dtype, world)
    return {wiring: rewire(loaded[one.lanes], one) for wiring, one in configs.items()}


def norms(config):
    """Return how many different norms the layers of a config have."""
    return len({norm for wiring in config.wirings for norm in wiring.norms})


def rewire(model, config):
    """Return a model that shares all weights with another, in the wiring of its own config."""
    model = copy.copy(model)
    model.config = config
    return model


def random_prompts(config, batch, length):
    """Return `batch` unequal lists of `length` random token ids."""
    return torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0)).tolist()


def make_cells(models, args, world):
    """Return {(wiring, batch): Cell}, each compiled and run once. Cells of equal shape share their KV cache."""
    cells, caches, compiles = {}, {}, (args.compile != "none", args.compile == "all")
    for wiring, model in models.items():
        for batch in args.batch:
            key = model.config.lanes, batch
            if key not in caches:
                caches[key] = generate.make_cache(model, batch, args.prompt_length + args.new_tokens)
            runner = generate.Runner(model, caches[key], *compiles)
            prompts = random_prompts(model.config, batch, args.prompt_length)
            compile_s = generate.warm_up(runner, prompts, args.new_tokens)
            cells[wiring, batch] = Cell(runner, prompts, compile_s)
            if world.rank == 0:
                print(f"tp {world.tp_size}, {wiring}, batch {batch}: ready in {compile_s:.1f} s", file=sys.stderr)
    return cells


# ---- Measuring -------------------------------------------------------------------------------------------------------


def measure(args, world):
    """Measure all cells on these ranks; return their lines, alike on all ranks."""
    with world.together():
        name, config = read_config(args)
        wirings = list(dict.fromkeys(args.wiring))
        if world.tp_size == 1:
            wirings = ["standard"] if "standard" in wirings else wirings[:1]
        if args.prompt_length + args.new_tokens > config.max_seq_len:
            asked = f"--prompt-length {args.prompt_length} and --new-tokens {args.new_tokens}"
            raise InputError(f"{asked} exceed the context of {config.max_seq_len}")
    bandwidth = world.gather(report.read_bandwidth(world.device, world))
    models = load_models(config, wirings, args, world)
    cells, sample = make_cells(models, args, world), Sampler(0, device=world.device)
    watch.at("measurement", timed=False)

    def run(cell):
        return lambda: generate.generate(cell.runner, cell.prompts, args.new_tokens, sample)

    with generate.without_guards(next(iter(cells.values())).runner):
        rounds = in_turns({key: run(cell) for key, cell in cells.items()}, args.repeats)
    made = report.environment(world) | {"commit": report.git_commit(), "command": command()}
    lines = []
    for (wiring, batch), runs in rounds.items():
        cell, standard = cells[wiring, batch], rounds.get(("standard", batch))
        model, tpot = cell.runner.model, [1e3 * run.decode_s / (run.steps - 1) for run in runs]
        ms = statistics.median(tpot)
        read = report.step_bytes(model, cell.runner.cache, args.prompt_length + args.new_tokens / 2)
        lines.append({
            "model": name, "n_layers": config.n_layers, "quant": config.quant, "wiring": wiring, "batch": batch,
            "dtype": checkpoint.dtype_name(model.dtype), "comm": args.comm, "compile": args.compile,
            "prompt_tokens": args.prompt_length, "new_tokens": args.new_tokens, "compile_s": cell.compile_s,
            "tpot_ms": tpot, "ttft_ms": [1e3 * run.prefill_s for run in runs], "tok_s": 1e3 * batch / ms,
            "times_standard": ratios(standard, runs, "decode_s"),
            "prefill_times_standard": ratios(standard, runs, "prefill_s"),
            "step_bytes": int(read), "bandwidth": bandwidth, "mbu": 1e3 * read / ms / bandwidth[0], **made,
        })  # fmt: skip
    return lines


def ratios(standard, runs, seconds):
    """Return how many times as fast as standard each round was, or None without standard."""
    pairs = zip(standard, runs, strict=True) if standard else ()
    return [getattr(a, seconds) / getattr(b, seconds) for a, b in pairs] or None


def command():
    return shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]])


# ---- The table -------------------------------------------------------------------------------------------------------


def markdown(head, rows):
    """Return a table; head: the cells of its first row, rows: a list of as many cells each."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


def spread(values, digits):
    """Return the median as text, with the quartiles of several values."""
    low, middle, high = (f"{value:.{digits}f}" for value in quartiles(values))
    return middle + f" ({low}-{high})" * (len(values) > 1)


def speedup(line, key, bounds):
    """Return ", 1.23x", marked as the legend of tables() says. bounds: the lines of upper-bound by (tp, batch)."""
    if line["wiring"] == "standard" or not line[key]:
        return ""
    (low, middle, high), bound = quartiles(line[key]), bounds.get((line["tp"], line["batch"]))
    above = bound is not None and middle > statistics.median(bound[key] or [middle])
    return f", {'~' * (low <= 1 <= high)}{middle:.2f}x{'^' * above}"


def tables(lines):
    """Return two Markdown tables, of decode and of prefill: a row for each (ranks, wiring), a column for each batch."""
    bounds = {(line["tp"], line["batch"]): line for line in lines if line["wiring"] == "upper-bound"}
    batches = sorted({line["batch"] for line in lines})

    def decode(line):
        text = f"{spread(line['tpot_ms'], 2)} ms, {line['tok_s']:.0f} tok/s{speedup(line, 'times_standard', bounds)}"
        return text + (f", {100 * line['mbu']:.0f} %" if line["step_bytes"] >= report.LARGE else "")

    def prefill(line):
        return f"{spread(line['ttft_ms'], 1)} ms{speedup(line, 'prefill_times_standard', bounds)}"

    def table(cell):
        rows = {}
        for line in lines:
            rows.setdefault((line["tp"], line["wiring"]), {})[line["batch"]] = cell(line)
        head = ["ranks", "wiring", *(f"batch {batch}" for batch in batches)]
        return markdown(head, [[str(tp), w, *(row.get(b, "") for b in batches)] for (tp, w), row in rows.items()])

    one = lines[0]
    how = "eager" if one["compile"] == "none" else "compiled"
    title = f"{one['model']}, {one['n_layers']} layers, {one['quant'] or one['dtype']}, {how}; {one['hardware']}; "
    title += f"prompt {one['prompt_tokens']}, {one['new_tokens']} new tokens; torch {one['torch']}, {one['commit']}"
    legend = "Medians (quartiles) of {} rounds; x: times as fast as standard, the median ratio within a round, "
    legend += "`~`: its quartiles include 1, `^`: above the upper bound, which only noise can be; %: of the bandwidth."
    text = f"Decode, time per token:\n\n{table(decode)}\n\nPrefill, time to first token:\n\n{table(prefill)}"
    return f"{title}\n\n{text}\n\n{legend.format(len(one['tpot_ms']))}"


# ---- The command line ------------------------------------------------------------------------------------------------


def parse(argv):
    gpus, cores = torch.cuda.device_count(), available_cores()
    p = cli.Parser(__doc__)
    which = p.add_mutually_exclusive_group()
    which.add_argument("--checkpoint", metavar="DIR", help="a folder of weights, e.g. demo")
    size = "8b" if gpus else "1b"
    which.add_argument("--model", metavar="NAME[:N]", help=f"random weights of a named size (default: {size})")
    p.add_argument("--quant", metavar="int8|int4[:N]", help="of --model")
    p.add_argument("--dtype", choices=checkpoint.DTYPES, help="of the weights (default: the checkpoint's, or bfloat16)")
    tps = [tp for tp in (1, 2, 4, 8) if tp <= (gpus or cores)]
    p.add_argument("--tp", type=count, nargs="+", default=tps, metavar="N", help="numbers of ranks")
    p.add_argument("--batch", type=count, nargs="+", default=[1, 4, 16], metavar="B", help="batch sizes")
    names = ["standard", "ladder", "parallel-ladder", "upper-bound"]
    p.add_argument("--wiring", nargs="+", default=names, metavar="NAME", help="as --wiring of generate.py")
    length, new = (1024, 512) if gpus else (64, 32)
    p.add_argument("--prompt-length", type=count, default=length, metavar="N", help="random tokens of each row")
    p.add_argument("--new-tokens", type=number(int, 2), default=new, metavar="N", help="the first is the prefill's")
    p.add_argument("--repeats", type=count, default=5, metavar="N", help="rounds, in which each cell generates once")
    words = "what is compiled: the decode step, the prefill too, or none, which starts at once"
    p.add_argument("--compile", choices=("decode", "all", "none"), default="decode", help=words)
    cli.add_rank_flags(p)
    cli.add_comm_flag(p)
    p.add_argument("--json", type=cli.appendable, default="bench.jsonl", metavar="FILE", help="append a line per cell")
    args = p.parse_args(argv)
    args.model = args.model or (None if args.checkpoint else size)
    if args.quant and args.checkpoint:
        raise InputError("--quant goes with --model: a checkpoint is as it is (quantize.py makes another)")
    _, config = read_config(args)
    for wiring in args.wiring:
        rewired(config, wiring)  # raises InputError before any rank starts
    return args


def available_cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def start(tp, args, argv):
    """Run this script on so many ranks; returns its exit code."""
    environment = os.environ | {"BENCH_PART": "1"}  # this process prints one table of all
    if args.device == "cpu" or not torch.cuda.device_count():
        environment["OMP_NUM_THREADS"] = str(max(1, available_cores() // tp))
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={tp}"] if tp > 1 else []
    if tp == 1:
        environment |= {"RANK": "0", "WORLD_SIZE": "1"}  # as torchrun would set them
    process = subprocess.Popen([sys.executable, *words, __file__, *argv], env=environment)
    try:
        return process.wait()
    except BaseException:  # Ctrl-C, or a signal to end
        process.terminate()
        process.wait()
        raise


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    if "RANK" in os.environ:  # one of the ranks
        alone = {"comm": "auto"} if launch.rank_and_size()[1] == 1 else {}
        world = launch.join(args.device, vars(args) | alone)
        lines = measure(args, world)
        for line in lines if world.rank == 0 else ():
            writing.append_line(args.json, line)
        if world.rank == 0 and "BENCH_PART" not in os.environ:
            print(tables(lines))
        return
    before = os.path.getsize(args.json) if os.path.exists(args.json) else 0
    for tp in args.tp:
        if code := start(tp, args, argv):
            sys.exit(code)  # a rank has said why
    with open(args.json) as f:
        f.seek(before)
        print(tables([json.loads(line) for line in f if line.strip()]))


if __name__ == "__main__":
    launch.run(main)
