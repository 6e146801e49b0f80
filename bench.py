"""Compare the speed of wirings at several batch sizes and numbers of ranks.

./bench.sh                                                                  # a comparison that suits this machine
./bench.sh --checkpoint demo --tp 1 2 --batch 1 4 --wiring standard ladder  # the same as: python bench.py ...
torchrun --nnodes=2 --nproc_per_node=8 ... bench.py --model 70b             # on each of several nodes

A cell is a wiring at a batch size. In every round all cells generate once, one after another, so that other programs on
the machine slow all of them alike. On one rank only one wiring runs, standard if it is named, since all cost about the
same there.
"""

import copy
import functools
import itertools
import os
import statistics
import subprocess
import sys

import ladder.openmp  # noqa: F401 (before torch loads)

import torch

import generate
from ladder import benchmarking, cgroups, outputs
from ladder.benchmarking import in_turns, pivot, quartiles
from ladder.checkpoints import checkpoint
from ladder.command_line import flags
from ladder.command_line.flags import count, number
from ladder.decoding.batch import Sampler, make_cache
from ladder.errors import InputError, naming
from ladder.memory import step_bytes
from ladder.progress import progress
from ladder.ranks import launch
from ladder.ranks.world import rank_and_size
from model import rewired
from tp import shard_plan

LARGE_STEP = 5e7  # bytes that a step reads; fewer may fit a processor's caches, so their MBU would mean nothing

# ---- The cells: a wiring at a batch size -----------------------------------------------------------------------------


def load_models(config, wirings, args, world):
    """Return {wiring: model}. Models share their weights if the ranks hold the same shards of them."""
    configs = [rewired(config, wiring) for wiring in wirings]
    models = {}
    loaded = {}
    for one in sorted(configs, key=lambda c: len({norm for w in c.layer_wirings for norm in w.norms}), reverse=True):
        # the wiring with the most norms comes first, so that its weights have all norms that others need
        has_own_shards = one.named_wiring.fixed_shards or one.named_wiring.loader(world.shares)
        key = one.wiring if has_own_shards else (*one.mlps,)  # which MLPs are sharded
        if key in loaded:
            models[one.wiring] = copy.copy(loaded[key])
            models[one.wiring].config = one
        else:
            models[one.wiring] = loaded[key] = generate.load_model(one, args.checkpoint, args.dtype, world)
    return {one.wiring: models[one.wiring] for one in configs}


def make_cells(models, args, world):
    """Return {(wiring, batch): (runner, prompts)}, compiled unless --eager. Caches of the same shape are shared."""
    cells = {}
    caches = {}
    random = torch.Generator().manual_seed(0)
    for (wiring, model), batch in itertools.product(models.items(), args.batch):
        prompts = torch.randint(model.config.vocab_size, (batch, args.prompt_length), generator=random).tolist()
        key = model.config.named_wiring.shards(world.shares), batch
        caches[key] = caches.get(key) or make_cache(model, batch, args.prompt_length + args.new_tokens, not args.eager)
        cells[wiring, batch] = generate.Runner(model, caches[key], not args.eager), prompts
    if args.eager:
        return cells
    from ladder.kernels import compiling

    for n, ((wiring, batch), cell) in enumerate(cells.items(), start=1):
        compiling.warm_up(*cell, args.new_tokens, Sampler(0, device=world.device))
        world.say(f"tp {world.tp_size}: compiled {n} of {len(cells)}, {wiring} at batch {batch}")
    return cells


# ---- Measuring -------------------------------------------------------------------------------------------------------


def measure(args, world):
    """Measure all cells on these ranks and return a dict of results for each."""
    with world.together():
        name, config = flags.read_config(args)
        wirings = list(dict.fromkeys(args.wiring))
        if world.tp_size == 1:
            wirings = ["standard"] if "standard" in wirings else wirings[:1]
            if len(args.wiring) > 1:
                world.say(f"tp 1: {wirings[0]} alone, since on one rank all cost about the same")
    bandwidth = world.gather(benchmarking.read_bandwidth(world.device, world))
    cells = make_cells(load_models(config, wirings, args, world), args, world)
    sample = Sampler(0, device=world.device)
    progress.at("measurement", timed=False)
    ways = {key: functools.partial(generate.generate, *cell, args.new_tokens, sample) for key, cell in cells.items()}
    in_turns(ways, 1)  # not measured: it allocates memory
    world.say(f"tp {world.tp_size}: {args.repeats} rounds of {', '.join(wirings)} ...")
    with next(iter(cells.values()))[0].passes.unguarded():
        rounds = in_turns(ways, args.repeats)
    environment = benchmarking.environment(world)
    lines = []
    for (wiring, batch), runs in rounds.items():
        runner = cells[wiring, batch][0]
        ms = [1e3 * run.decode_s / (run.new_tokens - 1) for run in runs]
        read = step_bytes(runner.model, runner.cache, args.prompt_length + args.new_tokens / 2)
        lines.append({
            "model": name, "n_layers": config.n_layers, "quant": config.quant, "wiring": wiring, "batch": batch,
            "dtype": checkpoint.dtype_name(runner.model.dtype), "comm": args.comm, "compiled": not args.eager,
            "prompt_tokens": args.prompt_length, "new_tokens": args.new_tokens, "tpot_ms": ms,
            "ttft_ms": [1e3 * run.prefill_s for run in runs], "tok_s": 1e3 * batch / statistics.median(ms),
            "step_bytes": int(read), "bandwidth": bandwidth, "mbu": 1e3 * read / statistics.median(ms) / bandwidth[0],
            **environment,
        })  # fmt: skip
    return lines


