"""The agreed step: nodes at any pace, some of which hear of nothing, always have one step in common."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckpt_core import verify
from ckpt_core.levels import Copy, due_steps, open_far, push, write_plan
from ckpt_core.levels.agent.board import Board
from ckpt_core.levels.agent.retiring import agreement, doomed, left_behind, with_sought
from ckpt_core.levels.agreed import (
    HELD,
    Agreed,
    Said,
    Save,
    Standing,
    concluded,
    late,
    opened,
    read_agreed,
    write_agreed,
)
from ckpt_core.levels.mailbox import LevelStatus, Plan, Status
from ckpt_core.levels.trainer.agreeing import Agreeing
from ckpt_core.levels.trainer.awaiting import Attempts, Due, awaited
from ckpt_core.levels.wants import wanted
from ckpt_core.options import Level
from ckpt_core.store import choose_retired, committed_steps, step_path
from ckpt_core.system.files import Files
from tests.levels.agents import Agents, plan_of
from tests.levels.restoring import fill
from tests.levels.servers.faulty import in_environment
from tests.levels.servers.moto import needs_store
from tests.levels.servers.peer import PeerServer

RUN = "ab" * 16
LEVEL = Level("peer://10.0.0.1:7077/run", keep_last=1)
OPERATIONS = 400


class Node:
    """What one node has: its root, and its copy on the next one."""

    def __init__(self) -> None:
        self.root: dict[int, str] = {}
        self.copy: dict[int, str] = {}
        self.heard = Agreed(RUN)
        self.agent = self.heard

    def has(self) -> set[Save]:
        return {*self.root.items(), *self.copy.items()}


class Cluster:
    """Nodes that save, send, retire, crash and are lost, in an order that chance decides."""

    def __init__(self, seed: int, *, keeps: bool = True) -> None:
        self.chance = random.Random(seed)
        self.nodes = [Node() for _ in range(self.chance.choice([2, 3, 5]))]
        self.keeps = keeps
        self.step = self.saves = self.session = self.losses = 0
        self.surest = 0
        self.is_whole = False
        self.paces = [self.chance.choice([0.02, 0.2, 1.0]) for _ in self.nodes]
        self.begin()

    def run(self) -> int:
        for _ in range(OPERATIONS):
            if self.chance.random() < 0.5:
                self.save()
            for node, pace in zip(self.nodes, self.paces, strict=True):
                if self.chance.random() < pace:
                    self.turn(node)
            if self.chance.random() < 0.02:
                self.begin()
            if self.is_whole and self.chance.random() < 0.05:
                self.lose(self.chance.randrange(len(self.nodes)))
        return self.losses

    # -- what happens ----------------------------------------------------------------------------

    def save(self) -> None:
        self.step, self.saves = self.step + 1, self.saves + 1
        save = (self.step, f"{self.saves}")
        before, said = self.latest, [self.said(node) for node in self.nodes]
        self.latest = concluded(before, said, save)
        if before.sought is not None and not late(before, said):
            assert self.latest.kept == (before.sought,)
            self.is_whole, self.surest = True, before.sought[0]
        decided = self.chance.random() < 0.9
        fails = self.chance.random() < 0.1
        for node in self.nodes:
            if decided and self.chance.random() < 0.8 and node.heard.order < self.latest.order:
                node.heard = self.latest
            if decided and not (fails and self.chance.random() < 0.5):
                node.root[save[0]] = save[1]
        for node in self.nodes:
            self.retire(node)

    def said(self, node: Node) -> Said:
        heard, sought = node.heard, node.heard.sought
        if not heard.begun:
            held = tuple(sorted(node.root.items())[-HELD:])
            return Said(heard.order, Standing.COMING, held)
        if sought is None:
            return Said(heard.order, Standing.COMING)
        step, attempt = sought
        if node.root.get(step) != attempt:
            return Said(heard.order, Standing.LOST)
        there = node.copy.get(step) == attempt and node.agent.order == heard.order
        return Said(heard.order, Standing.THERE if there else Standing.COMING)

    def retire(self, node: Node) -> None:
        kept = node.heard.keeps if node.heard.begun else {*node.root}
        kept = kept if self.keeps else ()
        going = choose_retired([*node.root], keep_last=1, keep_every=None, kept=kept, suspect=())
        for step in going:
            del node.root[step]

    def turn(self, node: Node) -> None:
        """The agent reads what is agreed on, or has read it before, and sends or retires a step."""
        if self.chance.random() < 0.7:
            node.agent = node.heard
        for step in left_behind(node.copy, node.root, node.agent):
            del node.copy[step]
        want = wanted(node.root, LEVEL, there=node.copy)
        want = with_sought(want, node.agent.sought, here=node.root, there=node.copy)
        for step in want[:1]:
            node.copy[step] = node.root[step]
        kept = node.agent.keeps if self.keeps else ()
        if node.agent.begun or not self.keeps:
            for step in doomed(node.copy, LEVEL, kept=kept):
                del node.copy[step]

    def begin(self) -> None:
        """A job starts, goes on from the newest step that all nodes can bring, and knows what each knew."""
        common = set.intersection(*[node.has() for node in self.nodes])
        assert common or not self.surest, "no step is left that all nodes can bring"
        assert max(common, default=(0, ""))[0] >= self.surest
        self.session += 1
        self.latest = opened([node.heard for node in self.nodes], RUN, self.session)
        for node in self.nodes:
            node.heard = self.latest
            newest = max(common, default=None)
            if newest is not None:
                node.root = {step: a for step, a in node.root.items() if step <= newest[0]}
                node.root[newest[0]] = newest[1]
                self.step = newest[0]

    def lose(self, number: int) -> None:
        """A node with its disk: its root, and the copy that it kept."""
        self.losses += 1
        self.is_whole = False
        self.nodes[number].root = {}
        self.nodes[number].heard = self.nodes[number].agent = Agreed(RUN)
        self.nodes[number - 1].copy = {}
        self.begin()


@pytest.mark.parametrize("seeds", [range(0, 60), range(60, 120)])
def test_whatever_the_paces_every_node_can_bring_the_newest_step_that_was_agreed_on(
    seeds: Sequence[int],
) -> None:
    assert sum(Cluster(seed).run() for seed in seeds) > len(seeds), "nodes were lost"


def test_without_it_there_may_be_no_step_that_all_nodes_can_bring() -> None:
    failed = 0
    for seed in range(30):
        try:
            Cluster(seed, keeps=False).run()
        except AssertionError:
            failed += 1
    assert failed > 10


# -- the conclusions -------------------------------------------------------------------------------


def everyone(agreed: Agreed, standing: Standing, count: int = 3) -> list[Said]:
    return [Said(agreed.order, standing)] * count


def test_a_step_is_agreed_on_when_it_is_with_all_nodes_and_the_next_one_is_sought_then() -> None:
    first = concluded(opened([], RUN, 1), everyone(Agreed(RUN, 1), Standing.COMING), (1, "a"))
    assert (first.kept, first.sought, first.begun) == ((), (1, "a"), True)
    said = [*everyone(first, Standing.THERE, 2), *everyone(first, Standing.COMING, 1)]
    assert concluded(first, said, (2, "b")) == first
    second = concluded(first, everyone(first, Standing.THERE), (3, "c"))
    assert (second.kept, second.sought) == (((1, "a"),), (3, "c"))
    assert second.keeps == {1, 3}


def test_whoever_goes_by_an_earlier_conclusion_is_waited_for() -> None:
    second = Agreed(RUN, 1, 2, ((1, "a"),), (3, "c"), True)
    said = [*everyone(second, Standing.THERE, 2), Said((1, 1), Standing.THERE)]
    assert concluded(second, said, (4, "d")) == second


def test_a_step_that_a_node_has_lost_is_given_up_for_the_next_one() -> None:
    second = Agreed(RUN, 1, 2, ((1, "a"),), (3, "c"), True)
    said = [*everyone(second, Standing.THERE, 2), *everyone(second, Standing.LOST, 1)]
    third = concluded(second, said, (4, "d"))
    assert (third.kept, third.sought) == (((1, "a"),), (4, "d"))
    assert concluded(second, said, None) == second, "which copies do not take"


def test_a_job_that_begins_keeps_what_was_agreed_on_and_what_it_was_restored_from() -> None:
    old = Agreed(RUN, 1, 9, ((5, "e"),), (7, "g"), True)
    fresh = opened([old, Agreed(RUN, 1, 8), Agreed(RUN)], RUN, 2)
    assert (fresh.order, fresh.kept, fresh.begun) == ((2, 0), ((5, "e"),), False)
    held = [((5, "e"), (6, "f")), ((6, "f"),), ((6, "f"), (7, "g"))]
    said = [Said(fresh.order, Standing.COMING, one) for one in held]
    begun = concluded(fresh, said, (8, "h"))
    assert (begun.kept, begun.sought) == (((5, "e"), (6, "f")), (6, "f"))
    said[1] = Said(fresh.order, Standing.UNKNOWN)
    assert concluded(fresh, said, (8, "h")) == fresh, "and gives nothing away before it is known"


# -- one node --------------------------------------------------------------------------------------


def test_nothing_is_given_away_at_a_copy_of_which_nothing_is_known(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    url = "peer://10.0.0.1:7077/x/node-00000"
    plan = Plan(RUN, 1, "token", (Level(url),), own=(url,))
    assert not agreement(tmp_path, plan, url).begun
    assert agreement(tmp_path, plan, "/nvme/run").begun, "other levels have nothing to do with it"
    (tmp_path / ".levels").mkdir()
    agreed = Agreed(RUN, 1, 2, ((1, "a"),), (3, "c"), True)
    for _ in range(2):
        write_agreed(tmp_path, agreed, files=Files())
    assert agreement(tmp_path, plan, url) == agreed == read_agreed(tmp_path, RUN)
    assert read_agreed(tmp_path, "cd" * 16) is None
    (tmp_path / ".levels" / "agreed.json").write_text("[]")
    assert not agreement(tmp_path, plan, url).begun


def test_steps_of_a_copy_that_other_nodes_did_not_have_go_once_training_has_gone_on() -> None:
    begun = Agreed(RUN, 2, 1, ((5, "e"),), (5, "e"), True)
    assert left_behind([4, 5, 8, 9], [5], begun) == (8, 9)
    assert left_behind([4, 5], [5, 6], begun) == ()
    assert left_behind([4, 5, 8], [], begun) == (), "a fresh root is to be filled first"
    assert left_behind([4, 5, 8], [5], Agreed(RUN, 2)) == (), "it may be restored from them"
    assert left_behind([4, 5, 8], [5], Agreed(RUN, begun=True)) == (), "levels that nodes share"


def test_what_was_said_of_steps_before_is_forgotten_with_a_new_checkpointer() -> None:
    url = "peer://10.0.0.1:7077/x/node-00000"
    said = Status(1, "h", "a", levels=[LevelStatus(url, reached={4: "d"}, skipped={5: "e"})])
    plan = Plan(RUN, 1, "a", (Level(url),))
    board = Board(plan, said)
    assert board.told().levels[0].skipped == {5: "e"}, "an agent that is started anew goes on"
    assert Board(dataclasses.replace(plan, token="b"), said).told().levels[0].skipped == {}
    board.follow(dataclasses.replace(plan, token="b"))
    (level,) = board.told().levels
    assert (level.reached, level.skipped) == ({}, {}), "a step 5 of now is another save"


def test_a_conclusion_that_cannot_be_noted_is_not_gone_by(tmp_path: Path) -> None:
    class Full(Files):
        full = True

        def write_new(self, path: Path, data: bytes) -> None:
            if self.full:
                raise OSError(28, "No space left on device")
            super().write_new(path, data)

    fill(tmp_path, 1, 2, 3)
    (tmp_path / ".levels").mkdir()
    files = Full()
    agreeing = Agreeing(tmp_path, Agreed(RUN, 1), "peer://x", files=files)
    assert [*agreeing.keeps([1, 2, 3])] == [1, 2, 3], "all, before anything is agreed on"
    assert [step for step, _ in agreeing.say().held] == [1, 2, 3]
    news = Agreed(RUN, 1, 1, ((1, "a"),), (3, "c"), True)
    agreeing.hear(news)
    assert [*agreeing.keeps([1, 2, 3])] == [1, 2, 3] and read_agreed(tmp_path, RUN) is None
    files.full = False
    agreeing.hear(news)
    assert [*agreeing.keeps([1, 2, 3])] == [1, 3] and read_agreed(tmp_path, RUN) == news
    agreeing.hear(Agreed(RUN, 1, 0, (), None, True))
    assert [*agreeing.keeps([1, 2, 3])] == [1, 3], "nor is one that comes late"


def test_a_node_says_of_what_is_sought_where_it_is(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2)
    (tmp_path / ".levels").mkdir()
    attempt = dict(Agreeing(tmp_path, Agreed(RUN), "x", files=Files()).say().held)[2]

    def standing(sought: Save) -> Standing:
        agreed = Agreed(RUN, 1, 1, (), sought, True)
        return Agreeing(tmp_path, agreed, "peer://x", files=Files()).say().standing

    assert standing((2, attempt)) is Standing.COMING
    assert standing((2, "another")) is Standing.LOST
    assert standing((3, attempt)) is Standing.COMING, "it may be on its way to being committed"
    assert step_path(tmp_path, 2).is_dir() and committed_steps(tmp_path) == (1, 2)


@contextmanager
def retired_at_its_copy(root: Path, agents: Agents) -> Iterator[tuple[PeerServer, str]]:
    """Steps 1 and 2 in a root; the first one's copy was retired. Where that was, and its attempt."""
    fill(root, 1)
    with PeerServer() as server, in_environment(server.environ()):
        push(step_path(root, 1), Level(server.url()), progress=lambda *_: None)
        with open_far(server.url()) as far:
            (attempt,) = far.steps().values()
            far.retire([step_path(root, 1).name])
        fill(root, 2)
        agents.environ = server.environ()
        yield server, attempt


