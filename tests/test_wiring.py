"""Every wiring against an independent float64 reference, and the order of collectives in compiled code."""

import dataclasses
import re

import pytest
import torch
import torch.distributed as dist
from helpers import BASE, WIRED, StateWeights, random_model, unequal_rows, wired_id
from reference import Reference

import model
import tp


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

    def settle(self, x, pending, after=None):
        if pending is not None:
            self.events.append(f"wait{pending}")
        return x


def eager_order(config):
    """The order in which the wiring computes (c), starts and waits."""
    comm = Recorder()
    _, stream = model.WIRINGS[config.wiring]
    sublayers = [(lambda x: comm.events.append("c"), i // 2 in config.stale_layers) for i in range(2 * config.n_layers)]
    stream(None, sublayers, comm, config)
    return " ".join(comm.events)


def test_order_of_the_plain_loop():
    two = dataclasses.replace(BASE, n_layers=2)
    assert eager_order(two) == "c start1 wait1 c start2 wait2 c start3 wait3 c start4 wait4"
    ladder = dataclasses.replace(two, wiring="ladder")
    assert eager_order(ladder) == "c start1 c start2 wait1 c start3 wait2 c start4 wait3 wait4"
    hybrid = dataclasses.replace(two, wiring="hybrid", ladder_layers=1)
    assert eager_order(hybrid) == "c start1 wait1 c start2 c start3 wait2 c start4 wait3 wait4"


def compiled_order(config, batch, length, rank=0, tp_size=2):
    """The order of matmuls, starts and waits in the code that Inductor generates for decode or prefill."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    net = tp.load_shard(config, StateWeights(random_model(config).state_dict()), torch.float32, "cpu", rank, tp_size)
    net.comm = tp.TensorParallel(config, tp_size, dist.group.WORLD)
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
        r"|(?P<c>extern_kernels\.(?:mm|addmm)\(|_linear_pointwise|mkl_linear))",
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


@pytest.mark.parametrize("length", [1, 5], ids=["decode", "prefill"])
@pytest.mark.parametrize("changes", WIRED[:3], ids=wired_id)
def test_compiled_code_waits_only_after_the_next_sublayers_matmuls(changes, length, fake_group):
    config = dataclasses.replace(BASE, **changes)
    expected = eager_order(config).split() + ["c"]  # and the output head
    assert squeeze(compiled_order(config, 2, length)) == " ".join(expected)
