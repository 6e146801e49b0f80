"""Runs a model's layers from recorded partials: what lies below the first rewired layer is the original's."""

from model import list_sublayers


def first_rewired(original, config):
    """Return the index of the first layer whose wiring differs between two Configs; n_layers if none does."""
    pairs = zip(original.layer_wirings, config.layer_wirings, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), config.n_layers)


def sublayers_below(config, layer):
    """Return how many sublayers the layers before `layer` have in a wiring that reads each layer alone."""
    return sum(len(wiring.block_sublayers) for wiring in config.layer_wirings[:layer])


def loop(model, config, x, metadata, known=(), recorded=None, around=None):
    """Return the loop of model.Transformer.loop in the wiring of a Config, of whose layers these are the weights.

    known: the partials (B, S, D) of the first sublayers, which are then not computed. recorded: a list to which the
    partials of all sublayers are added. around(i, h): what to compute in place of sublayer i, h; None: h itself.
    """

    def sublayer(i, h):
        def compute(x):
            partial = known[i] if i < len(known) else h(x) if around is None else around(i, h)(x)
            if recorded is not None:
                recorded.append(partial)
            return partial

        return compute

    sublayers = enumerate(list_sublayers(config, model.layers, metadata))
    wrapped = [(sublayer(i, h), stale) for i, (h, stale) in sublayers]
    return config.named_wiring.run(x, wrapped, model.loop_comm(), config)
