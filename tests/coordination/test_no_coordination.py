"""One process agrees with itself."""

from __future__ import annotations

import re

import pytest

from ckpt_core.coordination import Ballot, Coordination, NoCoordination
from ckpt_core.errors import CommitError
from ckpt_core.types import RankInfo


def test_one_process_is_rank_0_of_1_and_agrees_at_once() -> None:
    alone: Coordination = NoCoordination()
    assert alone.info == RankInfo(rank=0, world_size=1)
    assert alone.gather("steps", [1, 2], 0.0) == ([1, 2],)
    attempt = alone.attempt_id(7)
    assert re.fullmatch(r"000000000007-[0-9a-f]{8}", attempt)
    assert attempt != alone.attempt_id(7)
    assert alone.agree(attempt, 7, Ballot("plan", {"a": 1}), 0.0) == ({"a": 1},)
    alone.settle(attempt, 7, None, 0.0)


def test_a_failure_of_its_own_is_a_failure_of_rank_0() -> None:
    error = OSError(28, "No space left on device")
    with pytest.raises(CommitError, match=r"step 7 is not committed.*No space left") as caught:
        NoCoordination().settle("000000000007-0123abcd", 7, error, 1.0)
    assert caught.value.failures == {0: error}
    assert caught.value.__cause__ is error
    assert caught.value.step == 7
