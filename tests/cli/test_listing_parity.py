"""`ckpt-core ls` of a root whose group keeps parity: what was so once is told as that, or asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_core.levels import Status, read_plan, write_status
from ckpt_core.levels.mailbox import LevelStatus
from ckpt_core.levels.parity.groups import Shape
from tests.levels.parity.clusters import ATTEMPT, STEP
from tests.levels.parity.serving import ServedCluster, served
from tests.levels.servers.moto import needs_store

pytestmark = needs_store

Cli = Callable[..., Any]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ServedCluster]:
    """Whose agents have said that all keep the parity of the step, and were right."""
    with served(tmp_path, Shape(2, 1)) as cluster:
        for n in range(3):
            plan = read_plan(cluster.root(n))
            assert plan is not None
            levels = [LevelStatus(plan.levels[0].url, steps={STEP: ATTEMPT})]
            write_status(cluster.root(n), Status(pid=1, host="h", token="t", levels=levels))
        yield cluster


def told(cli: Cli, root: Path, *more: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(cli("ls", root, *more, "--json").out)
    return found


def test_who_is_asked_says_what_is_there_now(cli: Cli, cluster: ServedCluster) -> None:
    root = cluster.root(0)
    ((one,), silent) = (told(cli, root, "--ask")[name] for name in ("can_lose", "silent"))
    assert (one["what"], one["lacking"], one["unknown"], silent) == ("any 1 of 3 nodes", [], [], {})

    cluster.lose(2)
    found = told(cli, root, "--ask")
    ((one,), (level,)) = found["can_lose"], found["further"]["levels"]
    assert (one["what"], one["lacking"]) == ("nothing", ["node-00002"])
    assert level["steps"] == [], "and the level does not have it, either"
    said = cli("ls", root, "--ask").out
    assert f"step {STEP}: the step or its parity is not at node-00002" in said


def test_a_node_that_does_not_answer_is_not_counted(cli: Cli, cluster: ServedCluster) -> None:
    cluster.end(1)
    found = told(cli, cluster.root(0), "--ask")
    assert found["can_lose"] == [] and len(found["silent"]) == 2
    assert all("of-node-00001" in url for url in found["silent"])
    out = cli("ls", cluster.root(0), "--ask").out
    assert out.count("did not answer") == 2 and "any 1 of 3" not in out


def test_without_asking_it_is_said_that_it_was_so_when_it_was_made(
    cli: Cli, cluster: ServedCluster
) -> None:
    cluster.lose(2)
    (one,) = told(cli, cluster.root(0))["can_lose"]
    assert one["what"] == "any 1 of 3 nodes, when made"
    assert one["unknown"] == ["node-00001", "node-00002"]
    assert "what became of the parity at 2 other nodes is not known here: `ls --ask` asks them" in (
        cli("ls", cluster.root(0)).out
    )
