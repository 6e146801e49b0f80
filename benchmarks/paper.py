"""What the paper's own measurements would allow: its standard and upper-bound tok/s, put on the clock of exposed.py.

python benchmarks/paper.py

Llama 70B, tp 8, batch 1, 1024 prompt and 512 new tokens, on H100s (arXiv 2501.06589): the standard step minus the
upper-bound step, over its 160 all-reduces, is what one of them takes; the upper-bound step over the sublayers is what
one of those takes. The published rates include the prefill, here counted as if it were decode (a few percent).
"""

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from exposed import count_all_reduces, run_clock
from model import SIZES

UPPER_BOUND = 110.59  # tok/s, without communication
MEASURED = {  # tok/s
    "NVLink": {"standard": 77.39, "parallel": 94.22, "ladder": 101.22},
    "no P2P": {"standard": 51.66, "parallel": 72.36, "ladder": 82.59},
}


def main():
    head = "link, wiring, one all-reduce (us), measured (tok/s), limit (tok/s), measured / standard, limit / standard"
    print("| " + head.replace(", ", " | ") + " |\n" + "|---" * 7 + "|")
    for link, measured in MEASURED.items():
        all_reduce = (1 / measured["standard"] - 1 / UPPER_BOUND) / count_all_reduces(SIZES["70b"])
        for wiring, rate in measured.items():
            config = dataclasses.replace(SIZES["70b"], wiring=wiring)
            n = count_all_reduces(config)
            limit = 1 / run_clock(config, [1 / UPPER_BOUND / n] * n, all_reduce).now
            ratios = rate / measured["standard"], limit / measured["standard"]
            figures = [f"{x:.1f}" for x in (1e6 * all_reduce, rate, limit)] + [f"{r:.2f}" for r in ratios]
            print("| " + " | ".join([link, wiring, *figures]) + " |")


if __name__ == "__main__":
    main()
