"""What saves cost, from the clock of the training loop and the events of the engine.

    iterations without checkpoint activity -> the newest of them -> their median is the base
    iterations with activity -> the cycle of a save: time blocked (exact), and slowdown over the base (noisy)

Costs are counted in iterations, so that they hold when a load makes all iterations slower. Time blocked is
known for each save. A slowdown is averaged over the newest cycles, until one differs by more than noise
explains: then the load has changed, and that one stands alone. Iterations far from the rest (a validation, a
pause) hardly count: they do not move a median, and what one may add beyond the time blocked is bounded.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, stdev

WINDOW = 32
"""Most iterations that make the base; fewer where they are alike, since a base drifts within seconds."""
_LEAST_WINDOW = 5
"""Of which the three that follow a save which waited for them are the majority."""
_PRECISE = 0.05
"""Error of what a save costs, in iterations, that is small enough for the window to be short."""
_NEWEST = 8
"""Iterations that show how alike they are."""
IDLE_AFTER = 3
"""Iterations without activity in a row, after which the cost of a save is final."""
KEPT_CYCLES = 5
_LONGEST_EXTRA = 10.0
"""Iterations that one may take longer: more is no slowdown, and what blocked is counted in full."""
_ENOUGH = 3
_STICKS_OUT = 4.0
_SURE = 3.0
"""Standard errors between two slowdowns that are not of the same load."""
_FAR = 4.0
"""Standard deviations; three iterations in a row are not that far off by chance."""
_LEAST_NOISE = 1e-3
_MAD_TO_SIGMA = 1.4826


@dataclass(frozen=True, slots=True)
class Cycle:
    """From one save to the next; in iterations without activity.

    Attributes:
        blocked: that the engine kept the training thread.
        slowdown: that each active iteration took longer besides.
        active: how many iterations had activity.
        error: standard error of `slowdown`.
    """

    blocked: float
    slowdown: float
    active: int
    error: float


@dataclass(frozen=True, slots=True)
class Base:
    """Iterations without activity.

    Attributes:
        seconds: of one.
        noise: relative standard deviation.
        count: how many were measured.
    """

    seconds: float
    noise: float
    count: int


class Ledger:
    """Fed after every step, one iteration or more at a time; asked at the end of a cycle."""

    def __init__(self) -> None:
        self._idle: deque[float] = deque(maxlen=WINDOW)
        self._active: list[tuple[int, float]] = []
        self._blocked_s = 0.0
        self._open = False
        self._final: Cycle | None = None
        self._cycles: deque[Cycle] = deque(maxlen=KEPT_CYCLES)
        self.idle_in_row = 0

    def add_idle(self, steps: int, seconds: float) -> None:
        """So many iterations without activity have just ended."""
        self._idle.append(seconds / steps)
        self.idle_in_row += steps
        self._notice_shift()
        if self._open and self._final is None and self.idle_in_row >= IDLE_AFTER:
            # From here on, another load would change the base that this cost is measured by.
            self._final = self._measured()

    def add_active(self, steps: int, seconds: float, *, blocked_s: float) -> None:
        """So many iterations with activity have just ended; `seconds` includes the time blocked."""
        self._active.append((steps, seconds - blocked_s))
        self._blocked_s += blocked_s
        self._final = None
        self.idle_in_row = 0

    def base(self) -> Base | None:
        """What an iteration takes without activity; None before one was seen."""
        noise = _noise_of([*self._idle][-_NEWEST:])
        # An error of the base counts once for each active iteration.
        active = sum(steps for steps, _ in self._active) or (
            self._cycles[-1].active if self._cycles else 1
        )
        wanted = math.ceil((noise * active / _PRECISE) ** 2)
        count = min(max(wanted, _LEAST_WINDOW), WINDOW)
        newest = [*self._idle][-count:]
        return _base_of(newest, max(noise, _noise_of(newest)))

    def begin_cycle(self) -> None:
        """A save starts: what the one before has cost is final."""
        cycle = self.cycle()
        if cycle is not None:
            self._cycles.append(cycle)
        self.drop_cycle()
        self._open = True

    def drop_cycle(self) -> None:
        """What was measured since the last save is no measure of later ones."""
        self._active.clear()
        self._blocked_s = 0.0
        self._open = False
        self._final = None

    def restart(self, cost: float | None = None) -> None:
        """Forget what saves have cost; from now on it is `cost`, in iterations, until more is known."""
        self._cycles.clear()
        self.drop_cycle()
        if cost is not None:
            self._cycles.append(Cycle(blocked=cost, slowdown=0.0, active=0, error=math.inf))

    def cycle(self) -> Cycle | None:
        """The cycle of the last save so far; None before one, or without a base."""
        return self._measured() if self._final is None else self._final

    def costs(self, *, margin: float = 0.0) -> tuple[float, ...]:
        """In iterations, of the newest saves, oldest first; empty before one is known.

        Args:
            margin: standard errors of the slowdown to add to it.
        """
        now = self.cycle()
        cycles = [*self._cycles] if now is None else [*self._cycles, now]
        slowdown = _slowdown(cycles, margin)
        return tuple(cycle.blocked + slowdown * cycle.active for cycle in cycles)

    def _notice_shift(self) -> None:
        """Forget iterations of another load: the newest ones all lie far off, on the same side."""
        # Where not every step is asked about, one entry stands for several iterations.
        if self.idle_in_row < IDLE_AFTER or len(self._idle) < 2 * IDLE_AFTER:
            return
        *older, third, second, first = self._idle
        base = _base_of(older, _spread_of(older))
        if base is None:
            return
        far = _FAR * base.noise * base.seconds
        newest = (third, second, first)
        if min(newest) > base.seconds + far or max(newest) < base.seconds - far:
            self._idle = deque(newest, maxlen=WINDOW)

    def _measured(self) -> Cycle | None:
        base = self.base()
        if not self._open or base is None:
            return None
        return _cycle_of(self._active, self._blocked_s / base.seconds, base)


def _base_of(idle: Sequence[float], noise: float) -> Base | None:
    if not idle:
        return None
    seconds = median(idle)
    if seconds <= 0:
        return None  # the clock is coarser than the loop
    return Base(seconds, max(noise, _LEAST_NOISE), len(idle))


def _spread_of(values: Sequence[float]) -> float:
    """`_deviation`, relative to the median."""
    middle = median(values)
    return _deviation(values) / middle if middle else 0.0


def _deviation(values: Sequence[float]) -> float:
    """Standard deviation, of which some that stick out hardly count."""
    middle = median(values)
    return _MAD_TO_SIGMA * median(abs(one - middle) for one in values)


def _noise_of(values: Sequence[float]) -> float:
    """Relative standard deviation from one to the next: a drift does not count."""
    steps = [abs(later - one) for one, later in pairwise(values)]
    middle = median(values) if values else 0.0
    if not steps or middle <= 0:
        return 0.0
    return _MAD_TO_SIGMA * median(steps) / math.sqrt(2) / middle


def _cycle_of(active: Sequence[tuple[int, float]], blocked: float, base: Base) -> Cycle:
    count = sum(steps for steps, _ in active)
    if not count:
        return Cycle(blocked, 0.0, 0, math.inf)
    extra = _sum_of_like([seconds / base.seconds - steps for steps, seconds in active])
    error = base.noise * math.sqrt(1 / count + 1 / base.count)
    return Cycle(blocked, extra / count, count, error)


def _sum_of_like(extras: Sequence[float]) -> float:
    """What iterations took longer, with a bound for those that stick out."""
    usual = median(extras) if len(extras) >= _ENOUGH else _LONGEST_EXTRA
    most = min(max(_STICKS_OUT * usual, 1.0), _LONGEST_EXTRA)
    return sum(min(extra, most) for extra in extras)


def _slowdown(cycles: Sequence[Cycle], margin: float) -> float:
    """Of an active iteration under the present load; 0 or more."""
    alike: list[Cycle] = []
    for cycle in cycles:
        if alike and not _is_alike(cycle, alike):
            alike = []
        alike.append(cycle)
    return max(_mean(alike) + margin * _error_of(alike), 0.0)


def _is_alike(cycle: Cycle, others: Sequence[Cycle]) -> bool:
    known = fmean(one.error for one in others) / math.sqrt(len(others))
    # Saves differ from one another by more than the noise of iterations: a disk has its moments.
    spread = stdev(one.slowdown for one in others) if len(others) >= _ENOUGH else 0.0
    return abs(cycle.slowdown - _mean(others)) <= _SURE * math.hypot(cycle.error, known, spread)


def _error_of(cycles: Sequence[Cycle]) -> float:
    """Standard error of their mean, by how they differ; an odd one hardly counts."""
    slowdowns = [cycle.slowdown for cycle in cycles if cycle.active]
    if len(slowdowns) < _ENOUGH:
        return 0.0
    return _deviation(slowdowns) / math.sqrt(len(slowdowns))


def _mean(cycles: Sequence[Cycle]) -> float:
    count = sum(cycle.active for cycle in cycles)
    return sum(cycle.slowdown * cycle.active for cycle in cycles) / count if count else 0.0
