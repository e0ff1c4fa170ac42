"""What all saves of a Checkpointer run through: stager, writers, and the staging memory between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from ckpt_core.options import Options
from ckpt_core.persist import WriterPool
from ckpt_core.save.in_flight import InFlight
from ckpt_core.snapshot import (
    CopyStreams,
    DeviceClones,
    EagerCopies,
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
from ckpt_core.system.threads import Monitor
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
        self.workers = (self.stager.worker, *self.writers.workers)
        self._sampler = Sampler(devices)
        self._changed = Monitor()
        self._locks: set[Callable[[], None]] = set()

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

    def eager_copies(self) -> EagerCopies:
        """Makes the copies of one save that begins now. Called on the training thread."""
        return EagerCopies(self.devices, timeout_s=self.options.timeout_s)

    def pool_for(self, demand: PoolDemand) -> StagingPool:
        """The memory to stage so much in. Called on the training thread.

        Raises:
            ConfigError, StagingError: see `StagingMemory.pool_for`.
        """
        deadline = time.monotonic() + self.options.timeout_s
        return self.memory.pool_for(demand, deadline=deadline, is_open=_is_open)

    def lock_behind(self, pool: StagingPool, device: torch.device) -> None:
        """Have a pool page-locked on the stager thread, between what else it has to do; returns at once."""
        segments = iter(pool.segments())

        def lock_next() -> None:
            segment = None if pool.closed else next(segments, None)
            if segment is None:
                self._lock_ended(lock_next)
                return
            try:
                self.streams.lock(pool, segment, device)
            except BaseException:
                self._lock_ended(lock_next)
                raise
            self.stager.submit(lock_next)

        with self._changed.lock:
            self._locks.add(lock_next)
        self.stager.submit(lock_next)

    @property
    def locking(self) -> bool:
        """Whether memory is page-locked behind training. Takes no lock: steps of optimizers ask it."""
        return bool(self._locks)

    def wait_locked(self, *, deadline: float) -> bool:
        """Wait until no memory is page-locked behind training; False when the deadline passed first."""
        for lock_next in tuple(self._locks):
            # An interrupt may have come before the stager had it; done twice it does no harm.
            self.stager.submit(lock_next)
        return self._changed.wait_for(lambda: not self._locks, deadline=deadline)

    def _lock_ended(self, lock_next: Callable[[], None]) -> None:
        with self._changed.lock:
            self._locks.discard(lock_next)
            self._changed.notify_all()

    def touch_behind(self, pool: StagingPool, file_bytes: int) -> None:
        """Touch memory that saves of this size may take next. Called on the stager thread, behind a save.

        One chunk at a time, between what else it has to do.
        """
        if pool.touch_ahead(file_bytes) or self.kept.touch_ahead():
            self.stager.submit(partial(self.touch_behind, pool, file_bytes))

    def close(self, *, timeout_s: float) -> None:
        """End the threads and let go of the memory. Idempotent."""
        if self.stager.close(timeout_s=timeout_s):
            self.clones.drop()
        for lock_next in tuple(self._locks):
            self._lock_ended(lock_next)
        self.writers.close(timeout_s=timeout_s)
        self.kept.close()
        self.memory.close(deadline=time.monotonic() + timeout_s)


def _is_open(owner: object) -> bool:
    """Whether a save waits for its caller, who cannot end it while he waits for its memory."""
    return isinstance(owner, InFlight) and owner.open_ended and not owner.failed()
