"""CUDA graphs of a compiled decode step: a replay runs no Python but the copy of its inputs.

torch.compile's own graphs ("reduce-overhead") run Python before each replay: 0.3 ms a step for the 8b.
"""

import torch


def captured(step, pool=None):
    """Return (a function that replays step() on the device, the tensor that it writes its result to).

    pool: memory shared with other steps, which must not run at the same time.
    """
    step()  # compiles and loads what it needs, which a capture must not do
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(
        graph, pool, capture_error_mode="thread_local"
    ):  # NCCL's watchdog thread may query its events
        result = step()
    return graph.replay, result


class Graphs:
    """A model's compiled decode step, captured once for each shape of tokens and each cache_length.

    Called with (tokens (B, S), positions (B, S), cache, cache_length), it returns logits (B, S, v). The next call with
    the same shapes overwrites them. All calls must pass the same cache.
    """

    def __init__(self, model):
        # autotuning may change the last bits, but all ranks must compute a whole draft model to the same bits
        alike = model.comm.tp_size == 1 and torch.distributed.is_initialized()
        options = {"combo_kernels": True, "coordinate_descent_tuning": True, "deterministic": alike}
        self.step = torch.compile(model, fullgraph=True, dynamic=False, options=options)
        self.graphs, self.pool = {}, torch.cuda.graph_pool_handle()

    def __call__(self, tokens, positions, cache, cache_length):
        key = tokens.shape, cache_length
        if key not in self.graphs:
            own = tokens.clone(), positions.clone()
            states = [tensor for layer in cache for tensor in layer if tensor.dim() != 4]  # of linear attention
            before = [tensor.clone() for tensor in states]  # a step would change them twice, unlike keys and values
            self.graphs[key] = own, *captured(lambda: self.step(*own, cache, cache_length), self.pool)
            for tensor, old in zip(states, before, strict=True):
                tensor.copy_(old)
        own, replay, logits = self.graphs[key]
        torch._foreach_copy_(own, (tokens, positions))
        replay()
        return logits
