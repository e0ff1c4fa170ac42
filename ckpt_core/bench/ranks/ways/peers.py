"""What PyTorch itself offers to the ranks of a job, with the best settings of its documentation."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.distributed as dist

from ckpt_core.bench.contenders import Handle, Profile, State
from ckpt_core.bench.contenders.base import Done
from ckpt_core.bench.contenders.dcp import DcpAsyncReused, DcpSave
from ckpt_core.bench.contenders.torch_save import TorchSaveFsync
from ckpt_core.bench.ranks.ways.base import Way, bytes_of


class TorchSaveRank0(TorchSaveFsync, Way):
    """Rank 0 writes one file and makes it durable; the others wait for it."""

    name: ClassVar[str] = "torch_save_rank0"
    title: ClassVar[str] = "torch.save on rank 0"
    stands_for: ClassVar[str] = "what most scripts do (as Keras-Default)"

    def save(self, state: State, step: int) -> Handle:
        """Write on rank 0, then meet at a barrier."""
        if self._profile.rank == 0:
            super().save(state, step)
        else:
            self._paths.next(step)
        dist.barrier()
        return Done()

    def file_bytes(self) -> int:
        """The one file."""
        return bytes_of([self._paths.current()]) if self._profile.rank == 0 else 0

    def tidy(self) -> None:
        """Rank 0 removes older files."""
        if self._profile.rank == 0:
            super().tidy()
        self._paths.older.clear()


class _Ranked(DcpSave, Way):
    """Directories and collectives that all ranks share."""

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        # A group of its own: its collectives run in a thread, beside those of training.
        self._group = dist.new_group(backend="gloo")

    def _target(self, step: int) -> dict[str, Any]:
        target = super()._target(step)
        del target["no_dist"]
        return {**target, "process_group": self._group}

    def file_bytes(self) -> int:
        """The files that carry this rank's number; rank 0 writes the metadata."""
        folder = self._paths.current()
        mine = list(folder.glob(f"__{self._profile.rank}_*.distcp"))
        if self._profile.rank == 0:
            mine.append(folder / ".metadata")
        return bytes_of(mine)

    def tidy(self) -> None:
        """Rank 0 removes older directories."""
        if self._profile.rank == 0:
            super().tidy()
        self._paths.older.clear()

    def load_into(self, state: State) -> None:
        """Load into the live tensors of every rank."""
        reader = self._dcp.FileSystemReader(self._paths.current())
        self._dcp.load(state, storage_reader=reader, process_group=self._group)


class RankedDcpSave(_Ranked):
    """`dcp.save` of all ranks: replicated tensors are dealt out, whole."""

    name: ClassVar[str] = "dcp_save"
    title: ClassVar[str] = "DCP save"
    stands_for: ClassVar[str] = "dcp.save over gloo"


class RankedDcpAsync(_Ranked, DcpAsyncReused):
    """`dcp.async_save` of all ranks, with a stager that is kept."""

    name: ClassVar[str] = "dcp_async_reused"
    title: ClassVar[str] = "DCP async, reused stager"
    stands_for: ClassVar[str] = "dcp.async_save over gloo"
