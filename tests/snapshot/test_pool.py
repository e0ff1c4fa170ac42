"""The staging pool: its plan, its bound, and its waits."""

from __future__ import annotations

import ctypes
import gc
import re
import threading
import time
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core.errors import ConfigError, StagingError
from ckpt_core.snapshot import PoolDemand, PoolPlan, StagingPool, plan_pool
from ckpt_core.snapshot import pool as pool_module
from ckpt_core.snapshot.pool import Part
from ckpt_core.system.devices import Devices

MIB = 2**20
SMALL = PoolPlan(chunk_bytes=4096, fronts_per_save=1, front_chunks=2, stream_chunks=2)


def never() -> bool:
    return False


def soon() -> float:
    return time.monotonic() + 0.05


@given(
    file_bytes=st.integers(1, 2**36),
    front=st.floats(0, 1),
    in_flight=st.integers(1, 8),
    chunk_bytes=st.integers(1, 64 * 256).map(lambda pages: pages * 4096),
    staging_bytes=st.none() | st.integers(2**20, 2**36),
    free_bytes=st.integers(0, 2**38),
)
def test_a_plan_keeps_within_its_budget_and_serves_every_checkpoint_in_flight(
    file_bytes: int,
    front: float,
    in_flight: int,
    chunk_bytes: int,
    staging_bytes: int | None,
    free_bytes: int,
) -> None:
    front_bytes = max(1, int(file_bytes * front))
    try:
        plan = plan_pool(
            PoolDemand(file_bytes, front_bytes, in_flight),
            chunk_bytes=chunk_bytes,
            staging_bytes=staging_bytes,
            free_bytes=free_bytes,
        )
    except ConfigError:
        assert staging_bytes is not None
        assert staging_bytes < in_flight * (front_bytes + 4 * 65536)
        return
    assert plan.chunk_bytes % 4096 == 0
    assert plan.fronts_per_save * plan.chunk_bytes >= front_bytes
    assert plan.front_chunks == in_flight * plan.fronts_per_save
    assert plan.stream_chunks >= in_flight
    if staging_bytes is not None:
        assert plan.total_bytes <= staging_bytes


def test_too_small_a_budget_is_an_error_that_says_how_much_is_needed() -> None:
    with pytest.raises(
        ConfigError, match=r"staging_bytes=1048576 is too small.*at least .*\d+ bytes\)"
    ):
        plan_pool(
            PoolDemand(8 * MIB, 2 * MIB, in_flight=2),
            chunk_bytes=MIB,
            staging_bytes=MIB,
            free_bytes=MIB,
        )


def test_by_default_a_pool_takes_at_most_a_quarter_of_the_free_memory() -> None:
    plan = plan_pool(
        PoolDemand(1024 * MIB, 4096, in_flight=2),
        chunk_bytes=16 * MIB,
        staging_bytes=None,
        free_bytes=1024 * MIB,
    )
    assert plan.total_bytes <= 256 * MIB


