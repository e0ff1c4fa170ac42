"""What the lines of one rank come to, each time that it was opened apart from the others."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from ckpt_core.observe import EventName
from ckpt_core.policy import tuning

_MOST = 2.0**63
"""Above are neither moments nor sizes; not-a-number is not below it either."""
_MARKED = (
    EventName.RETIRED,
    EventName.LEVEL_REACHED,
    EventName.LEVEL_PASSED_OVER,
    EventName.LEVEL_PROBLEM,
)
Line = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Save:
    """A save of one rank. Moments are seconds since the begin of the page; None: never seen.

    Attributes:
        attempt: names it, the same on all ranks; None: the file is of before that was noted.
        place: which of the places in flight it had, from 0.
        opened_s: when its Checkpointer was opened, or its first line where that is missing.
        until_s: where its bar ends: its own end, or the last that its run has told.
        waited_s: what training waited from its call to the next; None: the file does not say.
        failure: why it failed; None if it did not.
    """

    step: int
    attempt: str | None
    place: int
    opened_s: float
    begin_s: float
    until_s: float
    staged_s: float | None = None
    persisted_s: float | None = None
    committed_s: float | None = None
    nbytes: int = 0
    waited_s: float | None = None
    failure: str | None = None

    @property
    def over(self) -> bool:
        """Its end was told."""
        return self.committed_s is not None or self.failure is not None


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at one moment: a name of an event, its step and its text."""

    name: str
    time_s: float
    step: int | None
    detail: str


@dataclass(slots=True)
class RankFacts:
    """What one rank has told.

    Attributes:
        opened: the line of the last time that it was opened: options, root, world_size.
        runs: first and last moment of each time that it was opened, in the order of the first.
        waits: spans of training in a barrier; `calls`: in `save`.
        clean_s: an iteration beside which no save was under way, median; 0: not known.
        beside_s: seconds of those beside which one was.
        waited_s: of training in all; `knows_calls`: what `save` itself took is in it.
    """

    rank: int
    opened: Line = field(default_factory=dict)
    hosts: list[str] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)
    calls: list[tuple[float, float]] = field(default_factory=list)
    restores: list[tuple[float, float]] = field(default_factory=list)
    runs: list[tuple[float, float]] = field(default_factory=list)
    clean_s: float = 0.0
    beside_s: list[float] = field(default_factory=list)
    waited_s: float = 0.0
    knows_calls: bool = False

    @property
    def lasted_s(self) -> float:
        """Seconds in which it was open: two Checkpointers may be so at a time."""
        lasted_s, counted_s = 0.0, float("-inf")
        for begin_s, end_s in self.runs:
            lasted_s += max(end_s - max(begin_s, counted_s), 0.0)
            counted_s = max(counted_s, end_s)
        return lasted_s


@dataclass(slots=True)
class _Run:
    """What one Checkpointer has told: its counters go on from line to line.

    Attributes:
        whole: its lines are there from "opened" on.
        waited_s: what it had waited as of the last line; None: no line has said.
        in_call: the save whose call may still be waiting.
    """

    begin_s: float
    last_s: float
    whole: bool
    saves: list[Save] = field(default_factory=list)
    open: list[Save] = field(default_factory=list)
    barriers: list[float] = field(default_factory=list)
    waited_s: float | None = None
    in_call: Save | None = None


