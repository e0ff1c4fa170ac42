"""What each level holds while a job runs and fails, and where the job goes on after a failure.

The first root holds each checkpoint from its commit on. A level gets the newest that it wants as soon as the
copy before is done, so one that lags passes over what came meanwhile. A failure takes the levels that do not
survive it, copies that are on their way, and levels of nodes that keep one another's steps, where too many
of those are gone at once. The job goes on from the newest step that is left, from the nearest level that has
it, and has it in the first root again.
"""

from __future__ import annotations

import math

from ckpt_core.simulate.costs import Costs, FurtherLevel, Kind
from ckpt_core.simulate.redundancy import Losses
from ckpt_core.simulate.stretch import Stretch


class Holdings:
    """The newest iteration at each level, the first root before the others; 0: none."""

    def __init__(self, costs: Costs, course: Stretch) -> None:
        self._course = course
        self._copying = [Copying(level, course) for level in costs.levels]
        self._survives = [costs.survives, *[level.survives for level in costs.levels]]
        self._loads_s = [costs.load_s, *[level.restore_s for level in costs.levels]]
        self._newest = [0] * len(self._loads_s)
        further = enumerate(costs.levels, start=1)
        self._losses = {n: Losses(one.redundancy) for n, one in further if one.redundancy}

    def fail(
        self, kind: Kind, base: int, up_s: float, *, at_s: float = 0.0, node: int | None = None
    ) -> tuple[int, float]:
        """A failure `up_s` after training went on from iteration `base`; not above 0: before it did.

        Args:
            at_s: since the begin of the run.
            node: the one that is lost; None: it is not of that kind.

        Returns:
            The iteration that is left, and the seconds to load it.
        """
        if up_s > 0:
            root = base + self._course.checkpoints_at(up_s) * self._course.interval
            further = zip(self._copying, self._newest[1:], strict=True)
            self._newest = [root, *[one.newest(base, held, up_s) for one, held in further]]
        for index, survives in enumerate(self._survives):
            if survives.rank < kind.rank:
                self._newest[index] = 0
        for index, losses in self._losses.items():
            if node is not None and losses.lose(node, at_s):
                self._newest[index] = 0
        left = max(self._newest)
        # With nothing left it begins anew, which is taken to need what a load from the first root does.
        return left, self._loads_s[self._newest.index(left) if left else 0]


class Copying:
    """The copies to one level in a stretch of training."""

    def __init__(self, level: FurtherLevel, course: Stretch) -> None:
        self._course = course
        self._copy_s = level.copy_s
        self._step = level.every // math.gcd(level.every, course.interval)
        # Then each copy is done before the next begins, and no loop over them is needed.
        self._keeps_up = level.copy_s <= self._step * course.least_gap_s

    def newest(self, base: int, held: int, up_s: float) -> int:
        """The newest iteration there `up_s` after training went on from `base`; it held `held` then."""
        course, ahead = self._course, base // self._course.interval
        # What was loaded goes there, too, where it is missing.
        first = 0 if 0 < base != held else 1
        if self._keeps_up:
            whole = course.checkpoints_at(up_s - self._copy_s) if up_s >= self._copy_s else -1
            sent = self._wanted(whole, ahead)
        else:
            sent = self._lagging(ahead, first, up_s)
        return base + sent * course.interval if sent >= first else held

    def _wanted(self, checkpoint: int, ahead: int) -> int:
        """The newest that goes there, up to this one; the stretch began `ahead` checkpoints into the run."""
        return checkpoint - (ahead + checkpoint) % self._step

    def _lagging(self, ahead: int, first: int, up_s: float) -> int:
        """One copy after the other: the last that is done."""
        free_s, sent = 0.0, first - 1
        while True:
            due = self._wanted(self._course.checkpoints_at(free_s), ahead)
            if due <= sent:
                due = self._wanted(sent + self._step, ahead)
                free_s = max(free_s, self._course.committed_at(due))
            free_s += self._copy_s
            if free_s > up_s:
                return sent
            sent = due
