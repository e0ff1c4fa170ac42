"""The staging pool as it follows the size of the state: made at the first save, made anew when outgrown."""

from __future__ import annotations

import time

import psutil

from ckpt_core.errors import StagingError
from ckpt_core.options import Options
from ckpt_core.snapshot import PoolPlan, StagingPool, plan_pool
from ckpt_core.types import parse_bytes


class StagingMemory:
    """Owns the pool; used by the training thread only."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._pool: StagingPool | None = None
        self._most_held_bytes = 0

    @property
    def most_held_bytes(self) -> int:
        """Most staging memory that was in use at one time."""
        now = self._pool.most_held_bytes if self._pool is not None else 0
        return max(now, self._most_held_bytes)

    def pool_for(
        self, *, file_bytes: int, front_bytes: int, pinned: bool, deadline: float
    ) -> StagingPool:
        """The pool for a shard file of this size; blocks only when it has to be replaced.

        Raises:
            ConfigError: `staging_bytes` is too small.
            StagingError: the old pool was still in use at the deadline.
        """
        if self._pool is not None and self._fits(file_bytes, front_bytes):
            return self._pool
        plan = self._plan(file_bytes, front_bytes)
        if self._pool is not None:
            if self._pool.plan.serves(plan):
                return self._pool
            # The old memory goes before the new comes, so that the bound holds meanwhile too.
            self.close(deadline=deadline)
        self._pool = StagingPool(plan, pinned=pinned)
        return self._pool

    def close(self, *, deadline: float | None = None) -> None:
        """Let go of the pool once nobody uses it."""
        pool = self._pool
        if pool is None:
            return
        if not pool.wait_idle(deadline=time.monotonic() if deadline is None else deadline):
            raise StagingError(
                "staging memory is still in use by a save that hangs: storage is stuck; "
                "earlier steps are untouched"
            )
        self._most_held_bytes = self.most_held_bytes
        pool.close()
        self._pool = None

    def _fits(self, file_bytes: int, front_bytes: int) -> bool:
        assert self._pool is not None
        plan = self._pool.plan
        room = plan.fronts_per_save * plan.chunk_bytes
        whole = (plan.front_chunks + plan.stream_chunks) * plan.chunk_bytes
        return front_bytes <= room and file_bytes <= whole // self._options.in_flight

    def _plan(self, file_bytes: int, front_bytes: int) -> PoolPlan:
        options = self._options
        budget = options.staging_bytes
        return plan_pool(
            file_bytes=file_bytes,
            front_bytes=front_bytes,
            in_flight=options.in_flight,
            chunk_bytes=options.chunk_size,
            staging_bytes=None if budget is None else parse_bytes(budget, field="staging_bytes"),
            free_bytes=psutil.virtual_memory().available,
        )
