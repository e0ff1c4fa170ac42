"""Find the candidate with the least seconds for each checkpoint, in few turns. Pure.

    planes: (in_flight, writers), (writers, direct_io), (writers, chunk_bytes)
      -> lines along every axis -> neighbours in two axes -> the same again until nothing is better
      -> finals: fresh turns, side by side

A race is successive halving: all rivals have one turn, the better half a second one, and so on; those far
behind leave at once. Finals decide, not what was measured on the way: a disk that drifts during the search
would otherwise favour whoever had a turn in a good minute.

Source: PCcheck (ASPLOS '25) section 3.4, which tries each N and p; successive halving is from K. Jamieson,
A. Talwalkar (AISTATS '16).
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ckpt_core.policy.tuning.space import AXES, Candidate, Measure, Space

Samples = dict[Candidate, list[float]]

_DECIDING_TURNS = 3
_PLANES = (("in_flight", "writers"), ("writers", "direct_io"), ("writers", "chunk_bytes"))
"""Axes that hinder each other too much to be searched one by one: threads, what keeps each of them waiting
(a direct write waits for the disk, a buffered one for memory), and work for each of them."""

_PAIRS = (
    ("in_flight", "writers"),
    ("in_flight", "staging_bytes"),
    ("chunk_bytes", "staging_bytes"),
    ("writers", "chunk_bytes"),
    ("writers", "direct_io"),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How thoroughly to search.

    Attributes:
        rounds: turns of each finalist; of each candidate when the search is exhaustive.
        finalists: how many of the fastest reach the finals.
        margin: a rival whose median is above the best by more than this part leaves its race.
        tolerance: finalists that are slower by at most this part are as fast, and the cheapest wins.
        passes: most passes over planes, lines and neighbours.
        seed: of the order of turns.
    """

    rounds: int = 5
    finalists: int = 3
    margin: float = 0.3
    tolerance: float = 0.03
    passes: int = 4
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to.

    Attributes:
        best: the candidate to recommend.
        start: the one that the search began with.
        samples: seconds for each checkpoint, of every candidate that had a turn, finals included.
        finals: those of the finals alone, `start` among them, in order of turns.
        complete: the search was not ended early.
    """

    best: Candidate
    start: Candidate
    samples: Samples
    finals: Samples
    complete: bool

    @property
    def turns(self) -> int:
        """Turns in all."""
        return sum(len(values) for values in self.samples.values())


def search(
    space: Space,
    measure: Measure,
    *,
    start: Candidate,
    plan: Plan = Plan(),
    enough: Callable[[], bool] = lambda: False,
) -> Found:
    """Search from `start`, a candidate of the space.

    Args:
        space: what may be chosen.
        measure: one turn; what it raises ends the search.
        start: where to begin, and what to compare with at the end.
        plan: see there.
        enough: true ends the search early; finals are held nevertheless.
    """
    run = _Run(measure, plan, enough)
    best = start
    for _ in range(plan.passes):
        before = best
        for first, second in _PLANES:
            best = run.race([best, *_plane(space, best, first, second)])
        for axis in AXES:
            best = run.race([best, *space.line(best, axis)])
        if best == before:
            best = run.race([best, *_diagonal(space, best)])
        if best == before:
            break
    return run.finals(start)


def exhaustive(
    space: Space,
    measure: Measure,
    *,
    start: Candidate,
    plan: Plan = Plan(),
    enough: Callable[[], bool] = lambda: False,
) -> Found:
    """Give every candidate `plan.rounds` turns, round by round, then hold the finals."""
    run = _Run(measure, plan, enough)
    for turns in range(1, plan.rounds + 1):
        run.level(space.candidates(), turns)
    return run.finals(start)


def _plane(space: Space, origin: Candidate, first: str, second: str) -> list[Candidate]:
    """Every value of one axis with every value of another."""
    return [moved for line in space.line(origin, first) for moved in space.line(line, second)]


def _diagonal(space: Space, origin: Candidate) -> list[Candidate]:
    """Neighbours in two axes at once: where two hinder each other, no step along one alone is better."""
    return [
        moved
        for first, second in _PAIRS
        for line in space.beside(origin, first)
        for moved in space.beside(line, second)
    ]


@dataclass
class _Run:
    """The turns of one search."""

    measure: Measure
    plan: Plan
    enough: Callable[[], bool]
    samples: Samples = field(default_factory=dict)
    ended: bool = False

    def __post_init__(self) -> None:
        self._random = random.Random(self.plan.seed)

    def level(self, rivals: Sequence[Candidate], turns: int) -> None:
        """Give each rival as many turns as it lacks of `turns`, in random order."""
        for rival in self._shuffled(rivals):
            while len(self.samples.get(rival, ())) < turns and not self._stop():
                self._turn(rival)

    def race(self, rivals: Sequence[Candidate]) -> Candidate:
        """The best of them; of equal ones the first given."""
        left, turns = list(dict.fromkeys(rivals)), 1
        while len(left) > 1:
            self.level(left, turns)
            left = self._within_margin(left)
            if len(left) == 2:
                # One lucky turn must not beat a median.
                self.level(left, min(_DECIDING_TURNS, self.plan.rounds))
            left = sorted(left, key=self._median)[: -(-len(left) // 2)]
            turns = min(turns + 1, self.plan.rounds)
        return left[0]

    def _within_margin(self, rivals: Sequence[Candidate]) -> list[Candidate]:
        """Those not far behind; one without a turn, where the search was ended early, is out."""
        measured = [rival for rival in rivals if rival in self.samples]
        bar = min(map(self._median, measured)) * (1 + self.plan.margin)
        return [rival for rival in measured if self._median(rival) <= bar]

    def finals(self, start: Candidate) -> Found:
        """Fresh turns of the fastest, the cheapest of those as fast, and `start`."""
        finalists = self._finalists(start)
        fresh: Samples = {finalist: [] for finalist in finalists}
        for _ in range(self.plan.rounds):
            for finalist in self._shuffled(finalists):
                fresh[finalist].append(self._turn(finalist))
        best = _cheapest(fresh, self.plan.tolerance)
        return Found(best, start, self.samples, fresh, not self.ended)

    def _finalists(self, start: Candidate) -> list[Candidate]:
        if not self.samples:
            return [start]
        ranked = sorted(self.samples, key=self._median)
        chosen = [
            *ranked[: self.plan.finalists],
            _cheapest(self.samples, self.plan.tolerance),
            start,
        ]
        return list(dict.fromkeys(chosen))

    def _turn(self, candidate: Candidate) -> float:
        value = self.measure(candidate)
        self.samples.setdefault(candidate, []).append(value)
        return value

    def _median(self, candidate: Candidate) -> float:
        return statistics.median(self.samples[candidate])

    def _shuffled(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        return self._random.sample(list(candidates), len(candidates))

    def _stop(self) -> bool:
        # The first turn is always taken: without it there is nothing to recommend.
        if not self.ended and self.samples and self.enough():
            self.ended = True
        return self.ended


def _cheapest(samples: Samples, tolerance: float) -> Candidate:
    """The cheapest of those whose median is within the tolerance of the least."""
    medians = {candidate: statistics.median(values) for candidate, values in samples.items()}
    bar = min(medians.values()) * (1 + tolerance)
    return min((c for c, median in medians.items() if median <= bar), key=lambda c: c.price)
