"""`open_source`: what steps are brought from, by its URL."""

from __future__ import annotations

from pathlib import Path

from ckpt_core.errors import ConfigError
from ckpt_core.levels.bring.joined import JoinedFar
from ckpt_core.levels.far.door import Readable
from ckpt_core.levels.far.opening import open_far, open_plain
from ckpt_core.levels.mailbox import Plan, read_plan
from ckpt_core.levels.parity.objects import is_root
from ckpt_core.levels.parity.opening import open_kept, open_root
from ckpt_core.options import PARITY, PEERS, scheme_of
from ckpt_core.system.files import Files


def open_source(url: str, *, files: Files | None = None) -> Readable:
    """A level; parity of what a root held; or the parts of all nodes, where these are cut otherwise.

    Raises:
        ConfigError: as `open_far`; or there is no such plan for that root any more.
    """
    scheme = scheme_of(url)
    if scheme not in (PARITY, PEERS):
        return open_far(url, files=files)
    plan = read_plan(Path(url.partition("://")[2]))
    if plan is None or bool(plan.parity) != (scheme == PARITY) or not (plan.parity or plan.asks):
        raise ConfigError(f"{url}: that root has no plan of {scheme}")
    if scheme == PARITY:
        return _open_parity(url, plan)
    places = [open_plain(one) if is_root(one) else open_far(one, files=files) for one in plan.asks]
    return JoinedFar(url, places)


def _open_parity(url: str, plan: Plan) -> Readable:
    # Only here: it needs NumPy.
    from ckpt_core.levels.parity.rebuilding import Node, ParityFar

    parts = [one.part for one in plan.nodes if one.part in plan.asks and one.part != plan.part]
    nodes = [Node(part, open_root(plan, part), open_kept(plan, part)) for part in parts]
    return ParityFar(url, plan.part, nodes)
