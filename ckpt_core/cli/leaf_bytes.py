"""Bytes of leaves, read in blocks and checked: no leaf is ever held whole here. Torch-free.

A checksum covers a chunk, which may hold many leaves or be a small part of one. So a chunk is hashed
whole, once, before any byte of it is handed out; the second read comes from the page cache.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Self

import xxhash

from ckpt_core.errors import CorruptCheckpoint
from ckpt_core.files import Files
from ckpt_core.layout import FileEntry, LeafEntry
from ckpt_core.restore import StepManifest

BLOCK_BYTES = 1 << 20
"""One read, and so the memory that a leaf of any size takes."""


class CheckedFile:
    """One shard file, open for reading until `close`."""

    def __init__(self, path: Path, entry: FileEntry, *, files: Files) -> None:
        self.path = path
        self._entry = entry
        self._files = files
        self._starts = [0, *accumulate(chunk.nbytes for chunk in entry.chunks)]
        self._sound = bytearray(len(entry.chunks))
        self._buffer = memoryview(bytearray(BLOCK_BYTES))
        self._fd = files.open_read(path)

    def close(self) -> None:
        """Close it."""
        self._files.close(self._fd)

    def blocks(self, offset: int, nbytes: int) -> Iterator[memoryview]:
        """Bytes offset .. offset+nbytes in blocks; each is overwritten by the next one.

        Raises:
            CorruptCheckpoint: a chunk that they lie in is not what was written.
        """
        end = offset + nbytes
        while offset < end:
            index = bisect_right(self._starts, offset) - 1
            stop = min(end, self._starts[index + 1], offset + BLOCK_BYTES)
            if not self._sound[index]:
                self._check(index)
                self._sound[index] = 1
            yield self._read(offset, stop - offset)
            offset = stop

    def _check(self, index: int) -> None:
        chunk = self._entry.chunks[index]
        if chunk.xxh3 is None:
            return
        start, stop = self._starts[index], self._starts[index + 1]
        digest = xxhash.xxh3_64()
        for position in range(start, stop, BLOCK_BYTES):
            digest.update(self._read(position, min(BLOCK_BYTES, stop - position)))
        if digest.hexdigest() != chunk.xxh3:
            where = f"{self.path}: chunk {index} (bytes {start}..{stop})"
            expected, got = f"xxh3 {chunk.xxh3}", f"xxh3 {digest.hexdigest()}"
            text = (
                f"{where}: expected {expected}, got {got}; `ckpt-core verify` lists all that is bad"
            )
            raise CorruptCheckpoint(text, path=self.path, expected=expected, got=got)

    def _read(self, offset: int, nbytes: int) -> memoryview:
        view = self._buffer[:nbytes]
        done = 0
        while done < nbytes:
            got = self._files.preadv(self._fd, [view[done:]], offset + done)
            if got == 0:
                text = f"{self.path}: it ends at byte {offset + done}; it was longer a moment ago"
                raise CorruptCheckpoint(text, path=self.path)
            done += got
        return view


class LeafReader:
    """The leaves of one step; keeps its files open until `close`."""

    def __init__(self, step: StepManifest) -> None:
        self._step = step
        self._files = Files()
        self._open: dict[str, CheckedFile] = {}
        self._places = {
            (rank.rank, leaf.spec.name): (rank.files[leaf.file], leaf)
            for rank in step.ranks
            for leaf in rank.leaves
        }

    def leaf(self, name: str, *, rank: int = 0) -> LeafEntry | None:
        """What the manifest says of a leaf; None when it has none of that name."""
        place = self._places.get((rank, name))
        return None if place is None else place[1]

    def blocks(self, name: str, *, rank: int = 0) -> Iterator[memoryview]:
        """Row-major bytes of a leaf, in blocks, each overwritten by the next one of its file.

        Raises:
            KeyError: there is no such leaf.
            CorruptCheckpoint: its bytes are not what was written.
            OSError: the system refused a read.
        """
        entry, leaf = self._places[rank, name]
        if leaf.nbytes == 0:
            return iter(())
        if entry.name not in self._open:
            path = self._step.path / entry.name
            self._open[entry.name] = CheckedFile(path, entry, files=self._files)
        return self._open[entry.name].blocks(leaf.offset, leaf.nbytes)

    def close(self) -> None:
        """Close the files."""
        while self._open:
            self._open.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