# ---- The table -------------------------------------------------------------------------------------------------------


def tables(lines):
    """Return Markdown tables of decode and of prefill: a row for each wiring, a column for each batch size."""
    cells = {(line["wiring"], line["batch"]): line for line in lines}
    one = lines[0]

    def table(key, rate):
        def cell(line, _):
            low, middle, high = quartiles(line[key])
            text = f"{middle:.2f} ({low:.2f}-{high:.2f}) ms"
            standard = cells.get(("standard", line["batch"]))
            if standard not in (None, line):
                low, middle, high = quartiles([a / b for a, b in zip(standard[key], line[key], strict=True)])
                text += f", {'~' * (low <= 1 <= high)}{middle:.2f}x"
            return text + rate(line)

        return pivot(["wiring"], lines, lambda x: (x["wiring"],), lambda x: f"batch {x['batch']}", cell)

    def rate(line):
        return f", {line['tok_s']:.0f} tok/s" + f", {100 * line['mbu']:.0f} %" * (line["step_bytes"] >= LARGE_STEP)

    size = f"{one['model']}, {one['n_layers']} layers, {one['quant'] or one['dtype']}, tp {one['tp']}"
    return (
        f"{size}, {'compiled' if one['compiled'] else 'eager'}; {one['hardware']}; prompt {one['prompt_tokens']}, "
        f"{one['new_tokens']} new tokens; torch {one['torch']}, commit {one['commit']}\n\n"
        f"Decode, time per token:\n\n{table('tpot_ms', rate)}\n\n"
        f"Prefill, time to first token:\n\n{table('ttft_ms', lambda line: '')}\n\n"
        f"Medians (quartiles) of {len(one['tpot_ms'])} rounds. x: times as fast as standard, the median ratio within a "
        "round; `~`: its quartiles include 1; %: of the memory's bandwidth."
    )


# ---- The command line ------------------------------------------------------------------------------------------------


def add_flags(p):
    """Add the flags that say which cells to measure, and how. Other scripts that measure have them, too."""
    flags.add_model_flags(p)
    p.add_argument("--batch", type=count, nargs="+", metavar="B", help="batch sizes")
    p.add_argument("--wiring", nargs="+", metavar="NAME", help="as --wiring of generate.py")
    p.add_argument("--prompt-length", type=count, metavar="N", help="random tokens of each row")
    p.add_argument("--eager", action="store_true", help="do not compile on GPUs, either, where steps are then captured")
    p.add_argument("--compile", action="store_true", help="compile on CPUs, too: for minutes, for a few percent")
    flags.add_rank_flags(p)
    flags.add_json_flag(p, "a line for each cell")


def is_eager(args):
    """Return whether to measure without torch.compile: by default on CPUs, whose kernels need none."""
    return args.eager or not args.compile and (args.device == "cpu" or not torch.cuda.is_available())


def parse(argv):
    gpus = torch.cuda.device_count()
    cores = available_cores()
    length, new, size = (1024, 512, "8b") if gpus else (64, 32, "1b")
    p = flags.Parser(__doc__)
    add_flags(p)
    names = ["standard", "ladder", "parallel-ladder", "upper-bound"]
    p.set_defaults(model=size, batch=[1, 4, 16], wiring=names, prompt_length=length, json="bench.jsonl")
    tps = [tp for tp in (1, 2, 4, 8) if tp <= (gpus or cores)]
    p.add_argument("--tp", type=count, nargs="+", default=tps, metavar="N", help="numbers of ranks")
    p.add_argument("--new-tokens", type=number(int, 2), default=new, metavar="N", help="the first is the prefill's")
    p.add_argument("--repeats", type=count, default=5, metavar="N", help="rounds, in which each cell generates once")
    args = p.parse_args(argv)
    args.eager = is_eager(args)
    _, config = flags.read_config(args)
    for wiring in args.wiring:
        for tp in args.tp:
            with naming(f"--wiring {wiring} --tp {tp}"):
                shard_plan(rewired(config, wiring), 0, (1,) * tp)  # raises InputError before any rank starts
    if args.prompt_length + args.new_tokens > config.max_seq_len:
        asked = f"--prompt-length {args.prompt_length} and --new-tokens {args.new_tokens}"
        raise InputError(f"{asked} exceed the context of {config.max_seq_len}")
    return args


def available_cores():
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return int(min(cores, cgroups.cpus()))


def start(tp, args, argv):
    """Run this script on tp ranks and return its exit code."""
    # one rank needs no torchrun, only the variables that it would set
    environment = os.environ | ({} if tp > 1 else {"RANK": "0", "WORLD_SIZE": "1"})
    if args.device == "cpu" or not torch.cuda.device_count():
        environment["OMP_NUM_THREADS"] = str(max(1, available_cores() // tp))
    words = ["--standalone", "--local_addr=127.0.0.1", f"--nproc_per_node={tp}"]  # its name may not resolve
    words = ["-m", "torch.distributed.run", *words] if tp > 1 else []
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
    if "RANK" not in os.environ:
        for tp in args.tp:
            if code := start(tp, args, argv):
                sys.exit(code)  # a rank has printed the reason
        return
    if rank_and_size()[1] == 1:
        args.comm = "auto"  # a way to sum takes two ranks
    world = launch.join(args.device, vars(args))
    lines = measure(args, world)
    if world.rank == 0:
        for line in lines:
            outputs.append_line(args.json, line)
        print(f"{tables(lines)}\n", flush=True)
        world.say(f"appended {len(lines)} lines to {args.json}")


if __name__ == "__main__":
    launch.run(main)
