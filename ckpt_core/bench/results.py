"""The figures of a run and their JSON form. Pure values; no torch, no I/O."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from ckpt_core.bench.contenders import OURS
from ckpt_core.bench.machine import Machine

SCHEMA = 1


class Unit(StrEnum):
    """What a figure counts."""

    BYTES_PER_S = "bytes/s"
    SECONDS = "s"
    BYTES = "bytes"
    TIMES = "x"
    STEPS = "steps"
    PERCENT = "%"
    """Held as a part of 1."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One quantity that is measured for every contender.

    Attributes:
        key: name in the JSON file.
        title: heading in the report.
        unit: what the values count.
        higher_is_better: direction.
    """

    key: str
    title: str
    unit: Unit
    higher_is_better: bool = False


Make = Callable[[int], Figure]
"""A figure for each interval, or for each number of ranks."""

PERSIST = Figure("persist", "Persist throughput, save() to durable", Unit.BYTES_PER_S, True)
STALL = Figure("stall", "Stall of save(): call, then barrier at once", Unit.SECONDS)
STALL_CALL = Figure("stall_call", "Stall of save(): the call alone", Unit.SECONDS)
STALL_BARRIER = Figure("stall_barrier", "Stall of save(): the barrier alone", Unit.SECONDS)
MEMORY = Figure("peak_memory", "Peak extra memory, seen from outside", Unit.BYTES)
AMPLIFICATION = Figure("write_amplification", "Bytes written / state bytes", Unit.TIMES)
RESTORE_WARM = Figure("restore_warm", "Restore into live tensors, cached", Unit.BYTES_PER_S, True)
RESTORE_COLD = Figure("restore_cold", "Restore into live tensors, cold", Unit.BYTES_PER_S, True)
LEAVES_STALL = Figure("small_leaves_stall", "Stall of save(), many small leaves", Unit.SECONDS)
TRAIN_BASE = Figure("train_step", "Training step without saves", Unit.SECONDS)


def slowdown(interval: int) -> Figure:
    """Time of a training step with a save every `interval` steps over one without saves."""
    title = f"Training slowdown, a save every {interval} steps"
    return Figure(f"slowdown_every_{interval}", title, Unit.TIMES)


def train_stall(interval: int) -> Figure:
    """Time that one save takes from the training thread, with the compute that hides it."""
    title = f"Stall in training, a save every {interval} steps"
    return Figure(f"train_stall_every_{interval}", title, Unit.SECONDS)


@dataclass(frozen=True, slots=True)
class Stats:
    """Values of one figure for one contender, one for each round, in order."""

    values: tuple[float, ...]

    @property
    def min(self) -> float:
        """Lowest value."""
        return min(self.values)

    @property
    def median(self) -> float:
        """Middle value."""
        return statistics.median(self.values)

    @property
    def max(self) -> float:
        """Highest value."""
        return max(self.values)


@dataclass(slots=True)
class Entrant:
    """What is known about one contender besides its figures.

    Attributes:
        reason: why it did not run, or stopped; None when it ran to the end.
        failed: the reason is an error rather than something that is not installed.
        restored: whether a destroyed state came back equal; None when that was not tried.
        digest: of the restored state; equal for all contenders.
    """

    version: str = ""
    fsyncs: str = ""
    settings: str = ""
    reference: bool = False
    reason: str | None = None
    failed: bool = False
    restored: bool | None = None
    digest: str | None = None
    notes: list[str] = field(default_factory=list)

    def fail(self, reason: str) -> None:
        """Note why it stopped, behind what is known already."""
        self.reason = "; ".join(filter(None, [self.reason, reason]))
        self.failed = True

    @property
    def durable(self) -> bool:
        """Whether the files of a completed save were fsynced."""
        return not self.fsyncs.startswith("no")


@dataclass(slots=True)
class Report:
    """All that one run found; filled while it runs.

    Attributes:
        more: what a suite finds besides figures of contenders: section -> plain values.
        ours: contenders that are this engine; a run in which one of them fails is not sound.
    """

    suite: str
    settings: dict[str, Any]
    machine: Machine
    entrants: dict[str, Entrant] = field(default_factory=dict)
    figures: dict[str, Figure] = field(default_factory=dict)
    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    ours: tuple[str, ...] = (OURS,)

    def add(self, figure: Figure, contender: str, value: float) -> None:
        """Note one value; values of one contender come in the order of rounds."""
        self.figures[figure.key] = figure
        self.values.setdefault(figure.key, {}).setdefault(contender, []).append(value)

    def stats(self, figure: Figure) -> dict[str, Stats]:
        """Contender -> its values, in the order of the report; empty when it was not measured."""
        found = self.values.get(figure.key, {})
        return {name: Stats(tuple(found[name])) for name in self.entrants if name in found}

    def ratio(self, figure: Figure, contender: str) -> float | None:
        """Median of a contender over ours; None without ours, and of differences, which may be 0 or less."""
        stats = self.stats(figure)
        if (
            figure.unit is Unit.PERCENT
            or OURS not in stats
            or contender not in stats
            or stats[OURS].median == 0
            or min(stats[OURS].min, stats[contender].min) < 0
        ):
            return None
        return stats[contender].median / stats[OURS].median

    @property
    def sound(self) -> bool:
        """Our engine did not fail, and no contender restored other bytes than it saved."""
        return all(
            entrant.restored is not False and not (entrant.failed and name in self.ours)
            for name, entrant in self.entrants.items()
        )

    def to_json(self) -> dict[str, Any]:
        """The content of the JSON file."""
        return {
            "schema": SCHEMA,
            "suite": self.suite,
            "machine": self.machine.to_json(),
            "settings": self.settings,
            "contenders": {name: _entrant(entrant) for name, entrant in self.entrants.items()},
            "results": {
                figure.key: {
                    "title": figure.title,
                    "unit": figure.unit.value,
                    "higher_is_better": figure.higher_is_better,
                    "contenders": self._rows(figure),
                }
                for figure in self.figures.values()
            },
            **self.more,
        }

    def _rows(self, figure: Figure) -> dict[str, Mapping[str, Any]]:
        return {
            name: {
                "values": list(stats.values),
                "min": stats.min,
                "median": stats.median,
                "max": stats.max,
                "ratio_to_ours": self.ratio(figure, name),
            }
            for name, stats in self.stats(figure).items()
        }


def _entrant(entrant: Entrant) -> dict[str, Any]:
    return asdict(entrant)
