"""What the paper's own measurements would allow, on the clock of clock.py, and what the advisor predicts without them.

python -m benchmarks.paper

Llama 70B, tp 8, 1024 prompt and 512 new tokens, on H100s (results/paper.csv).

The *limits* are from the paper's own rates: the standard step minus the upper-bound step, over its 160 all-reduces, is
what one of them takes; the upper-bound step over the layers is what a layer takes. *Alike*: attention and MLP take half
of that each, which gives a ladder more than it can have. *By bytes*: as much as their shards and the cache are of what
the layer reads, which makes them more unlike than launches and norms leave them. The published rates include the
prefill, here counted as if it were decode: a few percent at batch 1, more at larger ones.

The *advisor* (measure/advise.py --gpu h100) knows none of these rates: only the published bandwidth, a share of it, and
a link of the table in measure/link.py that stands for the paper's. Its steps have no prefill, no launches and no norms.
"""

import dataclasses

import torch

from formats.sizes import SIZES
from measure.advise import GPUS, decode_work, published_machine, step_seconds, times_of
from measure.clock import count_all_reduces, run_layers
from measure.link import LINKS
from measure.results import markdown, published
from runtime import cli, launch

STANDS_FOR = {"NVLink": "nvlink", "no P2P": "pcie"}  # the paper's link: one of the table's
WIRINGS = "standard", "parallel", "ladder", "parallel-ladder", "spd", "upper-bound"
CONTEXT = 1024 + 512 // 2  # filled slots of the cache, in the mean step


def published_rates():
    """The paper's tokens per second {(link, batch, wiring)} of the 70B."""
    return {(r["link"], r["batch"], r["wiring"]): r["tok_s"] for r in published()}


def reckoned(link, batch, rates):
    """(seconds of a layer, of an all-reduce): the upper bound's step is all the layers, and what standard's is longer
    all the all-reduces."""
    standard, upper_bound = (batch / rates[link, batch, wiring] for wiring in ("standard", "upper-bound"))
    return upper_bound / SIZES["70b"].n_layers, (standard - upper_bound) / count_all_reduces(SIZES["70b"])


def rows_of(link, batch, rates):
    """A row for each wiring. rates: as published_rates gives them."""
    layer, all_reduce = reckoned(link, batch, rates)
    case = SIZES["70b"], torch.bfloat16, 8, batch, CONTEXT
    times = times_of(*case, published_machine("h100"), LINKS[STANDS_FOR[link]])
    work = decode_work(*case)
    share = work["attention"].n_bytes / (work["attention"].n_bytes + work["feed_forward"].n_bytes)
    found = {}
    for wiring in WIRINGS:
        config = dataclasses.replace(SIZES["70b"], wiring=wiring)
        alike, by_bytes = (run_layers(config, x * layer, (1 - x) * layer, all_reduce).now for x in (0.5, share))
        steps = alike, by_bytes, step_seconds(config, times)[0]
        found[wiring] = [rates.get((link, batch, wiring)), *(batch / seconds for seconds in steps)]
    rows = []
    for wiring, kinds in found.items():
        cells = [f"{rate:.1f}" if rate else "" for rate in kinds]
        cells += [f"{rate / x:.2f}" if rate else "" for rate, x in zip(kinds, found["standard"], strict=True)]
        latencies = [f"{1e6 * seconds:.1f}" for seconds in (all_reduce, times.all_reduce)]
        rows.append([link, str(batch), wiring, *latencies, *cells])
    return rows


def reached(batch, rate):
    """The share of an H100's published bandwidth with which the paper's upper bound read its weights and its cache."""
    work = decode_work(SIZES["70b"], torch.bfloat16, 8, batch, CONTEXT)
    layer = work["attention"].n_bytes + work["feed_forward"].n_bytes
    n_bytes = SIZES["70b"].n_layers * layer + work["rest"].n_bytes
    return n_bytes * rate / batch / GPUS["h100"][0]


def main(argv=None):
    cli.Parser(__doc__).parse_args(argv)
    rates = published_rates()
    cases = dict.fromkeys((link, batch) for link, batch, _ in rates)
    head = "link, batch, wiring, one all-reduce (us), advisor's, measured (tok/s), limit: alike, by bytes, advisor"
    head += ", measured / standard, alike, by bytes, advisor"
    print(markdown(head.split(", "), [row for case in cases for row in rows_of(*case, rates)]))
    upper_bound = {batch: rate for (_, batch, wiring), rate in rates.items() if wiring == "upper-bound"}
    shares = ", ".join(f"{100 * reached(n, rate):.0f} % at batch {n}" for n, rate in upper_bound.items())
    print(f"\nThe paper's upper bound reads with {shares} of the published bandwidth, prefill included.")
    print(f"The advisor takes {published_machine('h100')}.")


if __name__ == "__main__":
    launch.run(main)
