"""Which wiring for my link? Predict a decode step of every wiring; no model runs.

python -m extras.measure.advise --model 70b --tp 8 --gpu h100 --link nvlink pcie
python -m extras.measure.advise --checkpoint demo --tp 2 --bandwidth-gbs 12.5 --link 150us+10gbps  # as the probe says

docs/choosing.md says what goes into it, and what does not.
"""

import contextlib
import dataclasses
import math
from collections import Counter
from typing import NamedTuple

import torch

from extras.measure import link
from extras.measure.clock import norms_over_ranks, run_layers, variants
from ladder import benchmarking
from ladder.architectures.mixture import Mixture
from ladder.checkpoints.checkpoint import dtype_name
from ladder.command_line import flags
from ladder.command_line.flags import count, number
from ladder.errors import InputError, naming
from ladder.lanes.lanes import LaneWiring, lanes_of_rank
from ladder.memory import cache_bytes, shard_on_meta, share_read, slices_bytes
from ladder.ranks import eight_bits, launch
from model import rewired

# ---- The work of a decode step, and how fast a machine does it -------------------------------------------------------


class Work(NamedTuple):
    """Bytes that one rank reads in a decode step, and its floating-point operations."""

    n_bytes: float
    flops: float


def decode_work(config, dtype, tp_size, batch, context):
    """Return {"attention": Work, "feed_forward": Work, "rest": Work}: of a mean layer, and outside the layers.

    It is the work of the rank that has the most, since the others wait for it. context: filled slots of the cache. Of
    the embedding table, a step reads only the rows of its tokens. Raises InputError if tp_size does not fit the config.
    """
    names = {}  # an untied head is like the table
    for field in ("not_quantized", "int8"):
        tables = getattr(config, field)
        heads = [name.replace("tok_embeddings", "output") for name in tables if name.startswith("tok_embeddings")]
        names[field] = *tables, *(heads if config.tie_embeddings else ())
    config = dataclasses.replace(config, tie_embeddings=False, **names)
    ranks = [rank_work(config, dtype, rank, (1,) * tp_size, batch, context) for rank in range(tp_size)]
    return {place: max(work[place] for work in ranks) for place in ranks[0]}


def rank_work(config, dtype, rank, shares, batch, context):
    """Return what decode_work says of one rank."""
    model, slices = shard_on_meta(config, dtype, rank, shares)
    n_bytes = Counter()
    flops = Counter()
    for name, (shape, stored, *_) in slices.items():
        if "norm" in name or "tok_embeddings" in name:
            continue
        place = name.split(".")[2] if name.startswith("layers.") else "rest"
        size = math.prod(shape)
        read = share_read(config, name, batch)  # of the weights, by a step
        used = share_read(config, name, 1)  # of the weights, in the products of one token
        n_bytes[place] += size * stored.itemsize * read
        if name.endswith(".weight"):
            flops[place] += 2 * batch * size * used * (2 if stored == torch.uint8 else 1)  # int4: two in a byte
    n_bytes["attention"] += cache_bytes(model, batch, context)
    flops["attention"] += 2 * batch * context * sum(each.multiplications() for each in model.attentions)
    n_bytes["rest"] += (batch + 1) * config.dim * dtype.itemsize  # rows of the embedding, and the final norm
    layers = {"attention": config.n_layers, "feed_forward": config.n_layers, "rest": 1}
    return {place: Work(n_bytes[place] / n, flops[place] / n) for place, n in layers.items()}


class Machine(NamedTuple):
    """A rank's machine. bandwidth: bytes per second that it reads. flops: per second, infinite if unknown."""

    name: str
    bandwidth: float
    flops: float = math.inf

    def seconds(self, work):
        return max(work.n_bytes / self.bandwidth, work.flops / self.flops)


