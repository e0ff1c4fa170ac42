"""One node's share of the parity of a save: k blocks of a stripe come, verified, and one goes to disk.

parts = [read_part(far, save) for far in fars]       see `parts`; None: that node does not have it
encode(group, node, save, Sources(fars, parts), far, how)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import xxhash

from ckpt_core.errors import CorruptCheckpoint
from ckpt_core.layout import ChunkSum, FileEntry, Manifest, RankEntry, RankManifest
from ckpt_core.levels.far.door import Away, Copy, Far, Readable
from ckpt_core.levels.parity.codes import Bytes, Code, combine
from ckpt_core.levels.parity.objects import (
    PARTS,
    PIECE_BYTES,
    RANKS,
    Description,
    Group,
    packed,
    stripe_name,
    sums_name,
)
from ckpt_core.levels.parity.parts import Filling, Part, verified

_MOST_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Sources:
    """Where the data of a group are, in the order of the group.

    Attributes:
        fars: the nodes' roots.
        parts: what each holds of the save.
    """

    fars: Sequence[Readable]
    parts: Sequence[Part]

    @property
    def nbytes(self) -> int:
        """Of the largest of them."""
        return max(part.nbytes for part in self.parts)


def _nothing(nbytes: int) -> None:
    pass


@dataclass(frozen=True)
class How:
    """How it is done.

    Attributes:
        let_through: called before so many bytes are read, by one thread at a time; may wait, and raises where
            it is to end.
        progress: told the bytes that have been read, likewise.
        piece_bytes: see `PIECE_BYTES`.
    """

    let_through: Callable[[int], None] = _nothing
    progress: Callable[[int], None] = _nothing
    piece_bytes: int = field(default=PIECE_BYTES)


def encode(group: Group, node: int, save: Copy, sources: Sources, far: Far, how: How) -> None:
    """Write and publish what a node keeps of the parity of a save.

    Args:
        node: its number in the group.
        far: where it keeps it.

    Raises:
        CorruptCheckpoint: the save is damaged somewhere, which is named. Nothing can be seen here.
        Away: somebody did not answer, or does not have the save any more; or the disk is full. Likewise.
        What `how.let_through` raises: at once; likewise.
    """
    _Encoding(group, node, save, sources, far, how).run()


class _Encoding:
    def __init__(
        self, group: Group, node: int, save: Copy, sources: Sources, far: Far, how: How
    ) -> None:
        self._group, self._node, self._save = group, node, save
        self._sources, self._far, self._how = sources, far, how
        self._copy = group.copy(save)
        shape = group.shape
        cuts = [part.cuts(shape.k) for part in sources.parts]
        sizes = [end - begin for row in cuts for begin, end in pairwise(row)]
        self._index = [
            (name, file, data)
            for name, part in zip(group.parts, sources.parts, strict=True)
            for file, data in (("manifest.json", part.raw), *part.ranks.items())
        ]
        self._about = Description(
            save.attempt,
            shape.k,
            shape.m,
            group.parts,
            node,
            max(1, *sizes),
            how.piece_bytes,
            tuple(cuts),
            tuple([(name, file, len(data)) for name, file, data in self._index]),
        )
        self._entries: list[FileEntry] = []
        self._lock = threading.Lock()
        self._done = 0

    def run(self) -> None:
        for stripe in self._group.shape.kept(self._node):
            self._stripe(stripe)
        self._put_small(PARTS, b"".join(data for *_, data in self._index))
        for entry in self._entries:
            self._look(entry)
        about = self._about.to_json()
        ranks = RankManifest(0, tuple(self._entries), (), about, version=3).encode()
        self._far.put(self._copy, RANKS, iter([memoryview(ranks)]), len(ranks))
        row = RankEntry(0, RANKS, len(ranks), xxhash.xxh3_64_hexdigest(ranks))
        size = sum(entry.nbytes for entry in self._entries)
        manifest = Manifest(
            self._copy.step,
            self._copy.attempt,
            time.time(),
            (row,),
            size,
            directory=self._copy.directory,
        ).encode()
        self._how.let_through(0)
        there = self._far.directories().get(self._copy.target)
        self._far.publish(self._copy, manifest, replaces=None if there is None else there.attempt)

    def _stripe(self, stripe: int) -> None:
        sums: list[list[int]] = [[] for _ in range(self._about.k + 1)]
        name = stripe_name(stripe)
        with closing(self._parity(stripe, sums)) as blocks:
            self._far.put(self._copy, name, blocks, self._about.block_bytes)
        chunks = [
            ChunkSum(end - begin, f"{found:016x}")
            for found, (begin, end) in zip(sums[-1], self._ranges(), strict=True)
        ]
        self._entries.append(FileEntry(name, self._about.block_bytes, tuple(chunks)))
        self._put_small(sums_name(stripe), packed(sums))

    def _ranges(self) -> Iterator[tuple[int, int]]:
        return map(self._about.piece, range(self._about.pieces))

    def _parity(self, stripe: int, sums: list[list[int]]) -> Generator[memoryview]:
        """The parity, piece by piece; the sums of what it was made of.

        The next piece of every block is read while this one is computed and written.
        """
        shape, about = self._group.shape, self._about
        code = Code(shape.k, shape.m)
        coefficients = code.coefficients(
            range(shape.k), shape.k + shape.parity(stripe).index(self._node)
        )
        fillings = [Filling(self._verified(node, stripe)) for node in shape.data(stripe)]
        size = min(about.piece_bytes, about.block_bytes)
        spare = [[np.zeros(size, np.uint8) for _ in fillings] for _ in range(2)]
        into = np.zeros(size, np.uint8)
        with ThreadPoolExecutor(shape.k, thread_name_prefix="ckpt-parity") as threads:

            def begin(number: int) -> list[Future[tuple[Bytes, int]]]:
                first, end = about.piece(number)
                views = [buffer[: end - first] for buffer in spare[number % 2]]
                return [threads.submit(_filled, *one) for one in zip(fillings, views, strict=True)]

            coming = begin(0)
            for number in range(about.pieces):
                pieces = [future.result() for future in coming]
                coming = begin(number + 1) if number + 1 < about.pieces else []
                parity = into[: len(pieces[0][0])]
                combine(coefficients, [piece for piece, _ in pieces], parity)
                found = [*(digest for _, digest in pieces), xxhash.xxh3_64_intdigest(parity.data)]
                for row, digest in zip(sums, found, strict=True):
                    row.append(digest)
                yield parity.data
        for filling in fillings:
            filling.end()

    def _verified(self, node: int, stripe: int) -> Iterator[memoryview]:
        begin, end = self._about.block(node, stripe)
        part, far = self._sources.parts[node], self._sources.fars[node]
        for block in verified(far, self._save, part, begin, end):
            # One after the other: who waits for the pace keeps the others from going faster than it.
            with self._lock:
                self._how.let_through(len(block))
            yield block
            with self._lock:
                self._done += len(block)
                self._how.progress(self._done)

    def _put_small(self, name: str, data: bytes) -> None:
        view = memoryview(data)
        blocks = [
            view[at : at + _MOST_CHUNK_BYTES] for at in range(0, len(data), _MOST_CHUNK_BYTES)
        ]
        self._far.put(self._copy, name, iter(blocks), len(data))
        chunks = tuple([ChunkSum(len(one), xxhash.xxh3_64_hexdigest(one)) for one in blocks])
        self._entries.append(FileEntry(name, len(data), chunks))

    def _look(self, entry: FileEntry) -> None:
        """Be sure that a file reads back as it was written."""
        part = Part(b"", {}, (entry,), (0, entry.nbytes))
        try:
            for _ in verified(self._far, self._copy, part, 0, entry.nbytes):
                self._how.let_through(0)
        except CorruptCheckpoint as exc:
            text = f"{exc}. Look for a disk that damages bytes; the step is safe in the roots"
            raise Away(text, step=self._save.step) from exc


def _filled(filling: Filling, piece: Bytes) -> tuple[Bytes, int]:
    """A piece, with its bytes, and their sum while they are in the processor's cache."""
    filling.fill(piece.data)
    return piece, xxhash.xxh3_64_intdigest(piece.data)
