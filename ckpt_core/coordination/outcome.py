"""How an attempt ended, as text for the store and as an error for the caller."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt_core import errors
from ckpt_core.errors import CkptError, CommitError, CoordinationTimeout
from ckpt_core.units import count_text

_PLAIN = ("StagingError", "BarrierError", "PersistError", "CommitError", "CoordinationTimeout")
_SHOWN = 8
"""So many ranks are named in a message; `.failures` has all."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why one rank made an attempt fail.

    Attributes:
        kind: name of the class of its error.
        text: what that error said.
        code: errno of an OSError.
        absent: it did not fail but is dead, has closed, or did not answer in time.
    """

    kind: str
    text: str
    code: int | None = None
    absent: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Cause:
        """From the error that a rank's own save raised."""
        if isinstance(error, OSError) and error.errno is not None:
            where = f": {error.filename}" if error.filename else ""
            return cls(type(error).__name__, f"{error.strerror}{where}", error.errno)
        return cls(type(error).__name__, str(error))

    @classmethod
    def lost(cls, text: str) -> Cause:
        """A rank that others hold for dead, or that was late."""
        return cls("CoordinationTimeout", text, None, True)

    def error(self, rank: int | None) -> BaseException:
        """The error again, as far as another process can have it."""
        if self.code is not None:
            return OSError(self.code, self.text)
        if self.kind in _PLAIN:
            made: CkptError = getattr(errors, self.kind)(self.text, rank=rank)
            return made
        return CkptError(f"{self.kind}: {self.text}" if self.text else self.kind, rank=rank)

    def __str__(self) -> str:
        return self.text if self.absent or not self.kind else f"{self.kind}: {self.text}"


@dataclass(frozen=True, slots=True)
class Words:
    """What an error says, to be raised again: the error itself holds frames, and with them a whole state."""

    cause: Cause
    step: int | None
    rank: int | None
    nowhere: bool
    causes: Mapping[int, Cause]

    @classmethod
    def of(cls, error: CkptError) -> Words:
        """Of an error with which an attempt ended."""
        found = error.failures.items() if isinstance(error, CommitError) else ()
        causes = {rank: Cause.of(failure) for rank, failure in found}
        return cls(Cause.of(error), error.step, error.rank, error.nowhere, causes)

    def error(self) -> CkptError:
        """The error anew."""
        made = self.cause.error(self.rank)
        assert isinstance(made, CkptError)
        made.step, made.nowhere = self.step, self.nowhere
        if isinstance(made, CommitError):
            made.failures = {rank: cause.error(rank) for rank, cause in self.causes.items()}
        return made


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was decided. No failures: go, or published.

    Attributes:
        failures: the ranks at fault.
        published: a failure came after `go`, so that some root may hold the step.
        asks: ranks whose references rank 0 wants to see, to say what differs.
        aside: what rank 0 has concluded beside it; None: nothing.
    """

    failures: Mapping[int, Cause] = field(default_factory=dict)
    published: bool = False
    asks: tuple[int, ...] = ()
    aside: Any = None

    @classmethod
    def lost(cls, why: Mapping[int, str], *, published: bool = False) -> Outcome:
        """Ranks that others hold for dead, or that were late, by rank; none: go."""
        return cls({rank: Cause.lost(text) for rank, text in why.items()}, published)

    @property
    def ok(self) -> bool:
        """Whether no rank failed."""
        return not self.failures

    def encode(self) -> str:
        """For the store."""
        rows = {
            str(rank): [cause.kind, cause.text, cause.code, cause.absent]
            for rank, cause in sorted(self.failures.items())
        }
        value = {"failures": rows, "published": self.published, "asks": self.asks}
        return json.dumps(value if self.aside is None else {**value, "aside": self.aside})

    @classmethod
    def decode(cls, text: str) -> Outcome:
        """From the store."""
        value: Any = json.loads(text)
        failures = {int(rank): Cause(*row) for rank, row in value["failures"].items()}
        return cls(failures, bool(value["published"]), tuple(value["asks"]), value.get("aside"))

    def error(
        self, step: int, own: BaseException | None = None, rank: int = 0, *, unsure: bool = False
    ) -> CkptError:
        """What a caller raises; `own` is the error of this rank `rank`, kept as it is.

        `unsure`: this rank has left, and does not know what became of the attempt.
        """
        found = {member: cause.error(member) for member, cause in self.failures.items()}
        if own is not None:
            found[rank] = own
        only_absent = all(cause.absent for cause in self.failures.values()) and own is None
        state = self._state(unsure, only_absent)
        text = f"step {step} {state}: {self._who()}. {self._advice(only_absent)}"
        first = min(found)
        if only_absent:
            return CoordinationTimeout(text, step=step, rank=first)
        return CommitError(text, failures=found, step=step, rank=first)

    def _state(self, unsure: bool, only_absent: bool) -> str:
        if unsure or (self.published and only_absent):
            return "may be committed or not (look at `steps()`)"
        return "is not committed in every root" if self.published else "is not committed"

    def _who(self) -> str:
        ranks = sorted(self.failures)
        parts = [f"rank {rank}: {self.failures[rank]}" for rank in ranks[:_SHOWN]]
        if len(ranks) > _SHOWN:
            parts.append(f"and {count_text(len(ranks) - _SHOWN, 'more rank')}")
        return "; ".join(parts)

    def _advice(self, only_absent: bool) -> str:
        safe = "Committed steps are safe"
        if self.published:
            safe += "; `restore` takes this step only if it is whole in every root"
        if only_absent:
            return f"{safe}. Look for a rank that died or hangs; raise `timeout` if all are merely slow"
        return f"{safe}. The next save starts afresh"
