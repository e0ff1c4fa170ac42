"""This engine: sliced over the ranks, or used as if there were no slices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch.distributed as dist

from ckpt_core.bench.agents import agent_of, end
from ckpt_core.bench.contenders import Handle, State
from ckpt_core.bench.contenders.base import Done, Futures
from ckpt_core.bench.contenders.ours import CkptCore
from ckpt_core.bench.ranks.ways.base import Way, bytes_of, memory_of
from ckpt_core.observe import EventName
from ckpt_core.options import Level

if TYPE_CHECKING:
    from ckpt_core.checkpointer import Checkpointer


class _Engine(CkptCore, Way):
    """What all of these have in common: a `Checkpointer`, or none on ranks that save nothing."""

    def _save_and_wait(self, state: State, step: int) -> None:
        assert self._checkpointer is not None
        self._checkpointer.save(step, state).committed.result(self._profile.timeout_s)

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


class Sharded(_Engine):
    """Each rank stores a slice of every leaf; one commit; all of it behind training."""

    name: ClassVar[str] = "ckpt_core"
    title: ClassVar[str] = "ckpt-core"
    stands_for: ClassVar[str] = "VELOC-Opt"

    def _open(self) -> Checkpointer:
        from ckpt_core.coordination import TorchStore

        return self._engine(self._profile.root / "shared", TorchStore.from_process_group())

    def _label(self) -> int:
        return self._profile.rank

    def _leads(self) -> bool:
        return self._profile.rank == 0


class Levelled(Sharded):
    """The same into memory; an agent takes each step on to the disk, which is what it waits for."""

    name: ClassVar[str] = "ckpt_core_levels"
    title: ClassVar[str] = "ckpt-core, memory and then disk"
    stands_for: ClassVar[str] = "VELOC-Opt, with its slow tier"

    @classmethod
    def available(cls, root: Path) -> str | None:
        """As for all, and there has to be memory that holds files."""
        missing = super().available(root)
        return missing or (None if memory_of(root).is_dir() else "no directory is in memory")

    def _open(self) -> Checkpointer:
        from ckpt_core.coordination import TorchStore

        root = self._profile.root
        files, workload = root.parents[1], root.parent.name
        memory = memory_of(files) / f"{files.parent.name}-{workload}"
        level = Level(str(root / "disk"), keep_last=1)
        return self._engine(memory, TorchStore.from_process_group(), levels=[level])

    @property
    def settings(self) -> str:
        """What is not the default."""
        return f"{super().settings}, root in memory, levels=[Level(disk, keep_last=1)]"

    def save(self, state: State, step: int) -> Handle:
        """Save; complete once it is at the disk."""
        assert self._checkpointer is not None
        handle, limit_s = self._checkpointer.save(step, state), self._profile.timeout_s
        arrives = handle.reached(1)
        return Futures(handle.staged, handle.committed, limit_s, lambda: arrives.result(limit_s))

    def persisted_s(self) -> float | None:
        """Those bytes are not what it waits for."""
        return None

    def close(self) -> None:
        """The agent ends with it."""
        super().close()
        if self._checkpointer is not None and self._profile.rank == 0:
            end(agent_of(self._checkpointer.root), self._profile.timeout_s)


class ShardedBlocking(Sharded):
    """The same slices; training waits until they are committed."""

    name: ClassVar[str] = "sharded_blocking"
    title: ClassVar[str] = "slices, blocking"
    stands_for: ClassVar[str] = "VELOC-Sharded"

    def save(self, state: State, step: int) -> Handle:
        """Save and wait."""
        self._save_and_wait(state, step)
        return Done()


class Single(_Engine):
    """Rank 0 saves everything, alone; the others wait for it."""

    name: ClassVar[str] = "single"
    title: ClassVar[str] = "rank 0 saves all"
    stands_for: ClassVar[str] = "VELOC-Single"

    def _open(self) -> Checkpointer | None:
        if self._profile.rank != 0:
            return None
        return self._engine(self._profile.root / "single")

    def save(self, state: State, step: int) -> Handle:
        """Save and wait; the others meet rank 0 at a barrier."""
        if self._checkpointer is not None:
            self._save_and_wait(state, step)
        dist.barrier()
        return Done()

    def load_into(self, state: State) -> float | None:
        """Rank 0 restores, and the others receive it."""
        if self._checkpointer is not None:
            super().load_into(state)
        for tensor in state.values():
            dist.broadcast(tensor, 0)
        return None


class Replicated(_Engine):
    """Every rank saves the whole state, in a root of its own."""

    name: ClassVar[str] = "replicated"
    title: ClassVar[str] = "each rank saves all"
    stands_for: ClassVar[str] = "VELOC-Opt without its slices"

    def _open(self) -> Checkpointer:
        return self._engine(self._profile.root / f"rank-{self._profile.rank}")
