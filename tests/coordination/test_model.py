"""Every state that the commit protocol can reach, with a few ranks and a few faults; see model.py."""

from __future__ import annotations

from collections import deque

import pytest

from tests.coordination.model import GO, NO, Bug, InVain, Model, State

SHARED = Model(groups=((0, 1, 2),))
NODES = Model(groups=((0, 1), (2,)))
PAIR = Model(groups=((0,), (1,)), attempts=2, faults=2)
TWICE = Model(groups=((0, 1),), attempts=2, faults=2)
WORLDS = {"one root": SHARED, "two roots": NODES, "two tries": TWICE, "two roots twice": PAIR}


class Violated(AssertionError):
    """A state that must not be, and how it came about."""


def check_all(model: Model) -> int:
    """Visit every state, breadth first; how many they are."""
    start = model.start()
    came_from: dict[State, tuple[str, State] | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        ends = True
        problem = broken(model, state)
        try:
            for name, after in () if problem else model.moves(state):
                ends = ends and after == state
                if after not in came_from:
                    came_from[after] = (name, state)
                    queue.append(after)
        except InVain as exc:
            problem = str(exc)
        if problem is None and ends:
            problem = unfinished(model, state)
        if problem is not None:
            raise Violated(f"{problem}\n" + "\n".join(_story(came_from, state)))
    return len(came_from)


def broken(model: Model, state: State) -> str | None:
    """Which invariant this state violates."""
    for leader, attempt in state.published:
        for member in model.members(leader):
            if (attempt, member) not in state.shards:
                return (
                    f"rank {leader} published attempt {attempt} without the shard of rank {member}"
                )
    for attempt in range(model.attempts):
        said = {word for k, _, word in state.told if k == attempt}
        roots = {leader for leader, k in state.published if k == attempt}
        newer = {leader for leader, k in state.published if k > attempt}
        if GO in said and roots | newer != set(model.leaders):
            return f"attempt {attempt} was called committed, but not every root has it"
        if NO in said and roots:
            return f"attempt {attempt} was called aborted, but a root has it"
    return _restored(model, state)


def _restored(model: Model, state: State) -> str | None:
    """What `restore` would take, if every process died now."""
    if len(state.published) < len(model.leaders):
        return None
    contents = {attempt for _, attempt in state.published}
    if len(contents) > 1 and Bug.RESTORE_IGNORES_THE_ATTEMPT in model.bugs:
        return "restore mixes two contents of one step"
    return None


def unfinished(model: Model, state: State) -> str | None:
    """Why this state, in which nobody can move, is no end."""
    for r, rank in enumerate(state.ranks):
        if rank.alive and rank.pc != "done":
            return f"rank {r} waits for ever at {rank.pc}"
    if state.faults == model.faults:
        wrong = [one for one in state.told if one[2] != GO]
        if wrong:
            return f"nothing failed, and yet not all ranks were told so: {wrong}"
    return None


def _story(came_from: dict[State, tuple[str, State] | None], state: State | None) -> list[str]:
    names = []
    while state is not None and (before := came_from[state]) is not None:
        names.append(before[0])
        state = before[1]
    return names[::-1]


@pytest.mark.parametrize("world", WORLDS)
def test_no_reachable_state_violates_the_protocol(world: str) -> None:
    assert check_all(WORLDS[world]) > 1000


def test_without_faults_everybody_is_told_that_it_is_committed() -> None:
    for model in WORLDS.values():
        check_all(Model(model.groups, model.attempts, faults=0))


SHOWN_BY = {
    Bug.ATTEMPTS_SHARE_THEIR_KEYS: TWICE,
    Bug.RESTORE_IGNORES_THE_ATTEMPT: PAIR,
    Bug.LATE_PUBLICATION_REPLACES_A_LATER_ONE: TWICE,
}


@pytest.mark.parametrize("bug", Bug)
def test_the_checker_finds_every_mistake_that_is_built_in(bug: Bug) -> None:
    with pytest.raises(Violated):
        check_all(SHOWN_BY.get(bug, NODES).with_bug(bug))
