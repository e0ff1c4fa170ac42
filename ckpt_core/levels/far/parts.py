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
    """Blocks copied together into the parts that the client sends, since it holds several at once.

    A block that is read-only stays as it is for as long as somebody has it: it goes on as a piece of a part,
    and nothing is copied.
    The memory of a part is used again once the client has let go of it: fresh memory for each would take the
    kernel longer than the copy.

    Attributes:
        raised: what the blocks raised; the client may hand it on under another name.
    """

    def __init__(self, blocks: Iterable[memoryview], nbytes: int) -> None:
        self._blocks = blocks
        self._nbytes = nbytes
        self._size = min(nbytes, part_bytes(nbytes))
        self._lent: list[tuple[bytearray, memoryview]] = []
        self.raised: BaseException | None = None

    def __iter__(self) -> Iterator[memoryview]:
        done, part, at = 0, memoryview(b""), 0
        try:
            for block in self._blocks:
                left = block.cast("B")
                self._check(done + len(left) <= self._nbytes, done + len(left))
                if left.readonly and at == len(part):
                    done += len(left)
                    del block  # only the client has it from here on
                    yield left
                    continue
                while left:
                    if at == len(part):
                        part, at = self._space(min(self._size, self._nbytes - done)), 0
                    piece = left[: len(part) - at]
                    part[at : at + len(piece)] = piece
                    left, at, done = left[len(piece) :], at + len(piece), done + len(piece)
                    if at == len(part):
                        yield part
            self._check(done == self._nbytes, done)
        except GeneratorExit:
            raise
        except BaseException as exc:
            self.raised = exc
            raise

    def _check(self, right: bool, done: int) -> None:
        # Invariant: an upload is completed only when the iterator ends well.
        assert right, f"{done} bytes were given of a file of {self._nbytes}"

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
