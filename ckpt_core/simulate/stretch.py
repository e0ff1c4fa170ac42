"""Training without failures, event by event until it repeats itself; from there on by arithmetic.

Every stretch between a recovery and the next failure begins alike: the state is loaded and nothing is
in flight. So one course of events serves all of them, and a failure costs one look into it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import count, pairwise

from ckpt_core.errors import ConfigError
from ckpt_core.simulate.costs import Costs, check
from ckpt_core.simulate.storage import Storage

MOST_CHECKPOINTS = 4096
"""Where a course that has not repeated itself exactly is taken as repeating itself."""

_DIGITS = 9


@dataclass(frozen=True, slots=True)
class Stretch:
    """A course of events; checkpoint k holds k * `interval` iterations, checkpoint 0 is the loaded one.

    In order, for checkpoint k: training reaches it (`reached_s[k]`) and waits until fewer than
    `in_flight` are on their way; it stands still for `stall_s` and goes on (`resumed_s[k]`); the
    snapshot begins, and the next update waits for it; persisting begins with the snapshot or after
    it. When both are over the checkpoint is committed (`committed_s[k]`).

    Attributes:
        interval: iterations from one checkpoint to the next.
        iteration_s: of one iteration without checkpoints.
        first: from this checkpoint on everything repeats after the last one in the lists.
        period_s: from one repetition to the next.
    """

    interval: int
    iteration_s: float
    reached_s: tuple[float, ...]
    resumed_s: tuple[float, ...]
    committed_s: tuple[float, ...]
    first: int
    period_s: float

    @property
    def events(self) -> int:
        """Checkpoints that were simulated one by one."""
        return len(self.reached_s) - 1

    @property
    def iterations_per_s(self) -> float:
        """Throughput once the course repeats itself."""
        return self.interval * self._cycle / self.period_s

    @property
    def slowdown(self) -> float:
        """Time of an iteration over that without checkpoints."""
        return 1 / (self.iterations_per_s * self.iteration_s)

    def checkpoints_at(self, after_s: float) -> int:
        """The newest checkpoint that is committed then."""
        return self._newest(self.committed_s, after_s)

    def committed_at(self, checkpoint: int) -> float:
        """When that checkpoint is committed."""
        return self._at(self.committed_s, checkpoint)

    @property
    def least_gap_s(self) -> float:
        """Shortest time from one commit to the next."""
        last = len(self.committed_s)
        return min(self.committed_at(k + 1) - self.committed_at(k) for k in range(last))

    def iterations_at(self, after_s: float) -> int:
        """Whole iterations that are done then."""
        done = self._newest(self.resumed_s, after_s)
        begin, end = self._at(self.resumed_s, done), self._at(self.reached_s, done + 1)
        part = min(1.0, (after_s - begin) / (end - begin))
        return done * self.interval + int(part * self.interval + 1e-9)

    def time_of(self, iterations: int) -> float:
        """When so many iterations are done."""
        if iterations == 0:
            return 0.0
        full = (iterations - 1) // self.interval
        begin, end = self._at(self.resumed_s, full), self._at(self.reached_s, full + 1)
        return begin + (end - begin) * (iterations - full * self.interval) / self.interval

    @property
    def worst_lost(self) -> int:
        """Most iterations that one failure takes: just before a commit."""
        instants = enumerate(self.committed_s[1:])
        return max(
            self.iterations_at(end_s * (1 - 1e-12)) - k * self.interval for k, end_s in instants
        )

    @property
    def worst_lost_s(self) -> float:
        """Most time that one failure takes: from where training goes on to just before the next commit.

        By the clock, with what training waits for; the way there again is no longer, as nothing is in flight.
        """
        return max(self.committed_at(k + 1) - at_s for k, at_s in enumerate(self.resumed_s))

    @property
    def mean_lost(self) -> float:
        """Iterations that a failure takes at a random moment, once the course repeats itself."""
        at, end, every = self.first, len(self.reached_s) - 1, self.interval
        done = 0.0
        for k in range(at, end + 1):
            resumed, reached = self._at(self.resumed_s, k), self._at(self.reached_s, k + 1)
            done += every * (k + 0.5) * (reached - resumed)
            done += every * (k + 1) * (self._at(self.resumed_s, k + 1) - reached)
        commits = [self._at(self.committed_s, k) for k in range(at, end + 2)]
        kept = sum(every * k * (b - a) for k, (a, b) in enumerate(pairwise(commits), start=at))
        # One period of commits begins later than one of training; each period adds the same.
        kept += every * self._cycle * (self.resumed_s[at] - self.committed_s[at])
        return (done - kept) / self.period_s

    @property
    def persist_s(self) -> float:
        """Longest time from the moment at which training goes on until the commit (PCcheck's T_w)."""
        return max(
            committed - resumed
            for committed, resumed in zip(self.committed_s, self.resumed_s, strict=True)
        )

    @property
    def _cycle(self) -> int:
        return len(self.reached_s) - self.first

    def _at(self, times_s: tuple[float, ...], k: int) -> float:
        if k < len(times_s):
            return times_s[k]
        cycles, rest = divmod(k - self.first, self._cycle)
        return times_s[self.first + rest] + cycles * self.period_s

    def _newest(self, times_s: tuple[float, ...], after_s: float) -> int:
        """The largest k with times_s[k] <= after_s, were the tuple endless."""
        begin_s = times_s[self.first]
        if after_s < begin_s:
            return bisect_right(times_s, after_s, 0, self.first) - 1
        cycles = int((after_s - begin_s) // self.period_s)
        rest_s = after_s - cycles * self.period_s
        return bisect_right(times_s, rest_s, self.first) - 1 + cycles * self._cycle


@dataclass(slots=True)
class _Course:
    """A stretch that is being simulated."""

    costs: Costs
    work_s: float
    storage: Storage
    reached_s: list[float] = field(default_factory=lambda: [0.0])
    resumed_s: list[float] = field(default_factory=lambda: [0.0])
    snapped_s: list[float] = field(default_factory=lambda: [0.0])
    ended_s: list[float] = field(default_factory=lambda: [0.0])

    def checkpoint(self) -> tuple[float, tuple[float, ...]]:
        """The next one: when it had its place, and what was left of the others then."""
        costs, storage = self.costs, self.storage
        # The snapshot of the last one ends before training comes here: the update waited for it.
        wait_s = costs.update_wait_s if len(self.reached_s) > 1 else 0.0
        self.reached_s.append(self.resumed_s[-1] + self.work_s + wait_s)
        at_s = self.reached_s[-1]
        self.ended_s += storage.advance(at_s)
        while len(self.reached_s) - 1 - len(self.ended_s) >= costs.in_flight:
            at_s = storage.next_end_s
            self.ended_s += storage.advance(at_s)
        left = tuple(round(s / costs.persist_s, _DIGITS) for s in storage.left_s if s)
        self.resumed_s.append(at_s + costs.stall_s)
        self.snapped_s.append(self.resumed_s[-1] + costs.snapshot_s)
        begin_s = self.resumed_s[-1] if costs.pipelined else self.snapped_s[-1]
        self.ended_s += storage.enter(begin_s)
        return at_s, left

    def committed_s(self) -> list[float]:
        """When each checkpoint was persisted and its snapshot over, as far as that is known."""
        return [max(pair) for pair in zip(self.ended_s, self.snapped_s, strict=False)]


def stretch(costs: Costs, *, iteration_s: float, interval: int) -> Stretch:
    """The course of training without failures, with a checkpoint every `interval` iterations.

    Raises:
        ConfigError: the interval is below 1, or a time out of range.
    """
    if interval < 1:
        raise ConfigError(f"interval={interval} must be at least 1")
    check("iteration_s", iteration_s, above=0.0)
    course = _Course(costs, iteration_s * interval, Storage(costs.persist_s, costs.sharing))
    seen: dict[tuple[float, ...], int] = {}
    placed_s = [0.0]
    for k in count(1):
        at_s, left = course.checkpoint()
        placed_s.append(at_s)
        if left in seen or k >= MOST_CHECKPOINTS:
            break
        seen[left] = k
    before = seen.get(left, k - 1)
    while len(course.ended_s) <= k:
        course.checkpoint()
    return Stretch(
        interval=interval,
        iteration_s=iteration_s,
        reached_s=tuple(course.reached_s[: k + 1]),
        resumed_s=tuple(course.resumed_s[: k + 1]),
        committed_s=tuple(course.committed_s()[: k + 1]),
        first=before + 1,
        period_s=placed_s[k] - placed_s[before],
    )