@needs_store
def test_a_step_that_a_copy_has_retired_is_given_up_and_the_next_one_sent(
    tmp_path: Path, agents: Agents
) -> None:
    root = tmp_path / "root"
    with retired_at_its_copy(root, agents) as (server, attempt):
        url = server.url()
        plan = plan_of(Level(url, backlog=2), own=(url,))
        write_plan(root, plan)
        agreed = Agreed(plan.run, 1, 1, ((1, attempt),), (1, attempt), True)
        write_agreed(root, agreed, files=Files())
        (level,) = agents.run(root).levels
        assert [*level.steps] == [2] and level.skipped == {1: attempt} and level.keeps == [1, 1]
        status = Agreeing(root, agreed, url, files=Files()).say()
        assert status.standing is Standing.LOST


@needs_store
def test_a_step_that_all_have_gone_on_from_comes_back_to_a_copy_that_had_retired_it(
    tmp_path: Path, agents: Agents
) -> None:
    root = tmp_path / "root"
    with retired_at_its_copy(root, agents) as (server, attempt):
        url = server.url()
        plan = dataclasses.replace(plan_of(Level(url, every=2), own=(url,)), restored=attempt)
        write_plan(root, plan)
        write_agreed(root, Agreed(plan.run, 1), files=Files())
        (level,) = agents.run(root).levels
        assert [*level.steps] == [1, 2] and level.skipped == {}
        with open_far(url) as far:
            assert far.steps()[1] == attempt
        assert verify(server.kept / "run").ok


