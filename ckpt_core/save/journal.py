"""What a thread that trains has under way inside the engine, so that an interrupt leaves nothing half done.

    enter --undo = ...--> work --> leave        any error: undo(error), at once, else before the next call

KeyboardInterrupt, or the error of any other signal handler, may come after any call that the training thread
makes, also while another error is handled. So:

- Before a call of ours takes anything, it notes here, in one assignment, what gives all of it back.
- What undoes is complete in itself, and may run twice.
- Whatever must not stop half-way is handed to another thread, by one call that is written in C.
- What one thread has noted, no call of another one undoes, or lets go of, but `close`.
"""

from __future__ import annotations

import functools
import gc
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import call
from types import FrameType
from typing import Any, Concatenate, ParamSpec, TypeVar

from ckpt_core.errors import ConfigError, StagingError
from ckpt_core.save.closing import refuse_halfway
from ckpt_core.system import collector
from ckpt_core.system.compiling import untraced

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

Undo = Callable[[BaseException], None]

_STARTS = frozenset({"save", "begin", "begin_files"})
"""Calls that take a place and staging memory: of one thread at a time."""

_MANY = 10_000
"""Objects whose first walk by the collector is a stall of its own: 0.1 to 0.4 microseconds for each."""


@dataclass(slots=True)
class Stall:
    """Time that the training thread has spent inside the engine.

    Attributes:
        seconds: in all so far.
        ended_s: when it last came out, on the monotonic clock; 0 before the first time.
    """

    seconds: float = 0.0
    ended_s: float = 0.0

    def count(self, began_s: float) -> None:
        """A call that began then ends now."""
        self.ended_s = now_s = time.monotonic()
        self.seconds += now_s - began_s


@dataclass(slots=True)
class Underway:
    """What one thread has under way: its call, and those within it.

    Attributes:
        undo: told the error if the call that is under way fails, and again if that was interrupted.
        making: what the calls that are under way start or go on with: it ends only when they have.
        cut: what the save raises, whatever it comes to: `close` has undone it meanwhile.
        error: that the call has ended in.
        collecting: it has paused the garbage collector.
        aging: what is young is made old when the collector goes on.
    """

    undo: Undo | None = None
    making: tuple[object, ...] = ()
    cut: ConfigError | None = None
    error: BaseException | None = None
    collecting: bool = False
    aging: bool = False

    def begin(self) -> None:
        """A call begins, which is in no other one."""
        self.sweep()
        if self.undo is None:
            self.making = ()

    def sweep(self, closed: ConfigError | None = None) -> None:
        """Undo what an interrupted call has left."""
        undo = self.undo
        self.resume_collector()
        if undo is not None:
            undo(self.error or closed or KeyboardInterrupt())
        if self.undo is undo:
            self.undo = self.error = None

    def failed(self, error: BaseException) -> None:
        """The call that is under way ends in this error."""
        self.error = error
        self.sweep()

    def raise_cut(self, cause: Exception | None = None) -> None:
        """Called at the end of a call, which ended in `cause`; raises `cut`, once."""
        cut = self.cut
        if cut is not None:
            self.cut = None
            if cut is not cause:
                raise cut from cause

    def resume_collector(self) -> None:
        """As it was before `Journal.pause_collector`. Idempotent; at the latest when the call ends."""
        if self.collecting:
            if self.aging and not gc.get_freeze_count():
                # By one call that is written in C: between the two, nothing at all would be collected.
                deque(map(call, (gc.freeze, gc.unfreeze)), maxlen=0)
            collector.resume()
            self.collecting = False


