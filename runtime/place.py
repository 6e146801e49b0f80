"""Where this process is: for messages, and for extras/watch, which finds hanging ranks by it."""

import dataclasses


@dataclasses.dataclass
class Place:
    """Where a rank is. step: the number of a step that all ranks take together, or the name of its own work."""

    phase: str = "start"
    step: object = None
    timed: bool = False  # whether no progress counts as a hang
    beats: int = 0  # how far this rank has come, in calls of at(): equal on all ranks that have come equally far
    busy: int = 0  # other signs of progress, of which some ranks have more

    def __str__(self):
        return self.phase if self.step is None else f"{self.phase} {self.step}"


here = Place()
fixed = False  # whether the phase stays as it is: runtime/compiling.py


def beat():
    """Note that this rank makes progress where it is."""
    here.busy += 1


def at(phase, step=None, timed=True):
    """Note where this rank is from now on, as in at("decode step", 57)."""
    here.beats += 1
    if not fixed:
        here.phase, here.step, here.timed = phase, step, timed
