"""What a run takes of the memory, said before it starts: weights and cache, against what a rank loads."""

import dataclasses

import pytest
import torch
from helpers import BASE, YARN

import eval
import generate
from formats import sizes
from runtime import launch, report
from runtime.report import rank_bytes
from tp import load_shard

CPU = torch.device("cpu")
SMALL = dataclasses.replace(BASE, n_heads=15, n_kv_heads=5, head_dim=16, dim=192, intermediate_size=256, vocab_size=301)
LINEAR = {"key_heads": 7, "value_heads": 14, "key_dim": 8, "value_dim": 4, "conv_width": 3}
LINEAR = {"n_heads": 16, "n_kv_heads": 8, "attention_gate": True, "linear_layers": (1,), "linear_attention": LINEAR}
CONFIGS = {
    "uneven": (SMALL, torch.float32),
    "tied": (dataclasses.replace(SMALL, tie_embeddings=True, wiring="ladder", rope_scaling=YARN), torch.bfloat16),
    "biases": (dataclasses.replace(SMALL, qkv_bias=True, wo_bias=True, mlp_bias=True, qk_norm=True), torch.bfloat16),
    "int8": (dataclasses.replace(SMALL, quant="int8", tie_embeddings=True), torch.bfloat16),
    "int4": (dataclasses.replace(SMALL, n_heads=24, n_kv_heads=4, quant="int4", group_size=64), torch.bfloat16),
    "linear": (dataclasses.replace(SMALL, **LINEAR), torch.bfloat16),
    "farskip": (
        dataclasses.replace(
            SMALL, n_experts=3, experts_per_token=2, expert_size=64, shared_expert_size=64, wiring="farskip"
        ),
        torch.bfloat16,
    ),
    "kept": (dataclasses.replace(SMALL, quant="int8", kept=("output", "w2")), torch.float16),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_and_cache_are_what_a_rank_will_hold(name):
    config, dtype = CONFIGS[name]
    for rank, shares in (0, 1), (1, 2), (2, 4), (5, 7), (1, (3, 1)):
        model = load_shard(config, sizes.RandomWeights(config, CPU), dtype, CPU, rank, shares)
        weights = {n: p for n, p in model.named_parameters() if not (config.tie_embeddings and n.startswith("output."))}
        cache = [tensor for layer in generate.make_cache(model, 3, 25) for tensor in layer]
        sums = [sum(tensor.nbytes for tensor in tensors) for tensors in (weights.values(), cache)]
        assert [*rank_bytes(config, dtype, 3, 25, rank, shares)] == sums


def test_a_step_reads_the_experts_that_its_tokens_choose():
    config = CONFIGS["farskip"][0]
    model = load_shard(config, sizes.RandomWeights(config, CPU), torch.bfloat16, CPU)
    one, three, drafted = (
        report.step_bytes(model, model.new_cache(rows, 8), 0, n) for rows, n in [(1, 0), (3, 0), (1, 2)]
    )
    more = config.n_layers * 3 * 3 * 192 * 64 * 2 * ((1 - 1 / 27) - 2 / 3)
    assert three == drafted == pytest.approx(one + more)


@pytest.fixture
def warning(monkeypatch, capsys):
    """A function that returns what warn() prints for such ranks and free memory."""

    def warn(free, rank=0, ranks=4, local=4, shares=None, **changes):
        monkeypatch.setattr(report, "free_bytes", lambda device: free)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
        world = launch.World(rank, ranks, CPU, shares=shares, **changes)
        report.warn_of_memory(world, 2, 16, (SMALL, torch.float32, rank, shares or ranks))
        return capsys.readouterr().err

    return warn


def needed(rank, shares):
    return sum(rank_bytes(SMALL, torch.float32, 2, 16, rank, shares))


def test_a_run_that_does_not_fit_is_said_in_a_line_of_rank_0(warning):
    for local, flags in (4, {}), (1, {}), (4, {"simulated": True}):
        sharers = 1 if flags else local  # the ranks of a machine share its memory; a simulated one has it alone
        assert warning(sharers * needed(0, 4), local=local, **flags) == ""
        line = warning(sharers * (needed(0, 4) - 1), local=local, **flags)
        assert line.count("\n") == 1 and "needed on rank 0" in line
    assert warning(1, rank=1) == ""
    shares = 3, 1, 1  # each of unlike ranks has its part of what is free
    for rank, share in enumerate(shares):
        for local, free in (1, needed(rank, shares)), (3, needed(rank, shares) * 5 / share):
            assert warning(free + 1, rank, 3, local, shares) == ""
            assert f"needed on rank {rank}, " in warning(free - 9, rank, 3, local, shares)


def test_scripts_warn_before_they_load_and_go_on(monkeypatch, capsys, tiny, tmp_path):
    class Loading(Exception):
        pass

    def load(*_):
        raise Loading

    monkeypatch.setattr(generate, "load_model", load)
    monkeypatch.setattr(report, "free_bytes", lambda device: 0)
    (tmp_path / "text").write_text("Once upon a time there was a little dog. " * 30)
    for main, flags, expected in (
        (generate.main, "--model 405b --prompt-length 10", "about 811."),
        (generate.main, "--model 1b --prompt-length 100 --batch 4096 --max-new-tokens 100", "29.3"),
        (eval.main, f"--checkpoint {tiny} --text {tmp_path / 'text'} --compare {tiny}", "needed on rank 0"),
    ):
        with pytest.raises(Loading):
            main(flags.split())
        assert expected in capsys.readouterr().err