# Bytes per second, and dense operations per second in bfloat16, summed in float32. NVIDIA's data sheets "A100 Tensor
# Core GPU" (80 GB, SXM), "H100 Tensor Core GPU" and "H200 Tensor Core GPU" (SXM); its white papers "NVIDIA Ampere GA102
# GPU Architecture", "NVIDIA Ada GPU Architecture" and "NVIDIA RTX Blackwell GPU Architecture".
GPUS = {
    "a100": (2.039e12, 312e12), "h100": (3.35e12, 989e12), "h200": (4.8e12, 989e12),
    "3090": (0.936e12, 71e12), "4090": (1.008e12, 165.2e12), "5090": (1.792e12, 209.5e12),
}  # fmt: skip
# The share of the published bandwidth that a decode step reaches. In gpt-fast's README the 7b in bfloat16 on one A100
# reaches 1397 of 2039 GB/s. The upper bound that the paper measured is lower: see benchmarks/bench.md.
BANDWIDTH_SHARE = 0.7
FILLED_SLOTS = 1024  # filled slots of the cache, at most
MOST_LOSS = 2.0  # percent that a recommended wiring may lose
COMMS = "library", "int8"
WHOLE_LAYERS_GBPS = 0.05  # over slower links whole layers on each machine may win a prompt
WHOLE_LAYERS = "A long prompt may be faster with whole layers on each machine, as llama.cpp's RPC has them: "
WHOLE_LAYERS += "docs/two-machines.md"
PCIE = """pcie was measured with eight GPUs and NCCL. Two to four that read one another's memory (nvidia-smi topo -p2p r
says OK) are pcie-p2p with one-shot kernels, 20us+74gbps with NCCL; those that cannot, such as RTX 5070 Ti, pcie-host.
extras.measure.probe measures yours."""

# ---- Predictions -----------------------------------------------------------------------------------------------------


class Times(NamedTuple):
    """Seconds of a layer's attention and MLP, of a step's rest, of an all-reduce, and of gathering the best tokens.

    flight: for how many seconds of an all-reduce the link can already carry the next one. norm_sum: seconds of the
    small all-reduce in each attention with whole_qk_norm, which nothing hides.
    """

    attention: float
    feed_forward: float
    rest: float
    all_reduce: float
    gather: float
    flight: float = 0.0
    norm_sum: float = 0.0


def times_of(config, work, dtype, tp_size, batch, machine, link, comm="library"):
    """Return the Times of a decode step over a Link. work: decode_work's. comm: one of COMMS."""
    count = batch * config.dim
    n_bytes = eight_bits.message_bytes(count) if comm == "int8" else count * dtype.itemsize
    all_reduce = link.seconds(n_bytes, tp_size)
    gather = link.seconds(16 * batch * tp_size, tp_size, passes=1)  # a logit and an id from each rank
    norm_sum = link.seconds(16 * batch, tp_size) if norms_over_ranks(config) else 0.0  # two sums of squares of each row
    return Times(*map(machine.seconds, work.values()), all_reduce, gather, link.flight, norm_sum)


def step_seconds(config, times):
    """Return (seconds of a step, the number of its all-reduces, the share of their time that computing hides)."""
    clock = run_layers(config, *times[:2], times.all_reduce, flight=times.flight, norm_sum=times.norm_sum)
    silent = run_layers(config, *times[:2], 0.0, norm_sum=times.norm_sum).now
    travel = clock.started * times.all_reduce
    hidden = max(0.0, 1 - (clock.now - silent) / travel) if travel else None  # not -0
    return clock.now + times.rest + times.gather, clock.started, hidden


def wiring_key(config, tp_size):
    """Return a key that two configs share if they compute the same function on so many ranks."""
    shards = config.named_wiring.shards((1,) * tp_size)  # spd is spd/4 on four ranks
    whatever_lanes = [
        dataclasses.replace(w, lanes=None) if isinstance(w, LaneWiring) else w for w in config.layer_wirings
    ]
    return tuple((w, shards if w.reads_partials else None) for w in whatever_lanes)


def retraining(own, config, tp_size):
    """Return in words whether weights of the Config `own` must be retrained for the wiring of `config`."""
    if wiring_key(config, tp_size) == wiring_key(own, tp_size):
        return "no"
    n_lanes = len(config.named_wiring.shards((1,) * tp_size))
    return f"yes, in {n_lanes} lanes" if config.named_wiring.reads_partials else "yes"


def measured_losses(own, tp_size):
    """Return {wiring_key: percent}: how much retraining in this wiring raised the loss of a small standard model.

    It was retrained on 20 % of the tokens of its training, and is compared with one that was trained plainly on as
    many: benchmarks/quality.md and, for a mixture, benchmarks/experts.md.
    """
    half = own.n_layers // 2
    middle = own.n_layers // 4
    losses = {own.wiring: 0.0}
    if own.wiring == "standard" and own.find(Mixture):
        losses |= {"ladder": 3.4}
    elif own.wiring == "standard":  # for weights in another wiring it was not measured
        losses |= {"ladder": 0.8, f"ladder:{half}": 0.3, "parallel-ladder": 3.0, "spd/4": 0.1, "delayed/4": 0.3}
        losses |= {f"pair:{middle}-{middle + half // 2 * 2 - 1}": -0.2}
    result = {}
    for wiring, loss in losses.items():
        with contextlib.suppress(InputError):  # if these weights cannot run in it
            result[wiring_key(rewired(own, wiring), tp_size)] = loss
    return result


