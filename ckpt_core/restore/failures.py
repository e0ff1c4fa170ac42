"""Two kinds of RestoreError that only this package tells apart. Callers catch RestoreError."""

from __future__ import annotations

from pathlib import Path

from ckpt_core.errors import RestoreError


class ReadRefused(RestoreError):
    """The system refused a read: an older step may still be readable. Its cause is the OSError."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(
            f"{path} cannot be read: {error.strerror or error}. Nothing on storage was changed; "
            "check permissions, the disk and its mount, then restore again",
            path=path,
        )


class ReadHung(RestoreError):
    """A read does not return: reads of older steps would not either."""
