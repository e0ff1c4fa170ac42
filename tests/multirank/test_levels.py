"""Several ranks with levels: one root or a root for each node; all of them, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt_core import verify
from ckpt_core.levels import read_plan
from ckpt_core.store import committed_steps, writer_of
from tests.crash.warm import Warm
from tests.levels.trainers import processes, until
from tests.multirank.crew import all_well

TWO_NODES = ["a", "b"]


def run(warm: Warm, name: str, *, nodes: list[str] | None = None, **more: Any) -> list[Any]:
    outcomes = warm.call(
        "tests.multirank.crew:run_ranks",
        call=f"tests.multirank.level_jobs:{name}",
        world_size=2,
        nodes=nodes,
        arguments=more,
    )
    return all_well(outcomes)


def all_ended(root: Path) -> None:
    """Agents end by themselves when their trainers are gone, and all is where it belongs."""
    for place in (root, root / "a", root / "b"):
        until(lambda place=place: not processes(place), "the end of the agent")


@pytest.mark.parametrize("kill_agent", [False, True], ids=["", "agent killed"])
@pytest.mark.parametrize("nodes", [None, TWO_NODES], ids=["one root", "roots of nodes"])
def test_a_step_of_two_ranks_reaches_a_level_whole_and_each_of_them_is_told(
    warm: Warm, tmp_path: Path, nodes: list[str] | None, kill_agent: bool
) -> None:
    root, far = tmp_path / "root", tmp_path / "far"
    root.mkdir()
    told = run(
        warm,
        "save_on",
        nodes=nodes,
        root=str(root),
        levels=[str(far)],
        steps=[1, 2, 3],
        kill_agent=kill_agent,
    )
    assert told == [[None, None, None, [3]]] * 2
    all_ended(root)
    assert 3 in committed_steps(far)
    assert verify(far).ok
    plans = [read_plan(root / node) for node in nodes or [""]]
    assert len({(plan.run, plan.session, plan.token) for plan in plans if plan}) == 1
    assert [plan.sweeps for plan in plans if plan] == [True, False][: len(plans)]


def test_ranks_with_different_levels_are_refused_on_all(warm: Warm, tmp_path: Path) -> None:
    levels = [[{"url": str(tmp_path / "far")}], []]
    told = run(warm, "opens", root=str(tmp_path / "root"), levels=levels)
    assert all(one.startswith("ConfigError: rank 1 has the levels []") for one in told)
    assert not processes(tmp_path / "root")


@pytest.mark.parametrize("nodes", [None, TWO_NODES], ids=["one root", "roots of nodes"])
def test_a_level_that_one_rank_cannot_use_stops_all_and_leaves_nothing(
    warm: Warm, tmp_path: Path, nodes: list[str] | None
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "file").write_text("no directory")
    bad = [{"url": str(tmp_path / "file")}]
    told = run(warm, "opens", nodes=nodes, root=str(root), levels=[bad, bad])
    assert told[0].startswith("ConfigError: ") and str(tmp_path / "file") in told[0]
    assert told[1].startswith("CommitError: rank 0 could not use the levels: ConfigError")
    for place in (root, root / "a", root / "b"):
        assert writer_of(place) is None
        assert not processes(place)


def test_a_node_that_cannot_start_its_agent_stops_all_and_the_others_agents_end(
    warm: Warm, tmp_path: Path
) -> None:
    root, level = tmp_path / "root", [{"url": str(tmp_path / "far")}]
    (root / "b").mkdir(parents=True)
    (root / "b" / ".levels").write_text("in the way")
    told = run(warm, "opens", nodes=TWO_NODES, root=str(root), levels=[level, level])
    assert told[0].startswith("CommitError: rank 1 could not use the levels: PersistError")
    assert told[1].startswith("PersistError: the id of the run could not be kept")
    for place in (root / "a", root / "b"):
        assert writer_of(place) is None
        assert not processes(place)
    (root / "b" / ".levels").unlink()
    told = run(warm, "opens", nodes=TWO_NODES, root=str(root), levels=[level, level])
    assert told == ["opened"] * 2
    all_ended(root)
