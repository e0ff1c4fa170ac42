"""How leaves look, at a few places: what is likely to be unchanged is guessed by that.

Leaves on the host are looked at where they are (`unchanged`). To read a device would make training wait for
it, so its leaves are looked at as they come out of staging memory, piece by piece, by the writers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping

from ckpt_core.system.threads import own_lock

_LOOKS, _LINE_BYTES = 4, 64


def lines_of(length: int) -> list[tuple[int, int]]:
    """Where a leaf of so many bytes is looked at: offsets, and how many bytes there."""
    size = min(_LINE_BYTES, length)
    step = (length - size) // (_LOOKS - 1)
    return [(look * step, size) for look in range(_LOOKS)]


class Looks:
    """Collects the lines of some leaves of one file from its pieces. Thread-safe.

    Args:
        leaves: offset in the file -> name and bytes.
        seen: told of a leaf when all of its lines have come.
    """

    def __init__(
        self, leaves: Mapping[int, tuple[str, int]], seen: Callable[[str, bytes], None]
    ) -> None:
        self._leaves = leaves
        self._seen = seen
        self._lock = own_lock()
        # Begin, end and leaf of each line; made by the first writer, not by training.
        self._lines: list[tuple[int, int, str]] | None = None
        self._left: dict[str, int] = {}
        self._parts: dict[str, list[tuple[int, bytes]]] = {}

    def show(self, offset: int, data: memoryview) -> None:
        """A piece of the file. Called by a writer."""
        with self._lock:
            lines = self._all_lines()
            end = offset + len(data)
            # A line may begin in one piece and end in the next.
            first = bisect_left(lines, (offset - _LINE_BYTES,))
            whole: dict[str, bytes] = {}
            for begin, stop, name in lines[first : bisect_left(lines, (end,))]:
                part = data[max(begin - offset, 0) : max(stop - offset, 0)]
                if part:
                    self._parts.setdefault(name, []).append((max(begin, offset), bytes(part)))
                    self._left[name] -= len(part)
                    if self._left[name] == 0:
                        whole[name] = b"".join(line for _, line in sorted(self._parts.pop(name)))
        for name, look in whole.items():
            self._seen(name, look)

    def _all_lines(self) -> list[tuple[int, int, str]]:
        if self._lines is None:
            self._lines = []
            for offset, (name, length) in self._leaves.items():
                for at, size in lines_of(length):
                    self._lines.append((offset + at, offset + at + size, name))
                    self._left[name] = self._left.get(name, 0) + size
            self._lines.sort()
        return self._lines
