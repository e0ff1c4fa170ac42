"""The one boundary where an `OSError` of a store operation becomes an error of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt_core.errors import CommitError, PersistError
from ckpt_core.system.files import advice


@contextmanager
def mapped(
    doing: str,
    *,
    path: Path,
    step: int | None = None,
    error: type[PersistError] | type[CommitError] = PersistError,
) -> Iterator[None]:
    """Turn an `OSError` of the body into `error`, saying what is safe and what to do.

    Raises:
        PersistError, CommitError: as `error` says, with the `OSError` as its cause.
    """
    try:
        yield
    except OSError as exc:
        reason = exc.strerror or str(exc)
        where = f"step {step} in {path}" if step is not None else f"{path}"
        text = f"could not {doing} ({where}): {reason}. Committed steps are safe. {advice(exc)}"
        raise error(text, step=step, path=path) from exc
