"""A made-up trace: one row each 63 s for 3.7 hours, with 48 changes, some of them large."""

from __future__ import annotations

import random

from ckpt_core.simulate import Trace

ROWS, EVERY_S, CHANGES, GPUS = 215, 63.0, 48, 64


def synthetic(seed: int = 0) -> Trace:
    """The trace of one seed."""
    dice = random.Random(seed)
    changing = set(dice.sample(range(1, ROWS), CHANGES))
    gpus = [GPUS]
    for row in range(1, ROWS):
        others = [count for count in range(16, GPUS + 1) if count != gpus[-1]]
        gpus.append(dice.choice(others) if row in changing else gpus[-1])
    return Trace(tuple(EVERY_S * row for row in range(ROWS)), tuple(gpus))


def lines(trace: Trace) -> list[str]:
    """The rows of the CSV file."""
    rows = zip(trace.times_s, trace.gpus, strict=True)
    return [",Time,GPUs", *(f"{k},{time_s},{gpus}" for k, (time_s, gpus) in enumerate(rows))]
