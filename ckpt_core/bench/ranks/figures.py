"""The figures of ways, one for each number of ranks."""

from __future__ import annotations

from ckpt_core.bench.results import Figure, Make, Unit


def share(ranks: int) -> Figure:
    """Files of the rank that writes most, over the replicated bytes."""
    return Figure(f"share_{ranks}_ranks", f"Largest share of a rank, {_of(ranks)}", Unit.TIMES)


def written(ranks: int) -> Figure:
    """Storage traffic of the rank that writes most, seen from outside."""
    title = f"Bytes written by the busiest rank, {_of(ranks)}"
    return Figure(f"written_{ranks}_ranks", title, Unit.BYTES)


def durable(ranks: int) -> Figure:
    """Seconds from the common start until every rank knows that the step is complete."""
    return Figure(f"durable_{ranks}_ranks", f"Save to complete, {_of(ranks)}", Unit.SECONDS)


def commit(ranks: int) -> Figure:
    """Seconds of those after the last rank had its bytes on disk."""
    title = f"Last bytes durable to committed everywhere, {_of(ranks)}"
    return Figure(f"commit_{ranks}_ranks", title, Unit.SECONDS)


def blocked(ranks: int) -> Figure:
    """Seconds that the slowest rank's training waits if it does nothing else meanwhile."""
    title = f"Blocking time: save, then wait until staged, {_of(ranks)}"
    return Figure(f"blocked_{ranks}_ranks", title, Unit.SECONDS)


def slowdown(ranks: int, interval: int) -> Figure:
    """Time of a training step with saves over one without."""
    title = f"Training slowdown, a save every {interval} steps, {_of(ranks)}"
    return Figure(f"slowdown_every_{interval}_{ranks}_ranks", title, Unit.TIMES)


def stall(ranks: int, interval: int) -> Figure:
    """Seconds that one save takes from training, on the rank that waits longest."""
    title = f"Stall in training, a save every {interval} steps, {_of(ranks)}"
    return Figure(f"train_stall_every_{interval}_{ranks}_ranks", title, Unit.SECONDS)


def base_step(ranks: int) -> Figure:
    """Seconds of a training step without saves."""
    title = f"Training step without saves, {_of(ranks)}"
    return Figure(f"train_step_{ranks}_ranks", title, Unit.SECONDS)


def slowdown_every(interval: int) -> Make:
    """`slowdown` of one interval."""
    return lambda ranks: slowdown(ranks, interval)


def stall_every(interval: int) -> Make:
    """`stall` of one interval."""
    return lambda ranks: stall(ranks, interval)


def _of(ranks: int) -> str:
    return f"{ranks} ranks" if ranks > 1 else "1 rank"
