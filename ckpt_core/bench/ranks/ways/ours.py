"""This engine: sliced over the ranks, or used as if there were no slices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch.distributed as dist

from ckpt_core.bench.contenders import Handle, State
from ckpt_core.bench.contenders.base import Done, Futures, missing
from ckpt_core.bench.ranks.ways.base import Place, bytes_of
from ckpt_core.observe import EventName
from ckpt_core.options import Options

if TYPE_CHECKING:
    from ckpt_core.checkpointer import Checkpointer
    from ckpt_core.coordination import Coordination


class _Engine(ABC):
    """What all four have in common: a `Checkpointer`, or none on ranks that save nothing."""

    fsyncs: ClassVar[str] = "yes"

    def __init__(self, place: Place) -> None:
        self._place = place
        self._options = Options(
            keep_last=1, staging_bytes=place.staging_bytes, timeout=place.timeout_s
        )
        self._checkpointer = self._make()

    @abstractmethod
    def _make(self) -> Checkpointer | None:
        """The engine of this rank, or None when it saves nothing."""

    def _engine(self, root: Path, coordination: Coordination | None = None) -> Checkpointer:
        root.mkdir(exist_ok=True)
        core: type[Checkpointer] = import_module("ckpt_core.checkpointer").Checkpointer
        return core(root, self._options, coordination=coordination)

    @classmethod
    def obstacle(cls) -> str | None:
        """None once the engine imports."""
        return missing("ckpt_core.checkpointer")

    @classmethod
    def release(cls) -> str:
        """Version of this package."""
        return f"ckpt-core {import_module('ckpt_core').__version__}"

    @property
    def settings(self) -> str:
        """The bound of memory, if there is one."""
        bound = self._place.staging_bytes
        return "defaults, keep_last=1" + ("" if bound is None else f", staging_bytes={bound}")

    def save(self, state: State, step: int) -> Handle:
        """Asynchronous."""
        assert self._checkpointer is not None
        handle = self._checkpointer.save(step, state)
        return Futures(handle.staged, handle.committed, self._place.timeout_s)

    def _save_and_wait(self, state: State, step: int) -> None:
        assert self._checkpointer is not None
        self._checkpointer.save(step, state).committed.result(self._place.timeout_s)

    def persisted_s(self) -> float | None:
        """As the engine's own log says."""
        if self._checkpointer is None:
            return None
        events = self._checkpointer.events.events()
        found = [event.seconds for event in events if event.name == EventName.PERSISTED]
        return found[-1] if found else None

    def file_bytes(self) -> int:
        """Shards and manifest of this rank; the leader's also that of the step."""
        if self._checkpointer is None:
            return 0
        step = sorted(self._checkpointer.root.glob("step-*"))[-1]
        mine = list(step.glob(f"*-{self._label():05d}*"))
        if self._leads():
            mine.append(step / "manifest.json")
        return bytes_of(mine)

    def _label(self) -> int:
        """Rank in the names of files."""
        return 0

    def _leads(self) -> bool:
        return True

    def tidy(self) -> None:  # noqa: B027 - nothing to do, and nothing that a way must add
        """Retention is part of the save."""

    def load_into(self, state: State) -> None:
        """Newest step into the live tensors, checksums verified."""
        assert self._checkpointer is not None
        if self._checkpointer.restore(state) is None:
            raise LookupError("no committed step to restore")

    def close(self) -> None:
        """Waits for what is in flight."""
        if self._checkpointer is not None:
            self._checkpointer.close()


class Sharded(_Engine):
    """Each rank stores a slice of every leaf; one commit; all of it behind training."""

    name: ClassVar[str] = "ckpt_core"
    stands_for: ClassVar[str] = "VELOC-Opt"

    def _make(self) -> Checkpointer:
        from ckpt_core.coordination import TorchStore

        return self._engine(self._place.root / "shared", TorchStore.from_process_group())

    def _label(self) -> int:
        return self._place.rank

    def _leads(self) -> bool:
        return self._place.rank == 0


class ShardedBlocking(Sharded):
    """The same slices; training waits until they are committed."""

    name: ClassVar[str] = "sharded_blocking"
    stands_for: ClassVar[str] = "VELOC-Sharded"

    def save(self, state: State, step: int) -> Handle:
        """Save and wait."""
        self._save_and_wait(state, step)
        return Done()


class Single(_Engine):
    """Rank 0 saves everything, alone; the others wait for it."""

    name: ClassVar[str] = "single"
    stands_for: ClassVar[str] = "VELOC-Single"

    def _make(self) -> Checkpointer | None:
        if self._place.rank != 0:
            return None
        return self._engine(self._place.root / "single")

    def save(self, state: State, step: int) -> Handle:
        """Save and wait; the others meet rank 0 at a barrier."""
        if self._checkpointer is not None:
            self._save_and_wait(state, step)
        dist.barrier()
        return Done()

    def load_into(self, state: State) -> None:
        """Rank 0 restores, and the others receive it."""
        if self._checkpointer is not None:
            super().load_into(state)
        for tensor in state.values():
            dist.broadcast(tensor, 0)


class Replicated(_Engine):
    """Every rank saves the whole state, in a root of its own."""

    name: ClassVar[str] = "replicated"
    stands_for: ClassVar[str] = "VELOC-Opt without its slices"

    def _make(self) -> Checkpointer:
        return self._engine(self._place.root / f"rank-{self._place.rank}")
