"""The parts of a run: which figure of which paper, which ways it compares, and what their turns say. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from ckpt_core.bench.papers import ways
from ckpt_core.bench.papers.found import (
    AMPLIFICATION,
    INTERVAL,
    PERSIST,
    SLOWDOWN,
    STALL,
    THROUGHPUT,
    Found,
    per_s,
    slowdown,
    smallest_interval,
)
from ckpt_core.bench.papers.settings import PapersMeasure, PapersSettings
from ckpt_core.bench.papers.ways import Way
from ckpt_core.bench.results import Figure

Answer = Mapping[str, Any]
Intervals = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """What the turn of one way in one round has found.

    Attributes:
        way: whose turn it was.
        blocks: interval -> block of training; empty where single checkpoints are measured.
        base_s: an iteration without checkpoints in the same round; 0 there.
        saved: the answer for a single checkpoint; empty where training is measured.
        state_bytes: of the state.
    """

    way: Way
    blocks: Mapping[int, Answer]
    base_s: float
    saved: Answer
    state_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One figure.

    Attributes:
        measure: its name.
        file: of the files that hold it, without a suffix.
        title: what it shows.
        source: where it is in the paper.
        axis: what points lie over that have a place; empty for bars alone.
        ways: who is compared.
        intervals: blocks of a turn; None where single checkpoints are measured.
        note: turns what a turn has found into points.
        sizes: of the states; None: that of the settings.
    """

    measure: PapersMeasure
    file: str
    title: str
    source: str
    axis: str
    ways: Callable[[PapersSettings], tuple[Way, ...]]
    intervals: Callable[[PapersSettings], Intervals] | None
    note: Callable[[Found, Turn, PapersSettings], None]
    sizes: Callable[[PapersSettings], Intervals] | None = None


def _throughput(found: Found, turn: Turn, settings: PapersSettings) -> None:
    for every, block in turn.blocks.items():
        found.add(THROUGHPUT, turn.way.line, every, per_s(block))
        found.add(SLOWDOWN, turn.way.line, every, slowdown(block, turn.base_s))


def _persist(found: Found, turn: Turn, settings: PapersSettings) -> None:
    found.add(PERSIST, turn.way.line, turn.state_bytes, turn.saved["seconds"])


def _slowdowns(found: Found, turn: Turn, settings: PapersSettings) -> None:
    for every, block in turn.blocks.items():
        found.add(SLOWDOWN, turn.way.line, every, slowdown(block, turn.base_s))


def _at(quantity: Figure) -> Callable[[Found, Turn, PapersSettings], None]:
    """Points that lie where the way says."""

    def note(found: Found, turn: Turn, settings: PapersSettings) -> None:
        (block,) = turn.blocks.values()
        value = per_s(block) if quantity == THROUGHPUT else slowdown(block, turn.base_s)
        found.add(quantity, turn.way.line, turn.way.at, value)

    return note


def _intervals(found: Found, turn: Turn, settings: PapersSettings) -> None:
    points = sorted(
        (every, slowdown(block, turn.base_s) - 1) for every, block in turn.blocks.items()
    )
    _slowdowns(found, turn, settings)
    found.add(INTERVAL, turn.way.line, None, smallest_interval(settings.max_overhead, points))


def _separated(found: Found, turn: Turn, settings: PapersSettings) -> None:
    # A filesystem in memory counts nothing as written, so what lies there has to do.
    written = turn.saved["newest_bytes"] if turn.way.in_memory else turn.saved["written"]
    found.add(PERSIST, turn.way.line, None, turn.saved["seconds"])
    if written:
        found.add(AMPLIFICATION, turn.way.line, None, written / turn.state_bytes)


def _breakdown(found: Found, turn: Turn, settings: PapersSettings) -> None:
    (block,) = turn.blocks.values()
    found.add(STALL, turn.way.line, None, median(block["stalls_s"]))
    found.add(THROUGHPUT, turn.way.line, None, per_s(block))


_EVERY = "iterations between checkpoints"

PARTS = (
    Part(
        measure=PapersMeasure.THROUGHPUT,
        file="pccheck-fig8",
        title="Throughput against the interval",
        source="PCcheck section 5.2.1, figure 8",
        axis=_EVERY,
        ways=lambda settings: ways.all_contenders(),
        intervals=lambda settings: settings.intervals,
        note=_throughput,
    ),
    Part(
        measure=PapersMeasure.PERSIST,
        file="pccheck-fig11",
        title="Time to persist one checkpoint against its size",
        source="PCcheck section 5.3, figure 11",
        axis="bytes of the state",
        ways=lambda settings: ways.all_contenders(),
        intervals=None,
        sizes=lambda settings: settings.sizes,
        note=_persist,
    ),
    Part(
        measure=PapersMeasure.IN_FLIGHT,
        file="pccheck-fig12",
        title="Slowdown with N checkpoints under way",
        source="PCcheck section 5.4.1, figure 12",
        axis=_EVERY,
        ways=lambda settings: ways.numbers_in_flight(settings.in_flight),
        intervals=lambda settings: settings.in_flight_intervals,
        note=_slowdowns,
    ),
    Part(
        measure=PapersMeasure.WRITERS,
        file="pccheck-fig13",
        title="Slowdown with p writers for each of N checkpoints",
        source="PCcheck section 5.4.2, figure 13",
        axis="writers for each checkpoint, p",
        ways=lambda settings: ways.numbers_of_writers(settings.in_flight[:3], settings.threads),
        intervals=lambda settings: (settings.one_interval,),
        note=_at(SLOWDOWN),
    ),
    Part(
        measure=PapersMeasure.MEMORY,
        file="pccheck-fig14",
        title="Throughput against staging memory",
        source="PCcheck section 5.4.3, figure 14",
        axis="staging memory in sizes of a checkpoint",
        ways=lambda settings: ways.sizes_of_memory(settings.memory_states, settings.chunks),
        intervals=lambda settings: (settings.one_interval,),
        note=_at(THROUGHPUT),
    ),
    Part(
        measure=PapersMeasure.INTERVALS,
        file="lightcheck-table1",
        title="What a save costs, and how often it may be",
        source="LightCheck section IV-B, table I",
        axis=_EVERY,
        ways=lambda settings: ways.placed(),
        intervals=lambda settings: settings.interval_points,
        note=_intervals,
    ),
    Part(
        measure=PapersMeasure.SEPARATED,
        file="lightcheck-fig11",
        title="Time of one checkpoint, data map and tensors apart or entry by entry",
        source="LightCheck section IV-D, figure 11",
        axis="",
        ways=lambda settings: ways.layouts(),
        intervals=None,
        note=_separated,
    ),
    Part(
        measure=PapersMeasure.BREAKDOWN,
        file="checkfreq-breakdown",
        title="What each phase behind training is worth",
        source="CheckFreq, Evaluation, Breakdown of Benefits",
        axis="",
        ways=lambda settings: ways.steps(),
        intervals=lambda settings: (settings.breakdown_interval,),
        note=_breakdown,
    ),
)


def chosen(part: Part, settings: PapersSettings) -> tuple[Way, ...]:
    """The ways of a part whose contenders take part, and for which there is a place to write to."""
    return tuple(
        way
        for way in part.ways(settings)
        if way.contender in settings.contenders and not (way.in_memory and settings.memory is None)
    )
