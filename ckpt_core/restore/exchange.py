"""The ranks of a restore do the same things at the same time, also when one of them fails.

Every exchange is one gather under a name, made by every rank on every path: a rank whose part fails takes
part with its error instead, so nobody waits for it; one that is interrupted anywhere leaves, and the others
have its interrupt for an error. What each rank concludes is a function of the answers of
all, which are the same everywhere; so all of them go on, go back or raise together.

States of a restore:  listing --ranks of one root see different steps--> listing again, once
                      listing --a common step--> reading --all ok--> in force --all ok--> restored
                      listing --a root lacks that step--> bringing --all ok--> reading
                      reading --not what is needed, and a further level has it--> listing --> bringing, once
                      reading or bringing --a rank found it bad or gone--> listing, without that step
                      any --an error that an older step would not cure--> raised on every rank
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, TypeVar

from ckpt_core.coordination import Coordination, Json
from ckpt_core.errors import CkptError, CorruptCheckpoint, NotCommitted, RestoreError
from ckpt_core.restore.failures import Elsewhere, Misplaced, NoMeans, NotBrought, ReadRefused

_Result = TypeVar("_Result")

_MARGIN_S = 10.0
"""A read that hangs is given up after the deadline of the others, were theirs not a little longer."""


class Kind(StrEnum):
    """What came of a rank's part."""

    OK = "ok"
    CORRUPT = "corrupt"
    REFUSED = "refused"
    GONE = "gone"
    ELSEWHERE = "elsewhere"
    MISPLACED = "misplaced"
    FATAL = "fatal"


@dataclass(frozen=True, slots=True)
class Answer:
    """What one rank says in an exchange: `data` if its kind is OK, else `text`."""

    rank: int
    kind: Kind
    text: str
    data: Json

    def error(self, path: Path, step: int | None = None) -> RestoreError:
        """This rank's failure, for the other ranks."""
        text = f"rank {self.rank}: {self.text}"
        if self.kind is Kind.CORRUPT:
            return CorruptCheckpoint(text, path=path, step=step, rank=self.rank)
        kind = NotCommitted if self.kind is Kind.GONE else RestoreError
        return kind(text, path=path, step=step, rank=self.rank)


@dataclass(slots=True)
class Exchange(Generic[_Result]):
    """The answers of all ranks, and what this one keeps to itself: its result or its error.

    Whoever raises that error takes it out (`raise_own`): it knows the calls that it comes through, those know
    this, and the state that was to be filled would wait for the garbage collector.
    """

    answers: tuple[Answer, ...]
    result: _Result | None
    error: Exception | None

    def first(self, *kinds: Kind) -> Answer | None:
        """The first rank whose answer is of one of these kinds."""
        return next((answer for answer in self.answers if answer.kind in kinds), None)

    def raise_own(self) -> None:
        """Raise this rank's error, if it has one."""
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error


class Together:
    """The exchanges of one Restorer."""

    def __init__(self, coordination: Coordination, *, root: Path, timeout_s: float) -> None:
        self.info = coordination.info
        self._coordination = coordination
        self._call = ""
        self._told: BaseException | None = None
        self._begun = False
        self._root = root
        self._timeout_s = timeout_s + min(timeout_s, _MARGIN_S)

    def call(self, action: Callable[[], _Result]) -> _Result:
        """What `action` returns, which is a call of `restore`: all exchanges are made within.

        What it raises without the others' knowing, such as an interrupt, they get at once as an error.
        """
        self._call, self._begun = self._coordination.call_id(), False
        try:
            return action()
        except BaseException as exc:
            try:
                self._leave(exc)
            finally:
                self._leave(exc)  # the first may have been interrupted
            raise
        finally:
            self._told = None

    def _leave(self, error: BaseException) -> None:
        # An error of ours is told by the exchanges, or is what all ranks have concluded, once there was one.
        known = isinstance(error, CkptError) and self._begun
        if self._call and not known and error is not self._told:
            text = f"its restore was cut short: {_text(error)}"
            others = [Kind.OK, "", None]
            self._coordination.leave(self._call, [Kind.FATAL, text, None], others)
            self._call = ""

    def met(self, word: str) -> None:
        """Take a word of rank 0: a rank that was kept from a save of before counts as the others do again."""
        self._coordination.count_anew(word)

    def exchange(
        self,
        topic: str,
        action: Callable[[], tuple[_Result, Json]],
        *,
        step: int | None = None,
        timeout_s: float | None = None,
    ) -> Exchange[_Result]:
        """Do this rank's part and learn how the others did theirs.

        Args:
            timeout_s: longest time that the others are waited for; None: that of a read.

        Raises:
            RestoreError: on every rank, when a rank failed in a way that no other step would cure; on
                that rank its own error, whatever it is.
            CoordinationTimeout, CommitError: the other ranks cannot be asked.
        """
        own, data, self._begun = Exchange[_Result]((), None, None), None, True
        try:
            own.result, data = action()
        except MemoryError as exc:
            own.error = NoMeans(self._root, exc)
            own.error.__cause__ = exc
        except Exception as exc:  # the others must learn of it before it goes on from here
            own.error = exc
        row = [kind_of(own.error), "" if own.error is None else _text(own.error), data]
        rows = self._gather(f"{topic}/{self._call}", row, own, timeout_s or self._timeout_s)
        own.answers = tuple(
            [Answer(rank, Kind(kind), text, data) for rank, (kind, text, data) in enumerate(rows)]
        )
        self._told = own.error
        fatal = own.first(Kind.FATAL)
        if fatal is not None:
            if kind_of(own.error) is Kind.FATAL:
                own.raise_own()
            raise fatal.error(self._root, step)
        return own

    def _gather(
        self, topic: str, row: Json, own: Exchange[Any], timeout_s: float
    ) -> tuple[Any, ...]:
        try:
            return self._coordination.gather(topic, row, timeout_s)
        except CkptError as exc:
            if own.error is not None:
                own.error.add_note(f"The other ranks could not be told: {exc}")
                own.error.__suppress_context__ = True
                own.raise_own()
            raise


def kind_of(error: Exception | None) -> Kind:
    """How a restore goes on after an error."""
    if error is None:
        return Kind.OK
    if isinstance(error, CorruptCheckpoint):
        return Kind.CORRUPT
    if isinstance(error, NotCommitted):
        return Kind.GONE
    if isinstance(error, Elsewhere):
        return Kind.ELSEWHERE
    if isinstance(error, Misplaced):
        return Kind.MISPLACED
    return Kind.REFUSED if isinstance(error, ReadRefused | NotBrought) else Kind.FATAL


def _text(error: BaseException) -> str:
    if isinstance(error, CkptError):
        return str(error)
    return f"{type(error).__name__}: {error}".removesuffix(": ")