def test_jobs_that_end_before_anything_is_agreed_on_leave_all_that_they_went_on_from() -> None:
    agreed = Agreed(RUN, 1, 5, kept=((10, "a"),), sought=(11, "b"), begun=True)
    for session, step in ((2, 20), (3, 30), (4, 30)):
        agreed = opened([agreed], RUN, session)
        said = [Said(agreed.order, Standing.COMING, ((step, str(step)),))] * 2
        agreed = concluded(agreed, said, (step + 1, "new"))
    assert agreed.kept == ((10, "a"), (20, "20"), (30, "30"))
    said = [Said(agreed.order, Standing.THERE)] * 2
    assert concluded(agreed, said, (40, "later")).kept == ((30, "30"),)


def test_what_all_have_gone_on_from_is_named_however_many_newer_steps_are_here(
    tmp_path: Path,
) -> None:
    fill(tmp_path, *range(1, HELD + 5))
    agreeing = Agreeing(tmp_path, Agreed(RUN, 2), "peer://10.0.0.1:7/r/p", files=Files())
    assert len(agreeing.say().held) == HELD
    attempt = Attempts(tmp_path).of([2])[2]
    agreeing.goes_on_from((2, attempt))
    assert agreeing.say().held == ((2, attempt),)


def test_a_step_that_all_have_gone_on_from_is_waited_for_whatever_every_says(
    tmp_path: Path,
) -> None:
    fill(tmp_path, 15, 16)
    save = Copy(15, Attempts(tmp_path).of([15])[15])
    level, due = Level("peer://10.0.0.1:7/r/p", every=10), Due(tmp_path, files=Files())
    assert due.left(level, None) == []
    assert due.left(level, None, needed=save) == ["step 15"]
    for steps, left in (({16: "newer"}, ["step 15"]), ({15: save.attempt}, [])):
        seen = LevelStatus(level.url, steps=steps)
        assert due.left(level, seen, needed=save) == left


