"""Trying an interval out: training with saves beside training without, in turns."""

from __future__ import annotations

from collections.abc import Callable

from ckpt_core.policy import tuning
from ckpt_core.tune.driver import NEVER, Driver, Turn
from ckpt_core.tune.facts import SKIPPED, mean_of

_INTERVALS = 3
_LEAST_ITERATIONS = 12
_MOST_TRIES = 5


def find_interval(
    driver: Driver,
    candidate: tuning.Candidate,
    first: int,
    *,
    max_overhead: float,
    rounds: int,
    notify: Callable[[str], None],
) -> tuple[tuning.Checked, ...]:
    """Try `first`, then longer ones until one keeps the bound, then shorter ones; all that were tried."""
    tried: list[tuning.Checked] = []
    every: int | None = first
    while every is not None and len(tried) < _MOST_TRIES:
        notify(f"trying interval {every}")
        tried.append(check_interval(driver, candidate, every, rounds=rounds))
        every = tuning.next_interval(tried, max_overhead=max_overhead)
    return tuple(tried)


def check_interval(
    driver: Driver, candidate: tuning.Candidate, every: int, *, rounds: int
) -> tuning.Checked:
    """What saving every `every` steps costs; in each round with and without take turns in being first."""
    # Whole intervals, after one that fills the pipeline.
    warmup = max(every, SKIPPED)
    length = every * max(_INTERVALS, -(-_LEAST_ITERATIONS // every))
    overheads = []
    for number in range(rounds):
        turns = [
            Turn(candidate, every, iterations=warmup + length),
            Turn(candidate, NEVER, iterations=warmup + length),
        ]
        if number % 2:
            turns.reverse()
        means = {turn.every: mean_of(driver.run(turn), warmup) for turn in turns}
        overheads.append(means[every] / means[NEVER] - 1)
    return tuning.Checked(every, tuple(overheads))
