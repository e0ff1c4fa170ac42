"""`KeptSteps`: what keeps a step in its place: a pin, a reader of this process, or that it looks sound."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from ckpt_core.store.failures import mapped
from ckpt_core.store.leaving import not_pinned
from ckpt_core.store.names import INFLIGHT, committed_steps, entries, is_committed
from ckpt_core.store.pins import (
    add_pin,
    forget_marks,
    mark_unpinned,
    pinned_steps,
    remove_pin,
    unpinned_marks,
)
from ckpt_core.store.repair import step_of_attempt
from ckpt_core.system.files import Files
from ckpt_core.system.threads import own_lock
from ckpt_core.types import check_step


class Hold:
    """Keeps a step while a reader of this process has it, or until it is released.

    An interrupt may come between the calls of a reader: with its frames, its hold is gone.
    """

    def __init__(self, step: int) -> None:
        self.step: int | None = step

    def release(self) -> None:
        """Let retention decide again. Idempotent."""
        self.step = None


class KeptSteps:
    """The part of a `StepStore` that says which steps stay.

    Two locks, taken in this order: `_names` for a change of names and its syncs, `_state` for the
    sets below and for the renames that must see them unchanged.
    """

    def __init__(self, root: Path, *, files: Files) -> None:
        """Of a root, with links resolved; writes nothing."""
        self.root = root
        self._files = files
        self._names = own_lock()
        self._state = own_lock()
        self._holds: weakref.WeakSet[Hold] = weakref.WeakSet()
        self._suspects: set[int] = set()
        self.awaited: Callable[[Sequence[int]], Collection[int]] = _nothing
        """Which of the committed steps are still to be taken elsewhere; asked with the locks held."""
        self.held: Callable[[], Collection[int]] = tuple
        """Steps that another process needs here; asked again when names are gone, for what came meanwhile."""

    def protect(self, step: int) -> Hold:
        """Keep a step as long as what this returns. Call before opening its files."""
        hold = Hold(step)
        with self._state:
            self._holds.add(hold)
        return hold

    def _protected(self) -> set[int]:
        """Called with `_state` held: no thread may add one meanwhile."""
        return {hold.step for hold in self._holds if hold.step is not None}

    def pin(self, step: int, *, committed: bool = False) -> None:
        """Keep a step for ever, durably. It may be one that is still to come.

        Any process may call this, beside a writer: once it returns, a step that is there stays.

        Args:
            committed: it must be there.

        Raises:
            NotCommitted: it is not there, and neither in flight nor newer than all others: it was retired
                meanwhile, or never saved. It is not pinned.
            PersistError: the pin could not be made durable.
        """
        step = check_step(step)
        with self._names, mapped("pin a step", path=self.root, step=step):
            before = pinned_steps(self.root)
            add_pin(self.root, step, files=self._files)
            # Order matters: looked at once the pin is durable. See `leaving`.
            there = is_committed(self.root, step)
            if there or (there is False and not committed and self._may_come(step)):
                marks = unpinned_marks(self.root).items()
                forget_marks(self.root, [n for n, of in marks if of == step], files=self._files)
                return
            if there is False and step not in before:
                remove_pin(self.root, step, files=self._files)
        raise not_pinned(self.root, step, undecided=there is None)

    def _may_come(self, step: int) -> bool:
        names = [entry.name for entry in entries(self.root / INFLIGHT) if "." not in entry.name]
        latest = self.latest()
        return latest is None or step > latest or step in map(step_of_attempt, names)

    def unpin(self, step: int) -> None:
        """Let retention decide again, durably, here and at further levels.

        Raises:
            PersistError: the change could not be made durable.
        """
        step = check_step(step)
        with self._names, mapped("unpin a step", path=self.root, step=step):
            # Order matters: a level takes a pin that is gone for nothing, as it was lost with a root.
            mark_unpinned(self.root, step, files=self._files)
            remove_pin(self.root, step, files=self._files)

    def pinned(self) -> frozenset[int]:
        """The pinned steps, committed or not."""
        return pinned_steps(self.root)

    def suspect(self, step: int) -> None:
        """Remember that a step was found corrupt: it no longer counts as one that retention keeps.

        Called by restore. Nothing is moved or deleted until a newer save begins.
        """
        with self._state:
            self._suspects.add(step)

    def steps(self) -> tuple[int, ...]:
        """The committed steps, ascending."""
        return committed_steps(self.root)

    def latest(self) -> int | None:
        """The newest committed step, or None."""
        return max(self.steps(), default=None)


def _nothing(committed: Sequence[int]) -> Collection[int]:
    return ()