def test_what_an_agent_said_before_training_went_back_is_not_said_of_saves_since(
    tmp_path: Path,
) -> None:
    fill(tmp_path, 1, 2, 3, 4)
    attempts = Attempts(tmp_path).of([1, 2, 3, 4])
    level = Level(every=2, parity="2+1", bind="lo:0", dir=tmp_path / "kept")
    due = Due(tmp_path, files=Files())
    apart = [attempts[4]]
    seen = LevelStatus(level.url, steps={4: attempts[4]}, skipped={2: "another save of it"})
    last = due.newest(apart=apart)
    assert last == (Copy(3, attempts[3]), Copy(4, attempts[4]))
    assert due.newest() == last[1:]
    assert due.left(level, seen, apart=apart, last=last) == ["step 2", "step 3"]
    seen.skipped[2] = attempts[2]
    assert due.left(level, seen, apart=apart, last=last) == ["step 3"]
    seen.steps = {3: attempts[3]}
    assert due.left(level, seen, apart=apart, last=last) == []
    seen.steps = {3: "another save of it"}
    assert due.left(level, seen, apart=apart, last=last) == ["step 3"]


def test_retention_does_not_count_what_training_has_gone_back_behind_as_newer() -> None:
    level = Level(every=2, parity="2+1", bind="lo:0", dir="/kept", backlog=2)
    here = {10: "a", 12: "b", 14: "c", 30: "old"}
    stale = LevelStatus(level.url, steps={10: "a", 30: "old"})
    assert awaited(here, [level], [stale], apart=["old"]) == {12, 14}


