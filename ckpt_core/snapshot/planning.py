"""How staging memory is cut: what checkpoints ask of it, and what they get."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_core.errors import ConfigError
from ckpt_core.units import ALIGN_BYTES, align_up, size_text

_SMALLEST_CHUNK = ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """How the staging memory is cut.

    Attributes:
        chunk_bytes: size of every chunk, a multiple of 4 KiB.
        fronts_per_save: front chunks that one checkpoint takes.
        front_chunks: fronts_per_save for each in-flight checkpoint; fewer only where whole ones must fit
            and memory is short.
        stream_chunks: chunks for everything else.
    """

    chunk_bytes: int
    fronts_per_save: int
    front_chunks: int
    stream_chunks: int

    @property
    def total_bytes(self) -> int:
        """Memory of the whole pool."""
        return self.chunk_bytes * (self.front_chunks + self.stream_chunks)

    def serves(self, need: PoolPlan) -> bool:
        """Whether a pool cut like this one also does for a state that asks for `need`."""
        return (
            self.fronts_per_save * self.chunk_bytes >= need.fronts_per_save * need.chunk_bytes
            and self.total_bytes * 5 >= need.total_bytes * 4
            # The pieces of a mapped file, too, have the size of a chunk.
            and (need.stream_chunks > 0 or self.chunk_bytes >= need.chunk_bytes)
        )

    def holds(self, demand: PoolDemand) -> bool:
        """Whether as many whole checkpoints fit as must."""
        if demand.mapped or not self.stream_chunks:
            return demand.mapped
        return not demand.whole or (
            demand.fronts(self.chunk_bytes) <= self.fronts_per_save
            and demand.least_fronts(self.chunk_bytes) <= self.front_chunks
            and demand.least_streams(self.chunk_bytes) <= self.stream_chunks
        )


@dataclass(frozen=True, slots=True)
class PoolDemand:
    """What the checkpoints ask of the staging memory.

    Attributes:
        file_bytes: length of the shard file of one.
        front_bytes: how much of it is copied inside `save`.
        in_flight: how many may be under way.
        whole: how many must fit from front to end, since nobody frees their chunks before they are
            complete; 0: none, chunks go to the writers as they fill.
        rest_bytes: length of the second shard file of a layer-wise one; counts for `whole` alone.
        mapped: what is behind the front is copied into the file itself, and takes no chunks.
    """

    file_bytes: int
    front_bytes: int
    in_flight: int
    whole: int = 0
    rest_bytes: int = 0
    mapped: bool = False

    def fronts(self, chunk_bytes: int) -> int:
        """Front chunks of one checkpoint."""
        return -(-self.front_bytes // chunk_bytes)

    def streams(self, chunk_bytes: int) -> int:
        """Stream chunks that hold everything else of one."""
        if self.mapped:
            return 0
        first = max(-(-self.file_bytes // chunk_bytes) - self.fronts(chunk_bytes), 1)
        return first + -(-self.rest_bytes // chunk_bytes)

    def least_streams(self, chunk_bytes: int) -> int:
        """Stream chunks without which a checkpoint could wait for ever."""
        if self.mapped:
            return 0
        # One for each checkpoint: a layer-wise one keeps its own open between layers.
        return self.whole * self.streams(chunk_bytes) or self.in_flight

    def least_fronts(self, chunk_bytes: int) -> int:
        """Front chunks without which a checkpoint could wait for ever, or `save` for storage."""
        # Whole ones in the least memory have to wait: the next begins once one is written.
        return (self.whole or self.in_flight) * self.fronts(chunk_bytes)

    def least_bytes(self, chunk_bytes: int) -> int:
        """Memory of `least_fronts` and `least_streams`."""
        return (self.least_fronts(chunk_bytes) + self.least_streams(chunk_bytes)) * chunk_bytes

    def largest_chunk(self, chunk_bytes: int) -> int:
        """Size of a chunk where memory is no concern: `chunk_bytes`, or the file if that is shorter."""
        return min(chunk_bytes, align_up(self.file_bytes, ALIGN_BYTES))


def budget_bytes(
    demand: PoolDemand, *, chunk_bytes: int, staging_bytes: int | None, free_bytes: int
) -> int:
    """The bound of the pool: `staging_bytes`, or what is taken when that is None."""
    if staging_bytes is not None:
        return staging_bytes
    least = demand.in_flight * (align_up(demand.front_bytes, chunk_bytes) + 2 * chunk_bytes)
    wanted = 2 * demand.file_bytes
    if demand.whole:
        wanted = max(wanted, demand.least_bytes(demand.largest_chunk(chunk_bytes)))
    return max(min(wanted, free_bytes // 4), least)


def plan_pool(
    demand: PoolDemand, *, chunk_bytes: int, staging_bytes: int | None, free_bytes: int
) -> PoolPlan:
    """Cut the staging memory.

    Chunks get smaller than `chunk_bytes` when the state or the budget is small.

    Raises:
        ConfigError: the budget cannot hold the front and one chunk more of each checkpoint, or not as many
            whole checkpoints as it must.
    """
    budget = budget_bytes(
        demand, chunk_bytes=chunk_bytes, staging_bytes=staging_bytes, free_bytes=free_bytes
    )
    chunk = demand.largest_chunk(chunk_bytes)
    while demand.least_bytes(chunk) > budget:
        if chunk <= _SMALLEST_CHUNK:
            raise too_small(demand, budget, staging_bytes=staging_bytes, chunk_bytes=chunk)
        chunk = align_up(chunk // 2, ALIGN_BYTES)
    each, most = demand.fronts(chunk), budget // chunk
    fronts = demand.in_flight * each
    if fronts > most - demand.least_streams(chunk):
        fronts = demand.least_fronts(chunk)
    streams = min(most - fronts, demand.in_flight * demand.streams(chunk))
    return PoolPlan(chunk, each, fronts, streams)


def too_small(
    demand: PoolDemand, budget: int, *, staging_bytes: int | None, chunk_bytes: int
) -> ConfigError:
    """The error of a budget that `demand` does not fit into, cut into chunks of `chunk_bytes`."""
    need = demand.least_bytes(chunk_bytes)
    given = f"staging_bytes={budget} is"
    if staging_bytes is None:
        given = f"staging_bytes=None is {size_text(budget)}, a quarter of the free memory, which is"
    if demand.whole:
        each = demand.file_bytes + demand.rest_bytes
        why = (
            f"with pipelined=False nothing is written before a checkpoint is staged, and "
            f"{demand.whole} x {size_text(each)} must fit"
        )
        advice = "set pipelined=True"
    else:
        why = (
            f"{demand.in_flight} checkpoints in flight copy {size_text(demand.front_bytes)} each inside "
            f"save()"
        )
        advice = "lower in_flight or eager_leaf_bytes"
    return ConfigError(
        f"{given} too small: {why}, so at least {size_text(need)} ({need} bytes) are needed; "
        f"raise staging_bytes, or {advice}"
    )
