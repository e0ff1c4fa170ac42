"""Which bytes of replicas all ranks look at, and when.

    large leaf   at every save up to 8 runs of bytes spread over it, which go on from save to save
    small leaf   in turns, 4 of them or 1/128, whichever is more; all of up to 16, and all at the first save
                 of a structure

Over a whole round each byte is looked at once. The choice follows from the step and the structure, so that
all ranks look at the same bytes without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import xxhash

from ckpt_core.share.reference import LeafRow
from ckpt_core.state import Leaf
from ckpt_core.units import align_up

SAVES = 128
"""So many times the number of ranks is the length of a round: a rank hashes 1/128 of what it stores."""

LEAST_BYTES = 256 * 1024
"""So much is looked at in any case: a round of a small state is short, and costs microseconds."""

SMALL_BYTES = 64 * 1024
"""Eager leaves up to this size take turns: what they cost the training thread is calls, not bytes. So do
lazy ones of which so little is due at each save that the call would cost more."""

FEW_LEAVES = 16
LEAST_LEAVES = 4
"""So many take a turn at a time; where there are few in all, every one at every save."""

_GRAIN = 64
_RUN_BYTES = 1024
_SMALL_RUN_BYTES = 4096
_MOST_RUNS = 8


@dataclass(frozen=True, slots=True)
class Runs:
    """Which bytes of a leaf are looked at: in each of some equal strips, one run at a time.

    Attributes:
        nbytes: of the leaf.
        strip: bytes of a strip.
        run: bytes of a run.
        places: how many runs a strip has; after so many turns each was looked at once.
        stride: from the place of one turn to that of the next; coprime to `places`.
    """

    nbytes: int
    strip: int
    run: int
    places: int
    stride: int

    @classmethod
    def of(cls, nbytes: int, budget: int, least_run: int = _RUN_BYTES) -> Runs:
        """Runs of about `budget` bytes at each turn; several only if they have `least_run`."""
        strips = min(_MOST_RUNS, max(min(budget, nbytes) // least_run, 1))
        strip = align_up(max(-(-nbytes // strips), 1), _GRAIN)
        run = min(align_up(max(-(-budget // strips), 1), _GRAIN), strip)
        places = -(-strip // run)
        stride = max(int(places * 0.618), 1)
        while gcd(stride, places) > 1:
            stride += 1
        return cls(nbytes, strip, run, places, stride)

    def at(self, turn: int) -> list[tuple[int, int]]:
        """`(begin, end)` of the runs of a turn."""
        if self.places == 1 and self.strip >= self.nbytes:
            return [(0, self.nbytes)]
        shift = turn * self.stride % self.places * self.run
        found = []
        for start in range(0, self.nbytes, self.strip):
            end = min(start + shift + self.run, start + self.strip, self.nbytes)
            if start + shift < end:
                found.append((start + shift, end))
        return found


@dataclass(frozen=True, slots=True)
class Replica:
    """A leaf that other ranks have too, byte for byte.

    Attributes:
        index: number of the leaf in the flat state.
        row: its place in `Share.rows`.
        copies: how many ranks have it.
        group: the same text on exactly those ranks; they have the same replicas in it.
    """

    index: int
    row: int
    copies: int
    group: str


@dataclass(frozen=True, slots=True)
class Look:
    """One leaf that is looked at.

    Attributes:
        index: of the leaf in the flat state.
        row: of the leaf in `Share.rows`.
        group: number of the ranks that have the same bytes; see `Replica.group`.
        runs: which bytes.
    """

    index: int
    row: int
    group: int
    runs: Runs


@dataclass(frozen=True, slots=True)
class Rota:
    """Leaves that are looked at at every save, and leaves that take turns: each at one save in `period`."""

    always: tuple[Look, ...]
    turns: tuple[Look, ...]

    @property
    def period(self) -> int:
        """Saves after which each leaf had its turn."""
        count = len(self.turns)
        if count <= FEW_LEAVES:
            return 1
        return -(-count // max(LEAST_LEAVES, -(-count // SAVES)))

    def due(self, turn: int, *, first: bool) -> list[tuple[Sequence[Look], int]]:
        """Leaves to look at, each list with its turn; all of them the `first` time."""
        if first:
            return [(self.always, turn), (self.turns, turn)]
        period = self.period
        return [(self.always, turn), (self.turns[turn % period :: period], turn // period)]


@dataclass(frozen=True, slots=True)
class AuditPlan:
    """What is looked at of the states of one structure; worked out once.

    Attributes:
        eager: leaves that are read inside `save`.
        lazy: leaves that are read by the stager.
        groups: ranks that have the same bytes, as text; equal on those ranks and on no others.
        rows: of all leaves, to name one by.
    """

    eager: Rota
    lazy: Rota
    groups: tuple[str, ...]
    rows: tuple[LeafRow, ...]

    @classmethod
    def of(
        cls, replicas: Sequence[Replica], rows: tuple[LeafRow, ...], leaves: Sequence[Leaf]
    ) -> AuditPlan:
        """Called on the training thread when the structure is new."""
        total = sum([leaves[one.index].nbytes // one.copies for one in replicas])
        part = max(1 / SAVES, min(LEAST_BYTES / max(total, 1), 1.0))
        groups: dict[str, int] = {}
        kinds: dict[tuple[bool, bool], list[Look]] = {}
        for one in replicas:
            leaf = leaves[one.index]
            budget = int(leaf.nbytes * part / one.copies)
            small = leaf.nbytes <= SMALL_BYTES if leaf.eager else budget < _GRAIN
            least = _SMALL_RUN_BYTES if leaf.eager or small else _RUN_BYTES
            budget = max(budget, least if leaf.eager or small else _GRAIN)
            group = groups.setdefault(one.group, len(groups))
            look = Look(one.index, one.row, group, Runs.of(leaf.nbytes, budget, least))
            if leaf.nbytes:
                kinds.setdefault((leaf.eager, small), []).append(look)
        eager, lazy = (
            Rota(tuple(kinds.get((kind, False), ())), tuple(kinds.get((kind, True), ())))
            for kind in (True, False)
        )
        # What else decides which bytes are read: ranks with other options are not compared.
        looks = (*eager.always, *eager.turns, *lazy.always, *lazy.turns)
        layout = xxhash.xxh3_64_hexdigest(repr((len(eager.turns), looks)).encode())
        return cls(eager, lazy, tuple([f"{group}@{layout}" for group in groups]), rows)


NO_AUDIT = AuditPlan(Rota((), ()), Rota((), ()), (), ())
"""Of what nobody else has."""


class Turns:
    """Counts saves in a way that all ranks share, without a word: by their steps.

    A round is in order as long as steps are evenly spaced. A rank that was not there at a save is out of
    turn at the next one, where it is compared with nobody, and not after it. One owner, one thread.
    """

    def __init__(self) -> None:
        self._last: int | None = None

    def next(self, step: int) -> int:
        """The turn of a save of `step`."""
        last, self._last = self._last, step
        return step // (step - last if last is not None and step > last else 1)
