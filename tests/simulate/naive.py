"""The same model in another form: one iteration after the other, nothing skipped.

For storage that serves the oldest checkpoint first, where a checkpoint's end follows from the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ckpt_core.simulate import Costs, Outage, Sharing


@dataclass
class Naive:
    """A stretch of training that began at 0."""

    costs: Costs
    iteration_s: float
    interval: int
    now_s: float = 0.0
    done: int = 0
    ends_s: list[float] = field(default_factory=list)
    commits_s: list[float] = field(default_factory=list)
    update_from_s: float = 0.0

    def iterate(self) -> float:
        """One iteration, and a checkpoint if it is time for one; when the iteration ended."""
        assert self.costs.sharing is Sharing.OLDEST_FIRST
        begun_s = self.now_s
        # Its update comes at the end, and waits for the snapshot of the checkpoint before it.
        self.now_s = max(begun_s + self.iteration_s, self.update_from_s)
        self.done += 1
        ended_s = self.now_s
        if self.done % self.interval == 0:
            self._checkpoint()
        return ended_s

    def _checkpoint(self) -> None:
        costs, number = self.costs, len(self.commits_s)
        if number >= costs.in_flight:
            self.now_s = max(self.now_s, self.commits_s[number - costs.in_flight])
        self.now_s += costs.stall_s
        snapped_s = self.now_s + costs.snapshot_s
        begin_s = self.now_s if costs.pipelined else snapped_s
        last_s = self.ends_s[-1] if self.ends_s else 0.0
        self.ends_s.append(max(begin_s, last_s) + costs.persist_s)
        self.commits_s.append(max(self.ends_s[-1], snapped_s))
        self.update_from_s = self.now_s + self.iteration_s + costs.update_wait_s

    def committed(self, at_s: float) -> int:
        """Checkpoints that are committed at `at_s`."""
        return sum(time_s <= at_s for time_s in self.commits_s)


def run(
    costs: Costs, outages: Sequence[Outage], duration_s: float, *, iteration_s: float, interval: int
) -> tuple[int, int]:
    """Iterations that count at the end, and those that were lost, for a recovery of `load_s`."""
    kept = lost = 0
    ready_s = 0.0
    for outage in [*outages, Outage(duration_s, duration_s)]:
        up_s = min(outage.at_s, duration_s) - ready_s
        course = Naive(costs, iteration_s, interval)
        whole = 0
        while up_s > 0 and course.iterate() <= up_s:
            whole += 1
        if outage.at_s >= duration_s:
            return kept + whole, lost
        if up_s > 0:
            saved = course.committed(up_s) * interval
            kept, lost = kept + saved, lost + whole - saved
        ready_s = max(ready_s, outage.back_s + costs.load_s)
    raise AssertionError
