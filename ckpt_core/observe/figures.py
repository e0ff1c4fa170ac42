"""Figures of a run for Prometheus: counted from its events, told in the text format 0.0.4.

Labels are the root and the rank, and of levels their URL; never a step. A handler takes microseconds: what
has to be asked for is asked when the text is made.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ckpt_core.observe.event import Event, EventName
from ckpt_core.observe.log import EventLog
from ckpt_core.system.threads import own_lock

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_BYTES = tuple(float(1 << power) for power in range(20, 42, 2))
_HEARD = (
    *(EventName.BEGIN, EventName.STAGED, EventName.COMMITTED, EventName.FAILED, EventName.RETIRED),
    *(EventName.LEVEL_REACHED, EventName.LEVEL_PASSED_OVER),
)
"""No others: those are told on the training thread, at each step."""

_FAMILIES = {
    "open": ("gauge", "1 while the root is open for saving, 0 once it was closed."),
    "opened_timestamp_seconds": ("gauge", "When the root was opened."),
    "newest_step": ("gauge", "The step that was committed last."),
    "newest_commit_timestamp_seconds": ("gauge", "When this run committed a step last."),
    "in_flight": ("gauge", "Saves that have begun and are not over."),
    "saves_total": ("counter", "Steps committed."),
    "save_failures_total": ("counter", "Saves that failed."),
    "saved_bytes_total": ("counter", "Bytes of committed steps."),
    "retired_steps_total": ("counter", "Steps that retention has let go."),
    "stall_seconds_total": ("counter", "Time that training has spent inside the engine."),
    "save_stall_seconds": ("histogram", "What training waited from one end of a save to the next."),
    "save_staging_seconds": ("histogram", "From the begin of a save until its state was copied."),
    "save_durable_seconds": ("histogram", "From the begin of a save until it was committed."),
    "save_bytes": ("histogram", "Bytes of a committed step."),
    "level_newest_step": ("gauge", "The newest step that is whole at a level."),
    "level_lag_steps": ("gauge", "How far that is behind the newest step of the root."),
    "level_unsent_bytes": ("gauge", "What is still to be sent of the step on its way there."),
    "level_sent_bytes_total": ("counter", "Bytes sent since the agent began."),
    "level_problem": ("gauge", "1 while a level cannot go on, else 0."),
    "level_reached_steps_total": ("counter", "Steps that have come to a level."),
    "level_passed_over_steps_total": ("counter", "Steps that never will."),
}
_FAMILY = "ckpt_core_"
Samples = dict[str, list[str]]
"""Lines by the name of their family."""


class LevelFigures(Protocol):
    """What is asked of a level: see `ckpt_core.save.LevelGauge`."""

    @property
    def url(self) -> str: ...
    @property
    def newest(self) -> int | None: ...
    @property
    def lag_steps(self) -> int | None: ...
    @property
    def sent_bytes(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def bytes_all(self) -> int: ...
    @property
    def problem(self) -> str: ...


class Figures:
    """Counts what the events of one Checkpointer tell.

    Args:
        log: its events.
        root, rank: labels of every figure.
        waited_s: how long the training thread has been inside the engine so far.
        levels: how far each further level is; asked whenever the figures are.
        changed: called in the thread of an event that changed something.
    """

    def __init__(
        self,
        log: EventLog,
        *,
        root: str,
        rank: int,
        waited_s: Callable[[], float],
        levels: Callable[[], Sequence[LevelFigures]],
    ) -> None:
        self.changed: Callable[[], object] = lambda: None
        self._labels = {"root": root, "rank": str(rank)}
        self._waited_s, self._levels = waited_s, levels
        self._mutex = own_lock()
        self._values: dict[str, float] = {"open": 1, "opened_timestamp_seconds": time.time()}
        self._values |= dict.fromkeys(("saves_total", "save_failures_total"), 0)
        self._values |= dict.fromkeys(("saved_bytes_total", "retired_steps_total"), 0)
        self._by_level: dict[tuple[str, str], int] = {}
        self._under_way: set[int | None] = set()
        self._told_s = 0.0
        self._histograms = {
            "save_stall_seconds": _Histogram(_SECONDS),
            "save_staging_seconds": _Histogram(_SECONDS),
            "save_durable_seconds": _Histogram(_SECONDS),
            "save_bytes": _Histogram(_BYTES),
        }
        self._unsubscribe = log.subscribe(self._event, only=_HEARD)

    def found(self, newest: int | None) -> None:
        """The newest step that was in the root when it was opened."""
        with self._mutex:
            if newest is not None:
                self._values.setdefault("newest_step", newest)
        self.changed()

    def close(self) -> None:
        """Count no more. Idempotent."""
        self._unsubscribe()
        with self._mutex:
            self._values["open"] = 0
            self._under_way.clear()

    def samples(self) -> Samples:
        """All lines. May ask storage how far levels are; never raises for what it cannot learn."""
        try:
            levels: Sequence[LevelFigures] = self._levels()
        except Exception:
            levels = ()  # the root cannot be listed now: the other figures are right all the same
        with self._mutex:
            lines = {name: [self._line(name, value)] for name, value in self._values.items()}
            lines["in_flight"] = [self._line("in_flight", len(self._under_way))]
            lines["stall_seconds_total"] = [self._line("stall_seconds_total", self._waited_s())]
            for name, histogram in self._histograms.items():
                lines[name] = list(histogram.lines(name, self._line))
            for (name, url), count in self._by_level.items():
                lines.setdefault(name, []).append(self._line(name, count, level=url))
        for level in levels:
            for name, value in _of_level(level):
                lines.setdefault(name, []).append(self._line(name, value, level=level.url))
        return lines

    def _event(self, event: Event) -> None:
        with self._mutex:
            self._count(event)
        self.changed()

    def _count(self, event: Event) -> None:
        name, values = event.name, self._values
        if name == EventName.BEGIN:
            self._under_way.add(event.step)
        elif name == EventName.STAGED:
            self._histograms["save_staging_seconds"].add(event.seconds)
        elif name == EventName.COMMITTED:
            values["saves_total"] += 1
            values["saved_bytes_total"] += event.nbytes
            values["newest_step"] = event.step or 0
            values["newest_commit_timestamp_seconds"] = time.time()
            self._histograms["save_durable_seconds"].add(event.seconds)
            self._histograms["save_bytes"].add(event.nbytes)
            self._over(event)
        elif name == EventName.FAILED:
            values["save_failures_total"] += 1
            self._over(event)
        elif name == EventName.RETIRED:
            values["retired_steps_total"] += 1
        else:
            key = (f"{name}_steps_total", event.detail)
            self._by_level[key] = self._by_level.get(key, 0) + 1

    def _over(self, event: Event) -> None:
        self._under_way.discard(event.step)
        waited_s = self._waited_s()
        self._histograms["save_stall_seconds"].add(max(waited_s - self._told_s, 0.0))
        self._told_s = waited_s

    def _line(self, name: str, value: float, **labels: str) -> str:
        pairs = [f'{key}="{_escaped(text)}"' for key, text in {**self._labels, **labels}.items()]
        return f"{_FAMILY}{name}{{{','.join(pairs)}}} {_number(value)}\n"


class _Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, line: Callable[..., str]) -> Iterable[str]:
        bounds = [*map(_number, self._bounds), "+Inf"]
        for bound, count in zip(bounds, itertools.accumulate(self._counts), strict=True):
            yield line(f"{name}_bucket", count, le=bound)
        yield line(f"{name}_sum", self._sum)
        yield line(f"{name}_count", sum(self._counts))


def told(all_of: Iterable[Figures]) -> bytes:
    """The figures of some Checkpointers as one text."""
    samples = [one.samples() for one in all_of]
    parts: list[str] = []
    for name, (kind, text) in _FAMILIES.items():
        lines = [line for one in samples for line in one.get(name, ())]
        if lines:
            parts += [
                f"# HELP {_FAMILY}{name} {text}\n",
                f"# TYPE {_FAMILY}{name} {kind}\n",
                *lines,
            ]
    return "".join(parts).encode(errors="backslashreplace")


def _of_level(level: LevelFigures) -> Iterable[tuple[str, float]]:
    if level.newest is not None:
        yield "level_newest_step", level.newest
    if level.lag_steps is not None:
        yield "level_lag_steps", level.lag_steps
    yield "level_unsent_bytes", max(level.total_bytes - level.sent_bytes, 0)
    yield "level_sent_bytes_total", level.bytes_all
    yield "level_problem", bool(level.problem)


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
