"""`kill -9` of any rank at any file operation of a save: nothing torn is published, nobody hangs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.warm import Warm
from tests.multirank.test_save import run, run_well

SIGKILL = 9


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("nodes", [None, ["a", "a", "b"]], ids=["shared", "nodes"])
def test_a_killed_rank_never_leaves_a_torn_step(
    warm: Warm, tmp_path: Path, victim: int, nodes: list[str] | None
) -> None:
    # Each victim dies at other operations than the others; all of them would take an hour.
    world, n, deaths = 3, victim, 0
    while True:
        root = tmp_path / str(n)
        outcomes = run(
            warm, "killed_at", world, nodes=nodes, root=str(root), victim=victim, n=n, point="after"
        )
        died = outcomes[victim]["signal"] == SIGKILL
        deaths += died
        for rank, outcome in enumerate(outcomes):
            if rank == victim and died:
                continue
            assert not outcome["problem"] and not outcome["signal"], (n, rank, outcome)
            result = outcome["result"]
            if died:
                assert result["outcome"] == "committed" or f"rank {victim}" in result["outcome"], (
                    n,
                    rank,
                    result,
                )
            else:
                assert result["outcome"] == "committed", (n, rank, result)
        committed = {o["result"]["outcome"] for i, o in enumerate(outcomes) if i != victim}
        found = run_well(warm, "restore_newest", world, nodes=nodes, root=str(root))
        steps = {one["step"] for one in found}
        assert len(steps) == 1 and steps <= {1, 2}, (n, steps)
        assert all(one["same"] for one in found), n
        if "committed" in committed:
            assert steps == {2}, (n, committed)
        if not died:
            break
        n += 4
    assert deaths > 2
