"""CUDA graphs: a GPU repeats the kernels of a function, and the host gives it only the inputs.

torch.compile has graphs of its own ("reduce-overhead"), but calls Python in front of each: for the 8b 0.3 ms a step.
"""

import torch


def captured(step):
    """Return (a function that repeats step() on the device, what it writes its result to), after one call of it."""
    step()  # compiles and loads all that it needs: a capture must not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's own thread may look after its work
        result = step()
    return graph.replay, result


class Graphs:
    """A decode step (tokens (B, S), positions (B, S), cache, cache_length) -> logits, captured for each S and length.

    A call writes its logits where the one before of the same S and length did. The cache is always the same.
    """

    def __init__(self, step):
        self.step, self.graphs = step, {}

    def __call__(self, tokens, positions, cache, cache_length):
        key = tokens.shape, cache_length
        if key not in self.graphs:
            own = tokens.clone(), positions.clone()
            self.graphs[key] = own, *captured(lambda: self.step(*own, cache, cache_length))
        own, replay, logits = self.graphs[key]
        torch._foreach_copy_(own, (tokens, positions))
        replay()
        return logits
