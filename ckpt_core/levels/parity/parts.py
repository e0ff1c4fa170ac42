"""What a node holds of a step, as one run of bytes in k blocks of whole checksum chunks.

part = read_part(far, save)       None: that node does not have it
part.cuts(k)                      where blocks begin and end
part.pieces(begin, end)           the files' ranges of it
verified(far, copy, part, ...)    the bytes of a block, each chunk compared with its sum
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Self

import xxhash

from ckpt_core.errors import CorruptCheckpoint
from ckpt_core.layout import FileEntry, Manifest, RankManifest
from ckpt_core.levels.far.door import Copy, Readable

RANGE_BYTES = 16 * 1024 * 1024
"""Most bytes of one request."""


@dataclass(frozen=True)
class Part:
    """The files of one node, one after the other.

    Attributes:
        raw: the bytes of its `manifest.json`.
        ranks: of its rank manifests, by name.
        entries: the other files, in the order of ranks.
        starts: where each of them begins, and the end.
    """

    raw: bytes
    ranks: dict[str, bytes]
    entries: tuple[FileEntry, ...]
    starts: tuple[int, ...]

    @classmethod
    def of(cls, raw: bytes, ranks: Mapping[str, bytes], *, path: Path) -> Self:
        """That of a manifest and the rank manifests that it names, compared with its sums.

        Args:
            path: named in errors.

        Raises:
            CorruptCheckpoint, UnknownFormat: they are damaged, or of a newer release.
        """
        manifest = Manifest.decode(raw, path=path / "manifest.json")
        entries: list[FileEntry] = []
        for row in manifest.ranks:
            found = xxhash.xxh3_64_hexdigest(ranks[row.file])
            if found != row.xxh3:
                raise wrong(path / row.file, f"xxh3 {row.xxh3}", f"xxh3 {found}", manifest.step)
            entries += RankManifest.decode(ranks[row.file], path=path / row.file).files
        starts = accumulate([entry.nbytes for entry in entries], initial=0)
        return cls(raw, dict(ranks), tuple(entries), tuple(starts))

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return self.starts[-1]

    def has(self, name: str) -> bool:
        """Whether a file of that name is one of them."""
        return name in self.ranks or any(entry.name == name for entry in self.entries)

    def cuts(self, k: int) -> tuple[int, ...]:
        """k blocks: where each begins, and the end. None is longer than an even one and a chunk together."""
        ends = [0]
        for entry, start in zip(self.entries, self.starts, strict=False):
            ends += accumulate([chunk.nbytes for chunk in entry.chunks], initial=start)
        even = [-(-self.nbytes * number // k) for number in range(1, k)]
        return (0, *(ends[bisect_left(ends, at)] for at in even), self.nbytes)

    def pieces(self, begin: int, end: int) -> Iterator[tuple[FileEntry, int, int]]:
        """The ranges of files, as offset and length, that a range of the part consists of."""
        for entry, start in zip(self.entries, self.starts, strict=False):
            first, last = max(begin, start), min(end, start + entry.nbytes)
            if first < last:
                yield entry, first - start, last - first


def read_part(far: Readable, save: Copy) -> Part | None:
    """The manifests of what a node holds of a save; None: it does not hold it.

    Raises:
        CorruptCheckpoint, UnknownFormat: they are damaged there, or of a newer release.
        Away: it cannot be told now.
    """
    path = Path(far.url) / save.target
    raw = far.manifest(save.target)
    if raw is None:
        return None
    manifest = Manifest.decode(raw, path=path / "manifest.json")
    if manifest.attempt != save.attempt:
        return None
    ranks = {row.file: far.read(save, row.file, row.nbytes) for row in manifest.ranks}
    return Part.of(raw, ranks, path=path)


def plain(far: Readable, copy: Copy, part: Part, begin: int, end: int) -> Iterator[memoryview]:
    """The bytes of a range, as they come. Raises Away."""
    for entry, offset, nbytes in part.pieces(begin, end):
        yield from _ranges(far, copy, entry.name, offset, nbytes)


def verified(far: Readable, copy: Copy, part: Part, begin: int, end: int) -> Iterator[memoryview]:
    """The same of whole chunks, and after the last byte of each it was found right.

    Raises:
        CorruptCheckpoint: a chunk is not what was saved.
        Away: as `plain`.
    """
    for entry, offset, nbytes in part.pieces(begin, end):
        at = 0
        for index, chunk in enumerate(entry.chunks):
            if offset <= at < offset + nbytes:
                found = xxhash.xxh3_64()
                for block in _ranges(far, copy, entry.name, at, chunk.nbytes):
                    found.update(block)
                    yield block
                if chunk.xxh3 not in (None, got := found.hexdigest()):
                    path = Path(far.url) / copy.target / entry.name
                    what = f"xxh3 {chunk.xxh3} of chunk {index}"
                    raise wrong(path, what, f"xxh3 {got}", copy.step)
            at += chunk.nbytes


def _ranges(far: Readable, copy: Copy, name: str, begin: int, nbytes: int) -> Iterator[memoryview]:
    for at in range(begin, begin + nbytes, RANGE_BYTES):
        yield from far.read_blocks(copy, name, at, min(RANGE_BYTES, begin + nbytes - at))


class Filling:
    """Fills buffers, one after the other, with bytes as they come; behind the last one with zeros."""

    def __init__(self, blocks: Iterator[memoryview]) -> None:
        self._blocks = blocks
        self._left = memoryview(b"")

    def fill(self, buffer: memoryview) -> None:
        """The next bytes. Raises what their source raises."""
        done = 0
        while done < len(buffer):
            if not self._left:
                found = next(self._blocks, None)
                if found is None:
                    buffer[done:] = bytes(len(buffer) - done)
                    return
                self._left = found
            size = min(len(self._left), len(buffer) - done)
            buffer[done : done + size] = self._left[:size]
            self._left = self._left[size:]
            done += size

    def end(self) -> None:
        """Let the source come to its end, and look at its last bytes too. Raises what it raises."""
        assert not self._left and next(self._blocks, None) is None


def wrong(path: Path, expected: str, got: str, step: int) -> CorruptCheckpoint:
    """What is there is not what was saved."""
    text = f"{path}: expected {expected}, got {got}"
    return CorruptCheckpoint(text, path=path, expected=expected, got=got, step=step)
