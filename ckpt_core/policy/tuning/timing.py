"""From moments of saves and iterations to the few numbers that a tuner needs. Pure.

The measure is the time that storage is busy for each checkpoint: while N saves are always under way it is
PCcheck's T_w / N, and while saves are rarer than storage could take it is T_w itself, so candidates that are
never full are not flattered by a large N.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

Span = tuple[float, float]
"""Begin and end, seconds on one clock."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What happened in one turn.

    Attributes:
        saves: from the start of each save, once it had a place, to its commit.
        iterations: from barrier to barrier.
        nbytes: what one save stored.
    """

    saves: tuple[Span, ...]
    iterations: tuple[Span, ...]
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """The figures of one turn, in seconds.

    Attributes:
        each_s: busy time of storage for each checkpoint.
        write_s: T_w: from the start of a save to its commit, median.
        longest_s: the same, longest.
        busy: how many saves were under way at a time, while any was.
        used: part of the time in which any was; near 1, training may have waited for storage.
        iteration_s: mean iteration meanwhile; 0 if none was seen.
        clean_s: median iteration beside which no save was under way; 0 if there was none.
        lost_s: training time lost for each save, by these two; 0 if one is unknown. Where storage is always
            in use it is no property of a save: iterations wait for a place in flight.
    """

    each_s: float
    write_s: float
    longest_s: float
    busy: float
    used: float
    iteration_s: float
    clean_s: float
    lost_s: float


def timing_of(trace: Trace, *, warmups: int) -> Timing | None:
    """The figures from the commit of the last of `warmups` saves to the last commit; None if none is left.

    Saves that began in the warm-up count from there on, so that a pipeline that stays full counts as full.
    """
    ends = sorted(end for _, end in trace.saves)
    if warmups < 1 or len(ends) <= warmups or ends[warmups - 1] == ends[-1]:
        return None
    window = (ends[warmups - 1], ends[-1])
    inside = [span for save in trace.saves if (span := _clipped(save, window)) is not None]
    union = _union(inside)
    busy_s = sum(end - begin for begin, end in union)
    count = len(ends) - warmups
    writes_s = [e - b for b, e in trace.saves if e > window[0]]
    # With the one in which the last commit falls: it has lost time to that save.
    whole = [span for span in trace.iterations if window[0] <= span[0] < window[1]]
    iteration_s = statistics.fmean(_lengths(whole)) if whole else 0.0
    clean_s = clean_iteration_s(trace)
    lost = max(iteration_s - clean_s, 0.0) * len(whole) / count if whole and clean_s else 0.0
    return Timing(
        each_s=busy_s / count,
        write_s=statistics.median(writes_s),
        longest_s=max(writes_s),
        busy=sum(_lengths(inside)) / busy_s if busy_s else 0.0,
        used=busy_s / (window[1] - window[0]),
        iteration_s=iteration_s,
        clean_s=clean_s,
        lost_s=lost,
    )


def clean_iteration_s(trace: Trace) -> float:
    """Median of the iterations beside which no save was under way, after the first one; 0 if none."""
    clean, _ = beside(trace)
    return statistics.median(clean) if clean else 0.0


def beside(trace: Trace, *, left_out: int = 1) -> tuple[list[float], list[float]]:
    """Seconds of the iterations after the first `left_out`: those beside no save, and those beside one."""
    union = _union(trace.saves)
    ends = [end for _, end in union]
    lengths: tuple[list[float], list[float]] = [], []
    # The first iteration compiles, allocates, and fills caches.
    for begin, end in trace.iterations[left_out:]:
        # They lie apart and in order: of those that end after its begin, the first one begins first.
        at = bisect.bisect(ends, begin)
        lengths[at < len(union) and union[at][0] < end].append(end - begin)
    return lengths


def iterations_of(
    barriers: Sequence[float], begins: Sequence[tuple[int, float]]
) -> tuple[Span, ...]:
    """Iterations from the moments of barriers, of which an iteration may have several.

    Args:
        barriers: when each barrier was passed, ascending.
        begins: step and moment of the start of each save, ascending: they tell how many barriers an
            iteration has.

    Returns:
        One span for each iteration; none if the number of barriers is not a multiple of that of steps, as
        under integrations that skip the barrier while nothing is staged.
    """
    per_step = _barriers_per_step(barriers, begins)
    if per_step is None:
        return ()
    moments = list(barriers)[::per_step]
    return tuple(itertools.pairwise(moments))


def _barriers_per_step(
    barriers: Sequence[float], begins: Sequence[tuple[int, float]]
) -> int | None:
    found = set()
    for (step, began), (next_step, next_began) in itertools.pairwise(begins):
        passed = bisect.bisect(barriers, next_began) - bisect.bisect(barriers, began)
        steps = next_step - step
        if steps < 1 or passed < steps or passed % steps:
            return None
        found.add(passed // steps)
    if not found:
        return 1
    return found.pop() if len(found) == 1 else None


def _union(spans: Sequence[Span]) -> list[Span]:
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def _clipped(span: Span, window: Span) -> Span | None:
    begin, end = max(span[0], window[0]), min(span[1], window[1])
    return (begin, end) if begin < end else None


def _lengths(spans: Sequence[Span]) -> list[float]:
    return [end - begin for begin, end in spans]
