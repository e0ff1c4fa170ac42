"""Which steps go at a level. Pure, but for the file that holds what nodes have agreed on."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ckpt_core.levels.agreed import Agreed, Save, read_agreed
from ckpt_core.levels.far.door import Copy
from ckpt_core.levels.mailbox import Plan
from ckpt_core.levels.wants import wanted
from ckpt_core.options import PARITY, Level, scheme_of
from ckpt_core.store import choose_retired


def awaited(
    there: Mapping[int, str],
    later: Sequence[tuple[Level, Mapping[int, str] | None]],
    *,
    last: bool = False,
) -> frozenset[int]:
    """Steps of a level that the levels behind it still want and have not.

    Args:
        there: what is whole at the level, with attempts.
        later: the levels behind it, and what is whole at each; None where that is not known.
        last: as for `wanted`.
    """
    found: set[int] = set()
    for level, beyond in later:
        found |= {*wanted(there, level, there=beyond or {}, last=last)}
    return frozenset(found)


def doomed(there: Collection[int], level: Level, *, kept: Collection[int]) -> tuple[int, ...]:
    """The steps that a level lets go now, ascending; never the newest.

    Args:
        there: what is whole there.
        kept: pinned, here or there, or awaited by a level behind it.
    """
    return choose_retired(
        sorted(there),
        keep_last=level.keep_last,
        keep_every=level.keep_every,
        kept=kept,
        suspect=(),
    )


def agreement(root: Path, plan: Plan, url: str) -> Agreed:
    """What is not given away at a level because nodes have agreed on it.

    Where this node's copy is, or parity of its steps, and nothing is known: not begun, so that nothing goes.
    Until the first vote it is the step that all have gone on from that is sought.
    """
    scheme = scheme_of(url)
    if scheme == PARITY or (url in plan.own and scheme is not None):
        agreed = read_agreed(root, plan.run) or Agreed(plan.run)
        if agreed.begun or not plan.restored:
            return agreed
        return dataclasses.replace(agreed, sought=(Copy.of(plan.restored).step, plan.restored))
    return Agreed(plan.run, begun=True)


def left_behind(there: Collection[int], here: Collection[int], agreed: Agreed) -> tuple[int, ...]:
    """Steps of a node's copy that training has gone back behind: other nodes did not have them.

    Its newest step stays in a root, so that none of this run is newer at the copy.
    """
    if not agreed.session or not agreed.begun or not here:
        return ()
    return tuple([step for step in there if step > max(here)])


def with_sought(
    want: Sequence[int], sought: Save | None, *, here: Mapping[int, str], there: Mapping[int, str]
) -> tuple[int, ...]:
    """The steps to be sent, in their order: what all nodes wait for goes first, however old it is."""
    if sought is None or here.get(sought[0]) != sought[1] or there.get(sought[0]) == sought[1]:
        return tuple(want)
    return (sought[0], *[step for step in want if step != sought[0]])
