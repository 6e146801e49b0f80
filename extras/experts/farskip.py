"""FarSkip (arXiv 2511.11505): a ladder whose sublayers miss no shared expert, since each rank computes all of it."""

import functools

from model import attention_then_mlp, residual_stream


def attention_then_experts(block, metadata, cache):
    """Sublayers that return (partial, the shared expert's output, or None where there is no shared expert)."""
    attention, mlp = attention_then_mlp(block, metadata, cache)
    has_experts = hasattr(block.feed_forward, "experts")

    def experts(x):
        return block.feed_forward(block.ffn_norm(x), apart=True) if has_experts else (mlp(x), None)

    return [lambda x: (attention(x), None), experts]


def farskip_stream(x, sublayers, comm, config):
    """Run a ladder whose sublayers also read the shared experts' outputs of the sums that are in flight.

    sublayers: as attention_then_experts makes them.
    """
    outputs = []  # one for each of these sums

    def with_outputs(h, stale, x):
        del outputs[: max(0, len(outputs) - stale)]
        partial, shared = h(sum((output for output in outputs if output is not None), start=x))
        outputs.append(shared)
        return partial if shared is None else partial + shared / comm.lanes  # the all-reduce adds up `lanes` of them

    ladder = [(functools.partial(with_outputs, h, stale), stale) for h, stale in sublayers]
    return residual_stream(x, ladder, comm, config)
