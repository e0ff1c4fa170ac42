"""One turn of the agent that keeps parity, among nodes that answer and do nothing by themselves."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_core.levels.agent.board import Board, Timing
from ckpt_core.levels.agent.parity_carrying import ParityCarrier
from ckpt_core.levels.agreed import Agreed, write_agreed
from ckpt_core.levels.far.door import Copy
from ckpt_core.levels.mailbox import LevelStatus, Plan, read_plan
from ckpt_core.levels.parity.groups import Shape
from ckpt_core.levels.parity.holds import held_steps
from ckpt_core.levels.parity.objects import Group
from tests.levels.making import make_store, save
from tests.levels.parity.clusters import ATTEMPT, STEP
from tests.levels.parity.serving import RUN, ServedCluster, served
from tests.levels.servers.moto import needs_store
from tests.store.harness import QuickFiles

pytestmark = needs_store

OLDER = STEP - 2
ATTEMPT_OF_OLDER = f"{OLDER:012d}-89abcdef"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ServedCluster]:
    """All nodes have a step and its parity, and an older step without."""
    with served(tmp_path, Shape(2, 1)) as cluster:
        for n in range(3):
            store = make_store(cluster.root(n))
            save(store, OLDER, ranks=(n,), world=3, attempt=ATTEMPT_OF_OLDER)
            store.close()
        yield cluster


class Agent:
    """That of the first node."""

    def __init__(self, cluster: ServedCluster) -> None:
        plan = read_plan(cluster.root(0))
        assert plan is not None
        self.plan: Plan = plan
        self.board, url = Board(plan, None), plan.levels[0].url
        timing = Timing(agrees_s=0.0)
        self.carrier = ParityCarrier(
            cluster.root(0), url, self.board, files=QuickFiles(), timing=timing
        )

    def turn(self, **changes: object) -> LevelStatus:
        self.plan = replace(self.plan, **changes)  # type: ignore[arg-type]
        self.board.follow(self.plan)
        self.carrier._turn()
        with self.board.change(self.carrier.url) as status:
            return status


@pytest.fixture
def agent(cluster: ServedCluster) -> Iterator[Agent]:
    agent = Agent(cluster)
    yield agent
    assert agent.carrier._met is not None
    agent.carrier._met.close()


def test_what_all_have_reached_passes_nothing_over_until_all_ranks_have_gone_on_from_a_step(
    cluster: ServedCluster, agent: Agent
) -> None:
    first = agent.turn()
    assert first.steps == {STEP: ATTEMPT} and first.skipped == []
    back = agent.turn(settled=True, apart=(ATTEMPT,))
    assert back.steps == {} and back.skipped == []
    assert (cluster.kept(0) / f"parity-{OLDER:012d}").is_dir(), "the step that they went back to"


def test_where_they_go_on_from_the_newest_what_is_older_is_passed_over(agent: Agent) -> None:
    agent.turn()
    assert agent.turn(settled=True).skipped == [OLDER]


def test_what_all_nodes_wait_for_comes_first_however_old_it_is_and_stays(
    cluster: ServedCluster, agent: Agent
) -> None:
    sought = (OLDER, ATTEMPT_OF_OLDER)
    agreed = Agreed(RUN, 1, 4, kept=(), sought=sought, begun=True)
    write_agreed(cluster.root(0), agreed, files=QuickFiles())
    seen = agent.turn(levels=(replace(agent.plan.levels[0], keep_last=1),))
    assert seen.keeps == [1, 4] and seen.skipped == []
    older = cluster.kept(0) / f"parity-{OLDER:012d}"
    assert older.is_dir() and OLDER in held_steps(cluster.root(0))
    cluster.save = Copy(*sought)
    cluster.encode(1, 2)
    assert agent.turn().steps == {OLDER: ATTEMPT_OF_OLDER, STEP: ATTEMPT}
    agreed = replace(agreed, number=5, kept=(sought,), sought=None)
    write_agreed(cluster.root(0), agreed, files=QuickFiles())
    assert agent.turn().steps == {OLDER: ATTEMPT_OF_OLDER, STEP: ATTEMPT}
    assert older.is_dir() and OLDER in held_steps(cluster.root(0))
    write_agreed(cluster.root(0), replace(agreed, number=6, kept=()), files=QuickFiles())
    assert agent.turn().steps == {STEP: ATTEMPT}
    assert not older.is_dir() and OLDER not in held_steps(cluster.root(0))


def test_parity_of_another_group_is_replaced_once_all_have_gone_on(
    cluster: ServedCluster, agent: Agent
) -> None:
    there = cluster.parity(0) / "manifest.json"
    for n in range(3):
        change_group(cluster, n)
    other = there.read_bytes()
    agent.turn()
    assert there.read_bytes() == other
    agent.turn(settled=True)
    assert there.read_bytes() != other


def change_group(cluster: ServedCluster, n: int) -> None:
    """What a node keeps is of other nodes."""
    group, kept = cluster.group, cluster.kept(n)
    shutil.rmtree(cluster.parity(n))
    cluster.group = Group(group.shape, (*group.parts[:2], "node-00009"))
    cluster.encode(n)
    cluster.group = group
    assert kept.is_dir()
