"""Newest valid step -> live state."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ckpt_core.errors import CorruptCheckpoint, NotCommitted, RestoreError
from ckpt_core.files import Files
from ckpt_core.restore.deadline import within
from ckpt_core.restore.failures import ReadHung, ReadRefused
from ckpt_core.restore.filling import fill, specs_of
from ckpt_core.restore.manifests import read_manifests
from ckpt_core.restore.reading import ParallelReader
from ckpt_core.restore.watch import Watch
from ckpt_core.state import Skeleton, bind
from ckpt_core.store import committed_steps, resolve, step_path

logger = logging.getLogger("ckpt_core")

_MOST_REPLACED = 3
_GONE = "it was retired while it was read"
_TOUCHED = (
    "Live tensors were overwritten, in part or all, before this was found: "
    "initialize them again before training"
)


class RestoreWarning(UserWarning):
    """A step was passed over, for an older one; the text says which and why."""


class Guard(Protocol):
    """What restore tells the owner of the root (a StepStore)."""

    def protect(self, step: int) -> None:
        """This process begins to read a step: it must not be retired."""

    def unprotect(self, step: int) -> None:
        """Undo one `protect`."""

    def suspect(self, step: int) -> None:
        """A step was found corrupt."""


class NoGuard:
    """For readers that do not own the root: another process may retire what they read."""

    def protect(self, step: int) -> None:
        """Nothing to do."""

    def unprotect(self, step: int) -> None:
        """Nothing to do."""

    def suspect(self, step: int) -> None:
        """Nothing to do."""


@dataclass(frozen=True)
class RestoredStep:
    """A step that was restored.

    Attributes:
        step: its number.
        path: its directory.
        state: the tree as loaded, for plain values such as counters; its tensors are the live ones.
        skipped: newer steps that could not be used, newest first, and why.
    """

    step: int
    path: Path
    state: Any
    skipped: tuple[tuple[int, str], ...] = ()


@dataclass(slots=True)
class _Search:
    """One call of `restore`.

    Attributes:
        live: the state to fill.
        trusted: as in `restore`.
        touched: live tensors may hold bytes of a step that was not restored.
        skipped: steps that could not be used, newest first, with the error.
        gone: steps that were retired while they were read.
    """

    live: Any
    trusted: bool
    touched: bool = False
    skipped: list[tuple[int, RestoreError]] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)

    def pick(self, steps: tuple[int, ...]) -> int | None:
        """The newest step that was not tried."""
        tried = self.gone | {step for step, _ in self.skipped}
        return max(set(steps) - tried, default=None)


class Restorer:
    """Restores steps of one root. Holds nothing open between calls."""

    def __init__(
        self,
        root: Path,
        *,
        files: Files,
        readers: int,
        timeout_s: float,
        store: Guard | None = None,
    ) -> None:
        """
        Args:
            root: directory of the steps.
            files: how files are read.
            readers: threads that read, each with a buffer of 1 MiB.
            timeout_s: longest time that one read may take.
            store: told which steps are read and which are corrupt; None for a mere reader.
        """
        self._root = root
        self._guard: Guard = NoGuard() if store is None else store
        self._how = ParallelReader(
            files=files, readers=readers, timeout_s=timeout_s, exclusive=store is not None
        )

    def restore(
        self, state: Any, *, step: int | None = None, strict: bool = False, trusted: bool = False
    ) -> RestoredStep | None:
        """Fill `state` in place from the newest valid step, or from `step`; None when there is none.

        Called on the training thread, before training. A step that is corrupt or cannot be read is
        passed over with a `RestoreWarning`; one that is corrupt is reported as suspect as well.

        Raises:
            CorruptCheckpoint: `strict` or `step` forbids falling back, or no step is valid; the text
                says of each step what is wrong, and whether live tensors were changed.
            NotCommitted: `step` is not there; the text names steps that are.
            StateMismatch: names, shapes or dtypes differ; found before anything is changed.
            UntrustedData, UnknownFormat: see there; found before anything is changed.
            RestoreError: no step can be read, a read hangs, or several ranks saved the step.
        """
        search = _Search(state, trusted)
        if step is not None:
            return self._restore_only(search, step)
        while (candidate := search.pick(self._steps())) is not None:
            found = self._try(search, candidate, strict=strict)
            if found is not None:
                return found
        if search.skipped or search.gone:
            raise self._nothing_left(search)
        return None

    # -- inside ----------------------------------------------------------------------------------

    def _steps(self) -> tuple[int, ...]:
        timeout_s = self._how.timeout_s
        return within(timeout_s, lambda: committed_steps(self._root), path=self._root)

    def _restore_only(self, search: _Search, step: int) -> RestoredStep:
        path = step_path(self._root, step)
        within(self._how.timeout_s, lambda: resolve(path), path=path)
        try:
            return self._read(search, step)
        except CorruptCheckpoint as exc:
            self._guard.suspect(step)
            _tell(exc, search)
            raise

    def _try(self, search: _Search, step: int, *, strict: bool) -> RestoredStep | None:
        """Restore a step, or note why not."""
        try:
            return self._read(search, step)
        except NotCommitted:
            logger.info("step %d: %s; looking again", step, _GONE)
            search.gone.add(step)
        except RestoreError as exc:
            corrupt = isinstance(exc, CorruptCheckpoint)
            if corrupt:
                self._guard.suspect(step)
            if strict or not (corrupt or isinstance(exc, ReadRefused)):
                _tell(exc, search)
                raise
            search.skipped.append((step, exc))
            text = f"step {step} was not restored, trying the next older one: {exc}"
            logger.warning("%s", text)
            warnings.warn(text, RestoreWarning, stacklevel=4)
        return None

    def _read(self, search: _Search, step: int) -> RestoredStep:
        """Restore a step; one that is replaced by a newer save of the same step is read again.

        Raises:
            NotCommitted: it was retired meanwhile.
        """
        path = step_path(self._root, step)
        for _ in range(_MOST_REPLACED):
            with self._protected(step):
                watch = within(self._how.timeout_s, lambda: Watch(path), path=path)
                try:
                    state = self._read_once(search, path)
                except RestoreError as exc:
                    if isinstance(exc, ReadHung) or watch.still_there():
                        raise
                else:
                    if watch.still_there():
                        skipped = tuple((number, str(exc)) for number, exc in search.skipped)
                        return RestoredStep(step, path, state, skipped)
        raise NotCommitted(f"step {step} in {self._root}: {_GONE}", step=step, path=path)

    @contextmanager
    def _protected(self, step: int) -> Iterator[None]:
        self._guard.protect(step)
        try:
            yield
        finally:
            self._guard.unprotect(step)

    def _read_once(self, search: _Search, path: Path) -> Any:
        how = self._how
        step = within(how.timeout_s, lambda: read_manifests(path, files=how.files), path=path)
        specs = specs_of(step)
        skeleton = Skeleton.from_json(step.ranks[0].skeleton, path=path)
        # Order matters: every difference is found here, before a live byte changes.
        binding = bind(skeleton, specs, search.live, trusted=search.trusted)
        search.touched = True
        fill(step, binding.destinations, how=how)
        return binding.finish()

    def _nothing_left(self, search: _Search) -> RestoreError:
        lines = [f"step {number}: {exc}" for number, exc in search.skipped]
        lines += [f"step {number}: {_GONE}" for number in sorted(search.gone, reverse=True)]
        text = f"no step in {self._root} can be restored:\n  " + "\n  ".join(lines) + "\n"
        text += "Nothing on storage was changed. To train from scratch, use another root. "
        if search.touched:
            text += _TOUCHED
        corrupt = [exc for _, exc in search.skipped if isinstance(exc, CorruptCheckpoint)]
        if not corrupt:
            return RestoreError(text.rstrip(), path=self._root)
        first = corrupt[0]
        return CorruptCheckpoint(
            text.rstrip(), path=self._root, expected=first.expected, got=first.got
        )


def _tell(exc: RestoreError, search: _Search) -> None:
    """Let an error say what happened to the live tensors."""
    if search.touched:
        exc.add_note(_TOUCHED)
