"""CUDA graphs: a GPU repeats the kernels of a function, and the host gives it only the inputs.

torch.compile has graphs of its own ("reduce-overhead"), but calls Python in front of each: for the 8b 0.3 ms a step.
"""

import torch


def captured(step, pool=None):
    """Return (a function that repeats step() on the device, what it writes its result to), after one call of it.

    pool: of memory that it shares with other steps, which never run at the same time.
    """
    step()  # compiles and loads all that it needs: a capture must not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):  # NCCL's own thread may look after its work
        result = step()
    return graph.replay, result


class Graphs:
    """A model's decode step (tokens (B, S), positions (B, S), cache, cache_length) -> logits, compiled to few kernels,
    each of the best shape, and captured for each S and length.

    A call writes its logits where the one before of the same S and length did. The cache is always the same.
    """

    def __init__(self, model):
        # what is tuned differs in its last bits, but each of several ranks is to run a draft alike
        alike = model.comm.tp_size == 1 and torch.distributed.is_initialized()
        options = {"combo_kernels": True, "coordinate_descent_tuning": True, "deterministic": alike}
        self.step = torch.compile(model, fullgraph=True, dynamic=False, options=options)
        self.graphs, self.pool = {}, torch.cuda.graph_pool_handle()

    def __call__(self, tokens, positions, cache, cache_length):
        key = tokens.shape, cache_length
        if key not in self.graphs:
            own = tokens.clone(), positions.clone()
            self.graphs[key] = own, *captured(lambda: self.step(*own, cache, cache_length), self.pool)
        own, replay, logits = self.graphs[key]
        torch._foreach_copy_(own, (tokens, positions))
        replay()
        return logits
