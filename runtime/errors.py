"""Errors that end a run, extras that may be missing, and `progress`: what this process is doing.

Messages say it, and extras/watch finds hanging ranks by it.
"""

import dataclasses
import importlib
import importlib.util


class InputError(ValueError):
    """Bad input: the message is one line that names it and says what would be right."""


class Verdict(Exception):
    """Why ranks that cannot go on are ended, in one line."""


class StoreLost(Verdict):
    """torchrun's store does not answer."""


def find_extra(name):
    """Return the package extras.NAME, whose import adds to the tables of the core, or None without that folder."""
    spec = importlib.util.find_spec("extras") and importlib.util.find_spec(f"extras.{name}")
    return importlib.import_module(f"extras.{name}") if spec and spec.origin else None  # without origin: no __init__.py


def load_extra(name, what):
    """Return find_extra(name). Raises InputError, which says that `what` needs it, if it is not there."""
    if (extra := find_extra(name)) is None:
        raise InputError(f"{what} needs the folder extras/{name}, which this copy does not have")
    return extra


@dataclasses.dataclass
class Progress:
    """Where a rank is. step: the number of a step that all ranks take together, or the name of its own work."""

    phase: str = "start"
    step: object = None
    timed: bool = False  # whether no progress counts as a hang
    beats: int = 0  # how far this rank has come, in calls of at(): equal on all ranks that have come equally far
    busy: int = 0  # other signs of progress, of which some ranks have more
    fixed = False  # no field, so not published: whether the phase stays as it is (runtime/compiling.py)

    def __str__(self):
        return self.phase if self.step is None else f"{self.phase} {self.step}"

    def beat(self):
        """Note that this rank makes progress where it is."""
        self.busy += 1

    def at(self, phase, step=None, timed=True):
        """Note where this rank is from now on, as in at("decode step", 57)."""
        self.beats += 1
        if not self.fixed:
            self.phase, self.step, self.timed = phase, step, timed


progress = Progress()
