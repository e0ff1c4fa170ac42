"""The staging pool as it follows the size of the state: made at the first save, made anew when outgrown."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckpt_core.errors import ConfigError, StagingError
from ckpt_core.options import Options
from ckpt_core.snapshot.planning import PoolDemand, PoolPlan, budget_bytes, plan_pool, too_small
from ckpt_core.snapshot.pool import StagingPool
from ckpt_core.system.devices import Devices
from ckpt_core.system.files import advice
from ckpt_core.system.memory_limit import free_memory
from ckpt_core.units import parse_bytes

_LOOK_AGAIN_S = 10.0
_PLENTY = 1 << 62
"""Bytes of memory with which a pool is as large as one is ever wanted."""
_NOTHING_SERVED: tuple[StagingPool | None, PoolDemand | None, float] = (None, None, 0.0)


@contextmanager
def _making() -> Iterator[None]:
    """Where an error of the operating system becomes one of ours."""
    try:
        yield
    except (OSError, MemoryError) as exc:
        raise StagingError(
            f"no memory for staging: {str(exc) or 'there is none left'}. Nothing was started, committed "
            f"steps are safe. {advice(exc)}"
        ) from exc


class StagingMemory:
    """Owns the pool; used by the training thread only.

    Args:
        neighbours: ranks on this machine, with this one: they share its memory.
    """

    def __init__(self, options: Options, devices: Devices, *, neighbours: int = 1) -> None:
        self._options = options
        self._devices = devices
        self._neighbours = neighbours
        self._pool: StagingPool | None = None
        self._outgrown: StagingPool | None = None
        self._most_held_bytes = 0
        self._served = _NOTHING_SERVED

    @property
    def most_held_bytes(self) -> int:
        """Most staging memory that was in use at one time."""
        now = self._pool.most_held_bytes if self._pool is not None else 0
        return max(now, self._most_held_bytes)

    def demand_of_save(self, file_bytes: int, front_bytes: int, *, mapped: bool) -> PoolDemand:
        """What `save` asks for; a mapped file is its own staging memory."""
        # One whole checkpoint is enough: the stager takes them one after another, and the chunks of one
        # that is staged come back.
        whole = 0 if self._options.pipelined or mapped else 1
        return PoolDemand(file_bytes, front_bytes, self._options.in_flight, whole, mapped=mapped)

    def demand_of_layers(self, file_bytes: int, front_bytes: int, *, rest_bytes: int) -> PoolDemand:
        """What the layer-wise form asks for, whose second file has `rest_bytes`."""
        in_flight = self._options.in_flight
        if self._options.pipelined:
            return PoolDemand(file_bytes, front_bytes, in_flight)
        # All that are in flight, since each keeps what it has staged until it is sealed.
        return PoolDemand(
            file_bytes, front_bytes, in_flight, whole=in_flight, rest_bytes=rest_bytes
        )

    def demand_of_files(self, nbytes: int) -> PoolDemand:
        """What a save of named files asks for."""
        return PoolDemand(nbytes, 0, self._options.in_flight)

    @_making()
    def pool_for(
        self,
        demand: PoolDemand,
        *,
        deadline: float,
        is_open: Callable[[object], bool] = lambda owner: False,
    ) -> StagingPool:
        """The pool for checkpoints of this size; blocks only when it has to be replaced.

        Args:
            is_open: whether an owner of a lease keeps it until this very thread ends it.

        Raises:
            ConfigError: `staging_bytes` is too small, or the pool has to be replaced while it is kept open.
            StagingError: the old pool was still in use at the deadline, or memory is used up.
        """
        if self._pool is not None and (self._fits(demand) or self._served_lately(demand)):
            return self._pool
        old = self._pool
        # Asking for free memory takes a millisecond: not where no more is wanted than there is.
        if old is not None and self._serves(old, self._plan(demand, free_bytes=_PLENTY), demand):
            return old
        plan = self._plan(demand, free_bytes=self._free_bytes())
        if old is not None and self._serves(old, plan, demand):
            return old
        if old is not None and any(map(is_open, old.owners())):
            raise ConfigError(
                f"a save of {demand.file_bytes} bytes needs more staging memory while a save that was begun "
                f"is open and uses it: seal() or abort() that one first, or prepare() the larger state "
                f"before begin"
            )
        # The old memory goes before the new comes, so that the bound holds meanwhile too.
        self.close(deadline=deadline)
        self._pool = StagingPool(plan, self._devices)
        return self._pool

    @_making()
    def make_room(self, pool: StagingPool, demand: PoolDemand) -> None:
        """Enlarge a pool that is in use, so that what has turned out larger than it was taken for fits.

        Raises:
            ConfigError: `staging_bytes` is too small; nothing was changed.
        """
        assert pool is self._pool, "a pool that is in use is not replaced"
        plan = pool.plan
        more = demand.least_streams(plan.chunk_bytes) - plan.stream_chunks
        if more <= 0:
            return
        chunk_bytes, staging_bytes = self._options.chunk_size, self._staging_bytes()
        budget = budget_bytes(
            demand,
            chunk_bytes=chunk_bytes,
            staging_bytes=staging_bytes,
            free_bytes=self._free_bytes() + plan.total_bytes,
        )
        if plan.total_bytes + more * plan.chunk_bytes > budget:
            # As large as the chunks of a pool could be that has been given so much.
            largest = demand.largest_chunk(chunk_bytes)
            raise too_small(demand, budget, staging_bytes=staging_bytes, chunk_bytes=largest)
        pool.extend(more)

    def close(self, *, deadline: float | None = None) -> None:
        """Let go of the pool once nobody uses it."""
        self._drop_outgrown()
        pool = self._pool
        if pool is None:
            return
        if not pool.wait_idle(deadline=time.monotonic() if deadline is None else deadline):
            raise StagingError(
                "staging memory is still in use by a save that hangs: storage is stuck; "
                "earlier steps are untouched"
            )
        self._most_held_bytes = self.most_held_bytes
        # Together, and before it is closed: an interrupt must not leave a closed pool in use.
        self._outgrown, self._pool, self._served = pool, None, _NOTHING_SERVED
        self._drop_outgrown()

    def _drop_outgrown(self) -> None:
        if self._outgrown is not None:
            self._outgrown.close()
            self._outgrown = None

    def _plan(self, demand: PoolDemand, *, free_bytes: int) -> PoolPlan:
        return plan_pool(
            demand,
            chunk_bytes=self._options.chunk_size,
            staging_bytes=self._staging_bytes(),
            free_bytes=free_bytes,
        )

    def _serves(self, pool: StagingPool, plan: PoolPlan, demand: PoolDemand) -> bool:
        served = pool.plan.serves(plan) and pool.plan.holds(demand)
        if served:
            self._served = (pool, demand, time.monotonic())
        return served

    def _fits(self, demand: PoolDemand) -> bool:
        assert self._pool is not None
        plan = self._pool.plan
        room = plan.fronts_per_save * plan.chunk_bytes
        return (
            demand.front_bytes <= room
            and (
                demand.largest_chunk(self._options.chunk_size) <= plan.chunk_bytes
                if demand.mapped
                else demand.file_bytes <= plan.total_bytes // demand.in_flight
            )
            and plan.holds(demand)
        )

    def _served_lately(self, demand: PoolDemand) -> bool:
        """Whether this pool was found to do some seconds ago."""
        pool, served, when = self._served
        return pool is self._pool and served == demand and time.monotonic() - when < _LOOK_AGAIN_S

    def _free_bytes(self) -> int:
        """This rank's share; not asked for where `staging_bytes` is given."""
        if self._options.staging_bytes is not None:
            return _PLENTY
        return free_memory() // self._neighbours

    def _staging_bytes(self) -> int | None:
        given = self._options.staging_bytes
        return None if given is None else parse_bytes(given, field="staging_bytes")
