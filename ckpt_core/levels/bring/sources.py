"""`open_source`: what steps are brought from, by its URL."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ckpt_core.errors import ConfigError
from ckpt_core.levels.bring.joined import JoinedFar
from ckpt_core.levels.far.door import Readable
from ckpt_core.levels.far.opening import open_far, open_plain
from ckpt_core.levels.mailbox import Source, read_plan
from ckpt_core.levels.parity.opening import kept_url, root_url
from ckpt_core.options import PARITY, PEERS, scheme_of
from ckpt_core.system.files import Files


def open_source(url: str, *, files: Files | None = None) -> Readable:
    """A level; what parity gives back of a root; or the parts of all nodes, where these are cut otherwise.

    Raises:
        ConfigError: as `open_far`; or there is no such plan for that root any more.
    """
    scheme = scheme_of(url)
    if scheme not in (PARITY, PEERS):
        return open_far(url, files=files)
    plan = read_plan(Path(url.partition("://")[2]))
    if plan is not None and scheme == PARITY and plan.parity:
        parts = [one.part for one in plan.nodes if one.part in plan.asks]
        now = [Source(one, root_url(plan, one), kept_url(plan, one)) for one in parts]
        return _rebuilt(url, plan.part, parts, now)
    if plan is not None and scheme == PEERS and plan.before:
        places: list[Readable] = [open_plain(one.root) for one in plan.before if one.root]
        here = {one.part for one in plan.before if one.root}
        groups = {one.part: one.group for one in plan.before if one.group}
        made = {part: _rebuilt(url, part, group, plan.before) for part, group in groups.items()}
        places += [far for part, far in made.items() if part not in here]
        return JoinedFar(url, places, rest=[made[part] for part in made if part in here])
    if plan is None or scheme == PARITY or plan.parity or not plan.asks:
        raise ConfigError(f"{url}: that root has no plan of {scheme}")
    return JoinedFar(url, [open_far(one, files=files) for one in plan.asks])


def _rebuilt(url: str, part: str, group: Sequence[str], there: Sequence[Source]) -> Readable:
    """A part, as others of its group have what it can be made of."""
    # Only here: it needs NumPy.
    from ckpt_core.levels.parity.rebuilding import Node, ParityFar

    nodes = [
        Node(
            one.part,
            open_plain(one.root) if one.root else None,
            open_plain(one.kept) if one.kept else None,
        )
        for one in there
        if one.part != part and one.part in group
    ]
    return ParityFar(url, part, nodes)
