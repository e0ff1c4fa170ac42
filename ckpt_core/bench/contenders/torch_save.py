"""`torch.save` to one file: what most training scripts do."""

from __future__ import annotations

import os
from typing import ClassVar

from ckpt_core.bench.contenders.base import (
    Contender,
    Done,
    Handle,
    State,
    sync_path,
)


class TorchSave(Contender):
    """torch.save, then torch.load(mmap=True) and a copy into the live tensors."""

    name: ClassVar[str] = "torch_save"
    title: ClassVar[str] = "torch.save"
    fsyncs: ClassVar[str] = "no"
    modules: ClassVar[tuple[str, ...]] = ("torch",)
    distribution: ClassVar[str] = "torch"
    setup: ClassVar[str] = "zip format; load with mmap=True, then copy_"

    def save(self, state: State, step: int) -> Handle:
        """Write the file through the page cache."""
        import torch

        torch.save(state, self._paths.next(step))
        return Done()

    def load_into(self, state: State) -> None:
        """Map the file and copy out of it."""
        import torch

        path = self._paths.current()
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        for name, tensor in state.items():
            tensor.copy_(loaded[name])


class TorchSaveFsync(TorchSave):
    """The same, made durable: fsync of the file and of its directory."""

    name: ClassVar[str] = "torch_save_fsync"
    title: ClassVar[str] = "torch.save + fsync"
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
