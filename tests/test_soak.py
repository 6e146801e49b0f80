"""Many requests to the same ranks: nothing grows, nothing compiles again, and nothing is answered otherwise."""

import dataclasses
import itertools
import json
import os

import pytest
import torch
from helpers import BASE, random_model, run_ranks, script, shard
from torch._dynamo.utils import counters

import generate
from benchmarks import soak
from runtime import launch

SHAPES = dataclasses.replace(BASE, n_layers=2, max_seq_len=2 * soak.LONGEST, wiring="ladder")


class Plain:
    """A tokenizer whose tokens are characters."""

    def encode(self, text):
        return [ord(c) % 100 + 3 for c in text]

    def continuation(self, prompt, row):
        return str(row)


def serve(world, number, compile):
    """(the new ids of some requests, the lines of the Record) on a rank."""
    torch._dynamo.reset()
    counters.clear()
    net = shard(SHAPES, world)
    record = soak.Record(world, number // 4, {})
    with torch.inference_mode():
        return soak.serve(net, number, 0, record, compile), record.lines


def grown(lines, name):
    """How much each rank has more of something in the last line than in the one before the middle."""
    first, last = lines[len(lines) // 2 - 1]["ranks"], lines[-1]["ranks"]
    return [b[name] - a[name] for a, b in zip(first, last, strict=True)]


def alone(number):
    """The new ids of some requests on one device."""
    net, rows = random_model(SHAPES), []
    for prompts, new in soak.requests(number, SHAPES.vocab_size, 0):
        runner = generate.Runner(net, net.new_cache(len(prompts), 2 * soak.LONGEST))
        rows.append(generate.generate(runner, prompts, new, generate.Sampler(0))[0])
    return rows


@pytest.mark.parametrize("number, compile", [(24, False), pytest.param(200, True, marks=pytest.mark.slow)])
def test_many_requests_take_no_more_of_anything(number, compile):
    for rows, lines in run_ranks(2, serve, number, compile):
        assert [line["done"] for line in lines] == [number // 4 * i for i in (1, 2, 3, 4)]
        assert grown(lines, "files") == grown(lines, "threads") == [0, 0]
        if compile:
            assert {rank["graphs"] for line in lines[1:] for rank in line["ranks"]} == {len(soak.BATCHES)}
            assert max(grown(lines, "resident")) < 2**25
        assert rows[:4] == alone(4)


def test_an_answer_that_is_not_what_it_was_is_noticed(monkeypatch, tmp_path):
    answers = itertools.count()
    monkeypatch.setattr(generate, "generate", lambda *args: ([[next(answers) // 2]], 1, 0.0, 0.0))
    monkeypatch.setattr(soak, "resident", lambda process="self": 0)
    record = soak.Record(launch.World(0, 1, torch.device("cpu")), 1, {"kind": "requests"}, tmp_path / "out.jsonl")
    with pytest.raises(RuntimeError, match="after 2 requests the first has another answer"):
        soak.serve(random_model(SHAPES), 4, 0, record, compile=False)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["done"]) for line in lines] == [("requests", 1), ("requests", 2)]


@pytest.mark.slow
def test_a_chat_of_many_turns_takes_no_more_of_anything(tmp_path):
    out = tmp_path / "out.jsonl"
    flags = ["--chat", "--checkpoint", "demo", "--every", "30", "--json", out]
    done = script("benchmarks/soak.py", *flags, ranks=2, stdin="One day\n" * 240, PYTHONPATH=os.getcwd())
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    # a line that starts the context anew is not answered
    assert len(lines) >= 6 and [line["done"] for line in lines] == [30 * (i + 1) for i in range(len(lines))]
    assert grown(lines, "files") == grown(lines, "threads") == grown(lines, "graphs") == [0, 0]


@pytest.mark.slow
def test_a_server_may_ask_for_completions_of_more_shapes_than_the_compiler_keeps_by_itself(monkeypatch):
    """complete() compiles for each number of rows, and calls of about the same length share what is compiled."""
    monkeypatch.setattr(generate.Runner, "_how", lambda self: {"backend": "eager"})
    torch._dynamo.reset()
    counters.clear()
    net = random_model(dataclasses.replace(BASE, n_layers=1, max_seq_len=512))
    for rows in range(1, 10):
        for new in (3, 20):
            prompts = ["abcdefg"[: 1 + i % 7] for i in range(rows)]
            eager, compiled = (
                generate.complete(net, Plain(), prompts, new, temperature=0, compile=c) for c in (False, True)
            )
            assert compiled == eager
    assert counters["stats"]["unique_graphs"] == 9


@pytest.mark.slow
def test_compiled_runs_of_several_shapes_in_one_process_give_what_eager_ones_do(tiny, tmp_path):
    """Each ends before the next begins, so that no guard is skipped (generate.run_batch) that tells them apart."""
    out = tmp_path / "out.jsonl"
    torch._dynamo.reset()
    for flags in ["--batch=1"], ["--batch=3"], ["--batch=1"], ["--prompt=The little dog ran"], ["--batch=3"]:
        for compiled in [], ["--compile"]:
            words = ["--checkpoint", str(tiny), "--prompt=Once upon", "--temperature=0", "--max-new-tokens=9"]
            generate.main([*words, *flags, *compiled, "--json", str(out)])
    found = [json.loads(line)["tokens"] for line in out.read_text().splitlines()]
    assert found[::2] == found[1::2]
