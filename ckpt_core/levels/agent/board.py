"""`Board`: what the threads of an agent know together, and tell in the status."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ckpt_core.levels.mailbox import LevelStatus, Plan, Status
from ckpt_core.options import Level


@dataclass(frozen=True)
class Timing:
    """How often and how long an agent looks, waits and bears, in seconds."""

    poll_s: float = 0.2
    gone_s: float = 1.0
    """Nobody trains any more when the root has been free for so long."""
    look_s: float = 60.0
    """How long what was seen at a level counts, while nobody else works there."""
    others_s: float = 2.0
    """The same while parts of other nodes are missing."""
    agrees_s: float = 0.5
    """How often the nodes of a group look what the others say, while nothing is to come."""
    sweep_s: float = 3600.0
    beat_s: float = 15.0
    again_s: float = 1.0
    again_most_s: float = 60.0
    fenced_s: float = 3.0
    """A trainer that begins takes its session first and writes its plan then."""
    patience_s: float = 3600.0
    """How long an agent goes on without any progress when nobody trains."""
    end_s: float = 3.0
    serves_s: float = 90.0
    """How long other nodes may still come when nobody trains: longer than they pause between tries."""


class Board:
    """What the levels have, whether somebody trains, and the status. Thread-safe."""

    def __init__(
        self, plan: Plan, before: Status | None, *, tell: Callable[[], None] = lambda: None
    ) -> None:
        """Begins with what the last agent of the same Checkpointer said of the same levels.

        Args:
            tell: called when there is something that somebody may wait for.
        """
        self._tell = tell
        self._lock = threading.Lock()
        self._known: dict[str, LevelStatus] = {}
        is_same = before is not None and before.token == plan.token
        for one in before.levels if before is not None and is_same else ():
            known = self._known[one.url] = LevelStatus(one.url)
            known.reached, known.skipped = one.reached, one.skipped
            known.token, known.restored = one.token, one.restored
        self._there: dict[str, dict[int, str]] = {}
        self._leaves: dict[str, Mapping[int, str]] = {}
        self._unpinned: dict[str, frozenset[str]] = {}
        self._status = Status(os.getpid(), socket.gethostname(), plan.token)
        self._alive = True
        self.epoch = 0
        """Counts plans, and beginnings and ends of training: what was found out before one may be wrong."""
        self.version = 0
        """Changes whenever there is something new to tell."""
        self.progress_s = time.monotonic()
        self.plan = plan
        self.follow(plan)

    def follow(self, plan: Plan) -> None:
        """Go by another plan."""
        with self._lock:
            if plan.token != self.plan.token:
                for status in self._known.values():
                    status.reached, status.skipped = {}, {}
                    # It may have been mended: whoever waits with this plan is told what its own turns meet.
                    status.problem, status.hopeless, status.since_s = "", False, 0.0
            self.plan = plan
            self.epoch += 1
            self.version += 1
            self._status.token = plan.token
            self._status.levels = [self._of(level.url) for level in plan.levels]
            self.progress_s = time.monotonic()

    @property
    def alive(self) -> bool:
        """Whether somebody trains."""
        return self._alive

    @alive.setter
    def alive(self, alive: bool) -> None:
        with self._lock:
            if alive != self._alive:
                self._alive = alive
                self.epoch += 1
                self.progress_s = time.monotonic()

    @contextmanager
    def change(self, url: str) -> Iterator[LevelStatus]:
        """The status of a level, to be changed."""
        with self._lock:
            self.version += 1
            status = self._of(url)
            before = _awaited(status)
            yield status
            is_news = _awaited(status) != before
        if is_news:
            self._tell()

    def moved(self) -> None:
        """Something has been achieved."""
        self.progress_s = time.monotonic()

    def has_sent(self, url: str, nbytes: int) -> None:
        """So many bytes have gone to a level."""
        with self._lock:
            self._of(url).bytes_all += nbytes

    def hosts(self, serving: str, refused: str) -> None:
        """Where steps of other nodes are kept, or why not."""
        with self._lock:
            if (self._status.serving, self._status.refused) != (serving, refused):
                self._status.serving, self._status.refused = serving, refused
                self.version += 1

    def seen(
        self, url: str, there: Mapping[int, str], *, leaves: Mapping[int, str] | None = None
    ) -> None:
        """Note what is whole at a level.

        Args:
            leaves: saves before it that it does not take, and that nothing waits for; None: as before.
        """
        with self._lock:
            if leaves is not None:
                self._leaves[url] = leaves
            if self._there.get(url) == there:
                return
            self.version += 1
            self._there[url] = dict(there)
            self._of(url).steps = dict(there)
        self._tell()

    def goes_by(
        self, url: str, plan: Plan, order: Sequence[int], *, never: Collection[tuple[int, str]]
    ) -> None:
        """Note which plan a level is kept by, and which conclusion on agreed steps.

        Called by the thread that notes what has come there and what never will.

        Args:
            never: saves that never come there, whatever training goes on from.
        """
        with self._lock:
            status = self._of(url)
            before, now = (status.token, status.restored), (plan.token, plan.restored)
            if (before, status.keeps) == (now, [*order]):
                return
            self.version += 1
            status.keeps = [*order]
            if status.token != plan.token:
                # Another node may be in its place.
                status.steps, self._there[url] = {}, {}
            if before != now:
                # Going back makes steps wanted that had been passed over.
                kept = {save for save in never if status.skipped.get(save[0]) == save[1]}
                status.token, status.restored = now
                status.skipped = dict(sorted(kept))
        self._tell()

    def is_last(self, newest: Iterable[str]) -> bool:
        """Whether nothing comes after what is newest here, by its attempts, so that it goes everywhere."""
        return not self._alive or not frozenset(self.plan.last).isdisjoint(newest)

    def pinned(self, url: str) -> list[int]:
        """What has been told of the pins of a level."""
        with self._lock:
            return self._of(url).pinned

    def has_unpinned(self, url: str, marks: Collection[str]) -> frozenset[str]:
        """Note which marks a level has been told of; those that all levels have been told of."""
        with self._lock:
            self._unpinned[url] = frozenset(marks)
            told = [self._unpinned.get(level.url, frozenset()) for level in self.plan.levels]
            return frozenset.intersection(*told) if told else frozenset()

    def behind(self, url: str) -> list[tuple[Level, dict[int, str] | None]]:
        """The levels behind one, and what is whole at each, or never comes there, if it is known."""
        with self._lock:
            urls = [level.url for level in self.plan.levels]
            later = self.plan.levels[urls.index(url) + 1 :] if url in urls else ()
            return [(level, self._settled(level.url)) for level in later]

    def told(self, ended: str = "") -> Status:
        """A copy of the status, for writing."""
        with self._lock:
            self._status.ended = ended
            return Status.from_json(self._status.to_json())

    def _settled(self, url: str) -> dict[int, str] | None:
        there = self._there.get(url)
        return None if there is None else {**there, **self._leaves.get(url, {})}

    def _of(self, url: str) -> LevelStatus:
        return self._known.setdefault(url, LevelStatus(url))


def _awaited(status: LevelStatus) -> tuple[object, ...]:
    """What a Checkpointer may wait for; how far something is on its way is no news."""
    return (
        {**status.reached},
        {**status.skipped},
        {**status.files, **status.files_skipped},
        status.problem,
        status.pinned,
    )
