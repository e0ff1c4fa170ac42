"""Where everything lies in a torch zip file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ZipExtent:
    """The bytes of one storage of the file.

    Attributes:
        name: of the record, without that of the archive, such as "data/0".
        offset: of its bytes, from the start of the file; a multiple of torch's storage alignment.
        nbytes: one or more.
    """

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class ZipLayout:
    """The data map of one torch zip file. Frames and extents cover it exactly, without holes.

    Attributes:
        file_bytes: length of the file.
        frames: `(offset, bytes)` of all that is not tensor data, ascending.
        extents: every storage that has bytes, ascending.
    """

    file_bytes: int
    frames: tuple[tuple[int, bytes], ...]
    extents: tuple[ZipExtent, ...]


def record_name(path: bytes | bytearray) -> str:
    """The record of a path in the zip file: all but the name of the archive."""
    return path.decode().partition("/")[2]
