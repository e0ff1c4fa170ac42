"""Lines of event files as facts, all ranks on one clock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt_core.errors import ConfigError
from ckpt_core.observe import EventLines, EventName
from ckpt_core.report.ranks import Line, RankFacts, RankLines, Save, number, opening_of

_SAME_CLOCK_S = 1.0
"""Two readings of a machine's clocks differ by less; after a reboot by more."""
_READ_BYTES = 16 << 20
_KEPT_LINES = 400
_Offsets = dict[tuple[int, str | None], float]
"""Of each rank and opening; under None, as its rank has told last."""


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

    Kept are, for each rank, the newest lines of saves and of iterations, and how it was opened that has told
    them. What comes before any "opened" is taken to be of this machine, and of now.
    """

    def __init__(self) -> None:
        self._clocks = _Clocks(time.time() - time.monotonic())
        self._files: dict[Path, tuple[EventLines, _Offsets]] = {}
        self._opened: dict[tuple[int, str | None], Line] = {}
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
        since_s = {line["rank"]: line["at_s"] for line in self._opened.values()}
        since_s |= {kept[0]["rank"]: kept[0]["at_s"] for kept in whole if len(kept) == kept.maxlen}
        return _facts(lines, self._clocks.known, unreadable=unreadable, cut=cut, since_s=since_s)

    def _keep(self, line: Line) -> None:
        rank, name = line["rank"], line["name"]
        if name == "opened":
            # What another run has told would be taken for iterations of this one.
            self._kept.pop((rank, True), None)
            told = {(old["rank"], opening_of(old)) for kept in self._kept.values() for old in kept}
            # Last in order: the newest of its rank.
            self._opened = {
                key: old for key, old in self._opened.items() if key in told or key[0] != rank
            }
            self._opened.pop((rank, opening_of(line)), None)
            self._opened[rank, opening_of(line)] = line
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

    def aligned(self, lines: list[Line], offsets: _Offsets) -> list[Line]:
        """The lines of one file in its order, with `at_s`; those without a finite time are left out.

        Args:
            offsets: of the file, as its lines before have told; those of these lines are added.
        """
        found = []
        for line in lines:
            rank, time_s, opening = line["rank"], number(line, "time_s"), opening_of(line)
            if time_s is None:
                continue
            if line["name"] == "opened" and (unix_s := number(line, "unix_s")) is not None:
                offset_s = self._offset(str(line.get("host")), unix_s - time_s)
                offsets[rank, opening] = offsets[rank, None] = offset_s
            latest_s = offsets.get((rank, None), self._any)
            found.append(line | {"at_s": time_s + offsets.get((rank, opening), latest_s)})
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
    origin_s = min(line["at_s"] - (number(line, "seconds") or 0.0) for line in lines)
    tellers: dict[int, RankLines] = {}
    in_flight = None
    # Stable: lines of one rank that tell of the same moment stay as they were written.
    for line in sorted(lines, key=lambda line: line["at_s"]):
        options = line.get("options")
        if in_flight is None and isinstance(options, dict):
            in_flight = options.get("in_flight")
        rank = line["rank"]
        if rank not in tellers:
            tellers[rank] = RankLines(rank, since_s=(since_s or {}).get(rank, origin_s) - origin_s)
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


def saves_of(ranks: Iterable[RankFacts]) -> dict[int, list[tuple[int, Save]]]:
    """Steps in ascending order, with every save of them and its rank."""
    found: dict[int, list[tuple[int, Save]]] = {}
    for rank in ranks:
        for save in rank.saves:
            found.setdefault(save.step, []).append((rank.rank, save))
    return dict(sorted(found.items()))