def distinct_configs(own, names, tp_size):
    """Return the Configs of standard, of these wirings and of `own`, but only one of those that compute the same."""
    configs = [*(rewired(own, name) for name in ("standard", *names)), own]
    for config in configs:
        lanes_of_rank(config, 0, (1,) * tp_size)  # raises InputError
    return [*{wiring_key(config, tp_size): config for config in configs}.values()]


def advice(configs, times, own, tp_size):
    """Return (a Markdown table of predictions, the fastest Config first, and the recommended wiring with its gain).

    The first of `configs` is standard. times: of each Config. Bounds, which have no all-reduce, stand at the end.
    """
    steps = [step_seconds(*pair) for pair in zip(configs, times, strict=True)]
    rows = []
    losses = measured_losses(own, tp_size)
    best = (math.inf, None)
    standard, all_reduces, _ = steps[0]
    for config, (seconds, n, hidden) in zip(configs, steps, strict=True):
        wiring = config.wiring if n else f"(bound: {config.wiring})"
        needs = retraining(own, config, tp_size) if n else "no model"
        share = "" if hidden is None else f"{100 * hidden:.0f} %"
        loss = losses.get(wiring_key(config, tp_size), math.nan)
        best = (seconds, config) if loss <= MOST_LOSS and seconds < best[0] else best
        loss = "" if not n else "unknown" if math.isnan(loss) else f"{loss:+.1f} %"
        cells = [wiring, f"{1e3 * seconds:.3f}", f"{standard / seconds:.2f}", str(n), share, loss, needs]
        rows.append((not n, seconds, cells))
    rows.sort(key=lambda row: row[:2])
    share = all_reduces * times[0].all_reduce / standard
    bounds = [seconds for is_bound, seconds, _ in rows if is_bound] or [(1 - share) * standard]
    text = f"The all-reduces are {100 * share:.0f} % of the standard step: "
    text += f"at most {standard / bounds[0]:.2f} times as fast.\n"
    page = "experts" if own.find(Mixture) else "quality"
    seconds, best = best
    gain = f"{best.wiring}, {standard / seconds:.2f} times as fast as standard"
    how = "as it is" if retraining(own, best, tp_size) == "no" else "once retrained (adapt.py)"
    least = f"the fastest in which a small model, retrained on 20 % of its tokens, lost at most {MOST_LOSS:g} %"
    least += f" (benchmarks/{page}.md)"
    text += f"Recommended: {best.wiring}, {how}: {least if own.wiring == 'standard' else 'no other loss is known'}."
    head = ["wiring", "ms a step", "times standard", "all-reduces", "hidden", "loss, retrained", "needs retraining"]
    return f"{benchmarking.markdown(head, [cells for *_, cells in rows])}\n\n{text}", gain


