"""Whatever fails right before the end: what is committed stays, and nothing else does."""

from __future__ import annotations

from pathlib import Path

from tests import places
from tests.crash.warm import Warm
from tests.multirank.crew import all_well


def test_clean_closes_behind_saves_that_fail_leave_no_attempt(warm: Warm, tmp_path: Path) -> None:
    cases = [
        (how, failing, slow, operation)
        for how in ("refuses", "disk")
        for failing in (0, 2)
        for slow, operation in (
            (0, "mkdir"),
            (1, "mkdir"),
            (1, "pwrite"),
            (1, "sync_dir"),
            (2, "unlink"),
        )
    ]
    cases = places.some(cases, 8, of="closing")
    outcomes = warm.call(
        "tests.multirank.crew:run_ranks",
        call="tests.multirank.closing_jobs:closes_behind_failures",
        world_size=3,
        nodes=None,
        arguments={"root": str(tmp_path), "cases": cases},
    )
    assert all_well(outcomes) == [len(cases)] * 3
    left = {
        cases[int(path.parent.parent.name)]: sorted(one.name for one in path.iterdir())
        for path in tmp_path.glob("*/.inflight/*")
    }
    assert not left
    assert len(list(tmp_path.glob("*/step-*1"))) == len(cases)