def test_a_step_that_was_passed_over_may_be_wanted_once_training_goes_on_from_another() -> None:
    url = "peer://10.0.0.1:7077/x/node-00000"
    plan = Plan(RUN, 1, "a", (Level(url),))
    board = Board(plan, None)
    board.goes_by(url, plan, (1, 1), never=())
    board.seen(url, {4: "d"})
    with board.change(url) as status:
        status.has_skipped(2, "b")
        status.has_skipped(3, "damaged")
        status.has_reached(4, "d")
    version = board.version
    board.goes_by(url, plan, (1, 1), never=())
    assert board.version == version, "there is nothing new to tell"
    assert board.told().levels[0].skipped == {2: "b", 3: "damaged"}
    back = dataclasses.replace(plan, restored="a")
    board.goes_by(url, back, (1, 1), never={(3, "damaged"), (4, "e")})
    (level,) = board.told().levels
    assert (level.restored, level.skipped, level.reached) == ("a", {3: "damaged"}, {4: "d"})
    again = Board(back, board.told())
    again.goes_by(url, back, (1, 1), never=())
    assert again.told().levels[0].skipped == {3: "damaged"}, "an agent that is started anew"
    board.goes_by(url, dataclasses.replace(back, token="b"), (2, 0), never=())
    (level,) = board.told().levels
    assert (level.token, level.steps) == ("b", {}), "another node may be in its place"
    board.seen(url, {4: "d"})
    assert board.told().levels[0].steps == {4: "d"}


