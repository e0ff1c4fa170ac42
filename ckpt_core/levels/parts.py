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

    Attributes:
        raised: what the blocks raised; the client may hand it on under another name.
    """

    def __init__(self, blocks: Iterable[memoryview], nbytes: int) -> None:
        self._blocks = blocks
        self._nbytes = nbytes
        self.raised: BaseException | None = None

    def __iter__(self) -> Iterator[bytes]:
        done = 0
        try:
            for block in self._blocks:
                done += block.nbytes
                yield bytes(block)
            # Invariant: an upload is completed only when this iterator ends well.
            assert done == self._nbytes, f"{done} bytes were given of a file of {self._nbytes}"
        except GeneratorExit:
            raise
        except BaseException as exc:
            self.raised = exc
            raise

    def joined(self) -> bytes:
        """All of it at once, for a small file."""
        return b"".join(self)
