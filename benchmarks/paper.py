"""What the paper's own measurements would allow: its standard and upper-bound tok/s, put on the clock of clock.py.

python -m benchmarks.paper

Llama 70B, tp 8, 1024 prompt and 512 new tokens, on H100s (results/paper.csv): the standard step minus the upper-bound
step, over its 160 all-reduces, is what one of them takes; the upper-bound step over the sublayers is what one of those
takes. The published rates include the prefill, here counted as if it were decode: a few percent at batch 1, more at
larger ones.
"""

import dataclasses

import launch
from checkpoint import SIZES
from measure.clock import count_all_reduces, run_clock
from measure.results import markdown, published


def main(argv=None):
    launch.Parser(__doc__).parse_args(argv)
    rates = {(r["link"], r["batch"], r["wiring"]): r["tok_s"] for r in published() if r["tok_s"]}
    rows = []
    for (link, batch, wiring), rate in rates.items():
        if wiring == "upper-bound":
            continue
        standard, upper_bound = (batch / rates[link, batch, w] for w in ("standard", "upper-bound"))  # seconds a step
        all_reduce = (standard - upper_bound) / count_all_reduces(SIZES["70b"])
        config = dataclasses.replace(SIZES["70b"], wiring=wiring)
        n = count_all_reduces(config)
        limit = batch / run_clock(config, [upper_bound / n] * n, all_reduce).now
        ratios = rate / rates[link, batch, "standard"], limit / rates[link, batch, "standard"]
        figures = [f"{1e6 * all_reduce:.1f}", f"{rate:.1f}", f"{limit:.1f}", *(f"{r:.2f}" for r in ratios)]
        rows.append([link, str(batch), wiring, *figures])
    head = "link, batch, wiring, one all-reduce (us), measured (tok/s), limit, measured / standard, limit / standard"
    print(markdown(head.split(", "), rows))


if __name__ == "__main__":
    launch.run(main)
