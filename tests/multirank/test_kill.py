"""`kill -9` of any rank at any file operation of a save: nothing torn is published, nobody hangs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.crash.warm import Warm
from tests.multirank.crew import all_well
from tests.multirank.test_save import run_several

SIGKILL = 9
STRIDE = 4
AT_ONCE = 8
"""Jobs side by side: where a rank has died, the others wait until it is taken for dead."""


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("nodes", [None, ["a", "a", "b"]], ids=["shared", "nodes"])
def test_a_killed_rank_never_leaves_a_torn_step(
    warm: Warm, tmp_path: Path, victim: int, nodes: list[str] | None
) -> None:
    deaths = 0
    # Each victim dies at other operations than the others; all of them would take an hour.
    for first in itertools.count(victim, STRIDE * AT_ONCE):
        several = [
            {"root": str(tmp_path / str(n)), "victim": victim, "n": n, "point": "after"}
            for n in range(first, first + STRIDE * AT_ONCE, STRIDE)
        ]
        jobs = run_several(warm, "killed_at", 3, several, nodes=nodes)
        roots = [{"root": how["root"]} for how in several]
        restored = run_several(warm, "restore_newest", 3, roots, nodes=nodes)
        for how, outcomes, found in zip(several, jobs, restored, strict=True):
            _check(how["n"], victim, outcomes, all_well(found))
        died = [outcomes[victim]["signal"] == SIGKILL for outcomes in jobs]
        deaths += sum(died)
        if not all(died):
            break
    assert deaths > 2


def _check(
    n: int, victim: int, outcomes: list[dict[str, Any]], found: list[dict[str, Any]]
) -> None:
    """What the ranks said of the save, and what the next job has found."""
    died = outcomes[victim]["signal"] == SIGKILL
    for rank, outcome in enumerate(outcomes):
        if rank == victim and died:
            continue
        assert not outcome["problem"] and not outcome["signal"], (n, rank, outcome)
        told = outcome["result"]["outcome"]
        assert told == "committed" or (died and f"rank {victim}" in told), (n, rank, told)
    committed = {o["result"]["outcome"] for i, o in enumerate(outcomes) if i != victim}
    steps = {one["step"] for one in found}
    assert len(steps) == 1 and steps <= {1, 2}, (n, steps)
    assert all(one["same"] for one in found), n
    if "committed" in committed:
        assert steps == {2}, (n, committed)
