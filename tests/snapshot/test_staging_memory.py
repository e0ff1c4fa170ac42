"""The staging memory from save to save: when it stays, when it grows, and when free memory is asked for."""

from __future__ import annotations

import time

import pytest

from ckpt_core.options import Options
from ckpt_core.snapshot import StagingMemory, StagingPool, staging_memory
from ckpt_core.system.devices import Devices

MIB = 2**20


def pool_of(memory: StagingMemory, file_bytes: int) -> StagingPool:
    demand = memory.demand_of_save(file_bytes, 4096, mapped=False)
    return memory.pool_for(demand, deadline=time.monotonic() + 60)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What free memory was asked for, and answered with the last; no answer is remembered."""
    answers = [1 << 40]

    def free() -> int:
        answers.append(answers[-1])
        return answers[-1]

    monkeypatch.setattr(staging_memory, "free_memory", free)
    monkeypatch.setattr(staging_memory, "_LOOK_AGAIN_S", 0.0)
    return answers


@pytest.mark.parametrize("file_bytes", [4096, 8 * MIB, 20 * MIB + 4096])
def test_nobody_asks_for_free_memory_where_there_is_all_that_is_wanted(
    asked: list[int], file_bytes: int
) -> None:
    memory = StagingMemory(Options(), Devices())
    pool = pool_of(memory, file_bytes)
    before = len(asked)
    assert pool_of(memory, file_bytes) is pool and len(asked) == before
    memory.close()


def test_a_pool_made_while_memory_was_short_grows_when_there_is_more(asked: list[int]) -> None:
    memory = StagingMemory(Options(), Devices())
    asked.append(4 * 60 * MIB)
    small = pool_of(memory, 100 * MIB)
    assert small.plan.total_bytes <= 60 * MIB
    assert pool_of(memory, 100 * MIB) is small
    asked.append(1 << 40)
    large = pool_of(memory, 100 * MIB)
    assert large is not small and 190 * MIB <= large.plan.total_bytes <= 200 * MIB
    memory.close()


def test_a_bound_that_was_given_needs_no_look_at_free_memory(asked: list[int]) -> None:
    memory = StagingMemory(Options(staging_bytes=40 * MIB), Devices())
    for _ in range(2):
        assert pool_of(memory, 100 * MIB).plan.total_bytes <= 40 * MIB
    assert len(asked) == 1
    memory.close()
