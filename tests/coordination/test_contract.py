"""What every implementation of Coordination promises to a world of one."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator

import pytest

from ckpt_core.coordination import Ballot, Coordination, NoCoordination, TorchStore
from ckpt_core.errors import CommitError
from ckpt_core.types import RankInfo


@pytest.fixture(params=["NoCoordination", "TorchStore"])
def alone(request: pytest.FixtureRequest) -> Iterator[Coordination]:
    made: Coordination
    if request.param == "NoCoordination":
        made = NoCoordination()
    else:
        made = TorchStore("127.0.0.1", 0, rank=0, world_size=1)
    yield made
    made.close()


def test_it_is_rank_0_of_1_and_leads(alone: Coordination) -> None:
    assert alone.info == RankInfo(rank=0, world_size=1)
    assert alone.info.leads


def test_it_gathers_its_own_value_any_number_of_times(alone: Coordination) -> None:
    for value in ([1, "zwei", None], {"a": 1.5}):
        assert alone.gather("steps", value, 10.0) == (value,)


def test_attempt_ids_name_the_step_and_are_new_each_time(alone: Coordination) -> None:
    ids = [alone.attempt_id(step) for step in (7, 7, 8, 7)]
    assert all(re.fullmatch(r"00000000000[78]-[0-9a-f]{8}", one) for one in ids)
    assert len(set(ids)) == 4


def test_it_agrees_with_itself_and_settles(alone: Coordination) -> None:
    for step in (7, 7, 9):
        attempt = alone.attempt_id(step)
        assert alone.agree(attempt, step, Ballot("plan", {"a": step}), 10.0) == ({"a": step},)
        alone.settle(attempt, step, None, 10.0)


def test_a_failure_to_publish_is_a_failure_of_its_rank(alone: Coordination) -> None:
    error = OSError(28, "No space left on device")
    attempt = alone.attempt_id(7)
    alone.agree(attempt, 7, Ballot("plan", None), 10.0)
    with pytest.raises(CommitError, match=r"step 7 is not committed.*No space left") as caught:
        alone.settle(attempt, 7, error, 10.0)
    assert caught.value.failures == {0: error}
    assert caught.value.__cause__ is error
    assert caught.value.step == 7


def test_declining_never_raises_and_may_be_repeated_and_late(alone: Coordination) -> None:
    attempt = alone.attempt_id(7)
    for _ in range(3):
        alone.decline(attempt, 7, RuntimeError("the disk is full"))
    later = alone.attempt_id(7)
    assert alone.agree(later, 7, Ballot("plan", 1), 10.0) == (1,)
    alone.settle(later, 7, None, 10.0)
    alone.decline(later, 7, RuntimeError("too late"))


def test_attempts_may_overlap_in_any_number_of_threads(alone: Coordination) -> None:
    ids = [alone.attempt_id(step) for step in range(20)]
    seen: list[object] = []

    def commit(step: int) -> None:
        seen.append(alone.agree(ids[step], step, Ballot("plan", step), 10.0))
        alone.settle(ids[step], step, None, 10.0)

    threads = [threading.Thread(target=commit, args=(step,)) for step in reversed(range(20))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(seen) == [(step,) for step in range(20)]


def test_closing_twice_is_closing_once(alone: Coordination) -> None:
    alone.close()
    alone.close()
