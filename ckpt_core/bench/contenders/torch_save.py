"""`torch.save` to one file: what most training scripts do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

from ckpt_core.bench.contenders.base import (
    Done,
    Handle,
    Profile,
    State,
    StepPaths,
    missing,
    release,
    sync_path,
)


class TorchSave:
    """torch.save, then torch.load(mmap=True) and a copy into the live tensors."""

    name: ClassVar[str] = "torch_save"
    fsyncs: ClassVar[str] = "no"
    disk_states: ClassVar[int] = 2
    memory_states: ClassVar[int] = 1
    reference: ClassVar[bool] = False
    settings = "zip format; load with mmap=True, then copy_"

    def __init__(self, profile: Profile) -> None:
        self._paths = StepPaths(profile.root)

    @classmethod
    def available(cls, root: Path) -> str | None:
        """torch is always there."""
        return missing("torch")

    @classmethod
    def version(cls) -> str:
        """Release of torch."""
        return release("torch")

    def save(self, state: State, step: int) -> Handle:
        """Write the file through the page cache."""
        import torch

        torch.save(state, self._paths.next(step))
        return Done()

    def tidy(self) -> None:
        """Remove older files."""
        self._paths.tidy()

    def load_into(self, state: State) -> None:
        """Map the file and copy out of it."""
        import torch

        loaded = torch.load(self._paths.current(), mmap=True, weights_only=True)
        for name, tensor in state.items():
            tensor.copy_(loaded[name])

    def close(self) -> None:
        """Nothing is held."""


class TorchSaveFsync(TorchSave):
    """The same, made durable: fsync of the file and of its directory."""

    name: ClassVar[str] = "torch_save_fsync"
    fsyncs: ClassVar[str] = "yes"

    def save(self, state: State, step: int) -> Handle:
        """Write the file and wait for the disk."""
        import torch

        path = self._paths.next(step)
        with path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        sync_path(path.parent)
        return Done()
