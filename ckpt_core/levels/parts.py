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


class Lent(bytearray):
    """Memory of blocks. Its only maker never writes into it while anybody holds a view of it."""


class Loans:
    """Memory for blocks that are read, looked at and sent: used again as soon as nobody holds it any more.

    Fresh memory for each block would take the kernel longer than to read it, and a copy of each as long.
    For one thread at a time.
    """

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._memory: list[Lent] = []

    def take(self, nbytes: int) -> memoryview:
        """A block that nobody holds; at most `block_bytes`."""
        for memory in self._memory:
            if _is_free(memory):
                return memoryview(memory)[:nbytes]
        memory = Lent(self.block_bytes)
        self._memory.append(memory)
        return memoryview(memory)[:nbytes]


def _is_free(memory: Lent) -> bool:
    try:
        # Invariant: a change of length is refused as long as there is a view, of whatever part.
        memory.pop()
    except BufferError:
        return False
    memory.append(0)
    return True


class Parts:
    """Iterates over blocks as the client may have them: it holds several while it asks for the next.

    Attributes:
        raised: what the blocks raised; the client may hand it on under another name.
    """

    def __init__(self, blocks: Iterable[memoryview], nbytes: int) -> None:
        self._blocks = blocks
        self._nbytes = nbytes
        self.raised: BaseException | None = None

    def __iter__(self) -> Iterator[memoryview | bytes]:
        done = 0
        try:
            for block in self._blocks:
                done += block.nbytes
                # Danger: other blocks may be overwritten as soon as the next one is asked for.
                yield block if isinstance(block.obj, Lent) else bytes(block)
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
