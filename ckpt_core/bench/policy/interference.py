"""The second job: computes on some threads and writes on another, as long as it is told to.

Started as `python -m ckpt_core.bench.policy.interference NAME ROOT FD`, as the processes of all suites are.
It ends when its parent hangs up, and removes what it has written.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from ckpt_core.bench.policy.processors import Load, keep_to
from ckpt_core.bench.serving import Answer
from ckpt_core.system.files import NO_DIRECT

_BLOCK_BYTES = 4 * 2**20
_MATRIX = 384


class Interference:
    """Threads that wait until they are told to work."""

    def __init__(self, name: str, root: Path) -> None:
        self._root = root
        self._on = threading.Event()
        self._ending = False
        self._threads: list[threading.Thread] = []
        self._paths: list[Path] = []
        self._done: dict[str, int] = {}

    def prepare(
        self, cpu_threads: int, disk_threads: int, file_bytes: int, processors: Sequence[int]
    ) -> Answer:
        """Make the threads, which keep to these processors; they wait."""
        keep_to(processors)
        load = Load(cpu_threads, disk_threads, file_bytes)
        works: list[tuple[str, Callable[[], None]]]
        works = [(f"compute-{number}", _compute()) for number in range(load.cpu_threads)]
        for number in range(load.disk_threads):
            path = self._root / f"interference-{number}.bin"
            self._paths.append(path)
            works.append((f"write-{number}", _writes(path, load.file_bytes)))
        for name, work in works:
            self._done[name] = 0
            # A daemon: whatever it writes to, it must not keep this process.
            thread = threading.Thread(target=self._run, args=(name, work), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        return {}

    def start(self) -> Answer:
        """From now on; what has been done so far, in pieces of work."""
        self._on.set()
        return {"done": self._done}

    def stop(self) -> Answer:
        """No more; what has been done so far, in pieces of work."""
        self._on.clear()
        return {"done": self._done}

    def close(self) -> None:
        """End all threads and remove the files."""
        self._ending = True
        self._on.set()
        for thread in self._threads:
            thread.join(timeout=10)
        for path in self._paths:
            path.unlink(missing_ok=True)

    def _run(self, name: str, work: Callable[[], None]) -> None:
        while self._on.wait() and not self._ending:
            work()
            self._done[name] += 1


def _compute() -> Callable[[], None]:
    """A few milliseconds of arithmetic, outside the interpreter's lock."""
    import torch

    torch.set_num_threads(1)
    left, right = torch.rand(_MATRIX, _MATRIX), torch.rand(_MATRIX, _MATRIX)

    def work() -> None:
        torch.mm(left, right)

    return work


def _writes(path: Path, size: int) -> Callable[[], None]:
    """The next block of a file that never grows beyond `size`, on storage when it returns."""
    block = min(_BLOCK_BYTES, size)
    buffer = mmap.mmap(-1, block)
    buffer.write(os.urandom(block))
    offsets = itertools.cycle(range(0, size - block + 1, block))
    fd = _opened(path, buffer)

    def work() -> None:
        os.pwrite(fd, buffer, next(offsets))
        os.fdatasync(fd)

    return work


def _opened(path: Path, buffer: mmap.mmap) -> int:
    """A new file, past the page cache where the filesystem can do that."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_DIRECT, 0o600)
        os.pwrite(fd, buffer, 0)
    except OSError as exc:
        if exc.errno not in NO_DIRECT:
            raise
        fd = os.open(path, flags, 0o600)
    return fd
