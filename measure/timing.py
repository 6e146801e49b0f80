"""Seconds of things, measured in turns: what a machine does in between then disturbs all of them alike."""

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
