"""The buffers of one reader: it fills one while devices copy from the other. Torch-free."""

from __future__ import annotations

from collections import deque
from typing import Protocol

SLOT_BYTES = 8 * 1024 * 1024
"""One buffer that devices are filled from, and so the longest copy."""

SLOTS = 2
"""Buffers of a reader: reading and hashing one takes longer than the copy of the other."""


class Copies(Protocol):
    """Copies that are queued from a buffer."""

    def wait(self) -> None:
        """Block until they are done."""


class Slots:
    """Takes turns with its buffers. Used by one thread.

    Attributes:
        waiting: that thread waits for copies now.
    """

    def __init__(self, memory: memoryview, *, count: int = 1) -> None:
        """
        Args:
            memory: for all of them.
            count: how many; each begins at a whole page where `memory` does and slots are whole pages.
        """
        self.nbytes = len(memory) // count
        parts = [memory[at * self.nbytes : (at + 1) * self.nbytes] for at in range(count)]
        self._slots: deque[tuple[memoryview, Copies | None]] = deque((x, None) for x in parts)
        self.waiting = False

    def free(self) -> memoryview:
        """A buffer that nothing is copied from; the same one until `queued` says that something is."""
        memory, copies = self._slots[0]
        if copies is not None:
            # Order matters: the bytes of the last turn are on their way until then.
            self._wait(copies)
            self._slots[0] = memory, None
        return memory

    def queued(self, copies: Copies) -> None:
        """Copies are queued from the buffer that `free` gave."""
        memory, _ = self._slots.popleft()
        self._slots.append((memory, copies))

    def drain(self) -> None:
        """Wait until nothing is copied from any of them."""
        for _, copies in self._slots:
            if copies is not None:
                self._wait(copies)

    def _wait(self, copies: Copies) -> None:
        self.waiting = True
        copies.wait()
        self.waiting = False
