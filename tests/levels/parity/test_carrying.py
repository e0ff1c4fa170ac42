"""One turn of the agent that keeps parity, among nodes that answer and do nothing by themselves."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_core.levels.agent import parity_carrying
from ckpt_core.levels.agent.board import Board, Timing
from ckpt_core.levels.agent.parity_carrying import ParityCarrier
from ckpt_core.levels.agreed import Agreed, write_agreed
from ckpt_core.levels.far.door import Away, Copy
from ckpt_core.levels.mailbox import LevelStatus, Plan, read_plan
from ckpt_core.levels.parity.agreeing import Said, say
from ckpt_core.levels.parity.groups import Shape
from ckpt_core.levels.parity.holds import held_steps, hold
from ckpt_core.levels.parity.objects import Group
from ckpt_core.store import step_path
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
    """That of the first node, or another one."""

    def __init__(self, cluster: ServedCluster, n: int = 0) -> None:
        plan = read_plan(cluster.root(n))
        assert plan is not None
        self.plan: Plan = plan
        self.board, url = Board(plan, None), plan.levels[0].url
        timing = Timing(agrees_s=0.0)
        self.carrier = ParityCarrier(
            cluster.root(n), url, self.board, files=QuickFiles(), timing=timing
        )

    def turn(self, **changes: object) -> LevelStatus:
        self.plan = replace(self.plan, **changes)  # type: ignore[arg-type]
        self.board.follow(self.plan)
        self.carrier._turn()
        with self.board.change(self.carrier.url) as status:
            return status

    def close(self) -> None:
        assert self.carrier._met is not None
        self.carrier._met.close()


@pytest.fixture
def agent(cluster: ServedCluster) -> Iterator[Agent]:
    with closing(Agent(cluster)) as agent:
        yield agent


def test_what_all_have_reached_passes_nothing_over_until_all_ranks_have_gone_on_from_a_step(
    cluster: ServedCluster, agent: Agent
) -> None:
    first = agent.turn()
    assert first.steps == {STEP: ATTEMPT} and first.skipped == {}
    back = agent.turn(restored=ATTEMPT_OF_OLDER, apart=(ATTEMPT,))
    assert back.steps == {} and back.skipped == {}
    assert (cluster.kept(0) / f"parity-{OLDER:012d}").is_dir(), "the step that they went back to"


def test_where_they_go_on_from_the_newest_what_is_older_is_passed_over(agent: Agent) -> None:
    agent.turn()
    assert [*agent.turn(restored=ATTEMPT).skipped] == [OLDER]


def test_what_all_nodes_wait_for_comes_first_however_old_it_is_and_stays(
    cluster: ServedCluster, agent: Agent
) -> None:
    sought = (OLDER, ATTEMPT_OF_OLDER)
    agreed = Agreed(RUN, 1, 4, kept=(), sought=sought, begun=True)
    write_agreed(cluster.root(0), agreed, files=QuickFiles())
    seen = agent.turn(levels=(replace(agent.plan.levels[0], keep_last=1),))
    assert seen.keeps == [1, 4] and seen.skipped == {}
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


def test_where_no_parity_can_be_written_what_is_older_goes_all_the_same(
    cluster: ServedCluster, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    sought = (OLDER, ATTEMPT_OF_OLDER)
    agreed = Agreed(RUN, 1, 4, kept=(), sought=sought, begun=True)
    write_agreed(cluster.root(0), agreed, files=QuickFiles())
    agent.turn(levels=(replace(agent.plan.levels[0], keep_last=2),))
    cluster.save = Copy(*sought)
    cluster.encode(1, 2)
    assert agent.turn().steps == {OLDER: ATTEMPT_OF_OLDER, STEP: ATTEMPT}
    write_agreed(cluster.root(0), replace(agreed, number=5, sought=None), files=QuickFiles())
    write(cluster, 9, 0, 1, 2)

    def full(*_: object, **__: object) -> None:
        raise Away("No space left")

    monkeypatch.setattr(parity_carrying, "encode", full)
    with pytest.raises(Away, match="No space left"):
        agent.turn(levels=(replace(agent.plan.levels[0], keep_last=1),))
    older = cluster.kept(0) / f"parity-{OLDER:012d}"
    assert not older.is_dir() and OLDER not in held_steps(cluster.root(0))
    assert 9 in held_steps(cluster.root(0)), "which is to get its parity yet"


def test_parity_of_another_group_is_replaced_once_all_have_gone_on(
    cluster: ServedCluster, agent: Agent
) -> None:
    there = cluster.parity(0) / "manifest.json"
    for n in range(3):
        change_group(cluster, n)
    other = there.read_bytes()
    agent.turn()
    assert there.read_bytes() == other
    agent.turn(restored=ATTEMPT)
    assert there.read_bytes() != other


def write(cluster: ServedCluster, step: int, *nodes: int) -> str:
    """A further step of some nodes; its attempt."""
    attempt = f"{step:012d}-01010101"
    for n in nodes:
        store = make_store(cluster.root(n))
        save(store, step, ranks=(n,), world=3, attempt=attempt)
        store.close()
    return attempt


def test_what_the_first_node_has_given_up_no_other_one_waits_for(cluster: ServedCluster) -> None:
    attempt = write(cluster, 9, 0, 1, 2)
    with closing(Agent(cluster, 1)) as agent:
        assert agent.turn(restored=ATTEMPT).skipped == {}
        assert 9 in agent.carrier._waiting
        assert agent.carrier._met is not None
        said = Said(agent.carrier._met.mark, ((STEP, ATTEMPT),), failed=(attempt,))
        say(cluster.kept(0), said, files=QuickFiles())
        assert 9 in agent.turn().skipped
        assert 9 not in agent.carrier._waiting


def test_what_the_first_node_gives_up_it_tells_the_others(cluster: ServedCluster) -> None:
    attempt = write(cluster, 9, 0, 1, 2)
    with closing(Agent(cluster)) as agent:
        agent.turn(restored=ATTEMPT)
        assert agent.carrier._met is not None and agent.carrier._met.said is not None
        assert agent.carrier._met.said.next == attempt
        shutil.rmtree(step_path(cluster.root(2), 9))
        assert 9 in agent.turn().skipped
        assert agent.carrier._met.said.failed == (attempt,)


def test_the_first_node_tells_that_it_has_lost_a_step_itself(cluster: ServedCluster) -> None:
    attempt = write(cluster, 9, 0, 1, 2)
    with closing(Agent(cluster)) as agent, closing(Agent(cluster, 1)) as other:
        agent.turn(restored=ATTEMPT)
        shutil.rmtree(step_path(cluster.root(0), 9))
        agent.turn()
        assert agent.carrier._met is not None and agent.carrier._met.said is not None
        assert agent.carrier._met.said.failed == (attempt,)
        assert 9 in other.turn(restored=ATTEMPT).skipped


def test_what_was_said_in_an_earlier_session_counts_no_more(cluster: ServedCluster) -> None:
    attempt = write(cluster, 9, 0, 1, 2)
    for n in range(2):
        with closing(Agent(cluster, n)) as agent:
            agent.turn()
            assert agent.carrier._met is not None
            word = Said(agent.carrier._met.mark, ((STEP, ATTEMPT),), failed=(attempt,))
            say(cluster.kept(n), word, files=QuickFiles())
    shutil.rmtree(cluster.parity(2))
    with closing(Agent(cluster)) as agent, closing(Agent(cluster, 1)) as other:
        told = other.turn(restored=attempt, session=2, token="u")
        assert (told.steps, told.skipped) == ({}, {})
        first = agent.turn(restored=attempt, session=2, token="u")
        assert 9 not in first.skipped and STEP not in first.steps
        assert agent.carrier._met is not None and agent.carrier._met.said is not None
        assert agent.carrier._met.said.next == attempt


def test_what_the_first_node_names_no_more_is_not_there_any_more(cluster: ServedCluster) -> None:
    with closing(Agent(cluster, 1)) as agent:
        agent.turn(restored=ATTEMPT)
        assert agent.carrier._met is not None
        mark = agent.carrier._met.mark
        say(cluster.kept(0), Said(mark, ((STEP, ATTEMPT),)), files=QuickFiles())
        assert agent.turn().steps == {STEP: ATTEMPT}
        say(cluster.kept(0), Said(mark, ((OLDER, ATTEMPT_OF_OLDER),)), files=QuickFiles())
        assert agent.turn().steps == {}


@pytest.mark.parametrize("how", [{"keep_every": OLDER}, {"keep_last": None}, {}])
def test_parity_that_is_to_be_kept_for_ever_stays_where_another_node_has_lost_its_own(
    cluster: ServedCluster, agent: Agent, how: dict[str, int | None]
) -> None:
    cluster.save = Copy(OLDER, ATTEMPT_OF_OLDER)
    cluster.encode(0, 1)
    agreed = Agreed(RUN, 1, 4, kept=(), sought=None, begun=True)
    write_agreed(cluster.root(0), agreed, files=QuickFiles())
    assert hold(cluster.root(0), OLDER, files=QuickFiles())
    level = replace(agent.plan.levels[0], **({"keep_last": 1} | how))
    assert STEP in agent.turn(levels=(level,)).steps
    assert (cluster.kept(0) / f"parity-{OLDER:012d}").is_dir() == bool(how)
    assert (OLDER in held_steps(cluster.root(0))) == bool(how)


def test_the_last_step_is_waited_for_where_another_node_publishes_it_later(
    cluster: ServedCluster, agent: Agent
) -> None:
    write(cluster, 8, 0, 1, 2)
    attempt = write(cluster, 9, 0)
    level = replace(agent.plan.levels[0], every=10)
    agent.turn(levels=(level,), restored=ATTEMPT, last=(attempt,))
    assert not list(cluster.kept(0).glob("parity-*8"))
    write(cluster, 9, 1, 2)
    agent.turn()
    assert list(cluster.kept(0).glob("parity-*9"))


def change_group(cluster: ServedCluster, n: int) -> None:
    """What a node keeps is of other nodes."""
    group, kept = cluster.group, cluster.kept(n)
    shutil.rmtree(cluster.parity(n))
    cluster.group = Group(group.shape, (*group.parts[:2], "node-00009"))
    cluster.encode(n)
    cluster.group = group
    assert kept.is_dir()


def test_a_kill_in_the_middle_of_a_word_leaves_no_more_than_the_next_one_takes_away(
    tmp_path: Path,
) -> None:
    class Killed(QuickFiles):
        def rename(self, old: Path, new: Path) -> None:
            raise SystemExit

        def unlink(self, path: Path) -> None:
            raise FileNotFoundError  # whoever is dead takes nothing away

    with pytest.raises(SystemExit):
        say(tmp_path, Said("a"), files=Killed())
    say(tmp_path, Said("b"), files=QuickFiles())
    assert [path.name for path in tmp_path.iterdir()] == ["agreed.json"]
    assert Said.decode((tmp_path / "agreed.json").read_bytes(), group="b") == Said("b")
