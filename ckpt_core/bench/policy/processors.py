"""What keeps iterations alike: processors and memory of their own, as training has on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34)}
"""Environment in which a process keeps memory that was freed, as torch does on a GPU. Else the kernel makes
the pages of all activations anew in each iteration, and iterations differ by a tenth."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the second job does as long as it is on.

    Attributes:
        cpu_threads: that multiply matrices without a pause.
        disk_threads: that write without a pause, each into a file of its own.
        file_bytes: size of such a file, which is overwritten from its beginning again and again.
    """

    cpu_threads: int
    disk_threads: int
    file_bytes: int


@dataclass(frozen=True, slots=True)
class Shares:
    """Processors, by number. What moves from one to another takes twice as long for a while.

    Attributes:
        training: as many as it has threads.
        second: the rest, for the second job; all where nothing is left.
    """

    training: tuple[int, ...]
    second: tuple[int, ...]

    @classmethod
    def of(cls, processors: Iterable[int], *, threads: int) -> Shares:
        """Divide those that this process may use."""
        known = tuple(sorted(processors))
        if len(known) <= threads:
            return cls(known, known)
        return cls(known[:threads], known[threads:])


def here(threads: int) -> Shares:
    """Of this process."""
    return Shares.of(os.sched_getaffinity(0), threads=threads)


def keep_to(processors: Iterable[int]) -> None:
    """Confine the calling thread, and those that it starts from now on."""
    os.sched_setaffinity(0, set(processors))