def test_what_has_come_there_and_is_given_up_later_is_said_to_be_given_up() -> None:
    status = LevelStatus("peer://10.0.0.1:7077/x/node-00000")
    status.has_reached(4, "d")
    status.has_skipped(4, "e")
    assert (status.reached, status.skipped) == ({4: "d"}, {4: "e"})
    status.has_skipped(4, "d")
    assert (status.reached, status.skipped) == ({}, {4: "d"})


def test_after_going_back_in_a_job_what_it_goes_on_from_is_kept_and_comes_first() -> None:
    second = Agreed(RUN, 1, 2, ((10, "a"),), (20, "b"), True)
    there = Said(second.order, Standing.THERE)
    back = dataclasses.replace(there, held=((10, "a"),))
    assert concluded(second, [back, back, there], (20, "c")).kept == ((20, "b"),), "not all say so"
    third = concluded(second, [back, back, back], (20, "c"))
    assert (third.kept, third.sought) == (((10, "a"),), (10, "a"))
    unknown = dataclasses.replace(back, standing=Standing.UNKNOWN)
    assert concluded(second, [back, back, unknown], (20, "c")) == second
    fourth = concluded(third, everyone(third, Standing.THERE), (21, "d"))
    assert (fourth.kept, fourth.sought) == (((10, "a"),), (21, "d"))


def test_a_node_says_what_it_has_gone_back_to_until_that_is_kept(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2, 3)
    (tmp_path / ".levels").mkdir(exist_ok=True)
    attempts = Attempts(tmp_path).of([1, 2, 3])
    begun = Agreed(RUN, 1, 4, ((2, attempts[2]),), (3, attempts[3]), True)
    agreeing = Agreeing(tmp_path, begun, "peer://10.0.0.1:7/r/p", files=Files())
    assert agreeing.say().held == ()
    save = (1, attempts[1])
    agreeing.goes_on_from(save)
    assert agreeing.say().held == (save,)
    agreeing.hear(Agreed(RUN, 1, 5, begun.kept, save, True))
    assert agreeing.say().held == (save,), "it is sought, and not kept yet"
    agreeing.hear(Agreed(RUN, 1, 6, (save,), save, True))
    assert agreeing.say().held == ()


def test_no_parity_is_due_of_what_training_has_gone_back_behind(tmp_path: Path) -> None:
    fill(tmp_path, 10, 16, 30)
    attempts = Attempts(tmp_path).of([10, 16, 30])
    level = Level(every=2, parity="2+1", bind="lo:0", dir="/kept", backlog=2)
    plan = Plan(RUN, 1, "a", (level,), apart=(attempts[30],))
    seen = LevelStatus(level.url, steps={30: attempts[30]})
    status = Status(1, "h", "a", levels=[seen])
    assert due_steps(tmp_path, plan, status) == {level.url: (10, 16)}
    seen.steps = {16: attempts[16]}
    assert due_steps(tmp_path, plan, status) == {level.url: ()}
