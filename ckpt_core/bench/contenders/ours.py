"""ckpt_core itself."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ckpt_core.bench.contenders.base import Contender, Futures, Handle, Profile, State

if TYPE_CHECKING:
    from ckpt_core.checkpointer import Checkpointer
    from ckpt_core.coordination import Coordination
    from ckpt_core.options import Level, Options


class CkptCore(Contender):
    """`Checkpointer` with its defaults; one step kept, so that retired files are recycled."""

    name: ClassVar[str] = "ckpt_core"
    title: ClassVar[str] = "ckpt-core"
    fsyncs: ClassVar[str] = "yes"
    disk_states: ClassVar[int] = 4
    memory_states: ClassVar[int] = 3
    modules: ClassVar[tuple[str, ...]] = ("ckpt_core.checkpointer",)
    checksum: ClassVar[bool] = True

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        self._checkpointer = self._open()

    def _open(self) -> Checkpointer | None:
        """The engine of this process, or None where it saves nothing."""
        return self._engine(self._profile.root)

    def _engine(
        self, root: Path, coordination: Coordination | None = None, levels: Sequence[Level] = ()
    ) -> Checkpointer:
        root.mkdir(exist_ok=True)
        core: type[Checkpointer] = import_module("ckpt_core.checkpointer").Checkpointer
        return core(root, self._options(), coordination=coordination, levels=levels)

    def _options(self) -> Options:
        from ckpt_core.options import Options

        return Options(
            keep_last=1,
            staging_bytes=self._profile.staging_bytes,
            timeout=self._profile.timeout_s,
            checksum=self.checksum,
        )

    @classmethod
    def version(cls) -> str:
        """Version of this package."""
        return f"ckpt-core {import_module('ckpt_core').__version__}"

    @property
    def settings(self) -> str:
        """What is not the default."""
        bound = self._profile.staging_bytes
        text = "defaults, keep_last=1" + ("" if self.checksum else ", checksum=False")
        return text if bound is None else f"{text}, staging_bytes={bound}"

    def save(self, state: State, step: int) -> Handle:
        """Asynchronous save of all leaves."""
        assert self._checkpointer is not None
        handle = self._checkpointer.save(step, state)
        return Futures(handle.staged, handle.committed, self._profile.timeout_s)

    def settle(self) -> None:
        """Older steps are retired behind a commit."""
        if self._checkpointer is not None:
            self._checkpointer.wait()

    def tidy(self) -> None:
        """Retention is part of the save."""

    def load_into(self, state: State) -> float | None:
        """Newest step into the live tensors, checksums verified."""
        assert self._checkpointer is not None
        if self._checkpointer.restore(state) is None:
            raise LookupError("no committed step to restore")
        return None

    def close(self) -> None:
        """Waits for what is in flight."""
        if self._checkpointer is not None:
            self._checkpointer.close()


class CkptCoreUnchecked(CkptCore):
    """The same without checksums: what is left to compare with peers that verify nothing."""

    name: ClassVar[str] = "ckpt_core_unchecked"
    title: ClassVar[str] = "ckpt-core, no checksums"
    checksum: ClassVar[bool] = False
