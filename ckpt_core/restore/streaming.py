"""Bytes of leaves in their order, read in blocks and checked: no leaf is ever held whole here. Torch-free.

For tools, which copy or compare what a restore would put into tensors.

A checksum covers a chunk, which may hold many leaves or be a small part of one. So a chunk is hashed
whole, once, before any byte of it is handed out; the second read comes from the page cache.

A leaf that ranks store together is put together on the way: slices that follow one another are read one
after the other, boxes are laid into a window that moves over the leaf.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Self

from ckpt_core.errors import CorruptCheckpoint
from ckpt_core.layout import FileEntry, RankManifest, itemsize, needed_ranges
from ckpt_core.restore.leaves import LeafPlace, StepLeaves, StoredLeaf
from ckpt_core.restore.manifests import StepManifest
from ckpt_core.restore.units import BadChunk, ChunkCheck, Discard, ReadJob, Unit
from ckpt_core.restore.windows import spans_of, windows
from ckpt_core.system.files import Files

BLOCK_BYTES = 1 << 20
"""One read, and so the memory that a leaf of any size takes."""

WINDOW_BYTES = 1 << 18
"""What is put together of boxes at once: smaller, since it may consist of a run for each element."""

MAX_OPEN = 100
"""Shard files that are open at once: thousands of ranks may have written parts of one leaf."""


class CheckedFile:
    """One shard file, open from the first read until `close`, after which it may be read again."""

    def __init__(self, path: Path, entry: FileEntry, *, files: Files, buffer: memoryview) -> None:
        self.path = path
        self._entry = entry
        self._files = files
        self._starts = [0, *accumulate(chunk.nbytes for chunk in entry.chunks)]
        self._sound = bytearray(len(entry.chunks))
        self._buffer = buffer
        self._fd: int | None = None

    def close(self) -> None:
        """Close it; does nothing when it is not open."""
        if self._fd is not None:
            self._files.close(self._fd)
            self._fd = None

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
        if self._entry.chunks[index].xxh3 is None:
            return
        start, stop = self._starts[index], self._starts[index + 1]
        found: list[BadChunk] = []
        job = ReadJob(self.path, self._entry, Discard())
        check = ChunkCheck(Unit(job, index, start, stop - start), found.append)
        for position in range(start, stop, BLOCK_BYTES):
            check.feed([self._read(position, min(BLOCK_BYTES, stop - position))])
        for bad in found:
            expected, got = f"xxh3 {bad.expected}", f"xxh3 {bad.got}"
            text = f"{bad.where}: expected {expected}, got {got}; `ckpt-core verify` lists all that is bad"
            raise CorruptCheckpoint(text, path=self.path, expected=expected, got=got)

    def _read(self, offset: int, nbytes: int) -> memoryview:
        if self._fd is None:
            self._fd = self._files.open_read(self.path)
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
    """The leaves of one step over all its ranks; keeps files open until `close`.

    Attributes:
        leaves: which there are, and where their parts lie.
    """

    def __init__(self, step: StepManifest, *, files: Files | None = None) -> None:
        """
        Args:
            files: how they are read.

        Raises:
            CorruptCheckpoint: ranks contradict each other about a leaf.
        """
        self.leaves = StepLeaves(step)
        self._step = step
        self._ranks = {rank.rank: rank for rank in step.ranks}
        self._files = files or Files()
        self._buffer = memoryview(bytearray(BLOCK_BYTES))
        self._known: dict[tuple[int, int], CheckedFile] = {}
        self._recent: dict[CheckedFile, None] = {}
        self._whole: set[int] = set()

    def of_rank(self, manifest: RankManifest) -> RankLeaves:
        """The leaves as one rank of the step has them."""
        return RankLeaves(self, manifest)

    def blocks(self, leaf: StoredLeaf, wanted: range | None = None) -> Iterator[memoryview]:
        """Row-major bytes of a leaf of `leaves`, in blocks; each is overwritten by the next one.

        Args:
            wanted: which of its bytes; the chunks that they lie in are read. None: all.

        Raises:
            CorruptCheckpoint: its bytes are not what was written, or not all of them are there.
            RestoreError: this is the root of a node, and another one holds a part of the leaf.
            OSError: the system refused a read.
        """
        wanted = range(leaf.nbytes) if wanted is None else wanted
        if not wanted:
            return
        self._check_whole(leaf)
        first = leaf.places[0]
        if first.part is None:
            yield from self._file(first).blocks(first.offset + wanted.start, len(wanted))
            return
        spans = spans_of(leaf)
        if spans is None:
            yield from self._boxes(leaf, wanted)
            return
        position = wanted.start
        for begin, end, place in spans:
            # What another slice has held already is passed over.
            skip, end = max(position - begin, 0), min(end, wanted.stop)
            if begin + skip < end:
                yield from self._file(place).blocks(place.offset + skip, end - begin - skip)
                position = end

    def close(self) -> None:
        """Close the files."""
        while self._known:
            self._known.popitem()[1].close()
        self._recent.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_whole(self, leaf: StoredLeaf) -> None:
        # Before the first byte: its size may be a lie, and whoever asks may write that much.
        if id(leaf) in self._whole:
            return
        gap = self.leaves.gap(leaf)
        if gap is not None and self.leaves.is_partial:
            raise self.leaves.elsewhere([leaf.spec.name])
        if gap is not None:
            raise self.leaves.lacks(leaf.spec.name, gap)
        self._whole.add(id(leaf))

    def _boxes(self, leaf: StoredLeaf, wanted: range) -> Iterator[memoryview]:
        window = memoryview(bytearray(WINDOW_BYTES))
        spare = memoryview(bytearray(WINDOW_BYTES))
        shape, unit, at = leaf.spec.shape, itemsize(leaf.spec.dtype), 0
        for box, nbytes in windows(shape, unit, WINDOW_BYTES):
            begin, end = max(wanted.start - at, 0), min(wanted.stop - at, nbytes)
            at += nbytes
            if begin >= end:
                continue
            for place in leaf.places:
                assert place.part is not None
                runs = needed_ranges(place.part, shape, unit, box)
                if not runs:
                    continue
                # The rows of a window follow one another in each stored box as well: one read.
                first, last = runs[0][0], runs[-1][0] + runs[-1][2]
                self._copy(place, first, spare[: last - first])
                for source, target, size in runs:
                    window[target : target + size] = spare[source - first : source - first + size]
            yield window[begin:end]

    def _copy(self, place: LeafPlace, begin: int, into: memoryview) -> None:
        done = 0
        for block in self._file(place).blocks(place.offset + begin, len(into)):
            into[done : done + len(block)] = block
            done += len(block)

    def _file(self, place: LeafPlace) -> CheckedFile:
        key = place.rank, place.file
        file = self._known.get(key)
        if file is None:
            entry = self._ranks[place.rank].files[place.file]
            path = self._step.path / entry.name
            file = CheckedFile(path, entry, files=self._files, buffer=self._buffer)
            self._known[key] = file
        self._recent.pop(file, None)
        self._recent[file] = None
        if len(self._recent) > MAX_OPEN:
            oldest = next(iter(self._recent))
            del self._recent[oldest]
            oldest.close()
        return file


class RankLeaves:
    """The leaves of a step as one rank has them: its own, and those that ranks store together."""

    def __init__(self, reader: LeafReader, manifest: RankManifest) -> None:
        self._reader = reader
        self._leaves = reader.leaves
        self.manifest = manifest

    @property
    def step(self) -> StepManifest:
        """The step that they are of."""
        return self._leaves.step

    def leaf(self, name: str) -> StoredLeaf | None:
        """A leaf by its name; None when the step has none of that name."""
        own = self._leaves.private[self.manifest.rank].get(name)
        return self._leaves.shared.get(name) if own is None else own

    def is_shared(self, name: str) -> bool:
        """Whether ranks store it together; always so in a step of one rank."""
        return name in self._leaves.shared

    def require(self, names: Collection[str]) -> None:
        """Check that each byte of these leaves is there; called before anything is sized by them.

        Raises:
            CorruptCheckpoint: no rank has stored a byte that one of them consists of.
            RestoreError: this is the root of a node, and another one holds a part of them.
        """
        self._leaves.of(self.manifest, names, whole=True)

    def blocks(self, name: str, wanted: range | None = None) -> Iterator[memoryview]:
        """Row-major bytes of a leaf, as `LeafReader.blocks`.

        Raises:
            KeyError: there is no such leaf.
        """
        leaf = self.leaf(name)
        if leaf is None:
            raise KeyError(name)
        return self._reader.blocks(leaf, wanted)
