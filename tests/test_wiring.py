"""Every wiring against an independent float64 reference, and the order of collectives in compiled code."""

import dataclasses
import re

import pytest
import torch
from helpers import BASE, WIRED, random_model, shard, unequal_rows, wired_id
from reference import Reference

import cpu
import model


@pytest.mark.parametrize("changes", WIRED, ids=wired_id)
@pytest.mark.parametrize(
    "shape", [{}, {"qkv_bias": True, "tie_embeddings": True}, {"qk_norm": True, "n_kv_heads": 6}], ids=str
)
def test_matches_the_naive_float64_reference(changes, shape):
    config = dataclasses.replace(BASE, **changes, **shape)
    net = random_model(config)
    tokens, lengths = unequal_rows(config)
    with torch.no_grad():
        logits = net(tokens)
    reference = Reference(config, net.state_dict())
    for row, length in enumerate(lengths):
        expected = torch.from_numpy(reference.logits(tokens[row, :length]))
        assert (logits[row, :length] - expected).abs().max() < 1e-4


def test_the_wirings_are_different_functions():
    """So that none of the comparisons can pass by accident (on one device desync and upper-bound are standard)."""
    tokens, _ = unequal_rows(BASE)
    seen = {}
    for changes in WIRED:
        if changes["wiring"] not in ("desync", "upper-bound"):
            config = dataclasses.replace(BASE, **changes)
            net = random_model(config)
            if config.wiring == "parallel":  # the same weights but for the missing norm
                net.load_state_dict(random_model(BASE).state_dict(), strict=False)
            with torch.no_grad():
                seen[wired_id(changes)] = net(tokens)
    names = list(seen)
    for i, a in enumerate(names):
        for b in names[:i]:
            assert (seen[a] - seen[b]).abs().max() > 0.1, (a, b)


def test_hybrid_with_all_layers_is_ladder_and_desync_with_period_1_is_standard():
    tokens, _ = unequal_rows(BASE)

    def logits(**changes):
        with torch.no_grad():
            return random_model(dataclasses.replace(BASE, **changes))(tokens)

    assert torch.equal(logits(wiring="ladder"), logits(wiring="hybrid", ladder_layers=3))
    assert torch.equal(logits(wiring="ladder"), logits(wiring="hybrid", ladder_layers=(0, 1, 2)))
    assert torch.equal(logits(), logits(wiring="desync", desync_period=1))


class Recorder(model.SingleDevice):
    """Writes down what the wiring asks of the collectives; a pending all-reduce is its number."""

    def __init__(self):
        self.events, self.started = [], 0

    def start(self, partial):
        self.started += 1
        self.events.append(f"start{self.started}")
        return self.started

    def wait(self, pending):
        self.events.append(f"wait{pending}")
        return 0.0

    def settle(self, x, pending, after=None):
        return x if pending is None else self.wait(pending)


def eager_order(config):
    """The order in which the wiring computes (c), starts and waits, as a list."""
    comm = Recorder()

    def h(x):
        comm.events.append("c")
        return 0.0

    split, stream = model.WIRINGS[config.wiring]
    sublayers = [(h, i in config.stale_layers) for i in range(config.n_layers) for _ in split(None, None, None)]
    stream(0.0, sublayers, comm, config)
    return comm.events


@pytest.mark.parametrize(
    "changes, order",
    [
        ({"wiring": "standard"}, "c start1 wait1 c start2 wait2 c start3 wait3 c start4 wait4"),
        ({"wiring": "ladder"}, "c start1 c start2 wait1 c start3 wait2 c start4 wait3 wait4"),
        ({"wiring": "hybrid", "ladder_layers": 1}, "c start1 wait1 c start2 c start3 wait2 c start4 wait3 wait4"),
        ({"wiring": "parallel"}, "c start1 wait1 c start2 wait2"),
        ({"wiring": "desync", "desync_period": 2}, "c c start1 wait1 c c start2 wait2"),
        ({"wiring": "desync", "desync_period": 3}, "c c c start1 wait1 c start2 wait2"),
        ({"wiring": "upper-bound"}, "c c c c"),
    ],
    ids=str,
)
def test_order_of_the_plain_loop(changes, order):
    assert eager_order(dataclasses.replace(BASE, n_layers=2, **changes)) == order.split()


def compiled_order(config, batch, length, dtype, rank=0, tp_size=2):
    """The order of matmuls, starts and waits in the code that Inductor generates for decode or prefill."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    net = shard(dataclasses.replace(config, head_dim=64), rank, tp_size, dtype)
    cpu.use_few_rows(net)
    cache = net.new_cache(batch, 16)
    tokens = torch.randint(config.vocab_size, (batch, length))
    kwargs = {"cache": cache}
    if length == 1:
        kwargs.update(positions=torch.zeros(batch, 1, dtype=torch.long), cache_length=16)
    with torch.no_grad():
        _, sources = run_and_get_code(torch.compile(net, fullgraph=True), tokens, **kwargs)
    return calls("\n".join(sources))


def calls(source):
    """Matmuls (c), starts and waits in a generated wrapper, in order; a wait bears the number of its start."""
    source = re.sub(r"reinterpret_tensor\((\w+), \([^()]*\), \([^()]*\), \d+\)", r"\1", source)
    pattern = re.compile(
        r"^ *[^#\n]*(?:all_reduce_\.default\((?P<start>\w+),"
        r"|(?:ladder\.settle\.default\(\w+, |wait_tensor\.default\()(?P<wait>\w+)"
        r"|(?P<c>extern_kernels\.(?:mm|addmm)\(|_linear_pointwise|mkl_linear|ladder\.few_rows\.default\())",
        re.MULTILINE,
    )
    events, started = [], []
    for match in pattern.finditer(source):
        if match["start"]:
            started.append(match["start"])
            events.append(f"start{len(started)}")
        elif match["c"]:
            events.append("c")
        elif match["wait"] != "None":
            if match["wait"] not in started:  # the gathered logits
                continue
            latest = max(i for i, buffer in enumerate(started, start=1) if buffer == match["wait"])
            events.append(f"wait{latest}")
    return events


def squeeze(events):
    """Runs of matmuls as one c."""
    return " ".join(e for e, before in zip(events, ["", *events], strict=False) if e != "c" or before != "c")


@pytest.mark.parametrize(
    "length, dtype",
    [(1, torch.float32), (5, torch.float32), (1, torch.bfloat16)],
    ids=["decode", "prefill", "decode with few_rows"],
)
@pytest.mark.parametrize("changes", WIRED, ids=wired_id)
def test_compiled_code_keeps_the_order_of_the_loop(changes, length, dtype, fake_group):
    """Each ladder sum is waited for behind the next sublayer's matmuls and the start of its all-reduce, not before."""
    config = dataclasses.replace(BASE, **changes)
    expected = [*eager_order(config), "c"]  # and the output head
    assert squeeze(compiled_order(config, 2, length, dtype)) == squeeze(expected)
