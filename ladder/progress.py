"""`progress`: what this process is doing. Messages say it, and ladder/ranks/watch.py finds hanging ranks by it."""

import contextlib
import dataclasses
import time
import types


@dataclasses.dataclass
class Progress:
    """Where a rank is. step: the number of a step that all ranks take together, or the name of its own work."""

    phase: str = "start"
    step: object = None
    timed: bool = False  # whether no progress counts as a hang
    beats: int = 0  # how far this rank has come, in calls of at(): equal on all ranks that have come equally far
    busy: int = 0  # other signs of progress, of which some ranks have more
    fixed = False  # no field, so not published: whether the phase stays as it is, in the block of during()

    def __str__(self):
        return self.phase if self.step is None else f"{self.phase} {self.step}"

    def beat(self):
        """Note that this rank makes progress where it is."""
        self.busy += 1

    def at(self, phase, step=None, timed=True):
        """Note where this rank is from now on, as in at("decode step", 57)."""
        self.beats += 1
        if not self.fixed:
            self.phase = phase
            self.step = step
            self.timed = timed

    @contextlib.contextmanager
    def during(self, phase):
        """Stay in a phase that may take any time, whatever the block notes, and then return to where this rank was."""
        before = self.fixed, self.phase, self.step, self.timed
        self.fixed = True
        self.phase = phase
        self.step = None
        self.timed = False
        try:
            yield
        finally:
            self.fixed, self.phase, self.step, self.timed = before
            self.beat()  # perhaps of one rank alone

    @contextlib.contextmanager
    def doing(self, phase, step=None):
        """Note where this rank is in the block, and that afterwards the caller may pause.

        Yields a clock, whose `seconds` say at the end how long the block took.
        """
        self.at(phase, step)
        clock = types.SimpleNamespace()
        start = time.perf_counter()
        yield clock
        clock.seconds = time.perf_counter() - start
        self.at("output", timed=False)


progress = Progress()
