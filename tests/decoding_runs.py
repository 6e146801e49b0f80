"""Decoding in this process or on the pool's ranks: generate.py, drafts, rows of a server, cells of bench.py."""

import contextlib
import io
import json
import sys

import pytest
import torch
from helpers import shard
from running import main_on_ranks, run_main, script

import bench
import generate
from extras.serve.rows import Rows
from generate import Runner
from ladder.command_line import flags
from ladder.decoding.batch import Sampler, make_cache
from ladder.decoding.drafts import of_model
from model import rewired


def bench_flags(tiny, *more):
    sizes = ["--prompt-length", "5", "--new-tokens", "4", "--repeats", "2"]
    return ["--checkpoint", str(tiny), "--device", "cpu", *sizes, *map(str, more)]


def cell_texts(world, words):
    """[(wiring, batch, what the cell generates, what a model that was loaded in this wiring generates)]."""
    torch._dynamo.reset()
    args = bench.parse(words)
    name, config = flags.read_config(args)
    cells = bench.make_cells(bench.load_models(config, args.wiring, args, world), args, world)
    answers = []
    sample = Sampler(0)
    for _ in range(2):  # in turns
        for (wiring, batch), (runner, prompts) in cells.items():
            model = generate.load_model(rewired(config, wiring), args.checkpoint, args.dtype, world)
            alone = Runner(model, make_cache(model, batch, 9))
            both = [generate.generate(one, prompts, 4, sample).rows for one in (runner, alone)]
            answers.append((wiring, batch, *both))
    return answers


def runner_with_draft(net, draft, count, rows, length, compile=False):
    """A Runner with a cache of just that length, and its draft. draft: "ngram", a model, or None."""
    runner = Runner(net, make_cache(net, rows, length), compile)
    if draft:
        runner.draft = of_model(draft, count, runner, getattr(draft, "config", net.config).vocab_size)
    return runner


def run_generate(*args, stdin=""):
    """(stdout, stderr) of generate.py in this process."""
    out = io.StringIO()
    err = io.StringIO()
    with pytest.MonkeyPatch.context() as m, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        m.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        run_main(generate, *args)
    return out.getvalue(), err.getvalue()


def generate_json(folder, *args, out, ranks=1, launched=False):
    """The JSON result of generate.py, what it printed and what it said; unless launched on ranks of the pool."""
    args = ["--checkpoint", folder, "--json", out, *args]
    if launched:  # as a user starts it, with torchrun
        done = script("generate.py", *args, ranks=ranks)
        assert done.returncode == 0, done.stderr
        printed = done.stdout
        said = done.stderr
    else:
        printed, said = run_generate(*args) if ranks == 1 else main_on_ranks(ranks, generate.main, *args)[0]
    return json.loads(out.read_text().splitlines()[-1]), printed, said


ASK = {  # a request to Rows, without ids and max_tokens
    "min_tokens": 0, "ignore_eos": False, "stop_token_ids": [], "sampling": {"temperature": 0},
    "repetition_penalty": 1.0, "logprobs": None, "echo": False,
}  # fmt: skip


def answer_in_turns(world, config, requests, n_rows, few_sizes=False):
    """What Rows answers to requests [(pass in which it comes, request)], and [(rows that decode, rows of the pass)]."""
    net = shard(config, world)
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("extras.serve.rows.SHORT_CHUNK", 5)  # so that a prompt takes several, between others' steps
        runner = Runner(net, net.new_cache(n_rows, config.max_seq_len))
        sizes = []
        decode = Runner.decode
        runner.passes.graphs = few_sizes  # as where steps are captured
        rows = Rows(runner, config.eos_ids)

        def counted(self, tokens, *args):
            sizes.append((sum(not row.prefilling for row in rows.busy), len(tokens)))
            return decode(self, tokens, *args)

        patch.setattr(Runner, "decode", counted)
        answers = [[] for _ in requests]
        of_row = {}
        left = list(enumerate(requests))
        while left or rows.busy:
            free = [i for i, row in enumerate(rows) if not row.request]
            while left and free and left[0][1][0] <= rows.n_passes:
                number, (_, request) = left.pop(0)
                of_row[i := free.pop(0 if few_sizes else -1)] = number  # the rows of a pass may be in their prefill
                rows.start(i, ASK | request)
            for row, token, finish, *_ in rows.step():
                answers[of_row[row]] += [token.id] * (finish != "stop")
    return answers, sizes
