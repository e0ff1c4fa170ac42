"""Where copies of nodes lie: each node's on one other node, across domains where there is room. Pure, but for
`held` and `cut`, which look at directories of this machine.

    <dir of a node>/<run>/<part>/step-...      what a node keeps for another one: a root to read

A *part* is what one node holds of a step. It is named after the first of the node's ranks, so that a machine
that takes a lost one's place finds what that one has saved.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from ckpt_core.errors import CkptError, ConfigError
from ckpt_core.layout import MANIFEST_NAME, RUN_NAME, Manifest
from ckpt_core.levels.mailbox import Node
from ckpt_core.levels.parity.objects import root_key
from ckpt_core.options import PEER
from ckpt_core.store import committed_steps, step_path
from ckpt_core.types import RankInfo

_RUN = re.compile(r"[0-9a-f]{8,64}")
_PART = re.compile(r"node-[0-9]{5,}")

Held = dict[str, dict[str, int]]
"""run -> part -> the newest session of the run that had something sent there."""


@dataclass(frozen=True)
class Known:
    """What a node knows when the job starts.

    Attributes:
        run: of its root; None: it is fresh.
        session: the newest that its root has had.
        held: what it keeps for others.
        agreed: what it knows of the steps that all nodes have; None: nothing.
        was: the part that the newest step of its root is, by the name that it had; None: it has no step.
        others: a step in its root is from another number of ranks, or from others than this node has.
    """

    run: str | None = None
    session: int = 0
    held: Held = field(default_factory=dict)
    agreed: Any = None
    was: str | None = None
    others: bool = False

    def to_json(self) -> dict[str, Any]:
        """What `from_json` takes."""
        return asdict(self)

    @classmethod
    def from_json(cls, obj: dict[str, Any]) -> Self:
        """As `to_json` gave it on another rank."""
        return cls(**obj)


@dataclass(frozen=True)
class Member:
    """A node of the ring.

    Attributes:
        rank: the first of its ranks, which leads there.
        address: where its agent listens.
        domain: what fails together with it; None: nothing else does.
    """

    rank: int
    address: str
    domain: str | None = None

    @property
    def part(self) -> str:
        """The name of what it holds."""
        return part_name(self.rank)


def held(folder: Path) -> Held:
    """What a directory of this machine keeps for other nodes."""
    found: Held = {}
    for place in folder.glob(f"*/*/{RUN_NAME}"):
        run, part = place.parts[-3:-1]
        if _RUN.fullmatch(run) and _PART.fullmatch(part):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                session = int(json.loads(place.read_bytes())["session"])
                found.setdefault(run, {})[part] = session
    return found


def cut(root: Path, info: RankInfo) -> tuple[str | None, bool]:
    """The part that the newest step of a root is, as `Known.was`; and whether there is a step from another
    number of ranks, or without the ranks of this node.
    """
    # What cannot be read has gone, or a restore tells what is wrong with it.
    found = [one for step in committed_steps(root) if (one := _manifest(step_path(root, step)))]
    if not found:
        return None, False
    ranks = [{row.rank for row in one.ranks} for one in found]
    are_mine = [
        one.world_size == info.world_size and there.issuperset(info.members)
        for one, there in zip(found, ranks, strict=True)
    ]
    return part_name(min(ranks[-1])), not all(are_mine)


def _manifest(path: Path) -> Manifest | None:
    with contextlib.suppress(OSError, CkptError):
        return Manifest.decode((path / MANIFEST_NAME).read_bytes(), path=path)
    return None


def part_name(rank: int) -> str:
    """What is held by the node whose first rank it is."""
    return f"node-{rank:05d}"


def joined(known: dict[int, Known]) -> Known:
    """The run that nodes go on with, and its newest session, wherever that is known of.

    Args:
        known: by the rank that leads each node.

    Returns:
        `run` is None where there is none yet.

    Raises:
        ConfigError: there are several.
    """
    runs = {one.run: rank for rank, one in known.items() if one.run is not None}
    if len(runs) > 1:
        rows = ", ".join(f"{run} (rank {rank})" for run, rank in runs.items())
        raise ConfigError(
            f"the roots of the nodes hold steps of several runs: {rows}. Empty those that do not belong to "
            f"this one, and they are filled from their peers"
        )
    if not runs:
        kept = {run: rank for rank, one in known.items() for run in one.held}
        if len(kept) > 1:
            rows = ", ".join(f"{run} (rank {rank})" for run, rank in kept.items())
            raise ConfigError(
                f"all roots are empty, and the nodes keep copies of several runs: {rows}. Remove from `dir` "
                f"those that are not to be gone on with"
            )
        runs = kept
    if not runs:
        return Known()
    (run,) = runs
    sessions = [one.session for one in known.values() if one.run == run]
    sessions += [n for one in known.values() for n in one.held.get(run, {}).values()]
    return Known(run, max(sessions, default=0))


def partners(members: Sequence[Member]) -> dict[int, Member]:
    """Who keeps the copy of each node, by its rank: every node keeps just one.

    Nodes are put in order by domain, and each takes the one that is as far ahead as the largest domain is
    long. So a copy lies in another domain, unless more than half of all nodes are in one.
    """
    domains = [_domain(one) for one in members]
    order = sorted(range(len(members)), key=lambda number: (domains.index(domains[number]), number))
    jump = max(Counter(domains).values())
    jump = jump if jump < len(members) else 1
    ring = [members[number] for number in order]
    return {one.rank: ring[(at + jump) % len(ring)] for at, one in enumerate(ring)}


def warning(members: Sequence[Member]) -> str:
    """What is to be said of copies that lie where their nodes are; "": nothing is."""
    there = partners(members)
    near = [one.rank for one in members if _domain(there[one.rank]) == _domain(one)]
    if not near:
        return ""
    return (
        f"peers: the nodes of ranks {near} and their copies are in one domain each: what fails with a domain "
        f"loses both. Spread the nodes, so that no domain has more than half of them"
    )


def check(members: Sequence[Member]) -> None:
    """Be sure that each node is reached at an address of its own.

    Raises:
        ConfigError: names the ranks and the address.
    """
    ranks: dict[str, int] = {}
    for one in members:
        if one.address in ranks:
            raise ConfigError(
                f"the nodes of ranks {ranks[one.address]} and {one.rank} are both at {one.address}: bind "
                f"names an address that the others reach, or the interface that has it"
            )
        ranks[one.address] = one.rank


def place(holder: Member, run: str, part: str) -> str:
    """The URL of a part at a node."""
    return f"{PEER}://{holder.address}/{run}/{part}"


def root_place(member: Member, run: str) -> str:
    """The URL at which a node shows its root."""
    return f"{PEER}://{member.address}/{root_key(run, member.part)}"


def places(
    mine: Member, members: Sequence[Member], run: str, kept: dict[int, Held]
) -> tuple[str, list[str]]:
    """Where the steps of a node go to, and all places where some of them may be, that one first."""
    target = partners(members)[mine.rank]
    others = [one for one in members if one != target and mine.part in kept[one.rank].get(run, {})]
    urls = [place(one, run, mine.part) for one in (target, *others)]
    return urls[0], urls


def everywhere(members: Sequence[Member], run: str, kept: dict[int, Held]) -> list[str]:
    """All places where some node has a part: the nodes' roots first, then the copies that they keep."""
    roots = [root_place(one, run) for one in members]
    parts = [(one, part) for one in members for part in sorted(kept[one.rank].get(run, {}))]
    return roots + [place(one, run, part) for one, part in parts]


def are_others(
    members: Sequence[Member], run: str, known: dict[int, Known], made: Collection[str] = ()
) -> bool:
    """Whether nodes that are cut otherwise have saved, so that one may need what another has.

    Args:
        made: parts that parity is kept of.
    """
    kept = {part for one in known.values() for part in one.held.get(run, {})}.union(made)
    if all(one.was is None for one in known.values()):
        return bool(kept) and kept != {one.part for one in members}
    if any(one.others for one in known.values()):
        return True
    # All roots have what their ranks wrote, and perhaps more: what a fresh node is to have, too.
    fresh = {one.part for one in members if known[one.rank].was is None}
    return bool(kept) and not fresh <= kept


def nodes(members: Sequence[Member], run: str) -> tuple[Node, ...]:
    """The ring, as plans have it."""
    there = partners(members)
    return tuple(
        [
            Node(
                one.part,
                one.address,
                one.domain,
                there[one.rank].part,
                place(there[one.rank], run, one.part),
            )
            for one in members
        ]
    )


def _domain(member: Member) -> tuple[str | None, int | None]:
    return (member.domain, None if member.domain is not None else member.rank)
