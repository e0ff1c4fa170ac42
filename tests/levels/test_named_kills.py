"""A kill at every file operation of what takes directories of files on, or brings them back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.warm import Warm
from tests.levels.named_kills import CASES


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    """The process that children are forked from."""
    with Warm("tests.levels.named_kills") as process:
        yield process


@pytest.mark.parametrize("point", ["before", "after", "torn"])
@pytest.mark.parametrize("case", CASES)
def test_whatever_is_killed_only_whole_directories_are_seen_and_the_next_try_ends_well(
    warm: Warm, case: str, point: str, tmp_path: Path
) -> None:
    count = warm.call(
        "tests.levels.named_kills:kill_everywhere", case=case, point=point, place=str(tmp_path)
    )
    assert count > 0
