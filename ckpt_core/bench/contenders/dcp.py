"""torch.distributed.checkpoint, blocking and asynchronous, single process (`no_dist=True`).

All variants cache their plans, fsync their files and write with more than one thread: how many is
tried during the warm-up saves. The asynchronous ones are limited to one save in flight, as a reused
stager demands (its buffers would change under the writer) and as its users do; that wait is inside
`save` and counts as stall.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from ckpt_core.bench.contenders.base import (
    Contender,
    Done,
    Futures,
    Handle,
    Profile,
    State,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint.staging import DefaultStager

_TRIALS = (2, 2, 4)
"""Writer threads of the first saves; the very first is no trial, since buffers are still cold."""


class ThreadTrials:
    """Tries numbers of writer threads on the first saves and stays with the fastest."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._saves = 0
        self._began = 0.0

    @property
    def count(self) -> int:
        """Threads that the save at hand uses."""
        if self._saves < len(_TRIALS):
            return _TRIALS[self._saves]
        return min(self._seconds, key=lambda count: self._seconds[count])

    def begin(self) -> int:
        """Start the clock of one save; returns its number of threads."""
        self._began = time.perf_counter()
        return self.count

    def end(self) -> None:
        """Note how long that save took."""
        if 0 < self._saves < len(_TRIALS):
            self._seconds[self.count] = time.perf_counter() - self._began
        self._saves += 1


class DcpSave(Contender):
    """`dcp.save`, then `dcp.load` in place."""

    name: ClassVar[str] = "dcp_save"
    title: ClassVar[str] = "DCP save"
    fsyncs: ClassVar[str] = "files, not directories"
    modules: ClassVar[tuple[str, ...]] = ("torch.distributed.checkpoint",)
    distribution: ClassVar[str] = "torch"

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        # Any: torch re-exports these names without declaring them exported.
        self._dcp: Any = import_module("torch.distributed.checkpoint")
        self._trials = ThreadTrials()

    @property
    def settings(self) -> str:
        """Number of threads that the trials chose."""
        return f"plan caching, sync_files, thread_count={self._trials.count}"

    def _target(self, step: int) -> dict[str, Any]:
        path = self._paths.next(step)
        threads = self._trials.begin()
        return {
            "storage_writer": self._dcp.FileSystemWriter(path, thread_count=threads),
            "planner": self._dcp.DefaultSavePlanner(enable_plan_caching=True),
            "no_dist": True,
        }

    def save(self, state: State, step: int) -> Handle:
        """Blocking save."""
        self._dcp.save(state, **self._target(step))
        self._trials.end()
        return Done()

    def load_into(self, state: State) -> None:
        """Load into the live tensors."""
        reader = self._dcp.FileSystemReader(self._paths.current())
        self._dcp.load(state, storage_reader=reader, no_dist=True)


class DcpAsyncDefault(DcpSave):
    """`dcp.async_save` as it comes: a new stager for each save, copying inside the call."""

    name: ClassVar[str] = "dcp_async_default"
    title: ClassVar[str] = "DCP async, defaults"
    overlapped: ClassVar[bool] = False
    reused: ClassVar[bool] = False

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        self._stager = self._make_stager() if self.reused else None
        self._upload: Future[Any] | None = None

    @property
    def settings(self) -> str:
        """Stager and threads."""
        stager = "default stager"
        if self.reused:
            stager = f"reused DefaultStager, async staging {'on' if self.overlapped else 'off'}"
        return f"{stager}, thread executor, {super().settings}"

    def _make_stager(self) -> DefaultStager:
        import torch
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        device = torch.accelerator.is_available()
        return DefaultStager(
            StagingOptions(
                use_pinned_memory=device,
                use_shared_memory=True,
                use_async_staging=self.overlapped,
                use_non_blocking_copy=device,
            )
        )

    def save(self, state: State, step: int) -> Handle:
        """Start an asynchronous save, after the previous one has ended."""
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        if self._upload is not None:
            self._upload.result(self._profile.timeout_s)
        response = self._dcp.async_save(
            state,
            async_checkpointer_type=AsyncCheckpointerType.THREAD,
            async_stager=self._stager,
            **self._target(step),
        )
        if isinstance(response, Future):
            staged, self._upload = None, response
        else:
            staged, self._upload = response.staging_completion, response.upload_completion
        return Futures(staged, self._upload, self._profile.timeout_s, self._trials.end)

    def close(self) -> None:
        """Wait for the last save and free the stager's buffers."""
        upload, self._upload = self._upload, None
        stager, self._stager = self._stager, None
        try:
            if upload is not None:
                upload.result(self._profile.timeout_s)
        finally:
            if stager is not None:
                stager.close()


class DcpAsyncReused(DcpAsyncDefault):
    """One stager for all saves, so that its buffers are warm; copying inside the call."""

    name: ClassVar[str] = "dcp_async_reused"
    title: ClassVar[str] = "DCP async, reused stager"
    memory_states: ClassVar[int] = 2
    reused: ClassVar[bool] = True


class DcpAsyncOverlapped(DcpAsyncDefault):
    """One stager for all saves that copies in its own thread."""

    name: ClassVar[str] = "dcp_async_overlapped"
    title: ClassVar[str] = "DCP async, overlapped"
    memory_states: ClassVar[int] = 2
    reused: ClassVar[bool] = True
    overlapped: ClassVar[bool] = True
