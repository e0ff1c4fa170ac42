"""What is measured. Slowdown and stall in training are those of the other suites."""

from __future__ import annotations

from ckpt_core.bench.results import Figure, Unit


def fit_time(interval: int) -> Figure:
    """Time of `Trainer.fit`, until it has returned, over the same without saves."""
    title = f"End-to-end fit over none, a save every {interval} steps"
    return Figure(f"fit_every_{interval}", title, Unit.TIMES)


def memory(interval: int) -> Figure:
    """Peak resident memory of a fit, over that of the same without saves."""
    title = f"Peak extra memory of a fit, a save every {interval} steps"
    return Figure(f"peak_memory_every_{interval}", title, Unit.BYTES)


LARGE_STALL = Figure("large_stall", "Large state: stall of a save", Unit.SECONDS)
LARGE_LONGEST = Figure("large_longest_step", "Large state: longest step", Unit.SECONDS)
LARGE_STEP = Figure("large_train_step", "Large state: step, saves among them", Unit.SECONDS)
LARGE_FIT = Figure("large_fit", "Large state: end-to-end fit", Unit.SECONDS)
LARGE_MEMORY = Figure("large_peak_memory", "Large state: peak extra memory", Unit.BYTES)
