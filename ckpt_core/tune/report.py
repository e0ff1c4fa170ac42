"""What a run of the tuner found."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass
from typing import Any

from ckpt_core.policy import tuning
from ckpt_core.system.machine import Machine


@dataclass(frozen=True, slots=True)
class TuneReport:
    """Everything that was measured, and what follows from it.

    Attributes:
        machine: where.
        limits: what was allowed.
        max_overhead: likewise.
        candidates: how many there were to choose from.
        found: the search.
        timings: of each candidate, one for each of its turns.
        load: what the recommended candidate costs training.
        storage_every: f* = ceil(T_w / (N q t)).
        every: the interval to save at: f*, or longer where the checks say so.
        checks: intervals that were tried out, in order.
        exhaustive: every candidate was measured.
        seconds: that it all took.
        problems: limits that cannot be met, each with the nearest that can.
        notes: what else to know.
    """

    machine: Machine
    limits: tuning.Limits
    max_overhead: float
    candidates: int
    found: tuning.Found
    timings: dict[tuning.Candidate, list[tuning.Timing]]
    load: tuning.Load
    storage_every: int
    every: int
    checks: tuple[tuning.Checked, ...]
    exhaustive: bool
    seconds: float
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def sureness(self) -> tuning.Sureness:
        """How clearly the best one won."""
        return tuning.sureness_of(self.found)

    def ranked(self) -> list[tuning.Candidate]:
        """All that had a turn: finalists first, the recommended one on top, then by their medians."""
        found = self.found

        def key(candidate: tuning.Candidate) -> tuple[bool, bool, float]:
            values = found.finals.get(candidate) or found.samples[candidate]
            return (
                candidate != found.best,
                candidate not in found.finals,
                statistics.median(values),
            )

        return sorted(found.samples, key=key)

    def write_s(self, candidate: tuning.Candidate) -> float:
        """T_w, median over the turns."""
        return statistics.median(timing.write_s for timing in self.timings[candidate])

    def busy(self, candidate: tuning.Candidate) -> float:
        """Saves under way at a time, median over the turns."""
        return statistics.median(timing.busy for timing in self.timings[candidate])


def as_json(report: TuneReport) -> dict[str, Any]:
    """The report as plain values; seconds and bytes."""
    sureness, best = report.sureness, report.found.best
    checks = [dataclasses.asdict(c) | {"overhead": c.overhead} for c in report.checks]
    return {
        "machine": report.machine.to_json(),
        "limits": dataclasses.asdict(report.limits)
        | {"max_overhead": report.max_overhead, "storage_bytes_needed": _storage(report)},
        "recommended": tuning.as_values(best)
        | {"expression": tuning.as_options(best), "environment": tuning.as_environment(best)},
        "interval": {
            "every": report.every,
            "storage_every": report.storage_every,
            "each_s": report.load.each_s,
            "iteration_s": report.load.iteration_s,
            "lost_s": report.load.lost_s,
        },
        "checks": checks,
        "sureness": dataclasses.asdict(sureness) | {"clear": sureness.clear},
        "search": {
            "candidates": report.candidates,
            "turns": report.found.turns,
            "exhaustive": report.exhaustive,
            "complete": report.found.complete,
            "seconds": report.seconds,
        },
        "measured": [_row(report, candidate) for candidate in report.ranked()],
        "problems": list(report.problems),
        "notes": list(report.notes),
    }


def _storage(report: TuneReport) -> int:
    return report.limits.storage_of(report.found.best.in_flight)


def _row(report: TuneReport, candidate: tuning.Candidate) -> dict[str, Any]:
    found = report.found
    return tuning.as_values(candidate) | {
        "turns_s": found.samples[candidate],
        "finals_s": found.finals.get(candidate, []),
        "median_s": statistics.median(found.samples[candidate]),
        "write_s": report.write_s(candidate),
        "busy": report.busy(candidate),
    }