@given(
    file_bytes=st.integers(1, 2**32),
    front=st.floats(0, 1),
    in_flight=st.integers(1, 8),
    rest_bytes=st.integers(0, 2**30),
    layerwise=st.booleans(),
    chunk_bytes=st.integers(1, 64 * 256).map(lambda pages: pages * 4096),
    staging_bytes=st.none() | st.integers(2**20, 2**36),
    free_bytes=st.integers(0, 2**38),
)
def test_a_plan_for_whole_checkpoints_holds_them_or_says_what_they_need(
    file_bytes: int,
    front: float,
    in_flight: int,
    rest_bytes: int,
    layerwise: bool,
    chunk_bytes: int,
    staging_bytes: int | None,
    free_bytes: int,
) -> None:
    whole = in_flight if layerwise else 1
    front_bytes = max(1, int(file_bytes * front))
    demand = PoolDemand(file_bytes, front_bytes, in_flight, whole, rest_bytes if layerwise else 0)
    try:
        plan = plan_pool(
            demand, chunk_bytes=chunk_bytes, staging_bytes=staging_bytes, free_bytes=free_bytes
        )
    except ConfigError as exc:
        need = int(re.findall(r"\((\d+) bytes\) are needed", str(exc))[0])
        assert need > (staging_bytes if staging_bytes is not None else free_bytes // 4)
        plan_pool(demand, chunk_bytes=chunk_bytes, staging_bytes=need, free_bytes=0)
        return
    assert plan.holds(demand)
    if staging_bytes is not None:
        assert plan.total_bytes <= staging_bytes
    size = plan.chunk_bytes
    fronts = min(plan.fronts_per_save, -(-file_bytes // size))
    first = -(-file_bytes // size) - fronts
    assert plan.front_chunks in (whole * plan.fronts_per_save, in_flight * plan.fronts_per_save)
    assert plan.stream_chunks >= whole * (first + -(-demand.rest_bytes // size))


def test_without_a_quarter_of_the_free_memory_for_it_a_whole_checkpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"staging_bytes=None is 64.0 MiB, a quarter of"):
        plan_pool(
            PoolDemand(128 * MIB, 4096, in_flight=1, whole=1),
            chunk_bytes=8 * MIB,
            staging_bytes=None,
            free_bytes=256 * MIB,
        )


def test_a_pool_in_use_can_be_enlarged() -> None:
    pool = StagingPool(SMALL, Devices())
    held = [pool.acquire(Part.STREAM, deadline=soon(), cancelled=never) for _ in range(2)]
    pool.extend(3)
    assert pool.plan.stream_chunks == 5
    held += [pool.acquire(Part.STREAM, deadline=soon(), cancelled=never) for _ in range(3)]
    for number, chunk in enumerate(held):
        chunk.tensor.fill_(number)
    assert [set(chunk.memory) for chunk in held] == [{0}, {1}, {2}, {3}, {4}]
    with pytest.raises(StagingError):
        pool.acquire(Part.STREAM, deadline=soon(), cancelled=never)
    for chunk in held:
        pool.release(chunk)
    assert pool.wait_idle(deadline=soon())
    assert pool.most_held_bytes == 5 * 4096


def test_chunks_are_page_aligned_and_do_not_overlap() -> None:
    pool = StagingPool(SMALL, Devices())
    chunks = [
        pool.acquire(part, deadline=soon(), cancelled=never)
        for part in (Part.FRONT, Part.FRONT, Part.STREAM, Part.STREAM)
    ]
    assert all(chunk.address % 4096 == 0 for chunk in chunks)
    for number, chunk in enumerate(chunks):
        chunk.tensor.fill_(number + 1)
    assert [set(chunk.memory) for chunk in chunks] == [{1}, {2}, {3}, {4}]
    assert pool.most_held_bytes == SMALL.total_bytes


def test_stream_chunks_running_out_leaves_the_fronts_free() -> None:
    pool = StagingPool(SMALL, Devices())
    for _ in range(2):
        pool.acquire(Part.STREAM, deadline=soon(), cancelled=never)
    with pytest.raises(StagingError, match="the deadline passed"):
        pool.acquire(Part.STREAM, deadline=soon(), cancelled=never)
    pool.acquire(Part.FRONT, deadline=soon(), cancelled=never)


def test_a_waiter_gets_the_chunk_that_is_released() -> None:
    pool = StagingPool(SMALL, Devices())
    held = [pool.acquire(Part.STREAM, deadline=soon(), cancelled=never) for _ in range(2)]
    threading.Timer(0.05, pool.release, args=(held[0],)).start()
    got = pool.acquire(Part.STREAM, deadline=time.monotonic() + 30, cancelled=never)
    assert got is held[0]


def test_giving_up_ends_the_wait_before_the_deadline() -> None:
    pool = StagingPool(SMALL, Devices())
    for _ in range(2):
        pool.acquire(Part.STREAM, deadline=soon(), cancelled=never)
    with pytest.raises(StagingError, match="given up"):
        pool.acquire(Part.STREAM, deadline=time.monotonic() + 3600, cancelled=lambda: True)


def test_chunks_are_touched_ahead_of_the_saves_that_may_hold_them() -> None:
    plan = PoolPlan(chunk_bytes=4096, fronts_per_save=1, front_chunks=2, stream_chunks=12)
    pool = StagingPool(plan, Devices())
    file_bytes = 6 * 4096 - 1
    assert not pool.touch_ahead(file_bytes), "nobody has held any"
    held = [pool.acquire(Part.STREAM, deadline=soon(), cancelled=never) for _ in range(3)]
    held[0].tensor.fill_(1)
    for chunk in held:
        pool.release(chunk)
    assert [pool.touch_ahead(file_bytes) for _ in range(2)] == [True, False], "one for two"
    held = [pool.acquire(Part.STREAM, deadline=soon(), cancelled=never) for _ in range(4)]
    assert all(chunk.touched for chunk in held) and set(held[-1].memory) == {0}
    assert {1} in [set(chunk.memory) for chunk in held]
    assert [pool.touch_ahead(file_bytes) for _ in range(2)] == [True, False], "all of a save"
    assert pool.touch_ahead(7 * 4096)


def test_idle_means_that_every_chunk_is_back() -> None:
    pool = StagingPool(SMALL, Devices())
    chunk = pool.acquire(Part.FRONT, deadline=soon(), cancelled=never)
    assert not pool.wait_idle(deadline=soon())
    pool.release(chunk)
    assert pool.wait_idle(deadline=soon())


@given(
    file_bytes=st.integers(1, 2**36),
    front=st.floats(0, 1),
    in_flight=st.integers(1, 8),
    chunk_bytes=st.integers(1, 64 * 256).map(lambda pages: pages * 4096),
    free_bytes=st.integers(0, 2**38),
)
def test_mapped_files_take_memory_for_their_fronts_alone(
    file_bytes: int, front: float, in_flight: int, chunk_bytes: int, free_bytes: int
) -> None:
    front_bytes = max(1, int(file_bytes * front))
    mapped = PoolDemand(file_bytes, front_bytes, in_flight, mapped=True)
    plan = plan_pool(mapped, chunk_bytes=chunk_bytes, staging_bytes=None, free_bytes=free_bytes)
    assert plan.total_bytes == in_flight * plan.fronts_per_save * plan.chunk_bytes
    assert plan.fronts_per_save * plan.chunk_bytes < front_bytes + plan.chunk_bytes
    assert plan.chunk_bytes == mapped.largest_chunk(chunk_bytes)
    assert plan.holds(mapped)
    # Whoever stages into chunks would wait in it for ever.
    assert not plan.holds(PoolDemand(file_bytes, front_bytes, in_flight))


class Struck(Devices):
    """Memory is unlocked, and Ctrl-C comes before that or behind it, once."""

    def __init__(self, *, before: bool) -> None:
        super().__init__()
        self.locked: list[int] = []
        self._before, self._struck = before, False

    def ask_to_lock(self, address: int, nbytes: int, device: torch.device) -> int | None:
        self.locked.append(address)
        return 0

    def unpin(self, address: int, device: torch.device) -> None:
        if not self._struck:
            self._struck = True
            if not self._before:
                self.locked.remove(address)
            raise KeyboardInterrupt
        if address in self.locked:
            self.locked.remove(address)


@pytest.mark.parametrize("before", [True, False])
def test_ctrl_c_while_memory_is_unlocked_leaves_none_locked_that_goes(
    before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_SEGMENT_BYTES", 2 * SMALL.chunk_bytes)
    devices = Struck(before=before)
    pool = StagingPool(SMALL, devices)
    for segment in pool.segments():
        pool.lock(segment, torch.device("cuda", 0))
    assert len(devices.locked) == 2
    with pytest.raises(KeyboardInterrupt):
        pool.close()
    pool.close()
    assert not devices.locked


def test_memory_that_a_device_may_still_write_to_stays_mapped_and_locked_when_its_pool_goes() -> (
    None
):
    devices = Struck(before=True)
    pool = StagingPool(SMALL, devices)
    for segment in pool.segments():
        pool.lock(segment, torch.device("cuda", 0))
    chunk = pool.acquire(Part.STREAM, deadline=soon(), cancelled=never)
    fresh = pool.acquire(Part.STREAM, deadline=soon(), cancelled=never)
    chunk.tensor.fill_(7)
    address, mapped = chunk.address, weakref.ref(pool._mappings[0])
    pool.lose(chunk)
    pool.release(fresh)
    pool.close()
    del pool, chunk, fresh
    gc.collect()
    assert mapped() is not None and ctypes.string_at(address, 1) == b"\7"
    assert devices.locked
