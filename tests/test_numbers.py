"""Numbers that are not finite end a generation with a line that says where; and the same request twice is the same."""

import dataclasses

import pytest
import torch
from helpers import BASE, random_model, run_ranks, shard, unequal_rows, write_model

import eval
import generate
from runtime.errors import InputError

NAN, INF = torch.nan, torch.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", [(0,), (0.8,), (1.0, 5, 0.9)])
def test_the_sampler_marks_rows_that_are_not_finite(how, dtype):
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    healthy = generate.Sampler(*how, seed=3)(logits)
    bad = {0: [NAN], 2: [INF], 3: [-INF], 5: [NAN, INF, -INF]}
    for row, values in bad.items():
        logits[row, 7 : 7 + len(values)] = torch.tensor(values, dtype=dtype)
    ids = generate.Sampler(*how, seed=3)(logits).tolist()
    assert [ids[row] for row in bad] == [-1] * 4
    assert [ids[row] for row in (1, 4)] == healthy[[1, 4]].tolist()
    assert generate.Sampler(*how)(torch.full((1, 9), -INF, dtype=dtype)).tolist() == [-1]


def test_the_first_of_equal_logits_is_greedy():
    logits = torch.randint(3, (64, 300), generator=torch.Generator().manual_seed(0)).bfloat16()
    assert generate.Sampler(0)(logits).tolist() == [row.index(max(row)) for row in logits.tolist()]


def generate_poisoned(world):
    """The error of a generation in which row 1 is not finite from its third step on."""
    model = random_model(BASE) if world is None else shard(BASE, world)
    runner = generate.Runner(model, model.new_cache(2, 12), False)
    decode, steps, shown = runner.decode, [], []

    def spoiled(*args):
        steps.append(args)
        logits = decode(*args)
        return logits.index_fill(0, torch.tensor([1]), NAN) if len(steps) >= 2 else logits

    runner.decode = spoiled
    with pytest.raises(InputError) as error:
        generate.generate(runner, [[3, 4, 5], [6]], 8, generate.Sampler(0), on_tokens=shown.append)
    assert len(steps) == len(shown) == 2
    return str(error.value)


def test_the_step_and_the_row_are_named_on_all_ranks():
    for line in generate_poisoned(None), *run_ranks(2, generate_poisoned):
        assert "row 1 in step 2" in line and "--dtype" in line


def test_an_overflow_of_float16_is_named(tmp_path):
    """A bfloat16 checkpoint whose second MLP, its layer 1's, gives more than float16 holds."""
    state = random_model(BASE).state_dict()
    state["layers.1.feed_forward.w2.weight"] *= 1e5
    write_model(tmp_path, BASE, state, torch.bfloat16)
    flags = ["--prompt", "ids:3,4,5", "--prompt", "ids:6,7", "--temperature", "0", "--dtype", "float16"]
    with pytest.raises(InputError, match="row 0 in step 0 .*--dtype"):
        generate.main(["--checkpoint", str(tmp_path), *flags])
    model = generate.load_model(BASE, str(tmp_path), "float16", generate.World(0, 1, "cpu"))
    with pytest.raises(InputError, match="loss of nan .* in float16: .*--dtype"):
        eval.checked(NAN, str(tmp_path), model)
    assert eval.checked(1.5, str(tmp_path), model) == 1.5


def twice(world, dtype, compile):
    """What a request of unequal rows gives, which is the same bits twice."""
    tokens, lengths = unequal_rows(BASE)
    prompts = [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]
    config = dataclasses.replace(BASE, wiring="ladder")
    net = random_model(config).to(dtype) if world is None else shard(config, world, dtype)
    runs = []
    for junk in (0.0, 1e3):  # what memory held before must not matter
        torch.full((2**18,), junk)
        torch._dynamo.reset()
        runner = generate.Runner(net, net.new_cache(3, 24), compile)
        greedy, seen = generate.Sampler(0), []

        def sample(logits, comm, greedy=greedy, seen=seen):
            seen.append(comm.gather_logits(logits).clone())
            return greedy(logits, comm)

        with pytest.MonkeyPatch.context() as m:
            m.setattr(generate, "PASS_TOKENS", 12)
            rows, *_ = generate.generate(runner, prompts, 12, sample)
        runs.append((rows, torch.stack(seen)))
    (rows, logits), (again, same) = runs
    assert rows == again and torch.equal(logits, same)
    return rows, logits


@pytest.mark.parametrize("ranks, dtype, compile", [
    (1, torch.bfloat16, False), (3, torch.bfloat16, False),
    pytest.param(2, torch.bfloat16, True, marks=pytest.mark.slow),
])  # fmt: skip
def test_the_same_request_twice_gives_the_same_bits(ranks, dtype, compile):
    results = run_ranks(ranks, twice, dtype, compile) if ranks > 1 else [twice(None, dtype, compile)]
    for rows, logits in results:
        assert rows == results[0][0] and torch.equal(logits, results[0][1])
