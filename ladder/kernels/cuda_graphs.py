"""CUDA graphs of a compiled decode step: a replay runs no Python but the copy of its inputs.

torch.compile's own graphs ("reduce-overhead") run Python before each replay: 0.3 ms a step for the 8b.
"""

import functools

import torch


def captured(step, pool=None, generator=None):
    """Return (a function that replays step() on the device, what step() returned, whose tensors it writes again).

    pool: memory shared with other steps, which must not run at the same time. generator: what step() draws from.
    """
    graph, state = torch.cuda.CUDAGraph(), generator and generator.get_state()
    step()  # compiles and loads what it needs, which a capture must not do
    if generator:
        generator.set_state(state)  # that one does not count
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):  # NCCL's thread may query its events
        result = step()
    return graph.replay, result


class Graphs:
    """A model's compiled decode step, captured for each shape of tokens and each cache_length when it first comes.

    All calls must pass the same cache. untimed: a function that returns a context for captures. n_bytes: what each
    capture took of the device's memory.
    """

    def __init__(self, model, untimed):
        settings = {"fullgraph": True, "dynamic": False}
        self.more_rows = torch.compile(model, options={"combo_kernels": True}, **settings)
        tuned = {"combo_kernels": True, "coordinate_descent_tuning": True}  # tuning may change the last bits of results
        self.one_row = torch.compile(model, options=tuned, **settings)
        self.untimed, self.pool = untimed, torch.cuda.graph_pool_handle()
        self.graphs, self.inputs, self.n_bytes = {}, {}, []

    def step(self, tokens, *args, **kwargs):
        """Run the compiled step, not captured.

        Only a step of one token is tuned: there the compiler multiplies by kernels of its own. For more it calls
        cuBLAS, and tuning the rest would only take time.
        """
        return (self.one_row if tokens.numel() == 1 else self.more_rows)(tokens, *args, **kwargs)

    def __call__(self, tokens, positions, cache, cache_length):
        """Return logits (B, S, v) for tokens (B, S), positions (B, S); the next such call overwrites them."""
        step = functools.partial(self.step, cache=cache, cache_length=cache_length)
        return self.replay((tokens, positions), (cache_length,), step, cache)

    def replay(self, inputs, key, function, cache, generator=None):
        """Return function(*inputs), by the graph of these shapes and this key. cache: what the function writes to.

        Graphs of the same shapes have the same inputs of their own, which need no copy if they are passed.
        """
        shapes = tuple(x.shape for x in inputs)
        own = self.inputs.get(shapes)
        if own is None:
            own = self.inputs[shapes] = tuple(x.clone() for x in inputs)
        if (shapes, key) not in self.graphs:
            with self.untimed():
                values, free = [x.clone() for x in inputs], torch.cuda.mem_get_info()[0]
                states = [tensor for layer in cache for tensor in layer if tensor.dim() != 4]  # of linear attention
                before = [tensor.clone() for tensor in states]  # a step would change them twice, unlike keys and values
                self.graphs[shapes, key] = captured(lambda: function(*own), self.pool, generator)
                self.n_bytes.append(free - torch.cuda.mem_get_info()[0])
                for tensor, old in zip(states, before, strict=True):
                    tensor.copy_(old)
            inputs = values  # function may have written to its own
        replay, result = self.graphs[shapes, key]
        if inputs[0] is not own[0]:
            torch._foreach_copy_(own, inputs)
        replay()
        return result
