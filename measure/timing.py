"""Timing in turns, so that what else the machine does disturbs all alike; and what of it is noise."""

import statistics
import time

import torch


def timed(device, step):
    """Seconds that step() takes on the device."""
    start = time.perf_counter()
    step()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def mark(device):
    """A moment of what the device does, for between()."""
    if torch.device(device).type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(start, end):
    """Seconds between two marks; on a GPU both must be over."""
    return end - start if isinstance(start, float) else 1e-3 * start.elapsed_time(end)


def in_turns(ways, rounds):
    """{name: what way() returned in each round}, all of {name: way} once in each round."""
    found = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(way())
    return found


def quartiles(values):
    """(lower quartile, median, upper quartile); of a single value that value, three times."""
    return tuple(statistics.quantiles(values, n=4)) if len(values) > 1 else (values[0],) * 3


def overlapping(some, others):
    """Whether two ranges (low, high) have a point in common."""
    return some[0] <= others[1] and others[0] <= some[1]


def within_noise(report):
    """Whether the quartiles of a step lie further apart than what it hid of its all-reduces, or than all of them take.

    report: of exposed.py. What a step exposes may well be within its quartiles: that is what hiding all of it means.
    """
    low, high = report["quartiles_ms"]
    communication = report["all_reduces"] * report["all_reduce_ms"]
    return min(communication, abs(communication - report["exposed_ms"])) <= high - low


def hidden_share(report):
    """The share of its communication that a step hid, in words; "none" where an all-reduce costs more inside of it."""
    if within_noise(report):
        return "within noise"
    return "none" if report["hidden"] < 0 else f"{100 * min(1.0, report['hidden']):.0f} %"
