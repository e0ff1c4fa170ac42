"""What of a plan is about parity: the group, its nodes, and a lost part as something to bring steps from."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_core.errors import ConfigError
from ckpt_core.levels.far.door import Readable
from ckpt_core.levels.far.opening import check_extra, open_far
from ckpt_core.levels.mailbox import Plan, read_plan
from ckpt_core.levels.parity.groups import Shape
from ckpt_core.levels.parity.objects import Group, parity_key, root_key
from ckpt_core.options import PARITY, PEER, scheme_of
from ckpt_core.system.files import Files

if TYPE_CHECKING:
    from ckpt_core.levels.far.plain import PlainFar


def url_of(root: Path) -> str:
    """What stands in a plan for the parity of a root, and for what can be rebuilt from that of others."""
    return f"{PARITY}://{root}"


def group_of(plan: Plan) -> Group | None:
    """The group of the node whose plan it is; None: the nodes have not met, or keep no parity."""
    mine = next((node.group for node in plan.nodes if node.part == plan.part), None)
    if mine is None:
        return None
    parts = [node.part for node in plan.nodes if node.group == mine]
    return Group(Shape.parse(plan.parity), tuple(parts))


def place_of(plan: Plan) -> Path:
    """Where the node whose plan it is keeps parity."""
    assert plan.serve is not None
    return Path(plan.serve.dir, parity_key(plan.run, plan.part))


def root_url(plan: Plan, part: str) -> str:
    """Where another node shows its root."""
    return f"{PEER}://{_address(plan, part)}/{root_key(plan.run, part)}"


def kept_url(plan: Plan, part: str) -> str:
    """Where a node shows what it keeps of parity."""
    return f"{PEER}://{_address(plan, part)}/{parity_key(plan.run, part)}"


def open_root(plan: Plan, part: str) -> PlainFar:
    """The root of another node, as it shows it."""
    return _open_plain(root_url(plan, part))


def open_kept(plan: Plan, part: str) -> PlainFar:
    """What another node keeps of parity."""
    return _open_plain(kept_url(plan, part))


def open_source(url: str, *, files: Files | None = None) -> Readable:
    """What steps are brought from: a level, or parity of what the root held.

    Raises:
        ConfigError: as `open_far`; or there is no plan of parity for that root any more.
    """
    if scheme_of(url) != PARITY:
        return open_far(url, files=files)
    plan = read_plan(Path(url.partition("://")[2]))
    if plan is None or not plan.parity:
        raise ConfigError(f"{url}: that root has no plan of parity")
    # Only here: it needs NumPy.
    from ckpt_core.levels.parity.rebuilding import Node, ParityFar

    parts = _known(plan, plan.asks)
    nodes = [Node(part, open_root(plan, part), open_kept(plan, part)) for part in parts]
    return ParityFar(url, plan.part, nodes)


def _known(plan: Plan, parts: Collection[str]) -> list[str]:
    return [node.part for node in plan.nodes if node.part in parts and node.part != plan.part]


def _address(plan: Plan, part: str) -> str:
    return next(one.address for one in plan.nodes if one.part == part)


def _open_plain(url: str) -> PlainFar:
    check_extra(url)
    # Never imported by a process that trains: see `open_far`.
    from ckpt_core.levels.far.plain import PlainFar

    return PlainFar(url)
