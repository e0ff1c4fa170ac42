"""The protocol of contenders and what several of them share."""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import torch

State = dict[str, "torch.Tensor"]
"""What every contender saves: flat names -> live tensors."""


@dataclass(frozen=True, slots=True)
class Profile:
    """How one instance is to be set up.

    Attributes:
        root: empty directory of its own.
        staging_bytes: bound of staging memory for contenders that have one; None is their default.
        timeout_s: deadline of any wait.
        rank: of this process, where several save together; all have the same root.
    """

    root: Path
    staging_bytes: int | None = None
    timeout_s: float = 600.0
    rank: int = 0


class Handle(Protocol):
    """One started save."""

    def barrier(self) -> None:
        """Block until training may change the state."""

    def wait_durable(self) -> None:
        """Block until the save is complete by the contender's own standard; raises what failed."""

    @property
    def persist_s(self) -> float | None:
        """Seconds by the contender's own clock, or None: then the caller's clock counts."""


class Done:
    """Handle of a save that was complete when the call returned."""

    persist_s: float | None = None

    def barrier(self) -> None:
        """Nothing to wait for."""

    def wait_durable(self) -> None:
        """Nothing to wait for."""


@dataclass(slots=True)
class Timed(Done):
    """A completed save whose duration the contender measured itself."""

    persist_s: float | None


@dataclass(slots=True)
class Futures:
    """Handle over one future for staging (None: staged in the call) and one for the end."""

    staged: Future[Any] | None
    committed: Future[Any]
    timeout_s: float
    on_durable: Callable[[], None] | None = None
    persist_s: float | None = field(default=None, init=False)

    def barrier(self) -> None:
        """Wait for the staging future."""
        if self.staged is not None:
            self.staged.result(self.timeout_s)

    def wait_durable(self) -> None:
        """Wait for the end."""
        self.committed.result(self.timeout_s)
        if self.on_durable is not None:
            self.on_durable()


@dataclass(slots=True)
class StepPaths:
    """New path for each step, the older ones removed when asked."""

    root: Path
    newest: Path | None = None
    older: list[Path] = field(default_factory=list)

    def next(self, step: int) -> Path:
        """A path that does not exist yet."""
        if self.newest is not None:
            self.older.append(self.newest)
        self.newest = self.root / f"step-{step}"
        return self.newest

    def current(self) -> Path:
        """Path of the newest step."""
        assert self.newest is not None, "nothing was saved yet"
        return self.newest

    def tidy(self) -> None:
        """Remove all but the newest."""
        while self.older:
            path = self.older.pop()
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


class Contender(ABC):
    """One way to save a state.

    Attributes:
        name: as in the registry.
        title: for people, in tables and pictures.
        fsyncs: "yes" when a completed save survives a power cut, else what is missing.
        disk_states: sizes of the state that may lie on disk at once.
        memory_states: sizes of the state that the process holds between saves, its own included.
        reference: measures the disk and holds no state, so it trains and restores nothing.
        modules: all that `save` needs.
        distribution: whose release is told.
        setup: settings in words, where they are always the same.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    fsyncs: ClassVar[str]
    disk_states: ClassVar[int] = 2
    memory_states: ClassVar[int] = 1
    reference: ClassVar[bool] = False
    modules: ClassVar[tuple[str, ...]]
    distribution: ClassVar[str] = ""
    setup: ClassVar[str] = ""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._paths = StepPaths(profile.root)

    @classmethod
    def available(cls, root: Path) -> str | None:
        """Why it cannot run here, or None. Imports all that `save` needs."""
        return missing(*cls.modules)

    @classmethod
    def version(cls) -> str:
        """Release of the package that does the work."""
        return release(cls.distribution)

    @property
    def settings(self) -> str:
        """Settings in words, for the report; final after the warm-up saves."""
        return self.setup

    @abstractmethod
    def save(self, state: State, step: int) -> Handle:
        """Start to save the state. Waits for an earlier save where the contender needs that."""

    def settle(self) -> None:  # noqa: B027 - most have nothing
        """Wait for what a save does behind its end: its processor time counts, its seconds do not."""

    def tidy(self) -> None:
        """Remove older steps than the newest; never timed."""
        self._paths.tidy()

    @abstractmethod
    def load_into(self, state: State) -> float | None:
        """Fill the live tensors from the newest step; seconds by its own clock if it has one."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Release everything; idempotent."""


def missing(*modules: str) -> str | None:
    """Why these modules cannot be used, or None when they all import."""
    for module in modules:
        try:
            import_module(module)
        except ImportError as exc:
            return f"{module} does not import: {exc}"
    return None


def release(distribution: str) -> str:
    """Installed version of a distribution."""
    return f"{distribution} {metadata.version(distribution)}"


def sync_path(path: Path) -> None:
    """fsync one file or directory."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
