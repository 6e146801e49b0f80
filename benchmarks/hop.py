"""Decode steps of the 1b in int4 in one hop and over gloo's ring, in turns with distributed-llama over the same link.

benchmarks/nodes.sh 2 100 0 .venv/bin/python -m benchmarks.hop ROUNDS LABEL FILE.jsonl|- [all-reduce | FOLDER]

FOLDER: of distributed-llama, with its model.m, tokenizer.t and read_times.py. all-reduce: only these, by their size.
"""

import copy
import itertools
import sys
import time

import torch
import torch.distributed as dist

from benchmarks.lines import about
from decoding.sampling import Sampler
from formats.sizes import RandomWeights, named_size
from generate import Runner, make_cache, pad, without_guards
from measure.probe import all_reduce_seconds
from measure.timing import quartiles
from model import rewired
from runtime import launch, watch, writing
from tp import TensorParallel, load_shard


def dllama(world, folder):
    import subprocess

    world.gather(0)
    b = f"{folder}/dllama"
    if world.rank == 1:
        p = subprocess.Popen(
            [b, "worker", "--host", "10.77.0.2", "--port", "19990", "--nthreads", "1"],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        world.gather(0)
        world.gather(0)
        p.kill()
        p.wait()
    else:
        world.gather(0)
        time.sleep(1)
        prompt = ("abcdefghijklmnopqrstuvwxyz" * 40)[:96]
        flags = f"--buffer-float-type q80 --prompt {prompt} --steps 160 --max-seq-len 1088 --temperature 0 --seed 1"
        cmd = f"{b} inference --model model.m --tokenizer tokenizer.t {flags} --nthreads 1 --workers 10.77.0.2:19990"
        cmd += " 2>&1 | python3 -u read_times.py distributed-llama"
        print(subprocess.run(cmd, shell=True, cwd=folder, capture_output=True, text=True).stdout, flush=True)
        world.gather(0)
    world.gather(0)


def main():
    rounds, label, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    folder = sys.argv[4] if len(sys.argv) > 4 else None
    model_name = "1b"
    names = ["standard", "ladder", "parallel-ladder", "upper-bound"]
    world = launch.join("cpu", {"comm": "auto"})
    if folder == "all-reduce":
        groups = {"one hop": world.group, "ring": dist.group.WORLD}
        with torch.inference_mode():
            found = {(g, n): [] for n in (4096, 8192, 65536, 1048576) for g in groups}
            for _ in range(rounds):
                for g, n in found:
                    found[g, n].append(1e6 * all_reduce_seconds(world, groups[g], n, 0.2))
        for (g, n), us in found.items() if world.rank == 0 else ():
            low, mid, high = quartiles(us)
            print(
                f"{label} | {world.tp_size} ranks | {n} bytes | {g}: {mid:.0f} us ({low:.0f} to {high:.0f})", flush=True
            )
            if out != "-":
                writing.append_line(
                    out,
                    {
                        "kind": "all-reduce",
                        "bytes": n,
                        **about("hop", sys.argv[1:], world),
                        "comm": g,
                        "link": {"name": label},
                        "us": mid,
                        "quartiles_us": [low, high],
                    },
                )
        return
    config = named_size(model_name, "int4")
    base = load_shard(
        config, RandomWeights(config, world.device), torch.bfloat16, world.device, world.rank, world.tp_size
    )
    watch.at("measurement", timed=False)
    if world.rank == 0:
        print("loaded", flush=True)
    torch._dynamo.config.recompile_limit = 1000
    sample = Sampler(0)
    groups = {"one hop": world.group, "ring": dist.group.WORLD}
    steps, runners = {}, []
    length = 128
    with torch.inference_mode():
        cache = make_cache(base, 1, length + 2)
        tokens, lengths = pad([[1] * length], world.device)
        token = tokens[:, :1].clone()
        for (g, group), name in itertools.product(groups.items(), names):
            if name == "upper-bound" and g == "ring":
                continue
            model = copy.copy(base)
            model.config = rewired(config, name)
            model.comm = TensorParallel(model.config, world.tp_size, group)
            runner = Runner(model, cache, True)

            def step(runner=runner, comm=model.comm):
                return sample(runner.decode(token, torch.full_like(lengths, length), length + 1)[:, 0], comm).tolist()

            for _ in range(3):
                step()
            steps[g, name] = step
            runners.append(runner)
            if world.rank == 0:
                print("compiled", g, name, flush=True)
        found = {k: [] for k in steps}
        with without_guards(runners[0]):
            for turn in range(rounds):
                if folder and turn % 8 == 4:
                    dllama(world, folder)
                for k, step in steps.items():
                    step()
                    for _ in range(4):
                        t = time.perf_counter()
                        step()
                        found[k].append(1e3 * (time.perf_counter() - t))
    if world.rank == 0:
        for (g, name), ms in found.items():
            low, mid, high = quartiles(ms)
            print(
                f"{label} | {g} | {name}: {mid:.1f} ms ({low:.1f} to {high:.1f}; least {min(ms):.1f}; {len(ms)})",
                flush=True,
            )
            if out != "-":
                writing.append_line(
                    out,
                    {
                        "model": model_name,
                        "quant": "int4",
                        "kind": "decode",
                        "compiled": True,
                        "batch": 1,
                        "tokens": length,
                        **about("hop", sys.argv[1:], world),
                        "comm": g,
                        "wiring": name,
                        "link": {"name": label},
                        "step_ms": mid,
                        "quartiles_ms": [low, high],
                        "least_ms": min(ms),
                        "steps": len(ms),
                    },
                )


if __name__ == "__main__":
    launch.run(main)
