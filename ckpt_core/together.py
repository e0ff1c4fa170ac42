"""What the ranks of a job do together around saves: open a root, and not raise one failure twice."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ckpt_core.coordination import Coordination
from ckpt_core.errors import CkptError, CommitError
from ckpt_core.files import Files
from ckpt_core.options import Options
from ckpt_core.store import GuestStore, StepStore
from ckpt_core.types import RAISED_TO_CALLER, OnError, RankInfo

_SEEN_WITHIN_S = 10.0
_REFUSED_WITHIN_S = 5.0
"""Who gives an attempt up tells the others at once, and removes its files meanwhile."""


def make_store(
    root: Path, options: Options, info: RankInfo, *, files: Files
) -> StepStore | GuestStore:
    """The store of a root, for a rank that leads or for one that does not."""
    if not info.leads:
        return GuestStore(root, files=files, rank=info.rank)
    return StepStore(
        root,
        files=files,
        keep_last=options.keep_last,
        keep_every=options.keep_every,
        spare_slots=options.in_flight * len(info.members),
        shared=len(info.members) > 1,
    )


def open_together(
    store: StepStore | GuestStore, coordination: Coordination, *, timeout_s: float
) -> None:
    """Open the root on every rank, or on none: leaders first, and the others look for what they did.

    Called on every rank when the Checkpointer is made.

    Raises:
        CkptError: what went wrong on this rank.
        CommitError: what went wrong on another one.
        CoordinationTimeout: a rank did not come.
    """
    info = coordination.info
    error: CkptError | None = None
    owner = None
    try:
        if isinstance(store, StepStore):
            store.open()
            owner = store.owner()
    except CkptError as exc:
        error = exc
    opened = coordination.gather("open", [_text(error), owner], timeout_s)
    _raise_first(error, [text for text, _ in opened])
    if info.world_size == 1:
        return
    if isinstance(store, GuestStore):
        leader = info.members[0]
        try:
            # Without an owner in the lock file (a full disk) there is nothing to compare.
            if opened[leader][1]:
                store.find_leader(opened[leader][1], leader=leader, timeout_s=_SEEN_WITHIN_S)
        except CkptError as exc:
            error = exc
    _raise_first(error, coordination.gather("joined", _text(error), timeout_s))


def _text(error: CkptError | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"


def _raise_first(mine: CkptError | None, texts: tuple[str | None, ...] | list[str | None]) -> None:
    if mine is not None:
        raise mine
    failures = {rank: CkptError(text, rank=rank) for rank, text in enumerate(texts) if text}
    if failures:
        rank = min(failures)
        raise CommitError(
            f"rank {rank} could not open its root: {failures[rank]}. No rank opened one",
            failures=dict(failures),
            rank=rank,
        )


class Failures:
    """Saves that failed in the background and were not raised yet. Thread-safe."""

    def __init__(self, on_error: OnError) -> None:
        self._raises = on_error is OnError.RAISE
        self._errors: list[BaseException] = []

    def note(self, error: BaseException) -> None:
        """Remember it, unless it is only the echo of another rank that raised an older one in `save`.

        Raised again, an echo would make the ranks take turns in refusing.
        """
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
        raise errors[0]


def refusal_behind(
    coordination: Coordination, attempt_id: str, step: int, error: BaseException, *, left_s: float
) -> CkptError | None:
    """Why another rank has given the attempt up, if that is why this one's files are gone.

    Called from background threads; returns within some seconds, and before `left_s`.
    """
    if not isinstance(error.__cause__, FileNotFoundError):
        return None
    within_s = min(max(left_s, 0.0), _REFUSED_WITHIN_S)
    return coordination.refusal(attempt_id, step, within_s)


def _is_echo(error: BaseException) -> bool:
    if not isinstance(error, CommitError) or not error.failures:
        return False
    return all(RAISED_TO_CALLER in str(failure) for failure in error.failures.values())
