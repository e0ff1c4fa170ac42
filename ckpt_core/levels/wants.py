"""Which steps a level still wants. Pure: the agent, the retention of roots and `ls` all ask here."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ckpt_core.options import Level


def meets(step: int, level: Level) -> bool:
    """Whether a step goes to a level while training goes on."""
    return step % level.every == 0


def but_for(saves: Mapping[int, str], apart: Collection[str]) -> dict[int, str]:
    """Saves, without the attempts that training has gone back behind: no parity is made of those."""
    return {step: attempt for step, attempt in saves.items() if attempt not in apart}


def newest_of(here: Mapping[int, str]) -> tuple[str, ...]:
    """The attempt of the newest step, if there is one."""
    return (here[max(here)],) if here else ()


def wanted(
    here: Mapping[int, str], level: Level, *, there: Mapping[int, str], last: bool = False
) -> tuple[int, ...]:
    """Steps that a level wants and does not have, in the order in which they are to be sent.

    Those that are newer than all that is there, and those that are there from another save of the same step;
    of these the newest `backlog`, ascending. What is behind more than that is passed over.

    Args:
        here: committed steps of the level or levels before it, with their attempts.
        there: what is whole at the level, likewise.
        last: nothing comes after the newest step, so that it goes there whatever `every` says.
    """
    fitting = {step for step in here if meets(step, level)}
    if last and here:
        fitting.add(max(here))
    open_ones = fitting & _open(here, there).keys()
    return tuple(sorted(open_ones)[-level.backlog :])


def coming(
    here: Mapping[int, str], level: Level, *, there: Mapping[int, str], want: Collection[int]
) -> frozenset[tuple[int, str]]:
    """Saves that may still come to a level: those to be sent now, and those that might be instead."""
    later = [save for save in _open(here, there).items() if meets(save[0], level)]
    return frozenset([*later, *[(step, here[step]) for step in want]])


def lasting(here: Collection[int], level: Level, *, there: Collection[int]) -> int | None:
    """The step that nodes agree on without a word, however fast steps come; None: there is none.

    Of those that a level wants and has not, the one whose number has most factors of two. Each node
    that keeps one keeps the same, and the longer nothing comes there, the longer it stays.
    """
    newest = max(there, default=-1)
    fitting = [step for step in here if step > newest and meets(step, level)]
    return max(fitting, key=lambda step: (_twos(step // level.every), step), default=None)


def _open(here: Mapping[int, str], there: Mapping[int, str]) -> dict[int, str]:
    """Saves that are newer than all that is there, or of which another one is there."""
    newest = max(there, default=-1)
    return {
        step: attempt
        for step, attempt in here.items()
        if there.get(step) != attempt and (step > newest or step in there)
    }


def _twos(number: int) -> int:
    return number & -number
