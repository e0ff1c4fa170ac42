"""The figures of a run and their JSON form. Pure values; no torch, no I/O."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from ckpt_core.bench.contenders import OURS
from ckpt_core.errors import ConfigError
from ckpt_core.system.machine import Machine

SCHEMA = 1
_FIELDS = ("schema", "suite", "machine", "settings", "contenders", "results")


class Unit(StrEnum):
    """What a figure counts."""

    BYTES_PER_S = "bytes/s"
    SECONDS = "s"
    MICROSECONDS = "us"
    BYTES = "bytes"
    TIMES = "x"
    STEPS = "steps"
    PER_S = "1/s"
    SECONDS_PER_GB = "s/GB"
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


@dataclass(frozen=True, slots=True)
class Family:
    """A figure for each number, such as the steps between saves.

    Attributes:
        key: with places for the numbers.
        title: likewise.
        unit: what the values count.
        of: what the first number counts, at the end of the title; empty where the title says it.
    """

    key: str
    title: str
    unit: Unit
    of: str = ""

    def __call__(self, *numbers: int | str) -> Figure:
        """The figure at these numbers."""
        title = self.title.format(*numbers)
        if self.of:
            title = f"{title}, {count(int(numbers[0]), self.of)}"
        return Figure(self.key.format(*numbers), title, self.unit)


Make = Callable[[int], Figure]
"""A figure for each interval, or for each number of ranks."""


def count(number: int, noun: str) -> str:
    """In words: of one, the noun has no s."""
    return f"{number} {noun if number > 1 else noun.removesuffix('s')}"


TRAIN_BASE = Figure("train_step", "Training step without saves", Unit.SECONDS)
SLOWDOWN = Family("slowdown_every_{}", "Training slowdown, a save every {} steps", Unit.TIMES)
"""Time of a training step with saves over one without; by the steps between saves."""

TRAIN_STALL = Family(
    "train_stall_every_{}", "Stall in training, a save every {} steps", Unit.SECONDS
)
"""Time that one save takes from the training thread, with the compute that hides it."""

TRAIN_PROCESSOR = Family(
    "train_processor_every_{}",
    "Processor time of saves in training, a save every {} steps",
    Unit.SECONDS_PER_GB,
)
"""What training with saves works longer than without, all threads and child processes, until the last save is
complete; for each GB of state that was saved."""


def per_gb(seconds: float, nbytes: float) -> float:
    """Seconds for each GB, as `Unit.SECONDS_PER_GB` counts them."""
    return seconds / nbytes * 1e9


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


@dataclass(frozen=True, slots=True)
class Setup:
    """What a reader must know about a way before it has run.

    Attributes:
        title: for people, in tables and pictures.
        fsyncs: whether a save that is complete survives a power cut; empty where nothing is saved.
        settings: how it is set up, in words.
    """

    title: str
    fsyncs: str
    settings: str


@dataclass(slots=True)
class Entrant:
    """What is known about one contender besides its figures.

    Attributes:
        title: for people; empty: its name is shown.
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
    title: str = ""

    def introduce(self, hello: Mapping[str, Any]) -> None:
        """Note what a worker's `hello` says under the names of these fields."""
        for name in ("title", "version", "fsyncs", "settings", "reference", "reason"):
            if name in hello:
                setattr(self, name, hello[name])

    def remark(self, text: str) -> None:
        """Note it once."""
        if text not in self.notes:
            self.notes.append(text)

    def compare(self, saved: str, restored: str) -> None:
        """Note the digests of a state and of what came back; one difference is enough."""
        self.restored = saved == restored and self.restored is not False
        self.digest = restored

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

    def title(self, contender: str) -> str:
        """What people call it."""
        entrant = self.entrants.get(contender)
        return (entrant and entrant.title) or contender

    def note_size(self, answer: Mapping[str, Any]) -> None:
        """The size that the report names is the one that was measured, not the one that was asked for."""
        self.settings.update(state_bytes=answer["state_bytes"], leaves=answer["leaves"])

    def tell_bound(self, name: str) -> None:
        """A bound of staging memory that was set is one of the settings of a way that is ours."""
        if name in self.entrants and self.settings["staging_bytes"] is not None:
            bound = f", staging_bytes={self.settings['staging_bytes']}"
            self.entrants[name].settings += bound

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
            "contenders": {name: asdict(entrant) for name, entrant in self.entrants.items()},
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

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Report:
        """The report that `to_json` has written.

        Raises:
            ConfigError: these are not the figures of a run, or of another version of this package.
        """
        try:
            if plain["schema"] != SCHEMA:
                raise ConfigError(
                    f"schema {plain['schema']} of figures is not known: take them again"
                )
            report = cls(plain["suite"], dict(plain["settings"]), Machine(**plain["machine"]))
            report.entrants = {name: Entrant(**row) for name, row in plain["contenders"].items()}
            for key, row in plain["results"].items():
                unit, ways = Unit(row["unit"]), row["contenders"]
                report.figures[key] = Figure(key, row["title"], unit, row["higher_is_better"])
                report.values[key] = {name: list(way["values"]) for name, way in ways.items()}
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            if isinstance(exc, ConfigError):
                raise
            raise ConfigError(f"not what `ckpt-core bench --json` writes: {exc!r}") from exc
        report.more = {name: value for name, value in plain.items() if name not in _FIELDS}
        return report

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
