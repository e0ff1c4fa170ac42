"""`watch`: what is known of a job at one moment, from its roots and its event files. Only reads."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt_core.anywhere import local, url_of
from ckpt_core.cli.listing import Listing, survey, survey_of
from ckpt_core.errors import CkptError
from ckpt_core.report import Facts, Following, RankFacts, Save

_RECENT = 10
_FAR_S = 30.0
"""How long what a store has said counts: each look asks it for all that it lists."""


@dataclass(frozen=True)
class UnderWay:
    """A save that has begun; `phase` is what it is in since `since_unix_s`."""

    rank: int
    step: int
    phase: str
    begin_unix_s: float
    since_unix_s: float


@dataclass(frozen=True)
class Saved:
    """A save that is over. `failure`: why it failed; None: it is durable."""

    rank: int
    step: int
    unix_s: float
    seconds: float
    nbytes: int
    waited_s: float | None
    failure: str | None


@dataclass(frozen=True)
class RankNow:
    """What one rank has told lately.

    Attributes:
        under_way: saves that have begun and are not over, oldest first.
        over: saves that are, in the order of their ends.
        every_steps, every_s: from the save before to the newest; None: there are not two.
        waited_share: of the time between saves, training has waited this part; None: it is not known.
        iteration_s, beside_s: an iteration without, and one with a save beside it, medians; 0: not known.
    """

    rank: int
    host: str
    world_size: int | None
    opened_unix_s: float
    heard_unix_s: float
    under_way: tuple[UnderWay, ...]
    over: tuple[Saved, ...]
    every_steps: int | None = None
    every_s: float | None = None
    waited_share: float | None = None
    iteration_s: float = 0.0
    beside_s: float = 0.0


@dataclass(frozen=True)
class Watched:
    """A job at one moment.

    Attributes:
        roots: those that were named, or that event files name on this machine.
        problems: what could not be read, for people.
        failed: saves that ended before they had begun: moment, rank, text.
    """

    unix_s: float
    roots: tuple[Listing, ...]
    ranks: tuple[RankNow, ...]
    problems: tuple[str, ...]
    failed: tuple[tuple[float, int, str], ...]


class Watcher:
    """Looks at a job again and again."""

    def __init__(self, places: Sequence[str]) -> None:
        """Any of `places` may be a root, a URL of one, or an event file, and may be missing yet."""
        self._places = places
        self._events = Following()
        self._far: dict[str, tuple[float, Listing]] = {}

    def look(self) -> Watched:
        """What is known now. What cannot be read is among the problems."""
        problems: list[str] = []
        roots: dict[str, Listing | None] = {}
        for place in self._places:
            try:
                self._look_at(place, roots, problems)
            except (CkptError, OSError) as exc:
                problems.append(_text(place, exc))
        facts = self._events.facts()
        for named in [] if facts is None else _roots_of(facts):
            if named not in roots:
                try:
                    roots[named] = survey(Path(named))
                except (CkptError, OSError) as exc:
                    problems.append(_text(named, exc))
        ranks = () if facts is None else tuple(_rank(one, facts) for one in facts.ranks)
        listed = tuple(root for root in roots.values() if root is not None)
        failed = () if facts is None else tuple(_lone_failures(facts))
        return Watched(time.time(), listed, ranks, tuple(problems), failed)

    def _look_at(self, place: str, roots: dict[str, Listing | None], problems: list[str]) -> None:
        url = url_of(place)
        if url is not None:
            roots[place] = self._far_root(place)
            return
        path = local(place).absolute()
        if path.is_dir():
            roots[str(path)] = survey(path)
        elif path.is_file():
            self._events.read(path)
        else:
            wrong = "is not there yet" if not path.exists() else "is neither a root nor a file"
            problems.append(f"{path} {wrong}")

    def _far_root(self, place: str) -> Listing:
        at_s, found = self._far.get(place, (0.0, None))
        if found is None or time.monotonic() - at_s > _FAR_S:
            found = survey_of(place)
            self._far[place] = time.monotonic(), found
        return found


def _text(place: str, exc: CkptError | OSError) -> str:
    text = (
        str(exc)
        if isinstance(exc, CkptError)
        else f"{exc.filename or place}: {exc.strerror or exc}"
    )
    return " ".join(text.split())


def _roots_of(facts: Facts) -> list[str]:
    """The roots that event files name, of this machine."""
    here = [rank.opened for rank in facts.ranks if rank.opened.get("host") == platform.node()]
    named = {line["root"] for line in here if isinstance(line.get("root"), str)}
    return [root for root in sorted(named) if Path(root).is_dir()]


def _rank(found: RankFacts, facts: Facts) -> RankNow:
    assert facts.began_unix_s is not None
    origin_s = facts.began_unix_s
    opened_s = found.runs[-1][0]
    # One that has told something since then is still open beside it.
    first_s = min(begin_s for begin_s, end_s in found.runs if end_s >= opened_s)
    last_s = max(end_s for _, end_s in found.runs)
    now = [save for save in found.saves if save.begin_s >= first_s]
    world_size = found.opened.get("world_size")
    every_steps, every_s = None, None
    same = [save for save in now if save.opened_s == now[-1].opened_s]
    if len(same) > 1:
        every_steps, every_s = same[-1].step - same[-2].step, same[-1].begin_s - same[-2].begin_s
    over = [_over(found.rank, save, origin_s) for save in found.saves if save.over]
    return RankNow(
        found.rank,
        str(found.opened.get("host") or ""),
        world_size if isinstance(world_size, int) else None,
        origin_s + opened_s,
        origin_s + last_s,
        tuple([_under_way(found.rank, save, origin_s) for save in now if not save.over]),
        tuple(sorted(over, key=lambda save: save.unix_s)),
        every_steps,
        every_s,
        _waited_share(now[-_RECENT:]),
        found.clean_s,
        sorted(found.beside_s)[len(found.beside_s) // 2] if found.beside_s else 0.0,
    )


def _under_way(rank: int, save: Save, origin_s: float) -> UnderWay:
    phase, since_s = "staging", save.begin_s
    if save.staged_s is not None:
        phase, since_s = "persist", save.staged_s
    if save.persisted_s is not None:
        phase, since_s = "commit", save.persisted_s
    return UnderWay(rank, save.step, phase, origin_s + save.begin_s, origin_s + since_s)


def _over(rank: int, save: Save, origin_s: float) -> Saved:
    return Saved(
        rank,
        save.step,
        origin_s + save.until_s,
        save.until_s - save.begin_s,
        save.nbytes,
        save.waited_s,
        save.failure,
    )


def _waited_share(saves: Sequence[Save]) -> float | None:
    if len(saves) < 2 or any(save.waited_s is None for save in saves):
        return None
    lasted_s = saves[-1].begin_s - saves[0].begin_s
    return sum(save.waited_s or 0.0 for save in saves[:-1]) / lasted_s if lasted_s > 0 else None


def _lone_failures(facts: Facts) -> list[tuple[float, int, str]]:
    """What failed before it had begun; saves that failed say so themselves."""
    assert facts.began_unix_s is not None
    return [
        (facts.began_unix_s + mark.time_s, rank.rank, mark.detail)
        for rank in facts.ranks
        for mark in rank.marks
        if mark.name == "failed"
    ]
