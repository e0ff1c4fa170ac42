"""`kill -9` of any rank at any file operation of a save: nothing torn is published, nobody hangs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.crash.warm import Warm
from tests.faults.mounts import mounted
from tests.multirank.crew import all_well
from tests.multirank.kills import RANKS, died, killed
from tests.multirank.test_save import JOBS, run_several


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("nodes", [None, ["a", "a", "b"]], ids=["shared", "nodes"])
def test_a_killed_rank_never_leaves_a_torn_step(
    warm: Warm, tmp_path: Path, victim: int, nodes: list[str] | None
) -> None:
    deaths = 0
    call = f"{JOBS}killed_at"
    for jobs in killed(warm, call, tmp_path, nodes=nodes, victim=victim, point="after"):
        roots = [{"root": how["root"]} for how, _ in jobs]
        restored = run_several(warm, "restore_newest", RANKS, roots, nodes=nodes)
        for (how, outcomes), found in zip(jobs, restored, strict=True):
            _check(how["n"], victim, outcomes, all_well(found))
            deaths += died(outcomes, victim)
    assert deaths > 2


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_killed_while_it_overwrites_files_in_memory_leaves_no_torn_step(
    warm: Warm, tmp_path: Path, victim: int
) -> None:
    deaths, call, first = 0, f"{JOBS}killed_at", 8
    how = {"victim": victim, "point": "after", "first": first, "keep_last": 1, "in_flight": 1}
    with mounted("tmpfs", tmp_path) as where:
        for jobs in killed(warm, call, where, **how):
            roots = [{"root": how["root"]} for how, _ in jobs]
            restored = run_several(warm, "restore_newest", RANKS, roots)
            for (job, outcomes), found in zip(jobs, restored, strict=True):
                _check(job["n"], victim, outcomes, all_well(found), first=first)
                deaths += died(outcomes, victim)
    assert deaths > 2


def _check(
    n: int,
    victim: int,
    outcomes: list[dict[str, Any]],
    found: list[dict[str, Any]],
    *,
    first: int = 1,
) -> None:
    """What the ranks said of the save, and what the next job has found."""
    dead = died(outcomes, victim)
    for rank, outcome in enumerate(outcomes):
        if rank == victim and dead:
            continue
        assert not outcome["problem"] and not outcome["signal"], (n, rank, outcome)
        told = outcome["result"]["outcome"]
        assert told == "committed" or (dead and f"rank {victim}" in told), (n, rank, told)
    committed = {o["result"]["outcome"] for i, o in enumerate(outcomes) if i != victim}
    steps = {one["step"] for one in found}
    assert len(steps) == 1 and steps <= {first, first + 1}, (n, steps)
    assert all(one["same"] for one in found), n
    if "committed" in committed:
        assert steps == {first + 1}, (n, committed)
