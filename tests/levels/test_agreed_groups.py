"""The agreed step of nodes that keep parity in groups, each of which goes at its own pace."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from ckpt_core.levels.agent.retiring import doomed, with_sought
from ckpt_core.levels.agreed import HELD, Agreed, Said, Standing, concluded, late, opened
from ckpt_core.levels.wants import wanted
from ckpt_core.options import Level
from ckpt_core.store import choose_retired
from tests.levels.test_agreed import RUN

OPERATIONS = 400
LEVEL = Level(parity="2+1", bind="lo:0", dir="/kept", keep_last=1, backlog=2)


class Node:
    """What one node has: its root, its parity, and what its agent knows to be reached."""

    def __init__(self) -> None:
        self.lose()

    def lose(self) -> None:
        self.root: dict[int, str] = {}
        self.parity: dict[int, str] = {}
        self.reached: dict[int, str] = {}
        self.next: int | None = None
        self.heard = self.agent = Agreed(RUN)


class Groups:
    """Groups of three that save, make parity, let go, crash and lose a node each, as chance decides."""

    def __init__(self, seed: int, *, keeps: bool = True) -> None:
        self.chance = random.Random(seed)
        self.groups = [[Node() for _ in range(3)] for _ in range(self.chance.choice([2, 3]))]
        self.paces = [self.chance.choice([0.02, 0.2, 1.0]) for _ in self.groups]
        self.keeps = keeps
        self.step = self.saves = self.session = self.losses = self.surest = 0
        self.is_whole = False
        self.begin()

    @property
    def nodes(self) -> list[Node]:
        return [node for group in self.groups for node in group]

    @property
    def may_lose(self) -> bool:
        return self.is_whole if self.keeps else all(one.reached for one in self.nodes)

    def run(self) -> int:
        for _ in range(OPERATIONS):
            if self.chance.random() < 0.5:
                self.save()
            for group, pace in zip(self.groups, self.paces, strict=True):
                for node in group:
                    if self.chance.random() < pace:
                        self.turn(node, group)
            if self.chance.random() < 0.02:
                self.begin()
            if self.may_lose and self.chance.random() < 0.05:
                self.lose()
        return self.losses

    def save(self) -> None:
        self.step, self.saves = self.step + 1, self.saves + 1
        save = (self.step, f"{self.saves}")
        before, said = self.latest, [self.said(node) for node in self.nodes]
        self.latest = concluded(before, said, save)
        if before.sought is not None and not late(before, said):
            assert self.latest.kept == (before.sought,)
            self.is_whole, self.surest = True, before.sought[0]
        for node in self.nodes:
            if self.chance.random() < 0.8 and node.heard.order < self.latest.order:
                node.heard = self.latest
            node.root[save[0]] = save[1]
            kept = {*node.parity, node.next}  # held
            if self.keeps:
                kept |= node.heard.keeps if node.heard.begun else {*node.root}
            here = [*node.root]
            for step in choose_retired(here, keep_last=1, keep_every=None, kept=kept, suspect=()):
                del node.root[step]

    def said(self, node: Node) -> Said:
        heard, sought = node.heard, node.heard.sought
        if not heard.begun:
            return Said(heard.order, Standing.COMING, tuple(sorted(node.root.items())[-HELD:]))
        if sought is None:
            return Said(heard.order, Standing.COMING)
        if node.root.get(sought[0]) != sought[1]:
            return Said(heard.order, Standing.LOST)
        there = node.reached.get(sought[0]) == sought[1] and node.agent.order == heard.order
        return Said(heard.order, Standing.THERE if there else Standing.COMING)

    def turn(self, node: Node, group: list[Node]) -> None:
        """As the agent does it: agree in the group, make what is next, let go."""
        if self.chance.random() < 0.7:
            node.agent = node.heard
        first, sought = group[0], node.agent.sought
        node.reached = {s: a for s, a in node.reached.items() if node.root.get(s) == a}
        if node is first:
            for step, attempt in node.parity.items():
                is_open = step > max(node.reached, default=-1) or (step, attempt) == sought
                if is_open and all(one.parity.get(step) == attempt for one in group):
                    node.reached[step] = attempt
            if (
                node.next is None
                or node.next in node.reached
                or not self.all_have(node.next, group)
            ):
                here = {s: a for s, a in node.root.items() if self.all_have(s, group)}
                want = wanted(here, LEVEL, there=node.reached)
                if self.keeps:
                    want = with_sought(want, sought, here=here, there=node.reached)
                node.next = want[0] if want else None
        else:
            node.reached |= {s: a for s, a in first.reached.items() if node.parity.get(s) == a}
            node.next = first.next
        if node.next in node.root and self.all_have(node.next, group):
            node.parity[node.next] = node.root[node.next]
        if node.agent.begun or not self.keeps:
            kept = node.agent.keeps if self.keeps else frozenset()
            for step in doomed(node.reached, LEVEL, kept=kept):
                del node.reached[step]
            stays = {*node.reached, node.next, *kept} | (
                {*node.root} if not node.reached else set()
            )
            node.parity = {s: a for s, a in node.parity.items() if s in stays}

    def all_have(self, step: int, group: list[Node]) -> bool:
        found = {one.root.get(step) for one in group}
        return len(found) == 1 and None not in found

    def has(self, node: Node, group: list[Node]) -> set[tuple[int, str]]:
        """In its root, or rebuilt: of what all others hold, with the parity that they keep."""
        others = [one for one in group if one is not node]
        common = set.intersection(*[{*one.root.items()} & {*one.parity.items()} for one in others])
        return {*node.root.items()} | common

    def begin(self) -> None:
        """A job starts, goes on from the newest step that all nodes can bring, and knows what each knew."""
        common = set.intersection(*[self.has(one, group) for group in self.groups for one in group])
        assert common or not (self.surest or self.losses), (
            "no step is left that all nodes can bring"
        )
        assert max(common, default=(0, ""))[0] >= self.surest
        self.session += 1
        self.latest = opened([node.heard for node in self.nodes], RUN, self.session)
        newest = max(common, default=None)
        for node in self.nodes:
            node.heard, node.reached, node.next = self.latest, {}, None
            if newest is not None:
                node.root = {step: a for step, a in node.root.items() if step <= newest[0]}
                node.root[newest[0]] = newest[1]
                self.step = newest[0]

    def lose(self) -> None:
        """One node of each group, or of some."""
        self.losses += 1
        self.is_whole = False
        for group in self.groups:
            if self.chance.random() < 0.7:
                self.chance.choice(group).lose()
        self.begin()


@pytest.mark.parametrize("seeds", [range(0, 60), range(60, 120)])
def test_whatever_the_paces_of_groups_all_nodes_can_bring_the_newest_agreed_step(
    seeds: Sequence[int],
) -> None:
    assert sum(Groups(seed).run() for seed in seeds) > len(seeds), "nodes were lost"


def test_without_it_groups_may_have_no_step_in_common() -> None:
    groups = [Groups(seed, keeps=False) for seed in range(60)]
    with pytest.raises(AssertionError, match="no step is left"):
        sum(one.run() for one in groups)