@dataclass(slots=True)
class Journal:
    """One for each Checkpointer; used by the threads that train.

    Args:
        timeout_s: how long a thread waits for its turn.
        refuse: called before that wait; raises where the caller would wait for itself.

    Attributes:
        turn: had by the thread that starts a save. Others wait: two that had half of the staging memory each
            would wait for one another.
        threads: what each has under way, by its number.
    """

    timeout_s: float = math.inf
    refuse: Callable[[str], None] = refuse_halfway
    turn: threading.RLock = field(default_factory=threading.RLock)
    stall: Stall = field(default_factory=Stall)
    threads: dict[int, Underway] = field(default_factory=dict)

    @property
    def mine(self) -> Underway:
        """What this thread has under way."""
        me = threading.get_ident()
        return self.threads.get(me) or self.threads.setdefault(me, Underway())

    @property
    def has_turn(self) -> bool:
        """Whether this thread has the turn."""
        had: bool = self.turn._is_owned()  # type: ignore[attr-defined]
        return had

    def is_within_turn(self, frame: FrameType | None) -> bool:
        """Whether a call further out on this thread, which `frame` is of, has the turn: this one goes on.

        One that interrupts have kept an earlier call from giving back is given back.
        """
        if self.has_turn and not _is_inside(self, frame):
            self.turn.release()
        return self.has_turn

    def give_turn(self, takes: bool) -> None:
        """Give it back, if this call has taken it. Idempotent."""
        if takes and self.has_turn:
            self.turn.release()

    def drop_turn(self, takes: bool) -> None:
        """As `give_turn`, also if an interrupt cuts that short; a second one leaves it to the next call."""
        try:
            self.give_turn(takes)
        finally:
            self.give_turn(takes)

    def take_turn(self, call: str, check_usable: Callable[[], None]) -> None:
        """Have the turn, as soon as no other thread starts a save.

        Raises:
            ConfigError: what `check_usable` raises, since in a fork nobody gives it back; or a thread of
                the engine calls, for which the other one may wait.
            StagingError: not within `timeout`.
        """
        if self.turn.acquire(blocking=False):
            return
        check_usable()
        self.refuse(call)
        began_s = time.monotonic()
        had = self.turn.acquire(timeout=min(self.timeout_s, threading.TIMEOUT_MAX))
        self.stall.seconds += time.monotonic() - began_s
        if not had:
            raise StagingError(
                f"{call}(): this save was not started, since another thread was in one of this Checkpointer"
                f" for all of `timeout`. Committed steps are safe; save from one thread"
            )

    def waited_s(self) -> float:
        """Seconds that training has spent inside the engine so far. Called by any thread."""
        return self.stall.seconds

    def note(self, undo: Undo, making: object = None) -> None:
        """What gives back all that this call is going to take."""
        mine = self.mine
        if making is not None:
            mine.making = (*mine.making, making)
        mine.undo = undo

    @property
    def is_inside(self) -> bool:
        """Whether a call that saves is still running further out on this thread."""
        return self.mine.undo is not None and _is_inside(self, sys._getframe(1))

    def sweep(self, closed: ConfigError) -> None:
        """Nobody calls again: what any thread has left, or has under way, is undone, with this error."""
        for one in [*self.threads.values()]:
            one.sweep(closed)

    def pause_collector(self, expected: int = 0) -> None:
        """No cyclic garbage collection from here: it would walk the whole heap on the training thread.

        A save of many leaves allocates enough objects to set it off, and none of them is part of a cycle.

        Args:
            expected: objects that live on when the collector is resumed. Many are old by then, as if it had
                walked them: else its next walk, of what is young, is the longer by them.
        """
        if gc.isenabled():
            mine = self.mine
            if expected >= _MANY:
                # Whatever else is young gets old with them, and no garbage may.
                gc.collect(1)
            mine.aging = expected >= _MANY
            mine.collecting = True
            collector.pause()
            # Again: a handler that came in between may have saved, and resumed it.
            mine.collecting = True


def stalling(
    method: Callable[Concatenate[Any, _Given], _Result],
) -> Callable[Concatenate[Any, _Given], _Result]:
    """Count the time of a method that training calls, of an object with a `_journal`; undo it if it fails."""
    starts = method.__name__ in _STARTS

    @untraced
    @functools.wraps(method)
    def counted(self: Any, /, *args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        refuse_halfway(method.__name__)
        journal: Journal = self._journal
        mine = journal.mine
        takes = not journal.is_within_turn(sys._getframe(1)) and starts
        try:
            if takes:
                journal.take_turn(method.__name__, self._check_usable)
            outer = mine.undo
            if outer is not None and _is_inside(journal, sys._getframe(1)):
                result = _nested(mine, outer, functools.partial(method, self, *args, **kwargs))
                journal.give_turn(takes)
                return result
            mine.begin()
            began_s = time.monotonic()
            try:
                result = method(self, *args, **kwargs)
                mine.raise_cut()
                mine.resume_collector()
                journal.give_turn(takes)
                journal.stall.count(began_s)
                # Together: no interrupt comes between, so that the caller gets the result or the error.
                mine.making = ()
                mine.undo = None
                return result
            except BaseException as exc:
                # Here: an interrupt at the entry of a function of its own would come before its `try`.
                try:
                    mine.failed(exc)
                except BaseException:
                    # A second interrupt: what it cut short is done now. A third leaves it to the next call.
                    mine.failed(exc)
                    raise
                journal.stall.count(began_s)
                if isinstance(exc, Exception):
                    mine.raise_cut(exc)
                raise
        except BaseException:
            journal.drop_turn(takes)
            raise

    return counted


def _nested(mine: Underway, outer: Undo, call: Callable[[], _Result]) -> _Result:
    """A call inside another one, which goes on whatever becomes of it."""
    making = mine.making
    try:
        return call()
    except BaseException as exc:
        inner = mine.undo
        if inner is not None and inner is not outer:
            try:
                inner(exc)
            except BaseException:
                # A second interrupt: what it cut short is done now, as for the outer one.
                inner(exc)
                raise
        raise
    finally:
        mine.making = making
        mine.undo = outer


def _is_inside(journal: Journal, frame: FrameType | None) -> bool:
    """Whether a call of this journal is still running further out: a user's object may call us from there."""
    while frame is not None:
        if frame.f_code.co_name == "counted" and frame.f_locals.get("journal") is journal:
            return True
        frame = frame.f_back
    return False
