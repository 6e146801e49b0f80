"""Which wiring for my link? A decode step of every wiring, predicted in no time: no model runs.

python -m measure.advise --model 70b --tp 8 --gpu h100 --link nvlink,pcie
python -m measure.advise --checkpoint demo --tp 2 --probe probe.jsonl     # of measure/probe.py, on your own ranks

A sublayer takes what the slower of two takes: to read its weights and its part of the cache from memory, and to
multiply them; where shards are uneven, the largest counts. An all-reduce takes what the link or the probe says. The
loop of model.py, run on the clock of measure/clock.py, makes a step of these. Norms, launches, and what communication
takes of the processor that computes, are left out: real steps are longer.
"""

import argparse
import dataclasses
import json
import math
from itertools import pairwise
from typing import NamedTuple

from formats import checkpoint
from formats.checkpoint import DTYPES, SIZES, dtype_name
from kernels import int_linear
from measure import link, report, results
from measure.clock import run_layers, variants
from model import WIRINGS, InputError, rewired
from runtime import cli, launch, writing
from runtime.cli import count, number
from tp import head_rows, shard_plan

LITTLE = 0.15  # a smaller share of a standard step in all-reduces is called little
ALIKE = 0.01  # a wiring is named next to the fastest if its step is longer by at most this share of it

# ---------------------------------------------------------------------------------------------------------------------
# What there is to do in a decode step, and how fast a machine does it


class Work(NamedTuple):
    """n_bytes: read from memory. flops: floating-point operations. Of one rank, in one decode step."""

    n_bytes: float
    flops: float


