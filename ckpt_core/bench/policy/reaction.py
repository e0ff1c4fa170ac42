"""What blocks of iterations say about the bound. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, median
from typing import Any

SETTLE_WITHIN = 20
"""Iterations of a new load after which the bound is to hold again."""

_NEIGHBOURS = 8

Taken = Mapping[str, Any]
"""A `Block` as its process sends it."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Blocks with saves beside those without, before and behind each.

    Attributes:
        base_s: one iteration without saves.
        added_s: by which all saves of the blocks have lengthened training, until the last was durable.
        iterations: of the whole intervals that the saves belong to.
        saves: how many they were.
    """

    base_s: float
    added_s: float
    iterations: int
    saves: int

    @property
    def overhead(self) -> float:
        """Time added, as a part of what the iterations take without."""
        return self.added_s / (self.iterations * self.base_s)

    @property
    def cost_s(self) -> float:
        """Of one save."""
        return self.added_s / self.saves


def compare(answer: Mapping[str, Any]) -> Compared:
    """A round: "pairs" of "before", "saving" and "drain", and "after"."""
    pairs: list[Mapping[str, Taken]] = answer["pairs"]
    without = [*(pair["before"] for pair in pairs), answer["after"]]
    base_s = fmean(_seconds(without))
    saving, drain = (_seconds([pair[part] for pair in pairs]) for part in ("saving", "drain"))
    # Iterations behind a block that a save still slows down are paid for by its intervals.
    added_s = sum(saving) + sum(drain) - (len(saving) + len(drain)) * base_s
    saves = sum(len(pair["saving"]["saves"]) for pair in pairs)
    return Compared(base_s, added_s, len(saving), saves)


def _seconds(blocks: Sequence[Taken]) -> list[float]:
    return [seconds for block in blocks for seconds in block["seconds"]]


def overheads_from(seconds: Sequence[float], base_s: float) -> list[float]:
    """At each iteration: by what part it and all behind it take longer than those without saves."""
    behind = list(accumulate(reversed(seconds)))[::-1]
    count = len(seconds)
    return [total / ((count - at) * base_s) - 1 for at, total in enumerate(behind)]


def added_from(seconds: Sequence[float], active: Sequence[int]) -> list[float]:
    """At each iteration: what saves add to it and to all behind it, as a part of these without them.

    An iteration with a save under way is compared with its neighbours that have none, so that neither a
    drift nor an iteration that is long by itself counts for a cost of saves, which no policy could lower.

    Args:
        seconds: of each iteration of a block.
        active: numbers of those in which a save was under way; some were not.
    """
    busy = set(active)
    quiet = [at for at in range(len(seconds)) if at not in busy]
    without = list(seconds)
    for at in busy:
        near = sorted(quiet, key=lambda other: abs(other - at))[:_NEIGHBOURS]
        without[at] = median(seconds[other] for other in near)
    added = [took - alone for took, alone in zip(seconds, without, strict=True)]
    return [sum(added[at:]) / sum(without[at:]) for at in range(len(seconds))]


def iterations_until(bound: float, overheads: Sequence[float]) -> int | None:
    """After how many iterations the overhead of the following ones is within the bound; None: never."""
    return next((at for at, overhead in enumerate(overheads) if overhead <= bound), None)


def counted_from(saves: Sequence[int], iterations: int, cost: float) -> list[float]:
    """At each iteration: what the saves from it on cost, as a part of all from it on.

    As `settled_overhead`, a drift or an iteration that is long by itself has no part in it.
    """
    return [
        sum(save >= at for save in saves) * cost / (iterations - at) for at in range(iterations)
    ]


def settled_overhead(saves: Sequence[int], iterations: int, cost: float) -> float:
    """What the saves behind the first `SETTLE_WITHIN` iterations of a block cost, as a part of these.

    Counts saves, whose usual cost is known, and takes no time: a drift of the iterations has no part in it.

    Args:
        saves: after how many iterations each was made.
        iterations: of the block.
        cost: of one save, in iterations.
    """
    first = min(SETTLE_WITHIN, iterations // 2)
    return sum(save >= first for save in saves) * cost / (iterations - first)


def intervals_of(block: Taken) -> list[int]:
    """The interval that each save of a block is followed by."""
    saves: list[int] = block["saves"]
    return [
        end - save for save, end in zip(saves, [*saves[1:], len(block["seconds"])], strict=True)
    ]
