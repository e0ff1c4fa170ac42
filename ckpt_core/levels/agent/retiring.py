"""Which steps go at a level. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ckpt_core.levels.wants import wanted
from ckpt_core.options import Level
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
