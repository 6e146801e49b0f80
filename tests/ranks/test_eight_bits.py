"""ladder/ranks/eight_bits.py: sums against float64, within the bound that it states and alike on all ranks."""

import math

import pytest
import torch
import torch.distributed as dist
from configs import BASE, MANY, OLMO, UNEQUAL_SHARES, change
from helpers import last_logits, rank_logits, seeded, shard, unequal_rows
from running import RANKS, run_ranks

import tp
from extras.measure import link
from ladder.ranks.eight_bits import GROUP, EightBits, message_bytes, read_message, round_to_message
from ladder.ranks.world import World

OPS = torch.ops._c10d_functional
SIZES = [1, 31, 32, 33, 100, 4097]
WIDE = [1e-30, 1e-5, 1.0, 1e30]
SCALES = {torch.bfloat16: WIDE, torch.float16: [1e-5, 1.0, 1000.0], torch.float32: WIDE}
LAST = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}


def run_over_gloo(shares, function, *args):
    """[function(world, *args) of each rank], over gloo as between machines, in groups as connect() makes them."""
    shares = (1,) * shares if isinstance(shares, int) else shares
    return run_ranks(RANKS, call_over_gloo, shares, function, *args)[: len(shares)]


def call_over_gloo(pool, shares, function, *args):
    inner, second = (dist.new_group(range(len(shares))) for _ in range(2))  # which all ranks of the pool must call
    if pool.rank < len(shares):
        world = World(pool.rank, len(shares), pool.device, inner, shares)
        world.dist_group = inner
        world.group = EightBits(inner, second, world.rank, world.tp_size, world.device)
        return function(world, *args)


