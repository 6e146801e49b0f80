"""Exposed communication: how long a prefill or a decode step waits for its all-reduces. It also traces steps."""

import copy
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from extras.measure.clock import norms_over_ranks, run_layers
from extras.measure.link import Link
from ladder import outputs
from ladder.benchmarking import in_turns, quartiles, timed
from ladder.memory import weight_bytes
from model import Config, SingleDevice, dummy_slot
from tp import TensorParallel


class Silent(TensorParallel):
    """Collectives without all-reduces: the same sublayers compute, but on partials."""

    start = SingleDevice.start
    wait = SingleDevice.wait
    settle = SingleDevice.settle
    pin = SingleDevice.pin


@torch.inference_mode()  # as in generate(): else the compiler would make another graph for these tensors
def replays(runner, tokens, lengths):
    """Return {"prefill": function, "decode": function}, which run that step any number of times.

    runner: a generate.Runner, whose prefill becomes one chunk. tokens, lengths: prompts, as `pad` makes them. The
    decode step reads and writes up to the last slot before the dummy slot.
    """
    runner.chunk_tokens = tokens.numel()
    token = tokens[:, :1].clone()
    longest = dummy_slot(runner.cache)
    last = torch.full_like(lengths, longest - 1)
    return {
        "prefill": lambda: runner.prefill(tokens, lengths), "decode": lambda: runner.decode(token, last, longest)
    }  # fmt: skip


class Case(NamedTuple):
    """What measure() compares: a step, and the same step without its all-reduces.

    comm: the model's collectives. partial: a tensor of the size that they sum. link: what world.group emulates during
    the steps. n_bytes: of the weights that a step reads, those of all attentions, of all MLPs, and of the output head
    (0 for a prefill, which computes few logits). splits: how many parts of the prompt take turns.
    """

    config: Config
    step: Callable
    silent_step: Callable
    comm: TensorParallel
    partial: torch.Tensor
    link: Link
    n_bytes: tuple
    splits: int = 1


@torch.inference_mode()
def make_case(kind, runner, tokens, lengths, world):
    """Return the Case of a runner's step, "prefill" or "decode"; tokens, lengths: as in replays()."""
    model = runner.model
    silent = copy.copy(runner.model)
    B, S = tokens.shape
    silent.comm = Silent(model.config, world.shares, world.group)
    steps = [replays(one, tokens, lengths)[kind] for one in (runner, runner.like(silent, runner.cache))]
    splits, width = (runner.choose_splits(B, S), S) if kind == "prefill" else (1, 1)
    partial = torch.zeros(B, -(-width // splits), model.config.dim, device=model.device, dtype=model.dtype)
    read = weight_bytes(model, B * width)
    places = (".attention.", ".feed_forward.", "output.")
    *layers, head = (sum(n_bytes for name, n_bytes in read.items() if place in name) for place in places)
    sizes = *layers, head * (kind == "decode")
    return Case(model.config, *steps, model.comm, partial, world.group.link, sizes, splits)


@torch.inference_mode()
def measure(world, cases, seconds):
    """Time the steps of {key: Case}, with and without all-reduces, in turns; return {key: report}, as _report says.

    There are as many rounds as about `seconds` allow, at least 3.
    """
    ways = {key: functools.partial(_run, world, case, own_all_reduce(world, case)) for key, case in cases.items()}
    for way in ways.values():  # the first run may compile
        way()
    start = time.perf_counter()
    first = in_turns(ways, 1)
    rounds = max(3, int(seconds / (time.perf_counter() - start)))
    runs = in_turns(ways, min(world.gather(rounds)) - 1)
    return {key: _report(case, first[key] + runs[key]) for key, case in cases.items()}


def own_all_reduce(world, case):
    """Return a function that sums a case's partial; on a GPU it replays a CUDA graph, as the steps do."""

    def all_reduce():
        case.comm.wait(case.comm.start(case.partial))

    if world.device.type != "cuda":
        return all_reduce
    from ladder.kernels.cuda_graphs import captured

    return captured(all_reduce)[0]


def _run(world, case, all_reduce):
    """Return {"all_reduce", "silent", "step": seconds} of one round of a case."""
    world.group.set_link(case.link)
    timed(world.device, all_reduce)  # waits for all ranks
    steps = {"all_reduce": all_reduce, "silent": case.silent_step, "step": case.step}
    return {name: timed(world.device, step) for name, step in steps.items()}


def _report(case, runs):
    """Return the medians over the runs of a case, which extras/measure/README.md explains.

    For the limit, the time of the silent step is divided in proportion to the bytes of weights. The small sums of
    whole_qk_norm count as all-reduces.
    """
    ms = {key: 1e3 * statistics.median(run[key] for run in runs) for key in runs[0]}
    attention, feed_forward, rest = (ms["silent"] * n_bytes / sum(case.n_bytes) for n_bytes in case.n_bytes)
    sublayers = [total / case.config.n_layers / case.splits for total in (attention, feed_forward)]
    flight = 1e3 * case.link.flight if case.partial.device.type == "cpu" else 0.0
    norm_sum = ms["all_reduce"] * norms_over_ranks(case.config)
    clock = run_layers(case.config, *sublayers, ms["all_reduce"], case.splits, flight, norm_sum)
    n = clock.started
    low, _, high = quartiles([1e3 * run["step"] for run in runs])
    exposed = ms["step"] - ms["silent"]
    return {
        "step_ms": ms["step"], "quartiles_ms": [low, high], "silent_ms": ms["silent"], "exposed_ms": exposed,
        "all_reduces": n, "all_reduce_bytes": case.partial.nbytes, "all_reduce_ms": ms["all_reduce"],
        "hidden": 1 - exposed / (n * ms["all_reduce"]) if n else None, "limit_ms": clock.now + rest,
        "rounds": len(runs),
    }  # fmt: skip


@torch.inference_mode()
def profile(folder, world, name, step):
    """Trace a step under its name into folder/rankN.json, for chrome://tracing or ui.perfetto.dev."""
    step()  # the first run may compile
    with torch.profiler.profile() as trace, torch.profiler.record_function(name):  # of all kinds of devices
        step()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
    path = Path(folder) / f"rank{world.rank}.json"
    with outputs.new_file(path) as unfinished:
        trace.export_chrome_trace(str(unfinished))
    world.say(f"trace in {path}")
