"""Where saves have come to: what the agent says of each level, against what was saved.

`Following` keeps the newest status, settles the futures that somebody asked for, and tells events. It reads
no file, and waits for nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from ckpt_core.errors import CommitError
from ckpt_core.levels.far.door import Copy
from ckpt_core.levels.mailbox import REMEMBERED, LevelStatus, Status
from ckpt_core.levels.trainer.last_saved import LastSaved
from ckpt_core.levels.wants import meets
from ckpt_core.observe import EventLog, EventName
from ckpt_core.options import Level
from ckpt_core.save import Followed, LevelGauge
from ckpt_core.system.threads import ThreadFuture, own_lock

_log = logging.getLogger("ckpt_core")

_GRACE_S = 10.0
"""So long a step may be missing below newer ones: agents of other nodes may have to say that it is there."""


@dataclass
class _Asked:
    """A future that waits for one save at one level.

    Attributes:
        missed_s: since when it has been missing below newer steps; None: it has not.
    """

    save: Followed
    level: int
    future: Future[None] = field(default_factory=ThreadFuture)
    missed_s: float | None = None


class Following:
    """What is known of the levels, and who waits for what. Thread-safe.

    Args:
        levels: in their order.
        events: told of each change.
    """

    def __init__(self, levels: Sequence[Level], events: EventLog) -> None:
        self._levels = tuple(levels)
        self._events = events
        self._lock = own_lock()
        self._status: Status | None = None
        self._asked: list[_Asked] = []
        self._latest: dict[int, Followed] = {}
        self._last_step, self._last_files = LastSaved(), LastSaved()
        self._ended = ""
        self._told: list[_Told] = [_Told() for _ in levels]
        self._refused = ""

    def lead_to(self, levels: Sequence[Level]) -> None:
        """These are the places, as many as before. Called before anything is heard of them."""
        self._levels = tuple(levels)

    def begin(self, committed: Sequence[int]) -> None:
        """These steps were there when the root was opened."""
        for told in self._told:
            told.older_than = max(committed, default=-1) + 1

    @property
    def seen(self) -> list[LevelStatus | None]:
        """What the agent has last said of each level; None before it has."""
        status = self._status
        return [None] * len(self._levels) if status is None else list(status.levels)

    def note(self, save: Followed) -> None:
        """A save has begun. Called on the training thread."""
        if save.destination is not None:
            self._last_files.note(save)
            return
        self._last_step.note(save)
        self._latest.pop(save.step, None)
        self._latest[save.step] = save
        if len(self._latest) > REMEMBERED:
            del self._latest[next(iter(self._latest))]

    def last_saved(self) -> tuple[Sequence[Copy], Sequence[Copy]]:
        """What was saved last, of steps and of directories of files; (): nothing. Called on that thread."""
        return self._last_step.copies(), self._last_files.copies()

    def ask(self, save: Followed, level: int) -> Future[None]:
        """A future for one save at one level, counted from 0."""
        asked = _Asked(save, level)
        asked.future.set_running_or_notify_cancel()
        with self._lock:
            ended = self._ended
            if not ended:
                # Settled by the thread alone: an interrupt of this one must lose nobody's future.
                self._asked.append(asked)
        if ended:
            self._settled(asked)
        return asked.future

    def take(self, status: Status) -> None:
        """The agent has said something new. Called by one thread."""
        if [level.url for level in status.levels] != [level.url for level in self._levels]:
            return
        self._status = status
        self._tell_refused(status)
        for level, told in zip(status.levels, self._told, strict=True):
            self._tell(level, told)

    def settle(self) -> None:
        """Tell those who wait what is known by now. Called again and again, by the thread of `take`."""
        with self._lock:
            asked, self._asked = self._asked, []
        open_ones = [one for one in asked if not self._settled(one)]
        with self._lock:
            self._asked += open_ones

    def end(self, why: str) -> None:
        """Nothing is heard any more: whoever still waits, or asks from now on, is told so. By that thread."""
        with self._lock:
            self._ended = why
        self.settle()

    def gauges(self, newest: int | None, *, problem: str) -> tuple[LevelGauge, ...]:
        """How far each level is.

        Args:
            newest: newest committed step of the root.
            problem: of all of them.
        """
        both = zip(self._levels, self.seen, strict=True)
        return tuple([_gauge(level, seen, newest, problem) for level, seen in both])

    # -- inside ----------------------------------------------------------------------------------

    def _settled(self, asked: _Asked) -> bool:
        save, level, seen = asked.save, self._levels[asked.level], self.seen[asked.level]
        error: BaseException | None
        if save.committed.done() and (error := save.committed.exception()) is not None:
            asked.future.set_exception(error)
            return True
        if save.destination is not None and level.parity is not None:
            why = "is a directory of files, and parity is kept of steps"
        elif not meets(save.step, level):
            why = f"does not go there: every={level.every}"
        elif not save.committed.done():
            why = self._ended
        elif _has_come(asked, seen):
            asked.future.set_result(None)
            return True
        else:
            why = self._will_not(asked, seen) or self._ended
        if why:
            text = f"step {save.step} is not at {level.url}: it {why}. Committed steps are safe"
            asked.future.set_exception(CommitError(text, step=save.step))
        return bool(why)

    def _will_not(self, asked: _Asked, seen: LevelStatus | None) -> str:
        step = asked.save.step
        if self._is_replaced(asked.save):
            return "was replaced by another save of that step"
        if seen is None or seen.sending == step:
            return ""
        if seen.skipped.get(step) == asked.save.attempt:
            return self._passed_over(step, seen)
        named = asked.save.destination
        if named is not None and seen.files_skipped.get(named.directory) == asked.save.attempt:
            return "was passed over: newer ones are there, or agent.log says why" + _because(seen)
        if _may_come(asked.save, seen):
            asked.missed_s = None
            return ""
        now = time.monotonic()
        asked.missed_s = asked.missed_s or now
        if now - asked.missed_s < _GRACE_S:
            return ""
        return "was passed over, or has been retired there since; newer steps are there"

    def _passed_over(self, step: int, seen: LevelStatus) -> str:
        newest = max(seen.steps, default=-1)
        ours = {save.attempt for save in tuple(self._latest.values())}
        if newest > step and seen.steps[newest] not in ours:
            return f"was passed over: step {newest} is there, of before training went back"
        return "was passed over, since the level lags behind" + _because(seen)

    def _is_replaced(self, save: Followed) -> bool:
        """Whether a later save of its step has been committed."""
        later = self._latest.get(save.step, save)
        if save.destination is not None or later.attempt == save.attempt:
            return False
        return later.has_committed

    def _tell(self, level: LevelStatus, told: _Told) -> None:
        for name, steps, known in (
            (EventName.LEVEL_REACHED, level.reached, told.reached),
            (EventName.LEVEL_PASSED_OVER, level.skipped, told.skipped),
        ):
            for step, _ in sorted(steps.items() - known):
                if told.began or step >= told.older_than:
                    self._events.tell(name, step, detail=level.url)
            known.clear()
            known.update(steps.items())
        told.began = True
        if level.problem != told.problem:
            self._tell_problem(level, told)

    def _tell_refused(self, status: Status) -> None:
        """Nothing is kept for other nodes, which have this one as their level: those do not go on."""
        before = self._refused
        if status.refused or status.serving:
            # An agent that has just been started says neither.
            self._refused = status.refused
        if self._refused and not before:
            text = (
                "this node keeps no steps for others (%s), and it is tried again; training goes on"
            )
            _log.warning(text, self._refused)
        elif before and not self._refused:
            _log.warning("this node keeps steps for others again, at %s", status.serving)

    def _tell_problem(self, level: LevelStatus, told: _Told) -> None:
        before, told.problem = told.problem, level.problem
        detail = f"{level.url}: {level.problem}" if level.problem else level.url
        self._events.tell(EventName.LEVEL_PROBLEM, level.sending, detail=detail)
        if not level.problem:
            _log.warning("the level %s goes on again", level.url)
        elif not before:
            then = "until somebody sees to it" if level.hopeless else "and it is tried again"
            text = "the level %s does not go on (%s), %s; training and its root go on"
            _log.warning(text, level.url, level.problem.rstrip("."), then)


@dataclass
class _Told:
    """What has been told of a level.

    Attributes:
        began: the agent has said something before; until then, steps before `older_than` are old news.
    """

    began: bool = False
    older_than: int = 0
    reached: set[tuple[int, str]] = field(default_factory=set)
    skipped: set[tuple[int, str]] = field(default_factory=set)
    problem: str = ""


def _has_come(asked: _Asked, seen: LevelStatus | None) -> bool:
    if seen is None:
        return False
    save = asked.save
    if save.destination is not None:
        return seen.files.get(save.destination.directory) == save.attempt
    # It may have been retired there since.
    return save.attempt in (seen.steps.get(save.step), seen.reached.get(save.step))


def _may_come(save: Followed, seen: LevelStatus) -> bool:
    """Whether a level may still want a save that is not there."""
    if save.destination is None:
        return save.step in seen.steps or save.step >= max(seen.steps, default=-1)
    steps = [Copy.of(attempt).step for attempt in seen.files.values()]
    return save.destination.directory in seen.files or save.step >= max(steps, default=-1)


def _because(seen: LevelStatus) -> str:
    return f" ({seen.problem})" if seen.problem else ""


def _gauge(level: Level, seen: LevelStatus | None, newest: int | None, problem: str) -> LevelGauge:
    if seen is None:
        return LevelGauge(level.url, problem=problem)
    there = max(seen.steps, default=None)
    lag = None if there is None or newest is None else max(newest - there, 0)
    return LevelGauge(
        level.url,
        there,
        lag,
        seen.sending,
        seen.sent_bytes,
        seen.total_bytes,
        seen.bytes_all,
        problem or seen.problem,
    )
