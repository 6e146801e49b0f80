"""What a run takes of the memory, said before it starts: weights and cache, against what a rank loads."""

import pytest
import torch
from configs import BASE, YARN, change

import generate
from ladder import memory
from ladder.checkpoints.random_weights import RandomWeights
from ladder.decoding.batch import make_cache
from ladder.ranks.world import World
from tp import load_shard

CPU = torch.device("cpu")
SMALL = change(BASE, n_heads=15, n_kv_heads=5, head_dim=16, dim=192, intermediate_size=256, vocab_size=301)
LINEAR = {"key_heads": 7, "value_heads": 14, "key_dim": 8, "value_dim": 4, "conv_width": 3}
LINEAR = {"n_heads": 16, "n_kv_heads": 8, "heads": {"gate": True}, "linear": {"layers": (1,), **LINEAR}}
EXPERTS = {"n_experts": 3, "experts_per_token": 2, "expert_size": 64, "shared_expert_size": 64}
EXPERTS = {"mixture": EXPERTS, "wiring": "farskip"}


@pytest.mark.parametrize("changes, dtype", [
    ({}, torch.float32), ({"tie_embeddings": True, "wiring": "ladder", "rope_scaling": YARN}, torch.bfloat16),
    ({"qkv_bias": True, "wo_bias": True, "mlp_bias": True, "heads": {"qk_norm": True}}, torch.bfloat16),
    ({"quant": "int8", "tie_embeddings": True}, torch.bfloat16), (LINEAR, torch.bfloat16), (EXPERTS, torch.bfloat16),
    ({"n_heads": 24, "n_kv_heads": 4, "quant": "int4", "group_size": 64}, torch.bfloat16),
])  # fmt: skip
def test_a_run_that_does_not_fit_is_said_in_a_line_of_the_rank(changes, dtype, monkeypatch, capsys):
    config = change(SMALL, **changes)
    for rank, shares in (0, (1,)), (1, (1, 2)), (2, (1, 1, 1, 2)), (0, (1,) * 7):
        model = load_shard(config, RandomWeights(config, CPU), dtype, CPU, rank, shares)
        tied = config.tie_embeddings  # then the output head is rows of the table
        weights = [p.nbytes for name, p in model.named_parameters() if not (tied and name.startswith("output."))]
        cache = [tensor.nbytes for layer in make_cache(model, 3, 24) for tensor in layer]
        # where a launcher such as srun does not say how many ranks are here, all are
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(len(shares))) if rank else monkeypatch.delenv("LOCAL_WORLD_SIZE", 0)
        for missing in 0, 1:  # bytes of the memory that the ranks of a machine share
            free = (sum(weights) + sum(cache) - missing + 0.1) * sum(shares) / shares[rank]
            monkeypatch.setattr(memory, "free_bytes", lambda device, free=free: free)
            memory.warn_of_memory(World(rank, len(shares), CPU, shares=shares), config, dtype, 3, 25)
            assert capsys.readouterr().err.count(f"weights and cache of rank {rank} may not fit: ") == missing


@pytest.mark.parametrize("tp_size, speakers", [(3, [0]), (5, [0]), (7, [*range(7)]), (10, [0])])
def test_of_equal_ranks_one_says_it_if_it_has_the_largest_part(tp_size, speakers, monkeypatch, capsys):
    """Of 5 KV heads, 7 ranks share some."""
    monkeypatch.setattr(memory, "free_bytes", lambda device: 0)
    said = []
    for rank in range(tp_size):
        memory.warn_of_memory(World(rank, tp_size, CPU), SMALL, torch.float32, 3, 25)
        said += [rank] * ("may not fit" in capsys.readouterr().err)
    assert said == speakers


def test_generate_warns_before_it_loads_and_goes_on(monkeypatch, capsys):
    monkeypatch.setattr(generate, "load_model", lambda *_: 1 / 0)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 0)
    for flags, expected in (
        ("--model 405b --prompt-length 10", "about 811."),
        ("--model 1b --prompt-length 100 --batch 4096 --max-new-tokens 100", "29.3"),
    ):
        with pytest.raises(ZeroDivisionError):
            generate.main(flags.split())
        assert expected in capsys.readouterr().err
