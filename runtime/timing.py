"""Timing in turns, so that other programs on the machine disturb all alike; and whether a difference is noise."""

import statistics
import time

import torch

QUEUED = 8  # calls that a GPU is given at once


def timed(device, step):
    """Return the seconds that step() takes on the device.

    On a GPU the mean of several calls, which one more precedes: what the host does for a call takes none of its time,
    unless it takes longer than the device.
    """
    if torch.device(device).type != "cuda":
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    step()
    start = mark(device)
    for _ in range(QUEUED):
        step()
    end = mark(device)
    end.synchronize()
    return between(start, end) / QUEUED


def mark(device):
    """Return a moment of the device's work, for between()."""
    if torch.device(device).type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(start, end):
    """Return the seconds between two marks; on a GPU both must be over."""
    return end - start if isinstance(start, float) else 1e-3 * start.elapsed_time(end)


def in_turns(ways, rounds):
    """Return {name: [the result of way() in each round]}, with all of {name: way} called once in each round."""
    found = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(way())
    return found


def quartiles(values):
    """Return (lower quartile, median, upper quartile); of a single value that value, three times."""
    return tuple(statistics.quantiles(values, n=4)) if len(values) > 1 else (values[0],) * 3


def overlapping(some, others):
    """Return whether two ranges (low, high) have a point in common."""
    return some[0] <= others[1] and others[0] <= some[1]


def within_noise(report):
    """Return whether a step's quartiles lie further apart than the all-reduce time that it hid, or than all of it.

    report: of exposed.py. The exposed time may well be within the quartiles: that is what hiding all of it means.
    """
    low, high = report["quartiles_ms"]
    communication = report["all_reduces"] * report["all_reduce_ms"]
    return min(communication, abs(communication - report["exposed_ms"])) <= high - low


def hidden_share(report):
    """Return the share of its communication that a step hid, in words; "none" if an all-reduce costs more inside it."""
    if within_noise(report):
        return "within noise"
    return "none" if report["hidden"] < 0 else f"{100 * min(1.0, report['hidden']):.0f} %"
