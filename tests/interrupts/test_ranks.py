"""One rank of two is interrupted at any line of a restore: the other hears of it, and both restore again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.warm import Warm
from tests.interrupts.rank_jobs import KINDS
from tests.multirank.crew import all_well

MOST = 10


@pytest.mark.parametrize("struck", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_both_ranks_restore_again_after_one_was_interrupted_at_any_line(
    tmp_path: Path, kind: str, struck: int
) -> None:
    with Warm() as warm:
        outcomes = warm.call(
            "tests.multirank.crew:run_ranks",
            call="tests.interrupts.rank_jobs:restores",
            world_size=2,
            arguments={
                "root": str(tmp_path / "root"),
                "struck": struck,
                "kind": kind,
                "most": MOST,
            },
        )
    found = all_well(outcomes)
    assert any(found[struck]["where"])
    assert [one["odd"] for one in found] == [[], []]
    assert found[1 - struck]["told"] > 0
