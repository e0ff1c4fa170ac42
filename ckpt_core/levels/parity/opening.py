"""What of a plan is about parity: the group, and what its nodes show of their disks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_core.levels.far.opening import open_plain
from ckpt_core.levels.mailbox import Plan
from ckpt_core.levels.parity.groups import Shape
from ckpt_core.levels.parity.objects import Group, parity_key, root_key
from ckpt_core.options import PARITY, PEER

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
    return open_plain(root_url(plan, part))


def open_kept(plan: Plan, part: str) -> PlainFar:
    """What another node keeps of parity."""
    return open_plain(kept_url(plan, part))


def _address(plan: Plan, part: str) -> str:
    return next(one.address for one in plan.nodes if one.part == part)
