"""CUDA graphs of a compiled decode step. To replay one, Python only copies its inputs.

torch.compile's own graphs ("reduce-overhead") run more Python before each replay, 0.3 ms a step for the 8b.
"""

import functools

import torch


def captured(step, pool=None, generator=None):
    """Return (a function that replays step() on the device, the result of step(), which each replay overwrites).

    pool: memory shared with other steps, which must not run at the same time. generator: what step() draws from.
    """
    graph, state = torch.cuda.CUDAGraph(), generator and generator.get_state()
    step()  # it compiles and loads what it needs, which is not possible in a capture
    if generator:
        generator.set_state(state)  # so that this run draws nothing
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):  # so that NCCL's thread may query its events
        result = step()
    return graph.replay, result


class Graphs:
    """A model's compiled decode step, which is captured at its first call with a shape of tokens and a cache_length.

    All calls must pass the same cache. untimed: a function that returns the context in which captures run. n_bytes: how
    much of the device's memory each capture took.
    """

    def __init__(self, model, untimed):
        settings = {"fullgraph": True, "dynamic": False}
        self.more_rows = torch.compile(model, options={"combo_kernels": True}, **settings)
        tuned = {"combo_kernels": True, "coordinate_descent_tuning": True}  # tuning may change the last bits of results
        self.one_row = torch.compile(model, options=tuned, **settings)
        self.untimed, self.pool = untimed, torch.cuda.graph_pool_handle()
        self.graphs, self.inputs, self.n_bytes = {}, {}, []

    def step(self, tokens, *args, **kwargs):
        """Run the compiled step without a graph.

        Only a step of one token is tuned: there the compiler multiplies by kernels of its own. For more it calls
        cuBLAS, and tuning the rest would only take time.
        """
        return (self.one_row if tokens.numel() == 1 else self.more_rows)(tokens, *args, **kwargs)

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
        if (shapes, key) not in self.graphs:
            with self.untimed():
                values, free = [x.clone() for x in inputs], torch.cuda.mem_get_info()[0]
                states = [tensor for layer in cache for tensor in layer if tensor.dim() != 4]  # linear attention's
                before = [tensor.clone() for tensor in states]  # unlike keys and values, they change with each run
                self.graphs[shapes, key] = captured(lambda: function(*own), self.pool, generator)
                self.n_bytes.append(free - torch.cuda.mem_get_info()[0])
                for tensor, old in zip(states, before, strict=True):
                    tensor.copy_(old)
            inputs = values  # the function may have overwritten its input tensors
        replay, result = self.graphs[shapes, key]
        if inputs[0] is not own[0]:
            torch._foreach_copy_(own, inputs)
        replay()
        return result
