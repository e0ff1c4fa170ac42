"""Whether the ranks' parts of each distributed leaf make it up, which rank 0 sees before any is published.

What a rank holds of a DTensor or a FlatPart is what it was given: nothing that it works out alone tells
whether all others are there, and hold the rest. So each says with its vote where its parts lie: by a digest,
and at length unless that is what it said with the last step that was committed. Rank 0 keeps what it was
told, and what it has found whole, so that a step that is cut as the one before costs a look.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeVar

import xxhash

from ckpt_core.coordination import Json
from ckpt_core.layout import Effort, itemsize, uncovered
from ckpt_core.system.threads import own_lock
from ckpt_core.types import Block, LeafSpec, Slice

_KEPT = 16
"""So many cuts of each rank are kept by rank 0 at least."""

_Place = tuple[int, int, tuple[tuple[int, ...], tuple[int, ...]] | None] | None
_Row = tuple[int, tuple[int, ...], _Place]
"""Bytes of an element, shape of the leaf, and where a rank's part of it lies; None: it stores nothing."""

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Cut(NamedTuple):
    """Where one rank's parts of all distributed leaves lie.

    Attributes:
        digest: of that.
        text: compressed JSON.
    """

    digest: str
    text: str

    @classmethod
    def of(cls, parts: Iterable[tuple[LeafSpec, Slice | None]]) -> Cut:
        """Of all distributed leaves; None where the rank stores nothing of one."""
        names: dict[_Row, list[str]] = {}
        for spec, part in parts:
            row = itemsize(spec.dtype), spec.shape, _place(part)
            names.setdefault(row, []).append(spec.name)
        data = json.dumps([*names.items()], separators=(",", ":")).encode()
        text = base64.b64encode(zlib.compress(data, 1)).decode()
        return cls(xxhash.xxh3_64_hexdigest(data), text)


class Cuts:
    """What the ranks have told of their cuts. One for each Checkpointer; any thread.

    Args:
        in_flight: most saves at a time. What a rank has said with its last commit is to be known yet when
            so many others have said something else, and as many have ended in another order than here.

    Attributes:
        told: digest of what rank 0 knows of this rank; "" when that is not certain.
    """

    def __init__(self, in_flight: int) -> None:
        self.told = ""
        self._most = max(_KEPT, 2 * in_flight + 1)
        self._lock = own_lock()
        self._texts: dict[int, dict[str, str]] = {}
        self._whole: dict[tuple[str, ...], None] = {}

    def vote(self, cut: Cut | None) -> CutVote | None:
        """This rank's part in a save whose leaves are cut so; None: none is distributed."""
        return None if cut is None else CutVote(self, cut)

    def forget(self) -> None:
        """A save has failed: perhaps rank 0 does not know what this rank has said with it."""
        self.told = ""

    def lack(self, said: Sequence[Json]) -> str | None:
        """See `Parts.lack`."""
        with self._lock:
            digests = tuple([digest for digest, _ in said])
            texts = [self._text(rank, *one) for rank, one in enumerate(said)]
            if digests in self._whole:
                return None
            unknown = [rank for rank, text in enumerate(texts) if not text]
            if unknown:
                return (
                    f"it does not know where the parts of distributed leaves lie that rank {unknown[0]} "
                    "stores, which tells it with its next save"
                )
            lack = _lack(texts)
            if lack is None:
                _keep(self._whole, digests, None, most=self._most)
            return lack

    def _text(self, rank: int, digest: str, text: str) -> str:
        known = self._texts.setdefault(rank, {})
        return _keep(known, digest, text or known.get(digest, ""), most=self._most)


@dataclass(frozen=True, slots=True)
class CutVote:
    """The `Parts` of one save."""

    cuts: Cuts
    cut: Cut

    def say(self) -> Json:
        """See `Parts.say`."""
        return [self.cut.digest, "" if self.cut.digest == self.cuts.told else self.cut.text]

    def lack(self, said: Sequence[Json]) -> str | None:
        """See `Parts.lack`."""
        return self.cuts.lack(said)

    def agreed(self) -> None:
        """The step is committed, so rank 0 has seen it."""
        self.cuts.told = self.cut.digest


def _keep(known: dict[_Key, _Value], key: _Key, value: _Value, *, most: int) -> _Value:
    """Put it last, and let go of what was used longest ago."""
    known.pop(key, None)
    known[key] = value
    while len(known) > most:
        del known[next(iter(known))]
    return value


def _place(part: Slice | None) -> _Place:
    if part is None:
        return None
    block = part.block
    return part.begin, part.nbytes, None if block is None else (block.offsets, block.sizes)


def _lack(texts: Iterable[str]) -> str | None:
    # Of hundreds of ranks with thousands of leaves: by far most are cut as others are, layers of a model and
    # states of its optimizer, and are looked at once. No leaf has more here than a number for each rank.
    numbers: dict[str, int] = {}
    rows: list[Json] = []
    of: dict[str, list[int]] = {}
    for text in texts:
        for row, names in json.loads(zlib.decompress(base64.b64decode(text))):
            number = numbers.setdefault(str(row), len(rows))
            if number == len(rows):
                rows.append(row)
            for name in names:
                of.setdefault(name, []).append(number)
    effort, whole = Effort(), set[tuple[int, ...]]()
    for name, found in of.items():
        cut = tuple(found)
        if cut in whole:
            continue
        gap = _gap([rows[number] for number in cut], effort)
        if gap is not None:
            return (
                f"the ranks' parts of {name!r} do not make it up: nothing of {gap} is in any. All ranks that "
                "hold a part of a DTensor must save together, and all FlatParts together hold every element"
            )
        whole.add(cut)
    return None


def _gap(rows: Sequence[Json], effort: Effort) -> str | None:
    """What is in none of them, of one leaf; None: nothing."""
    unit, shape, _ = rows[0]
    places = [place for _, _, place in rows if place is not None]
    if not places:
        return "it"
    if _is_made_of_runs(unit, shape, places):
        return None
    return uncovered(shape, unit, [_slice(*place) for place in places], effort=effort)


def _is_made_of_runs(unit: int, shape: Sequence[int], places: Iterable[Json]) -> bool:
    """Whether those parts that are runs of the leaf's bytes make it up: little work beside `uncovered`."""
    inner, line = shape[1:], unit * prod(shape[1:])
    runs = []
    for begin, nbytes, box in places:
        if box is None:
            runs.append((begin, begin + nbytes))
        elif box[1][1:] == inner:
            begin += line * box[0][0] if shape else 0
            runs.append((begin, begin + nbytes))
    reached = 0
    for begin, end in sorted(runs):
        if begin > reached:
            return False
        reached = max(reached, end)
    return reached >= unit * prod(shape)


def _slice(begin: int, nbytes: int, box: Json) -> Slice:
    return Slice(begin, nbytes, None if box is None else Block(*map(tuple, box)))