def size_by_group(x, parts):
    """For each number of x (n), the largest size in its group; each of the parts begins a group."""
    padded = torch.zeros(-(-len(x) // (parts * GROUP)) * parts * GROUP, dtype=x.dtype)
    padded[: len(x)] = x.abs()
    return padded.view(-1, GROUP).amax(-1).repeat_interleave(GROUP)[: len(x)]


def check_sum(result, partials):
    """Compare a sum (n) of partials (tp_size, n) with float64, within the bound of eight_bits.py."""
    exact = partials.double().sum(0)
    tp_size = len(partials)
    total = result.double()
    parts = 1 if tp_size == 2 else tp_size
    allowed = sum(size_by_group(partial.double(), parts) for partial in partials) / 253
    if tp_size > 2:
        allowed += (size_by_group(exact, parts) + size_by_group(allowed, parts)) / 253
    allowed += LAST[result.dtype] * (exact.abs() + allowed) + torch.finfo(result.dtype).smallest_normal * 2**-10
    assert ((total - exact).abs() <= allowed).all()


def numbers(rank, count, dtype, scale):
    """A rank's partial, with zeros in the middle; any rank can compute it."""
    generator = seeded(rank)
    x = torch.randn(count, generator=generator, dtype=torch.float64) * scale
    x[40:80] = 0
    return x.to(dtype)


def sum_numbers(world):
    sums = []
    ranks = range(world.tp_size)
    cases = [(dtype, n, scale) for dtype, scales in SCALES.items() for n in SIZES for scale in scales]
    pending = [OPS.all_reduce(numbers(world.rank, n, dtype, s), "sum", world.group.group_name) for dtype, n, s in cases]
    for started, (dtype, n, scale) in zip(pending, cases, strict=True):
        sums.append(OPS.wait_tensor(started))
        check_sum(sums[-1], torch.stack([numbers(rank, n, dtype, scale) for rank in ranks]))
    return [each.view(torch.uint8) for each in sums], others(world)


def others(world):
    """What is exact, or no number."""
    name = world.group.group_name
    n = world.tp_size
    for dtype in torch.int32, torch.int64, torch.float64:
        x = 1000 + 1001 * torch.arange(70, dtype=dtype) + world.rank
        assert torch.equal(OPS.wait_tensor(OPS.all_reduce(x, "sum", name)), x * n + sum(range(n)) - n * world.rank)
    largest = OPS.wait_tensor(OPS.all_reduce(torch.tensor([1.001 + world.rank]), "max", name))
    assert torch.equal(largest, torch.tensor([0.001 + n]))
    gathered = torch.ops.ladder.gather(torch.full((33,), 1.001 + world.rank), n, name)
    assert torch.equal(gathered, (1.001 + torch.arange(n))[:, None].expand(n, 33).float())
    x = torch.arange(2.0 * 33).view(2, 33).t()
    assert torch.allclose(OPS.wait_tensor(OPS.all_reduce(x, "sum", name)), n * x, atol=n)
    sums = []
    for bad in math.inf, -math.inf, math.nan:
        for rank in range(n):
            x = torch.ones(100, dtype=torch.bfloat16)
            x[50] = bad if rank == world.rank else 1
            sums.append(OPS.wait_tensor(OPS.all_reduce(x, "sum", name)))
            assert not sums[-1][50].isfinite() and sums[-1][[0, 99]].allclose(torch.tensor(n).bfloat16(), rtol=0.02)
    return [each.isfinite() for each in sums]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_are_within_the_bound_and_alike_on_all_ranks(ranks):
    """Of any size, dtype and magnitude, many in flight at once; what is no sum of floats is exact."""
    (sums, finite), *rest = run_over_gloo(ranks, sum_numbers)
    for other_sums, other_finite in rest:
        assert all(map(torch.equal, sums, other_sums)) and all(map(torch.equal, finite, other_finite))


def test_a_message_has_34_bytes_for_32_numbers():
    x = torch.randn(3, 96) * 10.0 ** torch.arange(-3, 3).repeat_interleave(16)
    message = round_to_message(x)
    assert message.dtype == torch.uint8 and message.shape == (3, message_bytes(96)) == (3, 3 * 34)
    assert torch.equal(round_to_message(read_message(message)), message)  # what is rounded is rounded to itself
    assert message_bytes(1) == 34 and message_bytes(2048) == 2176


# ---- In a run --------------------------------------------------------------------------------------------------------


class Recorder(tp.TensorParallel):
    """Collectives that keep the partials and their sums."""

    def start(self, partial):
        self.partials = [*getattr(self, "partials", []), partial.clone()]
        return super().start(partial)

    def wait(self, pending):
        self.sums = [*getattr(self, "sums", []), super().wait(pending).clone()]
        return self.sums[-1]


def recorded_logits(world, config):
    """(logits, whether each sum was exact) of a rank's shard, whose sums are checked."""
    net = shard(config, world)
    net.comm = Recorder(config, world.shares, world.group)
    logits = last_logits(net, *unequal_rows(config))
    exact = []
    for partial, total in zip(net.comm.partials, net.comm.sums, strict=True):
        partials = [torch.empty_like(partial) for _ in range(world.tp_size)]
        dist.all_gather(partials, partial, world.dist_group)
        partials = torch.stack([each.flatten() for each in partials])
        exact.append(torch.allclose(partials.double().sum(0), total.flatten().double(), rtol=1e-6, atol=1e-7))
        if total.dtype != torch.float64:
            check_sum(total.flatten(), partials)
    return logits, exact


@pytest.mark.parametrize("wiring", ["standard", "ladder"])
@pytest.mark.parametrize("shares", UNEQUAL_SHARES, ids=str)
def test_each_sum_of_a_run_is_within_the_bound(shares, wiring):
    """Of unequal shares and unequal rows. The logits stay near those of exact sums."""
    config = change(BASE, **MANY, wiring=wiring)
    (logits, exact), *others = run_over_gloo(shares, recorded_logits, config)
    assert all(torch.equal(logits, other) for other, _ in others)
    assert not any(exact)
    [plain, *_] = run_ranks(shares, rank_logits, config)
    assert 0 < (logits - plain).abs().max() < 0.1 * plain.abs().max()


def test_the_sums_of_a_norm_over_all_heads_are_exact():
    """With whole_qk_norm each attention sums squares, of whose rounding a small norm would be ruined."""
    config = change(BASE, **OLMO)
    for _, exact in run_over_gloo(2, recorded_logits, config):
        assert exact[::3] == [True] * (len(exact) // 3) and sum(exact) == len(exact) // 3


def compiled_logits(world, config):
    return [rank_logits(world, config, compile=compile) for compile in (False, True)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_compiled_ranks_sum_alike(ranks):
    results = run_over_gloo(ranks, compiled_logits, change(BASE, wiring="ladder", n_layers=2))
    (eager, compiled), *others = results
    assert all(torch.equal(compiled, other) for _, other in others)
    assert (compiled - eager).abs().max() < 0.02 * eager.abs().max()


# ---- What measures knows of it ---------------------------------------------------------------------------------------


def seconds_of_a_sum(world):
    slow = link.Link("x", 0.0, 8e-3)  # a byte in a microsecond
    group = link.LinkedGroup(world.group, slow, world.rank, 2, world.device)
    sent = []
    group._send = lambda n_bytes, passes=2: sent.append(n_bytes) or (lambda: None)
    for dtype in torch.bfloat16, torch.float32, torch.int32:
        OPS.wait_tensor(OPS.all_reduce(torch.ones(64, dtype=dtype), "sum", group.group_name))
    return sent


def test_an_emulated_link_carries_the_bytes_that_travel():
    assert run_over_gloo(2, seconds_of_a_sum) == [[68, 68, 256]] * 2
