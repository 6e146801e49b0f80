"""What measure/advise.py predicts beside what overlap.py measured, for each of its lines of a decode step.

python -m benchmarks.advise overlap.jsonl --bandwidth-gbs 12.5

All-reduces take what an emulated link says, or, between real ranks, what the lines themselves say, as a probe would.
The bandwidth comes from three places. From *each line's own silent step*, which checks only how the wiring orders its
sublayers and all-reduces. From *one silent step for all lines*, that of the upper bound over the fastest link; the
others were not asked. From *the memory as it was read* by measure/probe.py next to the run (--bandwidth-gbs), which is
all that the advisor knows beforehand.
"""

import dataclasses
import itertools
import statistics

from benchmarks import overlap
from benchmarks.lines import written_by
from formats.checkpoint import DTYPES, SIZES
from measure.advise import Machine, bytes_of_step, decode_work, step_seconds, times_of
from measure.link import Link
from measure.results import markdown
from model import InputError
from runtime import cli, launch

SETTING = ["model", "n_layers", "dtype", "device", "threads", "tp", "simulated", "batch", "tokens", "compiled"]
CLOSE = 0.05  # of a measured step: what a prediction should be within


class MeasuredLink:
    """A link between real ranks: an all-reduce takes what it took, and a gather no less."""

    def __init__(self, seconds, emulated):
        self.all_reduce, self.emulated = seconds, emulated

    def seconds(self, n_bytes, tp_size, passes=2):
        if passes == 2:
            return self.all_reduce
        return max(self.all_reduce, self.emulated.seconds(n_bytes, tp_size, passes) if self.emulated else 0.0)


def link_of(lines):
    """The link of some lines of one link and setting."""
    emulated = Link(**lines[0]["link"]) if "latency_us" in lines[0]["link"] else None
    if lines[0]["simulated"]:
        return emulated
    return MeasuredLink(1e-3 * statistics.median(line["all_reduce_ms"] for line in lines), emulated)


def shape_of(line):
    """The Config of a line, without its wiring."""
    if line["model"] not in ("small", *SIZES):
        raise InputError(f"unknown model {line['model']!r}; known: small, {', '.join(SIZES)}")
    config = overlap.SMALL if line["model"] == "small" else SIZES[line["model"]]
    return dataclasses.replace(config, n_layers=line["n_layers"])


def compare(lines, bandwidth=None):
    """[(link, wiring, seconds measured, {kind of bandwidth: seconds predicted})], of lines of one setting."""
    config, dtype = shape_of(lines[0]), DTYPES[lines[0]["dtype"]]
    case = config, dtype, lines[0]["tp"], lines[0]["batch"], lines[0]["tokens"]
    links = {}
    for line in lines:
        links.setdefault(line["link"]["name"], []).append(line)
    links = {name: link_of(some) for name, some in links.items()}
    whole = bytes_of_step(config, decode_work(*case))

    def times(line, rate):
        return times_of(*case, Machine("", rate), links[line["link"]["name"]])

    def implied(line):
        return whole / (1e-3 * line["silent_ms"] - times(line, 1.0).gather)

    def suits(line):
        return line["wiring"] == "upper-bound", line["wiring"] == "standard", -line["all_reduce_ms"]

    one_line, found = implied(max(lines, key=suits)), []
    for line in lines:
        name = line["wiring"]
        wired = dataclasses.replace(config, **overlap.chosen([name], config.n_layers)[name])
        rates = {"each line's own silent step": implied(line), f"one silent step ({one_line / 1e9:.2f} GB/s)": one_line}
        if bandwidth:
            rates[f"the memory as read ({bandwidth / 1e9:.2f} GB/s)"] = bandwidth
        predicted = {kind: step_seconds(wired, times(line, rate))[0] for kind, rate in rates.items()}
        found.append((line["link"]["name"], name, 1e-3 * line["step_ms"], predicted))
    return found


def tables(lines, bandwidth=None):
    """A table for each setting, and under it how many predictions are close."""
    settings, parts = {}, []
    for line in lines:
        settings.setdefault(tuple(line[key] for key in SETTING), []).append(line)
    for setting, own in settings.items():
        found, rows = compare(own, bandwidth), []
        off = {kind: {} for kind in found[0][3]}
        for link, wiring, measured, predicted in found:
            rows.append([link, wiring, f"{1e3 * measured:.2f}"])
            for kind, seconds in predicted.items():
                off[kind][f"{wiring} over {link}"] = seconds / measured - 1
                rows[-1].append(f"{1e3 * seconds:.2f} ({100 * (seconds / measured - 1):+.1f} %)")
        text = ", ".join(f"{key} {value}" for key, value in zip(SETTING, setting, strict=True))
        parts += [
            f"{text}; ms:",
            markdown(["link", "wiring", "measured", *(f"bandwidth from {kind}" for kind in off)], rows),
        ]
        for kind, differences in off.items():
            worst = max(differences, key=lambda name: abs(differences[name]))
            close = sum(abs(x) <= CLOSE for x in differences.values())
            parts.append(
                f"Bandwidth from {kind}: {close} of {len(differences)} are within {100 * CLOSE:.0f} %, half within "
                f"{100 * statistics.median(map(abs, differences.values())):.1f} %; the furthest is {worst}, "
                f"{100 * differences[worst]:+.1f} %."
            )
    return "\n\n".join(parts)


def main(argv=None):
    p = cli.Parser(__doc__)
    known = written_by("benchmarks/overlap.py", *overlap.KEYS, "silent_ms")
    p.add_argument("files", type=known, metavar="FILE", nargs="+", help="lines of overlap.py")
    rate = cli.number(float, 0, 1e9, above=True)
    p.add_argument("--bandwidth-gbs", type=rate, metavar="X", help="what a rank read per second, e.g. 12.5")
    args = p.parse_args(argv)
    lines = [*itertools.chain(*args.files)]
    decode = [line for line in lines if line["kind"] == "decode"]
    if not decode:
        raise InputError("there is no decode step in these files: the advisor predicts no other")
    if len(decode) < len(lines):
        print(f"{len(lines) - len(decode)} lines are of a prefill, which the advisor does not predict\n")
    print(tables(decode, args.bandwidth_gbs and 1e9 * args.bandwidth_gbs))


if __name__ == "__main__":
    launch.run(main)
