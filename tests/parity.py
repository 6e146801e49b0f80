"""Parity: of a model with the naive float64 reference, of ranks with one device."""

import functools

import torch
from configs import BASE, change
from helpers import counted_kernels, last_logits, load_random, random_model, rank_logits, seeded, shard, unequal_rows
from reference import Reference
from running import run_ranks

import tp
from ladder.kernels import compiling


def check_few_rows_in_bfloat16(config):
    """A step with kernels is about as near to float32 as one without; returns that model and its kernels' counts."""
    dtypes = torch.float32, torch.bfloat16, torch.bfloat16
    nets = [load_random(config, dtype) for dtype in dtypes]
    with torch.inference_mode():
        exact, plain = (last_logits(net, *unequal_rows(config)).float() for net in nets[:2])
        compiling.use_decode_kernels(nets[2])
        with counted_kernels() as counts:
            fast = last_logits(nets[2], *unequal_rows(config)).float()
    assert (fast - exact).abs().mean() < 1.2 * (plain - exact).abs().mean()
    return nets[2], counts


def check_against_the_reference(config, reference=Reference, **compile):
    """The logits of unequal rows: of all tokens, and after a prefill and decode steps."""
    net = random_model(config)
    tokens, lengths = unequal_rows(config)
    with torch.no_grad():
        logits = net(tokens)
    decoded = last_logits(net, tokens, lengths, **compile)
    reference = reference(config, net.state_dict())
    for row, length in enumerate(lengths):
        expected = torch.from_numpy(reference.logits(tokens[row, :length]))
        assert (logits[row, :length] - expected).abs().max() < 1e-4
        assert (decoded[row] - expected[-4:]).abs().max() < 1e-4


def logits_of_cases(world, cases, load=shard, **how):
    """Return the logits of each case on this rank."""
    return [last_logits(load(config, world), *unequal_rows(config), **how) for config in cases]


def reference_logits(config, shares):
    """Return (B, steps + 1, V) from the float64 reference, with the heads and neurons of each rank's shard."""
    net = random_model(config)
    tokens, lengths = unequal_rows(config)
    shares = (1,) * shares if isinstance(shares, int) else shares
    plans = [tp.shard_plan(config, rank, shares) for rank in range(len(shares))]
    shards = [(tuple(i // config.head_dim for i in p["wo"][1][0]), p["w2"][1][0]) for p in plans]
    reference = Reference(config, net.state_dict(), shards)
    rows = []
    for row, length in zip(tokens, lengths, strict=True):
        # each rank computes its vocabulary from its own stream; they differ in the upper bound
        whole = [logits[-4:] for logits in reference.all_logits(row[:length])]
        rows.append([x[:, slice(*p["output"][1][0])] for x, p in zip(whole, plans, strict=True)])
    return torch.stack([torch.cat([torch.from_numpy(x) for x in row], dim=1) for row in rows])


def check_ranks_against_the_reference(shares, cases, **how):
    """On each rank the logits are the reference's and, where the wiring has no lanes, those of one device."""
    cases = [change(BASE, **changes) for changes in cases]
    ranks = run_ranks(shares, functools.partial(logits_of_cases, cases=cases, **how))
    for config, first, *others in zip(cases, *ranks, strict=True):
        assert all(torch.equal(other, first) for other in others), f"{config}: the ranks disagree"
        error = (first - reference_logits(config, config.named_wiring.shards(shares))).abs().max()
        assert error < 1e-4, f"{config}: {error}"
        if not config.named_wiring.reads_partials:
            assert torch.allclose(first, rank_logits(None, config), atol=1e-4), config


def long_memory(config):
    """A random_model whose layers of linear attention, if it has some, remember far more than random ones."""
    net = random_model(config)
    generator = seeded(0)
    for name, parameter in net.named_parameters():
        if name.endswith("A_log"):
            torch.nn.init.uniform_(parameter, -5, 0, generator)
    return net


SPLITS = [{}, {"splits": 2}, {"splits": 3}]


def logits_of_ways(world, config, state, ways):
    """Return the logits of a rank, computed in each of the ways, which are arguments of last_logits."""
    net = shard(config, world, state=state)
    with torch.inference_mode():
        return [last_logits(net, *unequal_rows(config, length=14), steps=4, **how) for how in ways]


def check_ranks_against_one_device(ranks, configs, ways):
    """In each of the ways the logits are those of whole rows, one by one, without padding and without a cache."""
    for config in configs:
        state = long_memory(config).state_dict()
        rows = zip(*unequal_rows(config, length=14), strict=True)
        net = shard(config, state=state)
        with torch.no_grad():
            expected = torch.stack([net(row[None, :n])[0, -5:] for row, n in rows])
        for results in run_ranks(ranks, logits_of_ways, config, state, ways):
            for logits in results:
                assert (logits - expected).abs().max() < 1e-4, config.wiring