def copies_or_split(own, configs, dtype, tp_size, batch, context, machine, link, comm):
    """Return in a line what a whole copy of the model on each rank would do beside one model shared out over them.

    Both serve the same rows: so many that each copy has at least one. The gigabytes are those of rank 0's weights.
    """
    rows = -(-batch // tp_size)
    everything = decode_work(own, dtype, 1, rows, context)
    alone, _, _ = step_seconds(own, Times(*map(machine.seconds, everything.values()), 0.0, 0.0))
    n = rows * tp_size
    parts = []
    whole, shard = (slices_bytes(shard_on_meta(own, dtype, 0, (1,) * ranks)[1]) / 1e9 for ranks in (1, tp_size))
    words = f"{n} rows on {tp_size} whole copies of {whole:.1f} GB, {rows} each: "
    words += f"{1e3 * alone:.2f} ms ({n / alone:,.0f} tokens/s)"
    for config in (c for c in configs if c.wiring in ("standard", "ladder", own.wiring)):
        work = decode_work(config, dtype, tp_size, n, context)
        seconds, _, _ = step_seconds(config, times_of(config, work, dtype, tp_size, n, machine, link, comm))
        parts.append(f"{config.wiring} {1e3 * seconds:.2f} ms ({n / seconds:,.0f})")
    return f"{words}; shared out, {shard:.1f} GB each: {', '.join(parts)}"


# ---- The command line ------------------------------------------------------------------------------------------------


def parse(argv):
    p = flags.Parser(__doc__)
    g = p.add_argument_group("model")
    flags.add_model_flags(g, required=True)
    g.add_argument("--tp", type=number(int, 2), required=True, metavar="N", help="ranks, e.g. 8")
    g.add_argument("--batch", type=count, default=1, metavar="B", help="rows, e.g. 16")
    g.add_argument("--wirings", nargs="+", metavar="NAME", help="default: all; e.g. ladder:16 spd:3,5")
    g = p.add_argument_group("machine")
    one = g.add_mutually_exclusive_group(required=True)
    one.add_argument("--gpu", **flags.one_of(GPUS), help="its published bandwidth and rate")
    positive = number(float, 0, 1e9, above=True)
    one.add_argument("--bandwidth-gbs", type=positive, metavar="X", help="gigabytes per second a rank reads, e.g. 12.5")
    g.add_argument("--tflops", type=positive, metavar="X", help="10^12 operations per second a rank computes, e.g. 300")
    words = "how ranks sum: in the model's dtype, or in 8 bits; default: library"
    p.add_argument("--comm", **flags.one_of(COMMS), default="library", help=words)
    p.add_argument("--link", nargs="+", type=link.parse, metavar="LINK", help=f"default: all; of {link.LINK_FORMS}")
    return p.parse_args(argv)


def choose_machine(args):
    """Return the Machine that the flags describe."""
    if args.gpu:
        on_paper = f"{100 * BANDWIDTH_SHARE:.0f} % of the {args.gpu.upper()} on paper"
        machine = Machine(on_paper, *(BANDWIDTH_SHARE * rate for rate in GPUS[args.gpu]))
    else:
        machine = Machine("as given", 1e9 * args.bandwidth_gbs)
    return machine if args.tflops is None else machine._replace(flops=1e12 * args.tflops)


def main(argv=None):
    args = parse(argv)
    name, own = flags.read_config(args)
    dtype = flags.read_dtype(args)
    with naming("--wirings" if args.wirings else "--tp"):
        configs = distinct_configs(own, args.wirings or variants(own), args.tp)
    context = min(FILLED_SLOTS, own.max_seq_len)
    machine = choose_machine(args)
    what = f"{own.quant or dtype_name(dtype)}, tp {args.tp}, batch {args.batch}, {context} filled slots"
    what += f", sums by {args.comm}" * (args.comm != "library")
    rates = f"{machine.bandwidth / 1e9:,.1f} GB/s"
    if machine.flops < math.inf:
        rates += f", {machine.flops / 1e12:.0f} TFLOP/s"
    print(f"PREDICTED: {name}, {own.n_layers} layers, {what}\n{machine.name}: {rates} a rank")
    by_mlps = {(*config.mlps,): config for config in reversed(configs)}  # farskip alone shards a shared expert apart
    works = {mlps: decode_work(config, dtype, args.tp, args.batch, context) for mlps, config in by_mlps.items()}
    links = args.link or [one for one in link.LINKS.values() if one.per_byte]
    if any(one.name.startswith("pcie") for one in links):
        print(PCIE)
    gains = []
    for one in links:
        times = [times_of(c, works[(*c.mlps,)], dtype, args.tp, args.batch, machine, one, args.comm) for c in configs]
        parts = ", ".join(f"{key.replace('_', '-')} {1e6 * value:.1f}" for key, value in times[0]._asdict().items())
        table, gain = advice(configs, times, own, args.tp)
        print(f"\n{one.name}; in us: {parts}\n\n{table}")
        if own.find(Mixture):
            print(copies_or_split(own, configs, dtype, args.tp, args.batch, context, machine, one, args.comm))
        if one.gbps and one.gbps < WHOLE_LAYERS_GBPS:
            print(WHOLE_LAYERS)
        gains.append(f"{one.name}: {gain}")
    if len(gains) > 1:
        print("\nRecommended over each link:\n" + "\n".join(gains))
    folder = args.checkpoint or "DIR"
    line = f"python eval.py --checkpoint {folder} --wiring NAME --compare {folder} --text FILE"
    print(f"\nWhat a wiring loses without retraining is unmeasured, and may be far more. To measure it: {line}")


if __name__ == "__main__":
    launch.run(main)
