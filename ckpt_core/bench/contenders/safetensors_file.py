"""`safetensors.torch.save_file`: the same format as ours, written by its own library."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

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


class Safetensors:
    """save_file, then load_file and a copy into the live tensors."""

    name: ClassVar[str] = "safetensors"
    fsyncs: ClassVar[str] = "no"
    disk_states: ClassVar[int] = 2
    memory_states: ClassVar[int] = 1
    reference: ClassVar[bool] = False
    settings = "save_file; load_file, then copy_"

    def __init__(self, profile: Profile) -> None:
        self._library: Any = import_module("safetensors.torch")
        self._paths = StepPaths(profile.root)

    @classmethod
    def available(cls, root: Path) -> str | None:
        """Whether the library is installed."""
        return missing("safetensors.torch")

    @classmethod
    def version(cls) -> str:
        """Release of safetensors."""
        return release("safetensors")

    def save(self, state: State, step: int) -> Handle:
        """Write the file through the page cache."""
        self._library.save_file(state, self._paths.next(step))
        return Done()

    def tidy(self) -> None:
        """Remove older files."""
        self._paths.tidy()

    def load_into(self, state: State) -> None:
        """Load the file and copy out of it."""
        loaded = self._library.load_file(self._paths.current())
        for name, tensor in state.items():
            tensor.copy_(loaded[name])

    def close(self) -> None:
        """Nothing is held."""


class SafetensorsFsync(Safetensors):
    """The same, made durable: fsync of the file and of its directory."""

    name: ClassVar[str] = "safetensors_fsync"
    fsyncs: ClassVar[str] = "yes"

    def save(self, state: State, step: int) -> Handle:
        """Write the file and wait for the disk."""
        done = super().save(state, step)
        path = self._paths.current()
        sync_path(path)
        sync_path(path.parent)
        return done
