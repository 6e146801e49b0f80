"""Many requests to the same ranks: nothing grows, nothing compiles again, and nothing is answered otherwise."""

import dataclasses
import functools
import os
import random
from pathlib import Path

import pytest
import torch
from helpers import BASE, random_model, run_ranks, shard
from torch._dynamo.utils import counters

import generate
from complete import complete

BATCHES, LONGEST = (1, 2, 3, 4), 32  # rows; tokens of a prompt, and of an answer
SHAPES = dataclasses.replace(BASE, n_layers=2, max_seq_len=2 * LONGEST, wiring="ladder")


class Plain:
    """A tokenizer whose tokens are characters."""

    def encode(self, text):
        return [ord(c) % 100 + 3 for c in text]

    def continuation(self, prompt, row):
        return str(row)


def requests(number):
    """So many requests, as (prompts, new tokens)."""
    draw = random.Random(0)
    for _ in range(number):
        lengths = [draw.randint(1, LONGEST) for _ in range(draw.choice(BATCHES))]
        yield [[draw.randrange(3, SHAPES.vocab_size) for _ in range(n)] for n in lengths], draw.randint(1, LONGEST)


def usage():
    """What this process has by now, where only growth means something."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    files, threads = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
    return {"resident": resident, "graphs": counters["stats"]["unique_graphs"], "files": files, "threads": threads}


def serve(world, number, compile):
    """(the new ids of some requests, the usage after each half of them) on a rank: a Runner for each batch size."""
    torch._dynamo.reset()
    counters.clear()
    net, runners, rows, found = shard(SHAPES, world), {}, [], []
    with torch.inference_mode():
        for prompts, new in requests(number):
            batch = len(prompts)
            if batch not in runners:
                runners[batch] = generate.Runner(net, generate.make_cache(net, batch, 2 * LONGEST), compile)
                if compile:
                    generate.warm_up(runners[batch], prompts, new)
            rows.append(generate.generate(runners[batch], prompts, new, generate.Sampler(0))[0])
            if len(rows) % (number // 2) == 0:
                found.append(usage())
    return rows, found


def alone(number):
    """The new ids of some requests on one device, each by a Runner of its own."""
    net, rows = random_model(SHAPES), []
    for prompts, new in requests(number):
        runner = generate.Runner(net, net.new_cache(len(prompts), 2 * LONGEST))
        rows.append(generate.generate(runner, prompts, new, generate.Sampler(0))[0])
    return rows


@pytest.mark.parametrize("number, compile", [(24, False), pytest.param(200, True, marks=pytest.mark.slow)])
def test_many_requests_take_no_more_of_anything(number, compile):
    for rows, (half, all_of_them) in run_ranks(2, serve, number, compile):
        assert rows == alone(number)
        assert (half["files"], half["threads"]) == (all_of_them["files"], all_of_them["threads"])
        if compile:
            assert half["graphs"] == all_of_them["graphs"] == len(BATCHES)
            assert all_of_them["resident"] - half["resident"] < 2**25


@pytest.mark.slow
def test_a_server_may_ask_for_completions_of_more_shapes_than_the_compiler_keeps_by_itself(monkeypatch):
    """complete() compiles for each number of rows, and calls of about the same length share what is compiled."""
    in_python = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", lambda net, options, **how: in_python(net, **how))
    torch._dynamo.reset()
    counters.clear()
    net = random_model(dataclasses.replace(BASE, n_layers=1, max_seq_len=512))
    for rows in range(1, 10):
        for new in (3, 20):
            prompts = ["abcdefg"[: 1 + i % 7] for i in range(rows)]
            eager, compiled = (complete(net, Plain(), prompts, new, temperature=0, compile=c) for c in (False, True))
            assert compiled == eager
    assert counters["stats"]["unique_graphs"] == 9
