"""The order in which a model computes, starts and waits: of the plain loop, and in compiled code."""

import re
from unittest import mock

from configs import staleness
from helpers import shard

import model
from generate import Runner
from ladder.kernels import compiling


class Recorder(model.SingleDevice):
    """Writes down what the wiring asks of the collectives; a pending all-reduce is its number."""

    def __init__(self):
        self.events = []
        self.started = 0

    def start(self, partial):
        self.started += 1
        self.events.append(f"start{self.started}")
        return self.started

    def wait(self, pending):
        self.events.append(f"wait{pending}")
        return 0.0

    def settle(self, x, pending, newer=()):
        return self.wait(pending)


def eager_order(config, splits=1, output=0.0):
    """The order in which the wiring computes (c), starts and waits, in words; the splits' all-reduces count on.

    output: of each sublayer, as the wiring's loop takes it.
    """
    comm = Recorder()

    def h(x):
        comm.events.append("c")
        return output

    sublayers = [(h, stale) for stale in staleness(config)]
    model.interleave([config.named_wiring.loop(0.0, sublayers, comm, config) for _ in range(splits)])
    return " ".join(comm.events)


def generated_code(config, world, batch, length, dtype):
    """Inductor's code for decode or prefill, with a wrapper in Python, which is neither compiled nor run."""
    import torch._inductor.config
    from torch._inductor.utils import get_code

    torch._dynamo.reset()
    net = shard(config, world, dtype)
    with mock.patch.dict(compiling.CPU_OPTIONS, cpp_wrapper=False):
        runner = Runner(net, None, compile=True, compile_prefill=True)
    step = runner.passes.prefill
    kwargs = {"cache": net.new_cache(batch, 16)}
    if length == 1:
        kwargs.update(positions=torch.zeros(batch, 1, dtype=torch.long), cache_length=16)
        step = runner.passes.decode
    uncached = torch._inductor.config.patch(force_disable_caches=True)  # what is cached is not generated
    with torch.no_grad(), uncached:
        return "\n".join(get_code(step, torch.randint(config.vocab_size, (batch, length)), **kwargs))


MATMUL = r"extern_kernels\.(mm|addmm)\(|_linear_pointwise|mkl_linear|ladder\.(skinny_gemm|feed_forward)\.default\("


def order_in_code(source):
    """Matmuls (c), starts and waits in a generated wrapper, in order; a wait bears the number of its start."""
    source = re.sub(r"reinterpret_tensor\((\w+), \([^()]*\), \([^()]*\), \d+\)", r"\1", source)
    events = []
    started = []
    for line in (line.split("#")[0] for line in source.splitlines()):
        waited = re.search(r"(?:ladder\.settle\w*\.default\(\w+, |wait_tensor\.default\()(\w+)", line)
        if start := re.search(r"all_reduce_\.default\((\w+),", line):
            started.append(start[1])
            events.append(f"start{len(started)}")
        elif re.search(MATMUL, line):
            events.append("c")
        elif waited and waited[1] in started:  # it is not the gathered logits
            latest = max(i for i, buffer in enumerate(started, start=1) if buffer == waited[1])
            events.append(f"wait{latest}")
    return events


def squeeze(events):
    """Runs of matmuls as one c."""
    return re.sub(r"\bc( c)+\b", "c", " ".join(events))
