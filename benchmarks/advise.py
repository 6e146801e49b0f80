"""What measure/advise.py predicts beside what overlap.py measured, for each of its lines of a decode step.

python -m benchmarks.advise overlap.jsonl --bandwidth-gbs 12.5

All-reduces take what an emulated link says, or, between real ranks, what the lines themselves say, as a probe would.
The bandwidth is taken in two ways. *One line*: as the silent step of a single line implies it, that of the upper bound
over the fastest link. That checks how the wirings and links follow from one another, not the bandwidth. *Read*: as
measure/probe.py read the memory next to the run (--bandwidth-gbs). That is all that the advisor knows beforehand.
"""

import dataclasses
import itertools
import statistics

import launch
from benchmarks import overlap
from benchmarks.lines import written_by
from checkpoint import DTYPES, SIZES
from measure.advise import Machine, decode_work, step_seconds, times_of
from measure.clock import variants
from measure.link import Link
from measure.results import markdown
from model import InputError

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
    """(bytes per second that one line implies, [(link, wiring, measured, predicted by it, predicted by bandwidth)]).

    lines: of one setting. Seconds; the last is None without a bandwidth.
    """
    config, dtype = shape_of(lines[0]), DTYPES[lines[0]["dtype"]]
    case = config, dtype, lines[0]["tp"], lines[0]["batch"], lines[0]["tokens"]
    links = {}
    for line in lines:
        links.setdefault(line["link"]["name"], []).append(line)
    links = {name: link_of(some) for name, some in links.items()}

    def known(line):
        return line["wiring"] == "upper-bound", line["wiring"] == "standard", -line["all_reduce_ms"]

    source = max(lines, key=known)
    gather = times_of(*case, Machine("", 1.0), links[source["link"]["name"]]).gather
    work = decode_work(*case)
    whole = config.n_layers * (work["attention"].n_bytes + work["feed_forward"].n_bytes) + work["rest"].n_bytes
    implied = whole / (1e-3 * source["silent_ms"] - gather)
    wirings, found = variants(config.n_layers), []
    for line in lines:
        name = line["wiring"]
        if name not in wirings:
            raise InputError(f"unknown wiring {name!r}; known: {', '.join(wirings)}")
        predicted = [
            step_seconds(dataclasses.replace(config, **wirings[name]),
                         times_of(*case, Machine("", rate), links[line["link"]["name"]]))[0]
            for rate in (implied, bandwidth) if rate
        ]  # fmt: skip
        found.append((line["link"]["name"], name, 1e-3 * line["step_ms"], *predicted, *[None] * (2 - len(predicted))))
    return implied, found


def tables(lines, bandwidth=None):
    """A table for each setting, and under it how many predictions are close."""
    settings, parts = {}, []
    for line in lines:
        settings.setdefault(tuple(line[key] for key in SETTING), []).append(line)
    for setting, own in settings.items():
        implied, found = compare(own, bandwidth)
        kinds = {f"one line ({implied / 1e9:.2f} GB/s)": 3}
        if bandwidth:
            kinds[f"read ({bandwidth / 1e9:.2f} GB/s)"] = 4
        head, rows = ["link", "wiring", "measured, ms"], []
        for kind in kinds:
            head += [f"{kind}, ms", "off"]
        for row in found:
            cells = [row[0], row[1], f"{1e3 * row[2]:.2f}"]
            for i in kinds.values():
                cells += [f"{1e3 * row[i]:.2f}", f"{100 * (row[i] / row[2] - 1):+.1f} %"]
            rows.append(cells)
        text = ", ".join(f"{key} {value}" for key, value in zip(SETTING, setting, strict=True))
        parts += [f"{text}:", markdown(head, rows)]
        for kind, i in kinds.items():
            off = {f"{row[1]} over {row[0]}": row[i] / row[2] - 1 for row in found}
            worst = max(off, key=lambda name: abs(off[name]))
            close = sum(abs(x) <= CLOSE for x in off.values())
            parts.append(
                f"By {kind}: {close} of {len(off)} are within {100 * CLOSE:.0f} %, half within "
                f"{100 * statistics.median(map(abs, off.values())):.1f} %; the furthest is {worst}, "
                f"{100 * off[worst]:+.1f} %."
            )
    return "\n\n".join(parts)


def main(argv=None):
    p = launch.Parser(__doc__)
    known = written_by("benchmarks/overlap.py", *overlap.KEYS, "silent_ms")
    p.add_argument("files", type=known, metavar="FILE", nargs="+", help="lines of overlap.py")
    rate = launch.number(float, 0, 1e9, above=True)
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
