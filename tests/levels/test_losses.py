"""What can be lost without losing a step: nothing is counted that is not known."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_core import Level
from ckpt_core.levels import Plan, Status, can_lose, known
from ckpt_core.levels.far.door import Copy
from ckpt_core.levels.losses import Seen
from ckpt_core.levels.mailbox import LevelStatus, Node, Serve
from ckpt_core.levels.parity.groups import Shape
from ckpt_core.levels.parity.objects import Group
from ckpt_core.levels.parity.opening import kept_url, root_url
from ckpt_core.levels.trainer.ring import Member, nodes

RUN, MINE, STEP = "ab" * 8, "000000000007-0123abcd", 7
WHOLE = {STEP: MINE}


def plan_of(*domains: str | None, more: tuple[Level, ...] = (), serve: Serve | None = None) -> Plan:
    """Of the first of some nodes that keep one another's steps."""
    members = [Member(n, f"10.0.0.{n}:7077", domain) for n, domain in enumerate(domains)]
    ring = nodes(members, RUN)
    own = tuple([Level(one.copy) for one in ring[:1]])
    return Plan(RUN, 1, "t", (*own, *more), nodes=ring, part="node-00000", serve=serve)


def copies(plan: Plan, *parts: int) -> Seen:
    """All answer, and these have the step."""
    return {one.copy: WHOLE if number in parts else {} for number, one in enumerate(plan.nodes)}


def text(plan: Plan, seen: Seen, root: Path) -> str | None:
    found = can_lose(root, plan, seen)(STEP, MINE)
    return None if found is None else found.what


def test_any_node_can_be_lost_when_every_copy_of_every_node_is_whole(tmp_path: Path) -> None:
    plan = plan_of(None, None, None, None)
    assert text(plan, copies(plan, 0, 1, 2, 3), tmp_path) == "any 1 of 4 nodes"
    found = can_lose(tmp_path, plan, copies(plan, 0, 1, 3))(STEP, MINE)
    assert found is not None
    assert (found.what, found.lacking, found.unknown) == ("this node", ("node-00002",), ())
    assert text(plan, copies(plan, 1, 2, 3), tmp_path) == "nothing", "its own is what is missing"


def test_another_save_of_the_step_is_not_the_step(tmp_path: Path) -> None:
    plan = plan_of(None, None)
    seen = copies(plan, 0, 1) | {plan.nodes[0].copy: {STEP: "000000000007-ffffffff"}}
    assert text(plan, seen, tmp_path) == "nothing"


def test_what_is_not_known_is_never_counted(tmp_path: Path) -> None:
    plan = plan_of(None, None, None)
    assert text(plan, {}, tmp_path) is None
    mine = {plan.nodes[0].copy: WHOLE}
    found = can_lose(tmp_path, plan, mine)(STEP, MINE)
    assert found is not None
    assert (found.what, found.unknown) == ("this node", ("node-00001", "node-00002"))
    others = {one.copy: WHOLE for one in plan.nodes[1:]}
    assert text(plan, others, tmp_path) is None


@pytest.mark.parametrize(
    ("domains", "said"),
    [
        (("a", "a", "b", "b"), "any 1 of 4 nodes, any 1 of 2 domains"),
        (("a", "b", "c"), "any 1 of 3 nodes, any 1 of 3 domains"),
        (("a", "a", "b"), "any 1 of 3 nodes"),
        (("a", None), "any 1 of 2 nodes"),
    ],
)
def test_a_whole_domain_can_be_lost_where_every_copy_lies_in_another(
    domains: tuple[str | None, ...], said: str, tmp_path: Path
) -> None:
    plan = plan_of(*domains)
    assert text(plan, copies(plan, *range(len(domains))), tmp_path) == said


def test_levels_count_for_what_they_are(tmp_path: Path) -> None:
    near, memory = str(tmp_path / "level"), Path("/dev/shm")
    Path(near).mkdir()
    for url, root, said in [
        (near, tmp_path, "nothing"),
        ("s3://bucket/run", tmp_path, "all nodes"),
        ("peer://10.0.0.9:7070/run", tmp_path, "any 1 node"),
        (near, memory, "the memory"),
    ]:
        if url == near and root == memory and tmp_path.stat().st_dev == memory.stat().st_dev:
            continue
        plan = Plan(RUN, 1, "t", (Level(url),))
        assert text(plan, {url: WHOLE}, root) == said
        assert text(plan, {url: {}}, root) == "nothing"
        assert text(plan, {}, root) is None
    both = plan_of(None, None, more=(Level("s3://bucket/run"),))
    seen = {**copies(both, 0, 1), "s3://bucket/run": {}}
    assert text(both, seen, tmp_path) == "any 1 of 2 nodes"
    assert text(both, {**seen, "s3://bucket/run": WHOLE}, tmp_path) == "all nodes"


