"""This engine: sliced over the ranks, or used as if there were no slices."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch.distributed as dist

from ckpt_core.bench.contenders import Handle, State
from ckpt_core.bench.contenders.base import Done
from ckpt_core.bench.contenders.ours import CkptCore
from ckpt_core.bench.ranks.ways.base import Way, bytes_of
from ckpt_core.observe import EventName

if TYPE_CHECKING:
    from ckpt_core.checkpointer import Checkpointer


class _Engine(CkptCore, Way):
    """What all four have in common: a `Checkpointer`, or none on ranks that save nothing."""

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
