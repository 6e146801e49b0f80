"""What the rest of the project asks a Wiring (model.py), and the answers of those that run on any number of ranks."""

import dataclasses
import sys

from ladder.errors import InputError


def own_name(function):
    """Return the name by which a function of model.py or ladder/ is looked up in its file.

    "" for a lambda, a closure, a decorated one, and for those of your own: a sweep may define several of one name.
    """
    name = getattr(function, "__qualname__", "<partial>")
    file = getattr(function, "__module__", None) or ""
    is_ours = file == "model" or file.startswith("ladder.")
    return name if is_ours and "<" not in name and not hasattr(function, "__wrapped__") else ""


def as_defined_now(function, name):
    """Return what its file has by the function's own name now.

    So `model.mlp_sublayer = mine`, from Python, also reaches the Wirings that were made with the former one.
    """
    return getattr(sys.modules.get(function.__module__), name, function) if name else function


class WiringRules:
    """The base of Wiring. A subclass of that, such as those in ladder/lanes/, gives other answers."""

    def __post_init__(self):
        # kept, since the compiler cannot trace own_name
        object.__setattr__(self, "own_names", [own_name(h) for h in self.block_sublayers])
        object.__setattr__(self, "own_name_of_loop", own_name(self.loop))

    def run(self, x, sublayers, comm, config):
        """Return the generator that the loop makes."""
        return as_defined_now(self.loop, self.own_name_of_loop)(x, sublayers, comm, config)

    def sublayers_as_defined_now(self):
        """Return block_sublayers, or what somebody has put into their places since."""
        return [as_defined_now(h, name) for h, name in zip(self.block_sublayers, self.own_names, strict=True)]

    @property
    def usual_loop(self):
        """The loop of the wirings that name none: model.residual_loop."""
        return type(self).__dataclass_fields__["loop"].default

    # Whether sublayers read this rank's own partials before they are summed, so that the ranks' streams differ.
    reads_partials = False
    # Whether the weights were made for a number of shards, so that it matters where they are cut.
    fixed_shards = False

    @property
    def varies_with_ranks(self):
        """Whether it is another function on another number of ranks."""
        return self.reads_partials and not self.fixed_shards

    @property
    def takes_layers(self):
        """Whether NAME:n may wire only some layers.

        A loop of your own that obeys each sublayer's `stale` says so: class Mine(Wiring): takes_layers = True.
        """
        return self.loop is self.usual_loop and self != self.left_out()

    @property
    def forms(self):
        """What may follow its name in Config.wiring."""
        layers = (":N", ":I,J,...", ":I-J") if self.takes_layers else ()
        return (*layers, "-K") if self.stale else layers

    def configured(self, parsed):
        """Return this Wiring with what the text says of it, a wiring_text.Parsed."""
        return dataclasses.replace(self, stale=parsed.stale or self.stale)

    def can_run(self, other):
        """Return whether this wiring's loop runs single layers of the other one as their own would."""
        same_loop = other.loop in (self.loop, self.usual_loop)
        return same_loop and other.layers_per_input == 1 and other.reads_partials <= self.reads_partials

    def check(self, config):
        """Raise InputError for a Config that this wiring is not for."""

    def shards(self, shares=(1,)):
        """Return the shares in which the weights are cut: those of the ranks."""
        return shares

    def loader(self, shares):
        """Return the function that loads a rank's weights, with the arguments of tp.load_shard; None: that one."""


def wirings_of_layers(config, n_layers):
    """Return the Wiring of each layer of a model.

    Layers may be deleted, as by `del model.layers[3]`, or added, where all are wired alike, one by one, and run by
    residual_loop. Raises InputError for other wirings, which go by the numbers of layers.
    """
    if n_layers == config.n_layers:
        return config.layer_wirings
    wiring = config.named_wiring
    is_usual = wiring.loop is wiring.usual_loop and wiring.layers_per_input == 1
    if not is_usual or {*config.layer_wirings} != {wiring}:
        what = f"the model has {n_layers} layers, and its config says n_layers {config.n_layers}"
        how = f"model.config = dataclasses.replace(model.config, n_layers={n_layers})"
        raise InputError(f"{what}: {how}, since wiring {config.wiring} goes by the numbers of layers")
    return (wiring,) * n_layers
