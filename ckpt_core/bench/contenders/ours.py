"""ckpt_core itself."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ckpt_core.bench.contenders.base import Futures, Handle, Profile, State, missing

if TYPE_CHECKING:
    from ckpt_core.checkpointer import Checkpointer


class CkptCore:
    """`Checkpointer` with its defaults; one step kept, so that retired files are recycled."""

    name: ClassVar[str] = "ckpt_core"
    fsyncs: ClassVar[str] = "yes"
    disk_states: ClassVar[int] = 4
    memory_states: ClassVar[int] = 3
    reference: ClassVar[bool] = False
    checksum: ClassVar[bool] = True

    def __init__(self, profile: Profile) -> None:
        from ckpt_core.options import Options

        options = Options(
            keep_last=1,
            staging_bytes=profile.staging_bytes,
            timeout=profile.timeout_s,
            checksum=self.checksum,
        )
        core: type[Checkpointer] = import_module("ckpt_core.checkpointer").Checkpointer
        self._checkpointer = core(profile.root, options)
        self._timeout_s = profile.timeout_s
        self.settings = "defaults, keep_last=1" + ("" if self.checksum else ", checksum=False")
        if profile.staging_bytes is not None:
            self.settings += f", staging_bytes={profile.staging_bytes}"

    @classmethod
    def available(cls, root: Path) -> str | None:
        """None once the engine imports."""
        return missing("ckpt_core.checkpointer")

    @classmethod
    def version(cls) -> str:
        """Version of this package."""
        return f"ckpt-core {import_module('ckpt_core').__version__}"

    def save(self, state: State, step: int) -> Handle:
        """Asynchronous save of all leaves."""
        handle = self._checkpointer.save(step, state)
        return Futures(handle.staged, handle.committed, self._timeout_s)

    def tidy(self) -> None:
        """Retention is part of the save."""

    def load_into(self, state: State) -> None:
        """Newest step into the live tensors, checksums verified."""
        restored = self._checkpointer.restore(state)
        if restored is None:
            raise LookupError("no committed step to restore")

    def close(self) -> None:
        """Waits for what is in flight."""
        self._checkpointer.close()


class CkptCoreUnchecked(CkptCore):
    """The same without checksums: what is left to compare with peers that verify nothing."""

    name: ClassVar[str] = "ckpt_core_unchecked"
    checksum: ClassVar[bool] = False
