"""FarSkip (arXiv 2511.11505): a ladder whose sublayers miss no shared expert, since each rank computes all of it."""

import functools

from model import attention, mlp, residual_loop


def attention_apart(x, block, metadata, cache):
    """Return (partial, None): an attention has no shared expert."""
    return attention(x, block, metadata, cache), None


def experts(x, block, metadata, cache):
    """Return (partial, the shared expert's output, or None where there is no shared expert)."""
    if hasattr(block.feed_forward, "experts"):
        return block.feed_forward(block.ffn_norm(x), apart=True)
    return mlp(x, block, metadata, cache), None


APART = attention_apart, experts


def farskip_loop(x, sublayers, comm, config):
    """Run a ladder whose sublayers also read the shared experts' outputs of the sums that are in flight.

    sublayers: those of APART.
    """
    outputs = []  # one for each of these sums

    def with_outputs(h, stale, x):
        del outputs[: max(0, len(outputs) - stale)]
        partial, shared = h(sum((output for output in outputs if output is not None), start=x))
        outputs.append(shared)
        return partial if shared is None else partial + shared / comm.lanes  # the all-reduce adds up `lanes` of them

    ladder = [(functools.partial(with_outputs, h, stale), stale) for h, stale in sublayers]
    return residual_loop(x, ladder, comm, config)
