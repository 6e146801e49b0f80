"""FarSkip (arXiv 2511.11505): a ladder between mixtures, whose sublayers miss no shared expert and no dense layer.

Each rank computes all of a shared expert, so its output is there at once. Those of a mixture with routed experts R and
a shared expert S, where x is the stream, y the stream without the routed experts of the layer before, and dense MLPs M:

    a = attention(y)
    mixture:  y' = x + a + S(x),  x' = y' + R(x)
    dense:    y' = x' = x + a + M(x)
"""

import functools

from model import Wiring, attention_sublayer, mlp_sublayer, residual_loop


def attention_apart(x, block, metadata, cache):
    """Return (partial, None): an attention has no shared expert."""
    return attention_sublayer(x, block, metadata, cache), None


def experts(x, block, metadata, cache):
    """Return (partial, the shared expert's output, or None where there is no shared expert)."""
    if hasattr(block.feed_forward, "experts"):
        return block.feed_forward(block.ffn_norm(x), apart=True)
    return mlp_sublayer(x, block, metadata, cache), None


APART = attention_apart, experts


def farskip_loop(x, sublayers, comm, config):
    """Run a ladder whose sublayers also read the shared experts' outputs of the sums that are in flight.

    sublayers: those of APART, two a layer. The attention after a dense layer waits for all sums.
    """
    outputs = []  # one for each of these sums
    after_dense = [2 * layer + 2 for layer in config.dense_layers]

    def with_outputs(h, stale, x):
        del outputs[: max(0, len(outputs) - stale)]
        partial, shared = h(sum((output for output in outputs if output is not None), start=x))
        outputs.append(shared)
        return partial if shared is None else partial + shared / comm.lanes  # the all-reduce adds up `lanes` of them

    stales = [0 if i in after_dense else stale for i, (_, stale) in enumerate(sublayers)]
    ladder = [(functools.partial(with_outputs, h, n), n) for (h, _), n in zip(sublayers, stales, strict=True)]
    return residual_loop(x, ladder, comm, config)


FARSKIP = Wiring(
    "a ladder that misses no shared expert (of a mixture)", APART, stale=1, loop=farskip_loop, n_means=None
)
