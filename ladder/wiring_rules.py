"""What the rest of the project asks a Wiring (model.py), and the answers of those that run on any number of ranks."""

import dataclasses


class WiringRules:
    """The base of Wiring. A subclass of that, such as those in ladder/lanes/, gives other answers."""

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
        return same_loop and other.blocks == 1 and other.reads_partials <= self.reads_partials

    def check(self, config):
        """Raise InputError for a Config that this wiring is not for."""

    def shards(self, shares=(1,)):
        """Return the shares in which the weights are cut: those of the ranks."""
        return shares

    def loader(self, shares):
        """Return the function that loads a rank's weights, with the arguments of tp.load_shard; None: that one."""
