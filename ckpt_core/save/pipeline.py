"""What all saves of a Checkpointer run through: stager, writers, and the staging memory between them."""

from __future__ import annotations

import time
from functools import partial

import torch

from ckpt_core.options import Options
from ckpt_core.persist import WriterPool
from ckpt_core.save.in_flight import InFlight
from ckpt_core.snapshot import (
    CopyStreams,
    DeviceClones,
    LeafWatch,
    PoolDemand,
    Sampler,
    Stager,
    StagingMemory,
    StagingPool,
)
from ckpt_core.system.devices import Devices
from ckpt_core.system.files import Files
from ckpt_core.system.kept_mappings import KeptMappings
from ckpt_core.units import parse_bytes


class Pipeline:
    """Owns the stager thread, the writer threads and the staging memory, files that are mapped among it.

    Args:
        neighbours: ranks on this machine, with this one.
    """

    def __init__(
        self, options: Options, devices: Devices, *, files: Files, neighbours: int
    ) -> None:
        self.options = options
        self.eager_leaf_bytes = parse_bytes(options.eager_leaf_bytes, field="eager_leaf_bytes")
        self.devices = devices
        # Every file of this rank that comes round again, and no more.
        most = 0 if options.keep_last is None else options.keep_last + 2 * options.in_flight
        self.kept = KeptMappings(files=files, most=most)
        self.streams = CopyStreams(devices)
        self.clones = DeviceClones(self.streams)
        self.memory = StagingMemory(options, devices, neighbours=neighbours)
        self.stager = Stager()
        self.writers = WriterPool(options.writers)
        self._sampler = Sampler(devices)

    def start_threads(self) -> None:
        """Start the threads. Called once, when the Checkpointer is made.

        Raises:
            PersistError: the system gives no more threads.
        """
        self.stager.start()
        self.writers.start()

    def watch_for(self, inflight: InFlight) -> LeafWatch:
        """Finds what changes before it has been copied, in one file of a checkpoint."""
        sampler = None if self.options.debug_barrier else self._sampler
        return LeafWatch(inflight.step, sampler, devices=self.devices)

    def pool_for(self, demand: PoolDemand) -> StagingPool:
        """The memory to stage so much in. Called on the training thread.

        Raises:
            ConfigError, StagingError: see `StagingMemory.pool_for`.
        """
        return self.memory.pool_for(demand, deadline=time.monotonic() + self.options.timeout_s)

    def lock_behind(self, pool: StagingPool, device: torch.device) -> None:
        """Have a pool page-locked on the stager thread, between what else it has to do; returns at once."""
        segments = iter(pool.segments())

        def lock_next() -> None:
            segment = next(segments, None)
            if segment is not None and not pool.closed:
                self.streams.lock(pool, segment, device)
                self.stager.submit(lock_next)

        self.stager.submit(lock_next)

    def touch_behind(self, pool: StagingPool, file_bytes: int) -> None:
        """Touch memory that saves of this size may take next. Called on the stager thread, behind a save.

        One chunk at a time, between what else it has to do.
        """
        if pool.touch_ahead(file_bytes) or self.kept.touch_ahead():
            self.stager.submit(partial(self.touch_behind, pool, file_bytes))

    def close(self, *, timeout_s: float) -> None:
        """End the threads and let go of the memory. Idempotent."""
        self.stager.close(timeout_s=timeout_s)
        self.writers.close(timeout_s=timeout_s)
        self.kept.close()
        self.memory.close(deadline=time.monotonic() + timeout_s)
