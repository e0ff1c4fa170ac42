"""How users are told things: warnings of one category, by rank 0."""

from __future__ import annotations

import warnings


class CheckpointWarning(UserWarning):
    """A save failed, or a resume cannot be what was asked for; the text says why and what to do."""


def tell(text: str, *, rank: int = 0) -> None:
    """Warn; the other ranks have nothing to add."""
    if rank == 0:
        warnings.warn(text, CheckpointWarning, stacklevel=3)