def rank_work(config, model, dtype, rank, tp_size, batch, context):
    """What decode_work says, of one rank. model: the skeleton of one layer."""
    plan, H = shard_plan(config, rank, tp_size), config.head_dim
    n_bytes, flops = ({"attention": 0.0, "feed_forward": 0.0, "rest": 0.0} for _ in "12")
    for path, module in model.named_modules():
        place, name = path.split(".")[-2:] if "." in path else ("rest", path)
        if name not in plan:
            continue
        dim, ranges = plan[name]
        shape = module.out_features, module.in_features
        part = sum(stop - start for start, stop in ranges) / shape[dim]
        for p in module.parameters():
            whole = dim == 1 and (p.dim() == 1 or p.shape[1] == 1)  # a bias, or a scale for each row
            size = dtype.itemsize if p.is_floating_point() else p.element_size()
            n_bytes[place] += p.numel() * size * (1 if whole else part)
        flops[place] += 2 * batch * math.prod(shape) * part
    [(first, last)] = plan["wo"][1]
    heads = (last - first) // H
    kv_heads = (sum(stop - start for start, stop in plan["wqkv"][1]) // H - heads) // 2
    n_bytes["attention"] += 2 * batch * context * kv_heads * H * dtype.itemsize
    flops["attention"] += 4 * batch * context * heads * H
    n_bytes["rest"] += (batch + 1) * config.dim * dtype.itemsize  # rows of the embedding, and the final norm
    return {place: Work(n_bytes[place], flops[place]) for place in n_bytes}


def decode_work(config, dtype, tp_size, batch, context):
    """{"attention": Work of a layer's, "feed_forward": of its MLP, "rest": of what is outside of the layers}.

    Each of the rank that has the most of it to do: the others wait for that one.
    context: filled slots of the cache. The embedding table is not read, but for the rows of the step's tokens.
    Raises InputError where tp_size does not suit the config.
    """
    one = dataclasses.replace(rewired(config, "standard"), n_layers=1, nope_layers=())
    model = int_linear.skeleton(one)
    ranks = [rank_work(config, model, dtype, rank, tp_size, batch, context) for rank in range(tp_size)]
    return {place: max(work[place] for work in ranks) for place in ranks[0]}


def bytes_of_step(config, work):
    """Bytes that a rank reads in a whole step. work: of decode_work."""
    return config.n_layers * bytes_of_layer(work) + work["rest"].n_bytes


def bytes_of_layer(work):
    return work["attention"].n_bytes + work["feed_forward"].n_bytes


def attention_share(work):
    """The part of a layer's bytes that its attention reads. work: of decode_work."""
    return work["attention"].n_bytes / bytes_of_layer(work)


class Machine(NamedTuple):
    """bandwidth: bytes per second that a rank reads from memory. flops: operations per second, infinite if unknown."""

    name: str
    bandwidth: float
    flops: float = math.inf

    def seconds(self, work):
        return max(work.n_bytes / self.bandwidth, work.flops / self.flops)

    def __str__(self):
        computing = f", {self.flops / 1e12:.0f} TFLOP/s" if self.flops < math.inf else ""
        return f"{self.name}: {self.bandwidth / 1e9:,.1f} GB/s{computing} a rank"


# bytes per second, and dense bfloat16 operations per second: NVIDIA's data sheets of the SXM modules
GPUS = {"h100": (3.35e12, 989e12), "h200": (4.8e12, 989e12)}
# What a decode step gets of the published bandwidth: gpt-fast's README has 1397 of an A100's 2039 GB/s for the 7b in
# bfloat16 on one GPU. The upper bound that the paper measured is lower: benchmarks/paper.py prints both.
SHARE = 0.7


def published_machine(name, share=SHARE):
    bandwidth, flops = (share * x for x in GPUS[name])
    return Machine(f"{100 * share:.0f} % of what an {name.upper()} has on paper", bandwidth, flops)


# ---------------------------------------------------------------------------------------------------------------------
# Links


@dataclasses.dataclass(frozen=True)
class ProbedLink:
    """A link as measure/probe.py found it. table: ((bytes, seconds of an all-reduce), ...), by their bytes."""

    name: str
    table: tuple

    def seconds(self, n_bytes, tp_size, passes=2):
        """As Link.seconds: between two sizes of the table on a straight line, beyond the last one at its rate."""
        n_bytes = n_bytes * passes / 2  # a gather passes half as much
        (smallest, shortest), (largest, longest) = self.table[0], self.table[-1]
        if n_bytes <= smallest:
            return shortest
        for (a, start), (b, stop) in pairwise(self.table):
            if n_bytes <= b:
                return start + (stop - start) * (n_bytes - a) / (b - a)
        return longest * n_bytes / largest

    def __str__(self):
        return f"{self.name} (probed)"


def read_probe(path):
    """An argparse type: (path, the lines of measure/probe.py in a file, such as one of bench.sh)."""
    try:
        lines = [json.loads(line) for line in checkpoint.read_text(path).splitlines()]
        lines = [line for line in lines if "probe" in line]
        for line in lines:
            numbers = [*line["probe"]["bandwidth"], line["tp"]]
            numbers += [point[key] for point in line["probe"]["all_reduce"] for key in ("bytes", "us")]
            if not all(type(x) in (int, float) and 0 < x < math.inf for x in numbers):
                raise ValueError
            line["hardware"], line["device"], results.link(line)  # are there
    except InputError as e:
        raise argparse.ArgumentTypeError(e) from None
    except (ValueError, TypeError, KeyError, AttributeError):
        lines = []
    if not lines:
        raise argparse.ArgumentTypeError(f"{path} has no lines that measure/probe.py wrote, or broken ones")
    return path, lines


def probed(path, lines, tp_size, gpu=None):
    """(Machine, [ProbedLink]) of those lines that so many ranks wrote; the last one of each link counts.

    gpu: what the machine should be, if the user said it. Raises InputError for lines of others.
    """
    own = [line for line in lines if line["tp"] == tp_size and line["probe"]["all_reduce"]]
    if not own:
        found = ", ".join(str(n) for n in sorted({line["tp"] for line in lines}))
        raise InputError(f"--probe {path} was measured with tp {found}, not with --tp {tp_size}")
    machines = sorted({f"{line['hardware']} ({line['device']})" for line in own})
    if len(machines) > 1:
        raise InputError(f"--probe {path} has lines of several machines: {'; '.join(machines)}; give those of one")
    if gpu and gpu.upper() not in machines[0].upper():
        raise InputError(f"--probe {path} was measured on {machines[0]}, not on --gpu {gpu}")
    links = {}
    for line in own:
        table = sorted((point["bytes"], 1e-6 * point["us"]) for point in line["probe"]["all_reduce"])
        links[results.link(line)] = ProbedLink(results.link(line), tuple(table))
    return Machine(f"{machines[0]}, probed", min(own[-1]["probe"]["bandwidth"])), [*links.values()]


# ---------------------------------------------------------------------------------------------------------------------
# Predictions


class Times(NamedTuple):
    """Seconds: of a layer's attention and MLP, of the rest of a step, of an all-reduce, of gathering the logits."""

    attention: float
    feed_forward: float
    rest: float
    all_reduce: float
    gather: float


def times_of(config, dtype, tp_size, batch, context, machine, link):
    """The Times of a decode step. link: a Link or a ProbedLink."""
    work = decode_work(config, dtype, tp_size, batch, context)
    logits = batch * tp_size * head_rows(config.vocab_size, tp_size) * dtype.itemsize
    all_reduce = link.seconds(batch * config.dim * dtype.itemsize, tp_size)
    return Times(*map(machine.seconds, work.values()), all_reduce, link.seconds(logits, tp_size, passes=1))


def step_seconds(config, times):
    """(seconds of a step in the config's wiring, its all-reduces, the share of their time that it hides or None)."""
    clock = run_layers(config, *times[:2], times.all_reduce)
    silent = run_layers(config, *times[:2], 0.0).now
    travel = clock.started * times.all_reduce
    hidden = max(0.0, 1 - (clock.now - silent) / travel) if travel else None  # not -0
    return clock.now + times.rest + times.gather, clock.started, hidden


def retraining(own, config, tp_size):
    """Whether a model whose weights are of the Config `own` must be trained for the wiring of another."""
    if config.function == own.function:
        return "no" if own.made_for_tp in (None, tp_size) else "no, but a loss"
    if own.wiring == "standard" and config.kind.runs_standard == "any":
        return "no, but a loss"
    return f"yes, for {tp_size} ranks" if config.kind.tp_bound else "yes"


def candidates(own, layers=None):
    """The Configs to compare, each function once: variants, those that take layers also in the given ones, own."""
    names, unique = variants(own.n_layers), {}
    if layers:
        names = [n for n in names if not n.startswith("ladder:")]
        names += [f"{name}:{layers}" for name, wiring in WIRINGS.items() if wiring.parameter == "layers"]
    for config in [*(rewired(own, name) for name in names), dataclasses.replace(own, made_for_tp=None)]:
        unique.setdefault(config.function, config)
    return [*unique.values()]


def predictions(configs, own, times, tp_size):
    """A dict for each Config, the fastest first: the keys of a line of --json in docs/choosing.md."""
    standard, *_ = step_seconds(rewired(own, "standard"), times)
    found = []
    for config in configs:
        seconds, n, hidden = step_seconds(config, times)
        found.append({
            "wiring": config.wiring, "step_ms": 1e3 * seconds,
            "times_standard": standard / seconds, "all_reduces": n, "hidden": hidden,
            "retraining": retraining(own, config, tp_size) if n else None,  # a bound is no model
        })  # fmt: skip
    return sorted(found, key=lambda line: line["step_ms"])


def table(lines):
    """Markdown: first the wirings, and then, apart, the bounds, which have no all-reduce."""
    head = ["wiring", "ms a step", "times standard", "all-reduces", "hidden", "needs retraining"]
    rows = [
        [
            line["wiring"] if line["all_reduces"] else f"(bound: {line['wiring']})",
            f"{line['step_ms']:.3f}", f"{line['times_standard']:.2f}", str(line["all_reduces"]),
            "" if line["hidden"] is None else f"{100 * line['hidden']:.0f} %",
            line["retraining"] or "no model",
        ]
        for line in sorted(lines, key=lambda line: not line["all_reduces"])
    ]  # fmt: skip
    return results.markdown(head, rows)


def verdict(lines, all_reduce):
    """What to take, in a few sentences. all_reduce: seconds of one."""
    standard = next(line for line in lines if line["wiring"] == "standard")
    share = 1e3 * standard["all_reduces"] * all_reduce / standard["step_ms"]
    most = max((line["times_standard"] for line in lines if not line["all_reduces"]), default=1 / (1 - share))
    text = (
        f"The all-reduces are {100 * share:.0f} % of the standard step: none can be more than {most:.2f} times as fast."
    )
    if share < LITTLE:
        text += "\nThat is little: a standard model as it is loses no more than that to them."
    kinds = {False: "Without retraining", True: "With retraining"}
    for trained, kind in kinds.items():
        wanted = ("yes",) if trained else ("no", "no, but a loss")
        those = [x for x in lines if x["all_reduces"] and x["retraining"] in wanted]
        if not those:
            continue
        best = [x for x in those if x["step_ms"] <= (1 + ALIKE) * those[0]["step_ms"]]
        if standard in best or best[0]["times_standard"] <= 1 + ALIKE:
            text += f"\n{kind}: nothing is more than {100 * ALIKE:.0f} % faster than standard."
            continue
        names, lossy = ", ".join(x["wiring"] for x in best), any(x["retraining"] == "no, but a loss" for x in best)
        text += f"\n{kind}: {names}; {best[0]['step_ms']:.3f} ms, {best[0]['times_standard']:.2f} times as fast"
        if lossy:
            slower = [x for x in those if x not in best and x["times_standard"] > 1 + ALIKE]
            others = ", ".join(f"{x['wiring']}: {x['times_standard']:.2f}" for x in slower)
            text += f" ({others})" * bool(others)
            text += ", each at a loss of its own that grows with tp: eval.py measures it"
        text += "."
    return text


# ---------------------------------------------------------------------------------------------------------------------
# The command line


def parse(argv):
    p = cli.Parser(__doc__)
    g = p.add_argument_group("model")
    g.add_argument("--model", choices=SIZES, metavar="NAME", help=f"a named size: {', '.join(SIZES)}")
    g.add_argument("--checkpoint", metavar="DIR", help="... or a folder of weights, of which none is loaded")
    g.add_argument("--tp", type=number(int, 2), required=True, metavar="N", help="ranks, e.g. 8")
    g.add_argument("--batch", type=count, default=1, metavar="B", help="rows, e.g. 16")
    g.add_argument("--context", type=count, metavar="T", help="filled slots of the cache, e.g. 4096; else at most 1024")
    g.add_argument("--dtype", choices=DTYPES, help="without it the checkpoint's, or bfloat16")
    g.add_argument("--n-layers", type=count, metavar="N", help="of --model, take only so many layers, e.g. 4")
    g.add_argument("--quant", choices=("int8", "int4"), help="of --model, the weights as integers")
    g.add_argument("--group-size", type=int, metavar="N", help="of --quant int4, in columns: 32, 64 (default) or 128")
    g.add_argument(
        "--layers", metavar="N|I,J,...", help="wire the last N layers so, or layers I, J (from 0), where a wiring can; "
        "without it half of the layers are a ladder's"
    )  # fmt: skip
    g = p.add_argument_group("machine", "without --gpu and --bandwidth-gbs the probe's, or else this one, measured now")
    g.add_argument("--gpu", choices=GPUS, metavar="NAME", help=f"a published bandwidth and rate: {', '.join(GPUS)}")
    share = number(float, 0, 1, above=True)
    g.add_argument("--share", type=share, metavar="S", help=f"of what is published, e.g. 0.8; without it {SHARE}")
    positive = number(float, 0, 1e9, above=True)
    g.add_argument("--bandwidth-gbs", type=positive, metavar="X", help="gigabytes per second a rank reads, e.g. 12.5")
    g.add_argument("--tflops", type=positive, metavar="X", help="10^12 operations per second a rank computes, e.g. 300")
    g = p.add_argument_group("link")
    g.add_argument("--link", metavar="NAME,...", help=f"all, or some of {', '.join(link.LINKS)}")
    link.add_number_flags(g)
    g.add_argument(
        "--probe", type=read_probe, metavar="FILE", help="your own ranks, measured: lines of measure/probe.py"
    )
    cli.add_json_flag(p, "a line for each link")
    args = p.parse_args(argv)
    if bool(args.checkpoint) == bool(args.model):
        raise InputError("give either --checkpoint DIR or --model NAME")
    for name in ("n_layers", "quant", "group_size"):
        if args.checkpoint and getattr(args, name) is not None:
            raise InputError(f"--{name.replace('_', '-')} goes with --model: a checkpoint is as it is")
    if args.gpu and args.bandwidth_gbs:
        raise InputError("give either --gpu NAME or --bandwidth-gbs X")
    if args.share and not args.gpu:
        raise InputError("--share is of what is published: it goes with --gpu")
    return args


def choose_links(args):
    """The Links that the flags name."""
    names = [None] if args.link is None else args.link.split(",")
    if names == ["all"]:
        names = [name for name in link.LINKS if name != "free"]
    return [link.choose(name, args.link_latency_us, args.link_gbps) for name in names]


def describe(args):
    """(the Config of the weights, their dtype, what they are called)."""
    if args.model:
        config = checkpoint.named_size(args.model, args.n_layers, args.quant, args.group_size)
        return config, DTYPES[args.dtype or "bfloat16"], args.model
    config = checkpoint.read_config(args.checkpoint)
    own = DTYPES[args.dtype] if args.dtype else checkpoint.Weights(args.checkpoint).dtype("norm.weight")
    return config, own, checkpoint.name(args.checkpoint)


def choose_machine(args, dtype, found):
    """The Machine that the flags describe, for weights of a dtype. found: of --probe, or None."""
    if args.gpu:
        machine = published_machine(args.gpu, args.share or SHARE)
        if dtype.itemsize > 2:  # the published rate is of 16-bit numbers
            machine = machine._replace(flops=math.inf)
    elif args.bandwidth_gbs:
        machine = Machine("as given", 1e9 * args.bandwidth_gbs)
    elif found:
        machine = found
    else:
        device = launch.choose_device(None)
        machine = Machine(f"this machine ({device.type}), one process", report.read_bandwidth(device, size=2**28))
    return machine if args.tflops is None else machine._replace(flops=1e12 * args.tflops)


def main(argv=None):
    args = parse(argv)
    own, dtype, name = describe(args)
    configs = candidates(own, args.layers)
    shard_plan(own, 0, args.tp)  # raises InputError before anything is measured
    args.context = args.context or min(1024, own.max_seq_len)
    if args.context > own.max_seq_len:
        raise InputError(f"--context {args.context} is more than the {own.max_seq_len} that {name} allows")
    found, links = probed(*args.probe, args.tp, args.gpu) if args.probe else (None, [])
    links = [one for one in choose_links(args) if one] + links
    if not links:
        raise InputError("no link: give --link NAME, --link-latency-us and --link-gbps, or --probe FILE")
    machine = choose_machine(args, dtype, found)
    kind = own.quant or dtype_name(dtype)
    work = f"tp {args.tp}, batch {args.batch}, {args.context} filled slots"
    print(f"PREDICTED: {name}, {own.n_layers} layers, {kind}, {work}\n{machine}")
    for one in links:
        times = times_of(own, dtype, args.tp, args.batch, args.context, machine, one)
        lines = predictions(configs, own, times, args.tp)
        parts = ", ".join(f"{key.replace('_', '-')} {1e6 * value:.1f}" for key, value in times._asdict().items())
        print(f"\n{one}; in us: {parts}\n\n{table(lines)}\n\n{verdict(lines, times.all_reduce)}")
        if args.json:
            writing.append_line(args.json, {
                "model": name, "n_layers": own.n_layers, "dtype": dtype_name(dtype), "quant": own.quant,
                "tp": args.tp, "batch": args.batch, "context": args.context, "machine": machine.name,
                "bandwidth": machine.bandwidth, "flops": machine.flops if machine.flops < math.inf else None,
                "link": dataclasses.asdict(one), "us": {k: 1e6 * v for k, v in times._asdict().items()},
                "wirings": lines, "commit": report.git_commit(),
            })  # fmt: skip


if __name__ == "__main__":
    launch.run(main)
