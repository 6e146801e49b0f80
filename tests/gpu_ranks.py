"""What tests/test_gpu_ranks.py runs on several ranks: each case compares them with one rank, and prints a line.

torchrun --standalone --nproc_per_node=2 tests/gpu_ranks.py --device cuda:0 --comm one-shot
torchrun --standalone --nproc_per_node=2 tests/gpu_ranks.py --device cpu    # to try it: nothing is captured
"""

import argparse
import copy
import dataclasses
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from configs import change
from helpers import last_logits, load_random, random_model, shard, unequal_rows

from generate import Runner, generate
from ladder.decoding.batch import Sampler, last_tokens, make_cache, pad
from ladder.decoding.speculative import Ngrams
from ladder.errors import Verdict
from ladder.kernels import quant_kernels, registry
from ladder.progress import progress
from ladder.ranks import launch, shared_gpu
from model import Config

CONFIG = Config(3, 8, 4, 16, 128, 1024, 136, 64, bos_id=1, eos_ids=(2,))
MIXTURE = {"mixture": {"n_experts": 5, "experts_per_token": 2, "expert_size": 72, "dense_layers": (1,)}}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [9, 7, 9]]
SUMS = "nccl", "one_shot", "two_shot"  # in the names of the kernels that sum


def ids(net, way="captured", new=20, sample=(0,), draft=False, splits=None):
    """[ids of each row], generated eagerly, with captured steps, or with compiled and captured ones."""
    runner = Runner(net, make_cache(net, 2, 40), way == "compiled", splits=splits)
    if way == "eager":
        runner.passes.graphs = None
        runner.passes.decode = net
    runner.draft = Ngrams(3) if draft else None
    rows = generate(runner, PROMPTS, new, Sampler(*sample, device=net.device)).rows
    graphs = runner.passes.graphs
    assert way == "eager" or graphs is None or (graphs.graphs and not graphs.failed), "no graph"
    return rows


def ids_equal(world, changes, shares=None, way="captured", *how):
    """Whether the ranks generate what one does, in float32."""
    config = change(CONFIG, **changes)
    world = copy.copy(world)
    world.shares = shares or world.shares
    state = random_model(config).state_dict()
    alone, several = (shard(config, w, state=state).to(world.device) for w in (None, world))
    expected = ids(alone, "eager", *how)
    return ids(several, way, *how) == expected and min(map(len, expected)) > 3


def logits_close(world, quant, way):
    """Whether matrices of bytes on several ranks give the logits of one rank, in bfloat16 by the device's kernels."""
    config = dataclasses.replace(CONFIG, quant=quant, group_size=64 if quant == "int4" else None)
    state = load_random(config).state_dict()
    nets = [shard(config, w, torch.bfloat16, state).to(world.device) for w in (world, None)]
    for net in nets:
        quant_kernels.pack(net, world.device.type)
        registry.use(quant_kernels.KERNELS[world.device.type])
    rows = [x.to(world.device) for x in unequal_rows(config)]
    several, alone = (last_logits(net, *rows, 4, way == "compiled").double() for net in nets)
    return (several - alone).norm() < (0.1 if quant == "fp8" else 0.05) * alone.norm()  # each rank rounds its columns


def beside(events):
    """Return, for each sum of a trace's kernels [(name, start, end)], how many others run meanwhile."""
    sums = [event for event in events if any(word in event[0] for word in SUMS)]
    others = [event for event in events if event not in sums]
    return [
        sum(start < end_of_sum and end > start_of_sum for _, start, end in others)
        for _, start_of_sum, end_of_sum in sums
    ]


def order_right(world, _):
    """Whether kernels run beside most of the ladder's sums, and beside none of standard's, in a replayed step."""
    seen = {}
    for wiring in ("standard", "ladder"):
        net = shard(dataclasses.replace(CONFIG, wiring=wiring, n_layers=8), world).to(world.device)
        runner = Runner(net, make_cache(net, 2, 40))
        runner.prefill(*pad(PROMPTS, net.device))
        with torch.profiler.profile() as trace:
            for _ in range(2):  # the first one is captured, and runs without a graph before
                runner.decode(*last_tokens(PROMPTS, net.device))
            torch.cuda.synchronize()
        kernels = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        kernels = sorted((e.name, e.time_range.start, e.time_range.end) for e in kernels if "mem" not in e.name.lower())
        seen[wiring] = beside(kernels)
    world.say(f"kernels beside each sum: {seen}")
    return not any(seen["standard"]) and sum(map(bool, seen["ladder"])) >= len(seen["ladder"]) / 2 > 0


def cases(tp_size):
    """Return [(name, check, its arguments)], the telling ones first: compiling takes longest."""
    ladder = {"wiring": "ladder"}
    nucleus = (0.8, None, 0.9)
    some = [(w, ids_equal, ({"wiring": w},)) for w in ("standard", "ladder")]
    others = {w: {"wiring": w} for w in ("parallel-ladder", f"spd/{tp_size}")} | {"mixture": MIXTURE | ladder}
    return [
        *((f"{name}, captured", check, args) for name, check, args in some),
        *((f"{name}, captured", ids_equal, (changes,)) for name, changes in others.items()),
        ("int8, captured", logits_close, ("int8", "captured")), ("int4, captured", logits_close, ("int4", "captured")),
        ("fp8, captured", logits_close, ("fp8", "captured")),
        ("ladder, eager", ids_equal, (ladder, None, "eager")),
        ("top-p", ids_equal, (ladder, None, "captured", 20, nucleus)),
        ("drafts", ids_equal, (ladder, None, "captured", 20, (0,), True)),
        ("prefill in two parts", ids_equal, (ladder, None, "captured", 20, (0,), False, 2)),
        ("unequal shares", ids_equal, (ladder, (2, *[1] * (tp_size - 1)))),
        ("order of kernels", order_right, (None,)),
        ("ladder, compiled", ids_equal, (ladder, None, "compiled")),
        ("int8, compiled", logits_close, ("int8", "compiled")),
        ("standard, compiled", ids_equal, ({}, None, "compiled")),
    ]  # fmt: skip


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--device", required=True)
    p.add_argument("--comm", default="library", help="or gloo")
    p.add_argument("--seconds", type=float, default=60, help="start no case after so many")
    args = p.parse_args()
    start = time.monotonic()
    if args.comm == "gloo":
        shared_gpu.nccl_version = lambda: (0, 0, 0)  # one that refuses
    world = launch.join(args.device, {"comm": args.comm.replace("gloo", "library")})
    progress.at("tests", timed=False)
    on_gpu = world.device.type == "cuda"
    on_host = getattr(world.group, "on_host", ())
    failed = []
    for name, check, arguments in cases(world.tp_size):
        if ("compiled" in name or check is order_right) and (not on_gpu or "sums" in on_host):
            continue
        if max(world.gather(time.monotonic() - start)) > args.seconds:
            world.say(f"{args.comm}, {world.tp_size} ranks: {name} and what follows: not started, for want of time")
            break
        with torch.inference_mode():
            good = all(world.gather(bool(check(world, *arguments))))
        world.say(f"{args.comm}, {world.tp_size} ranks, {name}: {'right' if good else 'WRONG'}")
        failed += [name] * (not good)
    if failed:
        raise Verdict(f"wrong with {args.comm}: {', '.join(failed)}")


if __name__ == "__main__":
    launch.run(main)
