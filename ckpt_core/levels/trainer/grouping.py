"""Who keeps parity of whom, and what is left of the groups that nodes were in before. Pure, but for
`kept_here`, which looks at a directory of this machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckpt_core.levels.mailbox import Node, Source
from ckpt_core.levels.parity.groups import Shape, grouped, worst_domain
from ckpt_core.levels.parity.objects import groups_kept, parity_key
from ckpt_core.levels.trainer.ring import Known, Member, root_place
from ckpt_core.options import PEER

Kept = Mapping[str, Sequence[Sequence[str]]]
"""Whose parity a node keeps, by the name that it had then: of which groups."""


def kept_here(folder: Path, run: str) -> dict[str, list[list[str]]]:
    """What a directory of this machine keeps of a run."""
    whose = parity_key(run, "")
    places = folder.glob(f"{whose}*")
    return {
        str(place.relative_to(folder)).removeprefix(whose): [*map(list, groups_kept(place))]
        for place in places
    }


def nodes(members: Sequence[Member], shape: Shape) -> tuple[Node, ...]:
    """The groups, as plans have them."""
    return tuple(
        [
            Node(one.part, one.address, one.domain, group=number)
            for number, group in enumerate(grouped(members, shape))
            for one in group
        ]
    )


def warning(members: Sequence[Member], shape: Shape) -> str:
    """What is to be said of groups whose nodes fail together; "": nothing is."""
    worst = worst_domain(grouped(members, shape))
    if worst <= shape.m:
        return ""
    return (
        f"parity: {worst} nodes of a group are in one domain, and {shape.m} may be lost: what fails with a "
        f"domain loses more than that. Spread the nodes over more domains"
    )


def asked(mine: str, there: Sequence[Node], kept: Sequence[Kept]) -> tuple[str, ...]:
    """Parts from which that of this node may be rebuilt: of its group, and of those that it was in."""
    group = next(one.group for one in there if one.part == mine)
    found = {one.part for one in there if one.group == group}
    return tuple(sorted(found | _companions(mine, kept)))


def before(
    members: Sequence[Member], run: str, known: Mapping[int, Known], kept: Mapping[int, Kept]
) -> tuple[Source, ...]:
    """What is left of the parts of the nodes that have saved, where others go on.

    Of one part there may be several: a machine that has had another place before keeps what it kept there.

    Args:
        known, kept: by the rank that leads each node.
    """
    found: list[Source] = []
    for one in members:
        if (part := known[one.rank].was) is not None:
            found.append(Source(part, root_place(one, run)))
        place = f"{PEER}://{one.address}"
        found += [Source(part, kept=f"{place}/{parity_key(run, part)}") for part in kept[one.rank]]
    there = {one.part for one in found}
    found += [Source(part) for part in sorted(parts(kept) - there)]
    groups = {one.part: tuple(sorted(_companions(one.part, [*kept.values()]))) for one in found}
    return tuple([replace(one, group=groups[one.part]) for one in found])


def parts(kept: Mapping[int, Kept]) -> set[str]:
    """All that were in some group of which parity is kept, by the rank that leads the node that keeps it."""
    return {
        part for some in kept.values() for rows in some.values() for row in rows for part in row
    }


def _companions(part: str, kept: Sequence[Kept]) -> set[str]:
    """All that it was in a group with, itself too."""
    rows = [row for some in kept for groups in some.values() for row in groups if part in row]
    return {one for row in rows for one in row}