class RankLines:
    """Takes the lines of one rank, in order of time."""

    def __init__(self, rank: int, *, since_s: float) -> None:
        """Args: since_s: the moment of its first barrier that is there, where earlier ones are missing."""
        self._found = RankFacts(rank)
        self._since_s = since_s
        self._runs: list[_Run] = []
        self._by_opening: dict[str | None, _Run] = {}
        self._earlier: list[Save] = []

    def take(self, line: Line, now_s: float) -> None:
        """One more line; `now_s`: seconds since the begin of the page."""
        found, name, step = self._found, line["name"], line.get("step")
        seconds = number(line, "seconds") or 0.0
        run = self._run_of(line, now_s)
        barrier_s = seconds if name == EventName.WAITED else 0.0
        self._wait(run, number(line, "waited_s"), now_s, barrier_s=barrier_s)
        if name == "barrier":
            run.barriers.append(now_s)
        elif name == EventName.WAITED:
            found.waits.append((now_s - seconds, now_s))
        elif name == EventName.RESTORED:
            found.restores.append((now_s - seconds, now_s))
        elif isinstance(step, int):
            self._of_step(run, line, step, now_s)
        elif name in _MARKED or name == EventName.FAILED:
            found.marks.append(Mark(name, now_s, None, str(line.get("detail") or "")))

    def facts(self) -> RankFacts:
        """What they come to."""
        found = self._found
        found.runs = sorted((run.begin_s, run.last_s) for run in self._runs)
        for run in self._runs:
            for save in run.saves:
                if not save.over:
                    save.until_s = run.last_s
        spans = tuple((save.begin_s, save.until_s) for save in found.saves)
        trace = tuning.Trace(spans, tuple(self._iterations()))
        clean, found.beside_s = tuning.beside(trace, left_out=0)
        found.clean_s = statistics.median(clean) if clean else 0.0
        if not found.knows_calls:
            found.waited_s = sum(end - begin for begin, end in found.waits)
        return found

    def _run_of(self, line: Line, now_s: float) -> _Run:
        """Of a line that names no opening, as in files of before: whatever was opened last."""
        opening, opened = opening_of(line), line["name"] == "opened"
        run = self._by_opening.get(opening)
        if run is not None and opened and opening is None:
            # Two Checkpointers may take turns in one file: what began under the first may still end.
            self._earlier += run.open
            run = None
        if run is None:
            run = self._by_opening[opening] = _Run(now_s, now_s, whole=opened)
            self._runs.append(run)
        run.last_s = now_s
        if opened:
            self._found.opened, host = line, str(line.get("host") or "")
            if host and host not in self._found.hosts:
                self._found.hosts.append(host)
        return run

    def _of_step(self, run: _Run, line: Line, step: int, now_s: float) -> None:
        name, detail = line["name"], str(line.get("detail") or "")
        if name == EventName.BEGIN:
            self._begin(run, step, now_s, attempt=_text(line, "attempt"))
            return
        begun = run.open if opening_of(line) is not None else [*run.open, *self._earlier]
        named = (_text(line, "attempt"), None)
        mine = [save for save in begun if save.step == step and save.attempt in named]
        save = mine[0] if mine else None
        if save is None or name in _MARKED:
            if name in _MARKED or name == EventName.FAILED:
                self._found.marks.append(Mark(name, now_s, step, detail))
            return
        save.nbytes = int(number(line, "nbytes") or save.nbytes)
        if name == EventName.STAGED:
            save.staged_s = now_s
        elif name == EventName.PERSISTED:
            save.persisted_s = now_s
        elif name == EventName.COMMITTED:
            save.committed_s = now_s
        elif name == EventName.FAILED:
            save.failure = detail or "no reason given"
        if save.over:
            save.until_s = now_s
            (run.open if save in run.open else self._earlier).remove(save)

    def _begin(self, run: _Run, step: int, now_s: float, *, attempt: str | None) -> None:
        taken = {save.place for save in run.open}
        place = next(place for place in range(len(taken) + 1) if place not in taken)
        save = Save(
            step=step,
            attempt=attempt,
            place=place,
            opened_s=run.begin_s,
            begin_s=now_s,
            until_s=now_s,
        )
        if run.waited_s is not None:
            save.waited_s = 0.0
        run.open.append(save)
        run.saves.append(save)
        self._found.saves.append(save)
        run.in_call = save

    def _wait(self, run: _Run, waited_s: float | None, now_s: float, *, barrier_s: float) -> None:
        """What training has waited since the line before belongs to the save that was called last."""
        if waited_s is None:
            return
        before_s = run.waited_s
        if before_s is None:
            # What it had waited in lines that are missing is not of the time that is looked at.
            before_s = 0.0 if run.whole else waited_s
        # The counters of two Checkpointers, in a file that does not tell them apart, are no waits.
        run.waited_s = max(before_s, waited_s)
        more_s = run.waited_s - before_s
        self._found.knows_calls = True
        self._found.waited_s += more_s
        save = run.saves[-1] if run.saves else None
        if not more_s or save is None or save.waited_s is None:
            return
        save.waited_s += more_s
        call_s = more_s - barrier_s
        if save is run.in_call and call_s > 0:
            # Its call began before it had a place, and that moment is not told: drawn from there on.
            self._found.calls.append((save.begin_s, min(save.begin_s + call_s, now_s)))
            run.in_call = None

    def _iterations(self) -> list[tuple[float, float]]:
        """Of all runs, after the first of each. One that two Checkpointers tell of counts once."""
        told: list[tuple[float, float]] = []
        for run in self._runs:
            first_s = max(run.begin_s, self._since_s)
            begins = [(save.step, save.begin_s) for save in run.saves if save.begin_s >= first_s]
            # Each run compiles, allocates and fills caches anew.
            told += tuning.iterations_of(run.barriers, begins)[1:]
        found: list[tuple[float, float]] = []
        for span in sorted(told):
            if not found or span[0] >= found[-1][1]:
                found.append(span)
        return found


def opening_of(line: Line) -> str | None:
    """Which opening of a Checkpointer has told it; None: the file is of before that was noted."""
    return _text(line, "opening")


def _text(line: Line, key: str) -> str | None:
    value = line.get(key)
    return value if isinstance(value, str) else None


def number(line: Line, key: str) -> float | None:
    """The finite number that a line has there; None: it has none."""
    value = line.get(key)
    return value if isinstance(value, int | float) and abs(value) < _MOST else None
