"""Where everything lies in a torch zip file."""

from __future__ import annotations

import struct
from dataclasses import dataclass

# From the zip specification (APPNOTE 6.3.9, sections 4.3.9 to 4.3.16); torch always writes zip64.
_DESCRIPTOR_CRC = 4
_END64_SIZE, _LOCATOR_SIZE, _END_SIZE = 56, 20, 22
_END64_MAGIC = b"PK\x06\x06"
_END64_COUNT_AND_START = "<32xQ8xQ"
_ENTRY_MAGIC = b"PK\x01\x02"
_ENTRY_SIZE, _ENTRY_CRC = 46, 16
_ENTRY_LENGTHS = "<28xHHH"


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

    def crc_places(self) -> tuple[tuple[int, int], ...]:
        """For each extent the two offsets where the zip format keeps its CRC-32: behind it, and in the
        directory.

        Both hold four zero bytes, since the data was not known. torch reads neither; other zip programs
        do, and take the record for damaged. Whoever has the bytes at hand may put the checksum there,
        as a little-endian u32.
        """
        in_directory = self._directory_crcs()
        return tuple(
            [(end(extent) + _DESCRIPTOR_CRC, in_directory[extent.name]) for extent in self.extents]
        )

    def _directory_crcs(self) -> dict[str, int]:
        """Offset in the file of each record's CRC-32 in the zip directory."""
        base, tail = self.frames[-1]
        end64 = len(tail) - _END64_SIZE - _LOCATOR_SIZE - _END_SIZE
        assert tail.startswith(_END64_MAGIC, end64), "torch wrote no zip64 directory"
        count, start = struct.unpack_from(_END64_COUNT_AND_START, tail, end64)
        places: dict[str, int] = {}
        entry = start - base
        for _ in range(count):
            assert tail.startswith(_ENTRY_MAGIC, entry), "the zip directory is not what it says"
            name_end = (
                entry
                + _ENTRY_SIZE
                + (lengths := struct.unpack_from(_ENTRY_LENGTHS, tail, entry))[0]
            )
            places[record_name(tail[entry + _ENTRY_SIZE : name_end])] = base + entry + _ENTRY_CRC
            entry += _ENTRY_SIZE + sum(lengths)
        return places


def end(extent: ZipExtent) -> int:
    """Offset of the first byte behind it."""
    return extent.offset + extent.nbytes


def record_name(path: bytes | bytearray) -> str:
    """The record of a path in the zip file: all but the name of the archive."""
    return path.decode().partition("/")[2]
