"""`safetensors.torch.save_file`: the same format as ours, written by its own library."""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

from ckpt_core.bench.contenders.base import (
    Contender,
    Done,
    Handle,
    Profile,
    State,
    sync_path,
)


class Safetensors(Contender):
    """save_file, then load_file and a copy into the live tensors."""

    name: ClassVar[str] = "safetensors"
    title: ClassVar[str] = "safetensors"
    fsyncs: ClassVar[str] = "no"
    modules: ClassVar[tuple[str, ...]] = ("safetensors.torch",)
    distribution: ClassVar[str] = "safetensors"
    setup: ClassVar[str] = "save_file; load_file, then copy_"

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        self._library: Any = import_module("safetensors.torch")

    def save(self, state: State, step: int) -> Handle:
        """Write the file through the page cache."""
        self._library.save_file(state, self._paths.next(step))
        return Done()

    def load_into(self, state: State) -> None:
        """Load the file and copy out of it."""
        loaded = self._library.load_file(self._paths.current())
        for name, tensor in state.items():
            tensor.copy_(loaded[name])


class SafetensorsFsync(Safetensors):
    """The same, made durable: fsync of the file and of its directory."""

    name: ClassVar[str] = "safetensors_fsync"
    title: ClassVar[str] = "safetensors + fsync"
    fsyncs: ClassVar[str] = "yes"

    def save(self, state: State, step: int) -> Handle:
        """Write the file and wait for the disk."""
        done = super().save(state, step)
        path = self._paths.current()
        sync_path(path)
        sync_path(path.parent)
        return done
