"""FarSkip (arXiv 2511.11505): a ladder between mixtures of experts that misses no shared expert and no dense layer.

Each rank computes all of a shared expert, so that its output is there at once, without an all-reduce. In the equations,
x is the stream, y is the stream without the routed experts of the layer before, R are the routed experts of a mixture,
S is its shared expert, and M is a dense MLP:

    a = attention(y)
    mixture:  y' = x + a + S(x),  x' = y' + R(x)
    dense:    y' = x' = x + a + M(x)

In layers that farskip:N and its like leave out, the attention reads x and the MLP x + a, as in standard. But the y that
such a layer passes on is the one above.
"""

import dataclasses
import functools
import math

import model
from ladder.architectures.mixture import Mixture, experts_apart
from ladder.errors import InputError
from ladder.wiring_text import wiring_name
from model import Wiring


def attention_apart(x, block, metadata, cache):
    """Return (the partial, None), since an attention has no shared expert."""
    return model.attention_sublayer(x, block, metadata, cache), None


APART = attention_apart, experts_apart


def farskip_loop(x, sublayers, comm, config, early=APART):
    """Run a ladder whose sublayers also read the shared experts' outputs that belong to all-reduces in flight.

    sublayers: those of APART, two for each layer, of which those that are not `early` wait for all sums, and so does
    the attention after a dense layer.
    """
    outputs = []  # of shared experts or None, one for each all-reduce in flight
    after_dense = [2 * layer + 2 for layer in config.find(Mixture).dense_layers]

    def with_outputs(h, stale, x):
        del outputs[: max(0, len(outputs) - stale)]
        partial, shared = h(sum((output for output in outputs if output is not None), start=x))
        outputs.append(shared)
        return partial if shared is None else partial + shared / comm.lanes  # the all-reduce adds it up `lanes` times

    waits = [i in after_dense or APART[i % 2] not in early for i in range(len(sublayers))]
    stales = [0 if waits[i] else stale for i, (_, stale) in enumerate(sublayers)]
    ladder = [(functools.partial(with_outputs, h, n), n) for (h, _), n in zip(sublayers, stales, strict=True)]
    return model.residual_loop(x, ladder, comm, config)


class FarSkip(Wiring):
    """A Wiring of mixtures, whose layers that :n leaves out have the same sublayers, not stale."""

    takes_layers = True

    def left_out(self):
        return dataclasses.replace(self, stale=0)

    def check(self, config):
        if not config.find(Mixture):
            raise InputError(f"wiring {config.wiring} is for a mixture of experts")


FARSKIP = FarSkip("a ladder that misses no shared expert (of a mixture)", APART, stale=1, loop=farskip_loop)


def only_early(sublayer, name):
    """Return FARSKIP where only one of the two sublayers of APART does not wait."""
    loop = functools.partial(farskip_loop, early=(sublayer,))
    return dataclasses.replace(FARSKIP, about=f"farskip, where only each {name} is early", loop=loop)


FARSKIPS = {
    "farskip": FARSKIP,
    "farskip-attention": only_early(attention_apart, "attention"),
    "farskip-mlp": only_early(experts_apart, "mlp"),
}


def wiring_from_hf(hf):
    """Return the text of the wiring that farskip, its range of layers and its two restrictions make; None without it.

    hf: as ladder.sources.huggingface.read_hf returns it. Raises InputError.
    """
    if not hf.get("farskip"):
        return None
    if hf["ladder_layers"]:
        raise InputError("config.json has both farskip and ladder_layers, which are two wirings: drop one")
    n_layers = hf["num_hidden_layers"]
    only = (hf["attn_only_farskip"], hf["mlp_only_farskip"])
    layers = range(math.ceil(hf["farskip_start_idx"]), min(math.floor(hf["farskip_end_idx"]), n_layers - 1) + 1)
    if all(only) or not layers:  # AMD's code takes both together for neither sublayer being early
        return "standard"
    name = "farskip-attention" if only[0] else "farskip-mlp" if only[1] else "farskip"
    return name if len(layers) == n_layers else wiring_name(name, layers)
