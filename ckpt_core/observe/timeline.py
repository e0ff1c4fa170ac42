"""Events as a Chrome trace: each row one place in flight, each bar one phase of a save. Pure.

Format: the "JSON Object Format" of Chrome's trace events: "X" is a bar, "i" a mark, "M" a name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ckpt_core.observe.event import Event

_PID = 1
_TRAINING_ROW = 0
_RETENTION_ROW = _FAILURE_ROW = 1
_FIRST_SAVE_ROW = 2
_PHASES = {"staged": "staging", "persisted": "persist", "committed": "commit"}
_NEXT_PHASE = {"begin": "staging", "staged": "persist", "persisted": "commit"}
_MARKED = ("level_reached", "level_passed_over", "level_problem")
_LONE_ROWS = {"waited": _TRAINING_ROW, "restored": _TRAINING_ROW, "retired": _RETENTION_ROW}


def timeline(events: Iterable[Event]) -> dict[str, Any]:
    """The trace of some events, ready for `json.dumps`.

    A save takes the lowest row that is free when it begins, so there are as many rows as saves were
    ever in flight together. Saves whose begin is missing are left out; saves without an end are
    drawn up to the last event and say so.
    """
    ordered = sorted(events, key=lambda event: event.time_s)
    if not ordered:
        return {"traceEvents": [], "displayTimeUnit": "ms"}
    drawing = _Drawing(min(event.time_s - event.seconds for event in ordered))
    for event in ordered:
        drawing.add(event)
    drawing.finish(ordered[-1].time_s)
    return {"traceEvents": drawing.names() + drawing.items, "displayTimeUnit": "ms"}


@dataclass(slots=True)
class _Save:
    row: int
    step: int | None
    attempt: str | None
    last: Event


class _Drawing:
    def __init__(self, origin_s: float) -> None:
        self.items: list[dict[str, Any]] = []
        self._origin_s = origin_s
        self._rows: list[_Save | None] = []

    def add(self, event: Event) -> None:
        row = _LONE_ROWS.get(event.name)
        if row is not None:
            self._bar(event.name, row, event.time_s - event.seconds, event.time_s, _about(event))
        elif event.name in _MARKED:
            self._mark(event, _RETENTION_ROW)
        elif event.name == "begin":
            self._enter(event)
        elif (begun := self._save_of(event)) is not None:
            self._advance(event, begun)
        elif event.name == "failed":
            self._mark(event, _FAILURE_ROW)

    def finish(self, end_s: float) -> None:
        for save in self._rows:
            if save is not None:
                about = _about(save.last) | {"unfinished": True}
                self._bar(_NEXT_PHASE[save.last.name], save.row, save.last.time_s, end_s, about)

    def names(self) -> list[dict[str, Any]]:
        rows = ["training thread", "retention, levels and failures"]
        rows += [f"in-flight checkpoint {number + 1}" for number in range(len(self._rows))]
        named = [_meta("process_name", 0, {"name": "ckpt-core"})]
        for row, text in enumerate(rows):
            named.append(_meta("thread_name", row, {"name": text}))
            named.append(_meta("thread_sort_index", row, {"sort_index": row}))
        return named

    def _enter(self, event: Event) -> None:
        if None not in self._rows:
            self._rows.append(None)
        place = self._rows.index(None)
        self._rows[place] = _Save(_FIRST_SAVE_ROW + place, event.step, event.attempt, event)

    def _save_of(self, event: Event) -> _Save | None:
        """The save in flight that an event is about: of its attempt, else the oldest of its step."""
        saves = [save for save in self._rows if save is not None and save.step == event.step]
        named = [save for save in saves if save.attempt == event.attempt is not None]
        open_to_it = [save for save in saves if None in (save.attempt, event.attempt)]
        oldest = sorted(named or open_to_it, key=lambda save: save.last.time_s)
        return oldest[0] if oldest else None

    def _advance(self, event: Event, save: _Save) -> None:
        phase = _PHASES.get(event.name, _NEXT_PHASE[save.last.name])
        self._bar(phase, save.row, save.last.time_s, event.time_s, _about(event))
        if event.name == "failed":
            self._mark(event, save.row)
        if event.name in _NEXT_PHASE:
            save.last, save.attempt = event, save.attempt or event.attempt
        else:
            self._rows[save.row - _FIRST_SAVE_ROW] = None

    def _us(self, time_s: float) -> float:
        return round((time_s - self._origin_s) * 1e6, 3)

    def _bar(
        self, name: str, row: int, start_s: float, end_s: float, about: dict[str, Any]
    ) -> None:
        start = self._us(start_s)
        bar = {"ph": "X", "ts": start, "dur": round(self._us(end_s) - start, 3), "args": about}
        self.items.append({"name": str(name), "cat": "ckpt", "pid": _PID, "tid": row} | bar)

    def _mark(self, event: Event, row: int) -> None:
        mark = {"ph": "i", "s": "t", "ts": self._us(event.time_s), "args": _about(event)}
        self.items.append({"name": str(event.name), "cat": "ckpt", "pid": _PID, "tid": row} | mark)


def _about(event: Event) -> dict[str, Any]:
    about = {"step": event.step, "attempt": event.attempt, "detail": event.detail or None}
    about |= {"bytes": event.nbytes or None}
    return {key: value for key, value in about.items() if value is not None}


def _meta(name: str, row: int, about: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": _PID, "tid": row, "args": about}
