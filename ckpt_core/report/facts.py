"""Lines of event files as facts, all ranks on one clock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_core.errors import ConfigError
from ckpt_core.observe import EventLines, EventName
from ckpt_core.policy import tuning

_SAME_CLOCK_S = 1.0
"""Two readings of a machine's clocks differ by less; after a reboot by more."""
_READ_BYTES = 16 << 20
_KEPT_LINES = 400
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
        place: which of the places in flight it had, from 0.
        until_s: where its bar ends: its own end, or the last that its run has told.
        waited_s: what training waited from its call to the next; None: the file does not say.
        failure: why it failed; None if it did not.
    """

    step: int
    place: int
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
        runs: first and last moment of each time that it was opened.
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
        """Seconds of all runs."""
        return sum(end - begin for begin, end in self.runs)


@dataclass(frozen=True, slots=True)
class Facts:
    """A whole page. `seconds` is its length, `in_flight` the places that were set.

    `unreadable` counts lines that are none of an event file; `cut` says that a file ends within a line.
    """

    ranks: tuple[RankFacts, ...]
    seconds: float
    began_unix_s: float | None
    in_flight: int | None
    unreadable: int
    cut: bool


def gather(paths: Sequence[Path]) -> Facts:
    """The facts of some event files, which may hold lines of several ranks each.

    Raises:
        ConfigError: there is no such file, or none of its lines is an event.
        OSError: a file cannot be read.
    """
    lines: list[Line] = []
    clocks, unreadable, cut = _Clocks(), 0, False
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path} does not exist: name what events_file= of the run named")
        file = EventLines()
        lines += clocks.aligned(file.read(path), {})
        unreadable += file.unreadable
        cut = cut or file.cut
    if not lines:
        text = f"no line in {', '.join(map(str, paths))} is an event; a run writes them with events_file="
        raise ConfigError(text)
    return _facts(lines, clocks.known, unreadable=unreadable, cut=cut)


class Following:
    """Event files that are still written: the facts of their newest lines.

    Kept are, for each rank, how it was last opened, and the newest lines of saves and of iterations. What
    comes before any "opened" is taken to be of this machine, and of now.
    """

    def __init__(self) -> None:
        self._clocks = _Clocks(time.time() - time.monotonic())
        self._files: dict[Path, tuple[EventLines, dict[int, float]]] = {}
        self._opened: dict[int, Line] = {}
        self._kept: dict[tuple[int, bool], deque[Line]] = {}

    def read(self, path: Path) -> None:
        """Read what has come since the last time; nothing where there is no file yet.

        Raises:
            OSError: the file cannot be read.
        """
        file, offsets = self._files.setdefault(path, (EventLines(), {}))
        while lines := file.read(path, most_bytes=_READ_BYTES):
            for line in self._clocks.aligned(lines, offsets):
                self._keep(line)

    def facts(self) -> Facts | None:
        """What is known now; None before the first line."""
        lines = [*self._opened.values(), *(line for kept in self._kept.values() for line in kept)]
        if not lines:
            return None
        files = [file for file, _ in self._files.values()]
        unreadable, cut = sum(file.unreadable for file in files), any(file.cut for file in files)
        whole = [kept for (_, of_training), kept in self._kept.items() if of_training]
        since_s = {kept[0]["rank"]: kept[0]["at_s"] for kept in whole if len(kept) == kept.maxlen}
        return _facts(lines, self._clocks.known, unreadable=unreadable, cut=cut, since_s=since_s)

    def _keep(self, line: Line) -> None:
        rank, name = line["rank"], line["name"]
        if name == "opened":
            self._opened[rank] = line
            # What another run has told would be taken for iterations of this one.
            self._kept.pop((rank, True), None)
            return
        of_training = name in ("barrier", EventName.WAITED)
        kept = self._kept.setdefault((rank, of_training), deque(maxlen=_KEPT_LINES))
        kept.append(line)


class _Clocks:
    """From the monotonic clocks of machines to one, by what the lines "opened" say of both."""

    def __init__(self, offset_s: float | None = None) -> None:
        self.known = offset_s is not None
        self._offsets: dict[str, float] = {}
        self._any = offset_s or 0.0

    def aligned(self, lines: list[Line], offsets: dict[int, float]) -> list[Line]:
        """The lines of one file in its order, with `at_s`; those without a finite time are left out.

        Args:
            offsets: of its ranks, as its lines before have told; those of these lines are added.
        """
        found = []
        for line in lines:
            rank, time_s = line["rank"], _number(line, "time_s")
            if time_s is None:
                continue
            if line["name"] == "opened" and (unix_s := _number(line, "unix_s")) is not None:
                offsets[rank] = self._offset(str(line.get("host")), unix_s - time_s)
            found.append(line | {"at_s": time_s + offsets.get(rank, self._any)})
        return found

    def _offset(self, host: str, offset_s: float) -> float:
        known = self._offsets.get(host)
        if known is None or abs(known - offset_s) > _SAME_CLOCK_S:
            self._offsets[host] = known = offset_s
        if not self.known:
            self.known, self._any = True, known
        return known


def _facts(
    lines: list[Line],
    known: bool,
    *,
    unreadable: int,
    cut: bool,
    since_s: Mapping[int, float] | None = None,
) -> Facts:
    """Args: since_s: where earlier barriers of a rank are missing, the moment of its first."""
    origin_s = min(line["at_s"] - (_number(line, "seconds") or 0.0) for line in lines)
    tellers: dict[int, _Rank] = {}
    in_flight = None
    # Stable: lines of one rank that tell of the same moment stay as they were written.
    for line in sorted(lines, key=lambda line: line["at_s"]):
        options = line.get("options")
        if in_flight is None and isinstance(options, dict):
            in_flight = options.get("in_flight")
        rank = line["rank"]
        if rank not in tellers:
            tellers[rank] = _Rank(rank, since_s=(since_s or {}).get(rank, origin_s) - origin_s)
        tellers[rank].take(line, line["at_s"] - origin_s)
    ranks = tuple(tellers[rank].facts() for rank in sorted(tellers))
    return Facts(
        ranks,
        max(line["at_s"] for line in lines) - origin_s,
        origin_s if known else None,
        in_flight if isinstance(in_flight, int) else None,
        unreadable,
        cut,
    )


class _Rank:
    """The lines of one rank, in order of time."""

    def __init__(self, rank: int, *, since_s: float) -> None:
        self._found = RankFacts(rank)
        self._since_s = since_s
        self._open: list[Save] = []
        self._earlier: list[Save] = []
        self._barriers: list[float] = []
        self._iterations: list[tuple[float, float]] = []
        self._waited_s: float | None = None
        self._in_call: Save | None = None

    def take(self, line: Line, now_s: float) -> None:
        found, name, step = self._found, line["name"], line.get("step")
        seconds = _number(line, "seconds") or 0.0
        if name == "opened":
            found.opened = line
        if name == "opened" or not found.runs:
            self._begin_run(str(line.get("host") or ""), now_s)
        barrier_s = seconds if name == EventName.WAITED else 0.0
        self._wait(_number(line, "waited_s"), now_s, barrier_s=barrier_s)
        found.runs[-1] = (found.runs[-1][0], now_s)
        if name == "barrier":
            self._barriers.append(now_s)
        elif name == EventName.WAITED:
            found.waits.append((now_s - seconds, now_s))
        elif name == EventName.RESTORED:
            found.restores.append((now_s - seconds, now_s))
        elif isinstance(step, int):
            self._of_step(line, step, now_s)
        elif name in _MARKED or name == EventName.FAILED:
            found.marks.append(Mark(name, now_s, None, str(line.get("detail") or "")))

    def facts(self) -> RankFacts:
        self._end_run()
        found = self._found
        spans = tuple((save.begin_s, save.until_s) for save in found.saves)
        trace = tuning.Trace(spans, tuple(self._iterations))
        found.clean_s = tuning.clean_iteration_s(trace)
        _, found.beside_s = tuning.beside(trace)
        if not found.knows_calls:
            found.waited_s = sum(end - begin for begin, end in found.waits)
        return found

    def _of_step(self, line: Line, step: int, now_s: float) -> None:
        name, detail = line["name"], str(line.get("detail") or "")
        if name == EventName.BEGIN:
            self._begin(step, now_s)
            return
        save = next((save for save in (*self._open, *self._earlier) if save.step == step), None)
        if save is None or name in _MARKED:
            if name in _MARKED or name == EventName.FAILED:
                self._found.marks.append(Mark(name, now_s, step, detail))
            return
        save.nbytes = int(_number(line, "nbytes") or save.nbytes)
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
            (self._open if save in self._open else self._earlier).remove(save)

    def _begin(self, step: int, now_s: float) -> None:
        taken = {save.place for save in self._open}
        place = next(place for place in range(len(taken) + 1) if place not in taken)
        save = Save(step=step, place=place, begin_s=now_s, until_s=now_s)
        if self._waited_s is not None:
            save.waited_s = 0.0
        self._open.append(save)
        self._found.saves.append(save)
        self._in_call = save

    def _wait(self, waited_s: float | None, now_s: float, *, barrier_s: float) -> None:
        """What training has waited since the line before belongs to the save that was called last."""
        if waited_s is None:
            return
        more_s, self._waited_s = max(waited_s - (self._waited_s or 0.0), 0.0), waited_s
        self._found.knows_calls = True
        self._found.waited_s += more_s
        save = self._found.saves[-1] if self._found.saves else None
        if not more_s or save is None or save.waited_s is None:
            return
        save.waited_s += more_s
        call_s = more_s - barrier_s
        if save is self._in_call and call_s > 0:
            # Its call began before it had a place, and that moment is not told: drawn from there on.
            self._found.calls.append((save.begin_s, min(save.begin_s + call_s, now_s)))
            self._in_call = None

    def _begin_run(self, host: str, now_s: float) -> None:
        self._end_run()
        self._waited_s = None
        self._found.runs.append((now_s, now_s))
        if host and host not in self._found.hosts:
            self._found.hosts.append(host)

    def _end_run(self) -> None:
        if not self._found.runs:
            return
        first_s, last_s = self._found.runs[-1]
        for save in self._open:
            save.until_s = last_s
        first_s = max(first_s, self._since_s)
        begins = [
            (save.step, save.begin_s) for save in self._found.saves if save.begin_s >= first_s
        ]
        self._iterations += tuning.iterations_of(self._barriers, begins)
        # Two Checkpointers may take turns in one file: what began under the first may still end.
        self._earlier += self._open
        self._open, self._barriers, self._in_call = [], [], None


def _number(line: Line, key: str) -> float | None:
    value = line.get(key)
    return value if isinstance(value, int | float) and abs(value) < _MOST else None


def saves_of(ranks: Iterable[RankFacts]) -> dict[int, list[tuple[int, Save]]]:
    """Steps in ascending order, with every save of them and its rank."""
    found: dict[int, list[tuple[int, Save]]] = {}
    for rank in ranks:
        for save in rank.saves:
            found.setdefault(save.step, []).append((rank.rank, save))
    return dict(sorted(found.items()))
