"""The disk itself: large, aligned, direct writes and reads of as many bytes as the state has."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, Literal

from ckpt_core.bench.contenders.base import Contender, Handle, Profile, State, Timed
from ckpt_core.system.pages import page_memory
from ckpt_core.units import ALIGN_BYTES, align_up

_SHAPES = ((4 * 2**20, 4), (16 * 2**20, 2))
"""Block size and queue depth; the faster one of each turn counts."""
_THREADS = 2

Direction = Literal["read", "write"]


class RawDisk(Contender):
    """fio where it is installed, else our own loop with two threads; blocks are overwritten.

    Nothing of the state is written or restored: only its size counts.
    """

    name: ClassVar[str] = "raw_disk"
    title: ClassVar[str] = "the bare disk"
    fsyncs: ClassVar[str] = "yes"
    disk_states: ClassVar[int] = 1
    memory_states: ClassVar[int] = 0
    reference: ClassVar[bool] = True
    modules: ClassVar[tuple[str, ...]] = ()

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        self._path = profile.root / "raw"
        self._fio = shutil.which("fio")
        tool = "fio" if self._fio else f"{_THREADS} threads"
        self._how = f"{tool}, O_DIRECT, best of 4 MiB qd4 and 16 MiB qd2"

    @property
    def settings(self) -> str:
        """Who writes, and how."""
        return self._how

    @classmethod
    def available(cls, root: Path) -> str | None:
        """Whether the filesystem has direct I/O."""
        probe = root / "probe"
        try:
            fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            if exc.errno == errno.EINVAL:
                return "this filesystem has no direct I/O"
            raise
        finally:
            probe.unlink(missing_ok=True)
        os.close(fd)
        return None

    @classmethod
    def version(cls) -> str:
        """Version of fio."""
        fio = shutil.which("fio")
        if fio is None:
            return "own loop"
        return subprocess.run([fio, "--version"], capture_output=True, text=True).stdout.strip()

    def save(self, state: State, step: int) -> Handle:
        """Overwrite the file; its own clock leaves out the start of a process."""
        return Timed(self._best("write", _size(state)))

    def tidy(self) -> None:
        """The one file is overwritten."""

    def load_into(self, state: State) -> float | None:
        """Read as many bytes as the state has; the tensors stay as they are."""
        return self._best("read", _size(state))

    def _best(self, direction: Direction, size: int) -> float:
        run: Callable[[Direction, int, int, int], float] = self._run_fio if self._fio else self._run
        return min(run(direction, size, block, depth) for block, depth in _SHAPES)

    def _run_fio(self, direction: Direction, size: int, block: int, depth: int) -> float:
        block = min(block, align_up(size, ALIGN_BYTES))
        command = [
            str(self._fio),
            "--name=raw",
            f"--filename={self._path}",
            f"--rw={direction}",
            f"--size={align_up(size, block)}",
            f"--bs={block}",
            f"--iodepth={depth}",
            "--ioengine=libaio",
            "--direct=1",
            "--end_fsync=1",
            "--output-format=json",
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=self._profile.timeout_s, check=False
        )
        if done.returncode != 0:
            raise OSError(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][direction]
        return size / float(job["bw_bytes"])

    def _run(self, direction: Direction, size: int, block: int, depth: int) -> float:
        size = align_up(size, ALIGN_BYTES)
        block = min(block, size)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        buffers = [page_memory(block) for _ in range(_THREADS)]

        def lane(index: int) -> None:
            for offset in range(index * block, size, _THREADS * block):
                with memoryview(buffers[index])[: min(block, size - offset)] as view:
                    moved = (
                        os.pwrite(fd, view, offset)
                        if direction == "write"
                        else os.preadv(fd, [view], offset)
                    )
                if moved == 0:
                    raise OSError(errno.EIO, "direct I/O moved nothing", str(self._path))

        try:
            with ThreadPoolExecutor(_THREADS) as pool:
                began = time.perf_counter()
                list(pool.map(lane, range(_THREADS)))
                if direction == "write":
                    os.fdatasync(fd)
                return time.perf_counter() - began
        finally:
            for buffer in buffers:
                buffer.close()
            os.close(fd)


def _size(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())
