"""A file's blocks on their way into the parts of an upload."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

PART_BYTES = 8 << 20
"""Size of a part: larger ones wait longer for their last byte, smaller ones cost a request each."""

STREAMS = 4
"""Parts on their way at once."""

_MOST_PARTS = 9_000
"""S3 takes 10,000."""


def part_bytes(nbytes: int) -> int:
    """Size of the parts of a file of that length."""
    units = -(-nbytes // (_MOST_PARTS * PART_BYTES))
    return PART_BYTES * max(1, units)


class Parts:
    """Iterates over copies of blocks, since the client holds several while it asks for the next.

    The memory of a copy is used again once the client has let go of it: fresh memory for each would take the
    kernel longer than the copy.

    Attributes:
        raised: what the blocks raised; the client may hand it on under another name.
    """

    def __init__(self, blocks: Iterable[memoryview], nbytes: int) -> None:
        self._blocks = blocks
        self._nbytes = nbytes
        self._lent: list[tuple[bytearray, memoryview]] = []
        self.raised: BaseException | None = None

    def __iter__(self) -> Iterator[memoryview]:
        done = 0
        try:
            for block in self._blocks:
                done += block.nbytes
                view = self._space(block.nbytes)
                view[:] = block.cast("B")
                yield view
            # Invariant: an upload is completed only when this iterator ends well.
            assert done == self._nbytes, f"{done} bytes were given of a file of {self._nbytes}"
        except GeneratorExit:
            raise
        except BaseException as exc:
            self.raised = exc
            raise

    def joined(self) -> bytes:
        """All of it at once, for a small file."""
        return b"".join(map(bytes, self))

    def _space(self, nbytes: int) -> memoryview:
        for index, (memory, view) in enumerate(self._lent):
            if len(memory) < nbytes:
                continue
            try:
                # Invariant: this fails as long as the client has the bytes, also to send them once more.
                view.release()
            except BufferError:
                continue
            view = memoryview(memory)[:nbytes]
            self._lent[index] = memory, view
            return view
        memory = bytearray(nbytes)
        view = memoryview(memory)
        self._lent.append((memory, view))
        return view
