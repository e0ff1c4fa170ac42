"""How users are told things: warnings of one category, each said once for a callback."""

from __future__ import annotations

import warnings

from lightning.pytorch.utilities import rank_zero_only


class CheckpointWarning(UserWarning):
    """A save failed, or a resume cannot be exact; the text says why and what to do."""


class Teller:
    """Warns on rank 0, with each text once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def once(self, text: str) -> None:
        """Warn unless this text was told before."""
        if text not in self._told:
            self._told.add(text)
            tell(text)


@rank_zero_only
def tell(text: str) -> None:
    """Warn."""
    warnings.warn(text, CheckpointWarning, stacklevel=4)
