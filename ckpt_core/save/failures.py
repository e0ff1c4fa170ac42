"""Saves that failed in the background: each is raised once, to the next call, where it concerns the rank."""

from __future__ import annotations

import contextlib
import logging

from ckpt_core.errors import CommitError
from ckpt_core.types import RAISED_TO_CALLER, OnError

_log = logging.getLogger("ckpt_core")


class Failures:
    """Saves that failed in the background and were not raised yet. Thread-safe."""

    def __init__(self, on_error: OnError) -> None:
        self._raises = on_error is OnError.RAISE
        self._errors: list[BaseException] = []

    def note(self, step: int, error: BaseException) -> None:
        """Log it, and remember it for `report`.

        But for the mere echo of another rank that raised an older one in `save`: raised again, it would
        make the ranks take turns in refusing.
        """
        _log.error("save of step %d failed: %s", step, error)
        if self._raises and not _is_echo(error):
            self._errors.append(error)

    def forget(self, error: BaseException) -> None:
        """It has been raised to the caller already."""
        # Others may be noted meanwhile, and equality of errors is identity.
        with contextlib.suppress(ValueError):
            self._errors.remove(error)

    def report(self, step: int | None = None) -> None:
        """Raise the oldest with a note of the others; `step` is not saved then. None is left."""
        errors = list(self._errors)
        if not errors:
            return
        for other in errors[1:]:
            errors[0].add_note(f"Then also: {other}")
        if step is not None:
            errors[0].add_note(f"Step {step} was not saved; the next call tries again.")
        # Order matters: no interrupt comes between the two, so that none is taken out and not raised.
        del self._errors[: len(errors)]
        try:
            raise errors[0]
        finally:
            del errors  # It would know itself, and hold the state of whoever is told.


def _is_echo(error: BaseException) -> bool:
    if not isinstance(error, CommitError) or not error.failures:
        return False
    return all(RAISED_TO_CALLER in str(failure) for failure in error.failures.values())
