"""What the kernel says about a process and its children, read from outside it."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

_PERIOD_S = 0.005
_PROCESSOR_CLOCK = 2
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_ENDED_CHILDREN = slice(13, 15)
"""cutime and cstime, counted from behind the name, which may hold anything."""


@dataclass(frozen=True, slots=True)
class IoBytes:
    """Bytes that a process tree caused to be read from and written to storage."""

    read: int
    written: int

    def since(self, earlier: IoBytes) -> IoBytes:
        """What was added after `earlier`."""
        return IoBytes(self.read - earlier.read, self.written - earlier.written)


def tree(pid: int) -> list[int]:
    """`pid` and all its living descendants; those that end meanwhile are left out."""
    found = [pid]
    for parent in found:
        try:
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            continue
    return found


def memory_bytes(pid: int) -> int:
    """Proportional memory of a process tree: a page that n of its processes share counts once."""
    return sum(own_memory_bytes(member) for member in tree(pid))


def own_memory_bytes(pid: int) -> int:
    """Proportional memory of a process without its children."""
    return _field(pid, "smaps_rollup", "Pss:") * 1024


def io_bytes(pid: int) -> IoBytes:
    """Storage traffic of a process tree since its start.

    Buffered writes count when a page becomes dirty, direct ones when they are submitted; a child
    that ended counts with the parent that waited for it.
    """
    members = tree(pid)
    return IoBytes(
        sum(_field(member, "io", "read_bytes:") for member in members),
        sum(_field(member, "io", "write_bytes:") for member in members),
    )


def processor_s(pid: int) -> float:
    """Processor time of all threads of a process tree since its start, the system's part included.

    The difference of two is what the tree has worked in between; a child that ended counts with the parent
    that waited for it.
    """
    return sum(_own_processor_s(member) for member in tree(pid))


def _own_processor_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # The clock of another process, as clock_getcpuclockid(3) makes it: `stat` has ticks of 10 ms.
        own_s = time.clock_gettime((~pid << 3) | _PROCESSOR_CLOCK)
    except OSError:
        return 0.0  # it ended between listing and reading
    return own_s + sum(map(int, fields[_ENDED_CHILDREN])) / _TICKS_PER_S


class PeakMemory:
    """Samples the memory of a process tree in a `with` block; `peak_bytes` is the highest seen."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="bench-memory", daemon=True)
        self.peak_bytes = 0

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            last = self._stop.wait(_PERIOD_S)
            self.peak_bytes = max(self.peak_bytes, memory_bytes(self._pid))
            if last:
                return


def _field(pid: int, file: str, name: str) -> int:
    try:
        text = Path(f"/proc/{pid}/{file}").read_text()
    except OSError:
        return 0  # it ended between listing and reading
    for line in text.splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    return 0
