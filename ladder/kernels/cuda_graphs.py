"""CUDA graphs of a decode step, compiled or not. To replay one, Python only copies its inputs.

torch.compile's own graphs ("reduce-overhead") run more Python before each replay, 0.3 ms a step for the 8b.
"""

import functools

import torch

from ladder.errors import first_line
from ladder.progress import progress
from ladder.ranks.world import say


def captured(step, pool=None, generator=None):
    """Return (a function that replays step() on the device, the result of step(), which each replay overwrites).

    pool: memory shared with other steps, which must not run at the same time. generator: what step() draws from.
    """
    graph = torch.cuda.CUDAGraph()
    state = generator and generator.get_state()
    step()  # it compiles and loads what it needs, which is not possible in a capture
    if generator:
        generator.set_state(state)  # so that this run draws nothing
        graph.register_generator_state(generator)
    # thread_local, so that NCCL's thread may query its events; a capture that fails leaves its stream the current one
    own = torch.cuda.stream(torch.cuda.current_stream())
    with own, torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
        result = step()
    return graph.replay, result


class Graphs:
    """A model's decode step, which is captured at its first call with a shape of tokens and a cache_length.

    All calls must pass the same cache. step: the model, or what calls its compiled forms. untimed: a function that
    returns the context in which captures of a compiled step run; without it, the step is an eager one, and runs without
    graphs once it cannot be captured. n_bytes: how much of the device's memory each capture took.
    """

    def __init__(self, step, untimed=None):
        self.step = step
        self.is_eager = untimed is None
        self.failed = False
        self.untimed = untimed or functools.partial(progress.during, "capture")
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs = {}
        self.inputs = {}
        self.n_bytes = []

    def __call__(self, tokens, positions, cache, cache_length):
        """Return logits (B, S, v) for tokens (B, S), positions (B, S); the next such call overwrites them."""
        step = functools.partial(self.step, cache=cache, cache_length=cache_length)
        return self.replay((tokens, positions), (cache_length,), step, cache)

    def replay(self, inputs, key, function, cache, generator=None):
        """Return function(*inputs), by the graph for these shapes and this key. cache: what the function writes to.

        All graphs of the same shapes read the same input tensors. If these are passed as inputs, nothing is copied.
        """
        shapes = tuple(x.shape for x in inputs)
        own = self.inputs.get(shapes)
        if own is None:
            own = self.inputs[shapes] = tuple(x.clone() for x in inputs)
        if (shapes, key) not in self.graphs and not self.failed:
            with self.untimed():
                values = [x.clone() for x in inputs]
                free = torch.cuda.mem_get_info()[0]
                states = [tensor for layer in cache for tensor in layer if tensor.dim() != 4]  # linear attention's
                before = [tensor.clone() for tensor in states]  # unlike keys and values, they change with each run
                self.capture((shapes, key), lambda: function(*own), generator)
                self.n_bytes.append(free - torch.cuda.mem_get_info()[0])
                for tensor, old in zip(states, before, strict=True):
                    tensor.copy_(old)
            inputs = values  # the function may have overwritten its input tensors
        if self.failed:
            return function(*inputs)
        replay, result = self.graphs[shapes, key]
        if inputs[0] is not own[0]:
            torch._foreach_copy_(own, inputs)
        replay()
        return result

    def capture(self, key, function, generator):
        """Capture a function under a key. Raises RuntimeError for a compiled step that cannot be captured."""
        try:
            self.graphs[key] = captured(function, self.pool, generator)
        except RuntimeError as e:  # above all something that makes the host wait for the device
            if not self.is_eager:
                raise
            self.failed = True
            say(f"decode steps run without CUDA graphs, thus slower: {first_line(e)}")