def test_a_node_knows_what_its_agent_said_and_what_it_keeps(tmp_path: Path) -> None:
    plan = plan_of(None, None, None, serve=Serve(str(tmp_path), "10.0.0.0:7077", "token"))
    mine, _, kept = plan.nodes
    assert kept.keeper == "node-00000" and isinstance(kept, Node)
    old = LevelStatus("peer://10.0.0.7:7077/x", steps={1: "a"})
    status = Status(1, "h", "t", [LevelStatus(mine.copy, steps=WHOLE), old])
    assert known(plan, status) == {mine.copy: WHOLE, kept.copy: {}}
    assert known(plan, None) == {kept.copy: {}}


def test_a_plan_tells_its_nodes_to_who_reads_it() -> None:
    plan = plan_of("a", "b", None)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("parity", "groups", "said"),
    [
        ("2+1", (0, 0, 0), "any 1 of 3 nodes"),
        ("2+2", (0, 0, 0, 0), "any 2 of 4 nodes"),
        ("2+1", (0, 0, 0, 1, 1, 1), "any 1 of the 3 nodes of its group"),
    ],
)
def test_what_the_agent_has_said_of_parity_is_told_as_what_was(
    parity: str, groups: tuple[int, ...], said: str, tmp_path: Path
) -> None:
    level = Level(url="parity:///run", parity=parity, bind="lo:1", dir="/kept")
    grouped = tuple(Node(f"node-{n:05d}", f"h:{n}", None, group=g) for n, g in enumerate(groups))
    plan = Plan(RUN, 1, "t", (level,), nodes=grouped, part="node-00000", parity=parity)
    status = Status(1, "h", "t", [LevelStatus(level.url, steps=WHOLE)])
    assert text(plan, known(plan, status), tmp_path) == f"{said}, when made"
    assert text(plan, {level.url: {}}, tmp_path) == "nothing"
    assert text(plan, {}, tmp_path) is None


@pytest.mark.parametrize(
    ("shape", "lost", "said"),
    [
        *(("2+1", (), "any 1 of 3 nodes"), ("2+1", (2,), "nothing"), ("2+1", (0,), "this node")),
        *(("2+2", (), "any 2 of 4 nodes"), ("2+2", (1,), "any 1 of 4 nodes")),
        *(("2+2", (1, 2), "nothing"), ("2+2", (0, 2), "this node"), ("2+1", (1, 2), "nothing")),
    ],
)
def test_a_node_without_its_parity_counts_as_lost(
    shape: str, lost: tuple[int, ...], said: str, tmp_path: Path
) -> None:
    group = Group(
        Shape.parse(shape), tuple(f"node-{n:05d}" for n in range(Shape.parse(shape).nodes))
    )
    level = Level(url="parity:///run", parity=shape, bind="lo:1", dir="/kept")
    grouped = tuple(Node(part, f"h:{n}", None, group=0) for n, part in enumerate(group.parts))
    plan = Plan(RUN, 1, "t", (level,), nodes=grouped, part="node-00000", parity=shape)
    kept = {STEP: group.copy(Copy(STEP, MINE)).attempt}
    seen = {kept_url(plan, part): kept for part in group.parts}
    seen |= {root_url(plan, part): WHOLE for part in group.parts[1:]}
    for n in lost:
        # Of one of them the disk is empty, of another one only the parity is gone.
        seen[kept_url(plan, group.parts[n])] = {}
        if n % 2:
            seen[root_url(plan, group.parts[n])] = {}
    found = can_lose(tmp_path, plan, seen)(STEP, MINE)
    assert found is not None and found.what == said
    assert found.lacking == tuple(group.parts[n] for n in lost) and not found.unknown
    silent = {url: there for url, there in seen.items() if url != root_url(plan, group.parts[-1])}
    if not lost and group.shape.m == 1:
        assert text(plan, silent, tmp_path) is None, (
            "that it did not answer is not that it has nothing"
        )
