"""Which steps go. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def choose_retired(
    committed: Sequence[int],
    *,
    keep_last: int | None,
    keep_every: int | None,
    kept: Collection[int],
    suspect: Collection[int],
) -> tuple[int, ...]:
    """The steps that retention takes away, ascending.

    Args:
        committed: every committed step, in any order.
        keep_last: newest sound steps that stay; None keeps every step.
        keep_every: its multiples stay for ever.
        kept: pinned or being read: they stay, and count towards `keep_last` like any other.
        suspect: found corrupt: they stay (to be moved aside, not deleted) and count for nothing.

    Whatever the settings, the newest committed step and the newest sound one stay.
    """
    if keep_last is None or not committed:
        return ()
    sound = sorted(set(committed) - set(suspect))
    stays = {max(committed), *sound[-max(keep_last, 1) :], *kept}
    return tuple(
        step
        for step in sound
        if step not in stays and (keep_every is None or step % keep_every != 0)
    )
