"""What tests of a root in memory share."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from ckpt_core import Checkpointer
from ckpt_core.system.files import Buffer, Files

CHUNK = 256 * 1024


class CountingFiles(Files):
    """What is written by calls, and not through a mapping."""

    def __init__(self, *, huge: bool | None = None) -> None:
        self.huge = huge
        self.written: dict[str, int] = {}

    def in_huge_pages(self, path: Path) -> bool:
        return super().in_huge_pages(path) if self.huge is None else self.huge

    def pwrite(self, fd: int, data: Buffer, offset: int) -> None:
        name = Path(f"/proc/self/fd/{fd}").readlink().name
        super().pwrite(fd, data, offset)
        self.written[name] = self.written.get(name, 0) + len(memoryview(data).cast("B"))

    @property
    def of_leaves(self) -> int:
        """Bytes of shard files."""
        return sum(n for name, n in self.written.items() if name.endswith(".safetensors"))


def state(step: int) -> dict[str, torch.Tensor]:
    return {f"w{number}": torch.full((CHUNK // 2,), step + number / 8) for number in range(4)}


def until_warm(ck: Checkpointer) -> None:
    """Wait until the stager has nothing left to touch."""
    deadline, kept = time.monotonic() + 60, ck._engine.pipeline.kept
    while not all(one.is_warm for one in list(kept._kept.values())[:-1]):
        assert time.monotonic() < deadline
        time.sleep(0.001)
