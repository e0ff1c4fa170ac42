"""The steps that one restore has left behind, and what is said of them."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_core.errors import (
    CkptError,
    CorruptCheckpoint,
    NotCommitted,
    RestoreError,
    RestoreWarning,
)
from ckpt_core.restore.choosing import Listing, common_step, known_steps, reason, table

logger = logging.getLogger("ckpt_core")

_PACKAGE = __name__.partition(".")[0]
GONE = "it was retired while it was read"
TOUCHED = (
    "Live tensors were overwritten, in part or all, before this was found: "
    "initialize them again before training"
)
_KEPT = "Nothing on storage was changed. To train from scratch, use another root."
_AWAY = (
    "there is no step in {root}, and not every further level could be asked whether it has one: {away}. "
    "Nothing was changed. Start again when it can be reached; to train from scratch, leave that level out"
)


@dataclass(slots=True)
class Trail:
    """What was tried by one call of `restore`; the same on every rank.

    Attributes:
        root: where.
        asked: the one step that the call is about; None: the newest.
        strict: whether a corrupt step ends it.
        skipped: steps that could not be used, with the error.
        gone: steps that were retired while they were read.
        suspects: those of the skipped steps that must not stand as the newest once an older one is in force.
        listings: of all ranks, the last ones.
        damaged: saves that roots cannot use and are to be brought anew: (step, attempt) -> which nodes.
        mended: (step, node, whole) for which that has been tried.
        misplaced: steps of which a node has what other ranks wrote, and needs what its own did beside it.
        partial: steps of which a node needs more than its own ranks wrote, and the end of a sentence on that.
    """

    root: Path
    asked: int | None
    strict: bool
    skipped: dict[int, RestoreError] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    suspects: set[int] = field(default_factory=set)
    listings: Sequence[Listing] = ()
    damaged: dict[tuple[int, str], set[int]] = field(default_factory=dict)
    mended: set[tuple[int, int, bool]] = field(default_factory=set)
    misplaced: set[int] = field(default_factory=set)
    partial: dict[int, str] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)

    @property
    def tried(self) -> set[int]:
        """Steps that are not to be tried again."""
        return self.gone | self.skipped.keys()

    def can_mend(self, step: int, attempt: str, rank: int, *, whole: bool = False) -> bool:
        """Whether a save can be brought anew to the root of this rank, or, with `whole`, all of it."""
        node = self.listings[rank].node
        can_have = self.listings[node].can_have(step, attempt)
        return can_have and (step, node, whole) not in self.mended

    def mends(self, step: int, attempt: str, ranks: Sequence[int], *, whole: bool) -> bool:
        """Whether a save that these ranks cannot use is brought to their roots anew: once for each root."""
        if not all(self.can_mend(step, attempt, rank, whole=whole) for rank in ranks):
            return False
        nodes = {self.listings[rank].node for rank in ranks}
        self.damaged[step, attempt] = nodes
        self.mended |= {(step, node, whole) for node in nodes}
        return bool(nodes)

    def tell_others(self, step: int, attempt: str) -> None:
        """Say, once, that a step which is about to be brought is not the same save at all levels."""
        others = {one for listing in self.listings for one in listing.further.get(step, ())} - {
            attempt
        }
        if others and step not in self.told:
            self.told.add(step)
            warn(
                f"further levels hold {len(others) + 1} different saves of step {step}: {attempt} is "
                f"restored, which was made last as far as they tell. A level that was left out for a while "
                f"may hold older ones"
            )

    def pass_over(self, step: int, error: RestoreError) -> None:
        """Leave a step for an older one, with a warning."""
        # What it came through knows this trail, and the state that is to be filled.
        self.skipped[step] = error.with_traceback(None)
        error.__cause__ = error.__context__ = None
        warn(f"step {step} was not restored, trying the next older one: {error}")

    def pass_over_lost(self, listings: Sequence[Listing], candidate: int) -> None:
        """Leave every step newer than the candidate that not all ranks hold."""
        leaders = [listings[node] for node in {listing.node for listing in listings}]
        lost = {step for step in known_steps(listings) if step > candidate} - self.tried
        for step in sorted(lost, reverse=True):
            why = f"not every node holds it: {reason(listings, step)}"
            if common_step(leaders, asked=step, tried=()) is None:
                self.suspects.add(step)  # Else it is whole, and some rank merely does not see it.
            self.pass_over(step, NotCommitted(why, step=step, path=self.root))

    def texts(self) -> tuple[tuple[int, str], ...]:
        """The skipped steps, newest first, and why."""
        return tuple(sorted([(k, str(exc)) for k, exc in self.skipped.items()], reverse=True))

    def raise_if_none_left(self, listings: Sequence[Listing], *, touched: bool) -> None:
        """None is left to try; returns where there has never been one.

        Raises:
            CorruptCheckpoint, NotCommitted, RestoreError: there has been one.
        """
        if not self.tried:
            if self.asked is not None or known_steps(listings):
                raise self._none_common(listings)
            away = sorted({text for listing in listings for text in listing.away})
            if not away:
                return
            text = _AWAY.format(root=self.root, away="; ".join(away))
            raise RestoreError(text, path=self.root)
        lines = [f"step {step}: {why}" for step, why in self.texts()]
        lines += [f"step {step}: {GONE}" for step in sorted(self.gone, reverse=True)]
        text = f"no step in {self.root} can be restored:\n  " + "\n  ".join(lines) + "\n"
        if len(listings) > 1:
            text += f"What the nodes hold:\n{table(listings)}\n"
        text += f"{_KEPT} {TOUCHED}" if touched else _KEPT
        corrupt = [exc for exc in self.skipped.values() if isinstance(exc, CorruptCheckpoint)]
        if not corrupt:
            raise RestoreError(text, path=self.root)
        first = corrupt[0]
        raise CorruptCheckpoint(text, path=self.root, expected=first.expected, got=first.got)

    def _none_common(self, listings: Sequence[Listing]) -> NotCommitted:
        what = "no step is" if self.asked is None else f"step {self.asked} is not"
        text = (
            f"{what} held by every node, whole and from the same save:\n{table(listings)}\n{_KEPT}"
        )
        return NotCommitted(text, step=self.asked, path=self.root)


def tell_touched(error: Exception) -> None:
    """Have an error say that live tensors hold bytes of a step that was not restored."""
    if isinstance(error, CkptError):
        # Whoever wrote the text knew of its own step only.
        text = str(error).replace("othing was changed", "othing but live tensors was changed")
        error.args = (text,)
    if TOUCHED not in f"{error} {getattr(error, '__notes__', ())}":
        error.add_note(TOUCHED)


def warn(text: str) -> None:
    """A RestoreWarning, also in the log."""
    logger.warning("%s", text)
    warnings.warn(text, RestoreWarning, stacklevel=_callers_level())


def _callers_level() -> int:
    """The stack level, for a warning, of the first frame that is not this package's."""
    frame, level = sys._getframe(1), 1
    # A script that is run has a __package__, and it is None.
    while frame.f_back is not None and str(frame.f_globals.get("__package__")).startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    return level
