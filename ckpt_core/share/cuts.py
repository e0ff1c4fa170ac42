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
"""So many cuts of each rank are kept by rank 0: more than there are saves under way."""

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
        rows = [(spec.name, itemsize(spec.dtype), spec.shape, _row(part)) for spec, part in parts]
        data = json.dumps(rows, separators=(",", ":")).encode()
        text = base64.b64encode(zlib.compress(data, 1)).decode()
        return cls(xxhash.xxh3_64_hexdigest(data), text)


class Cuts:
    """What the ranks have told of their cuts. One for each Checkpointer; any thread.

    Attributes:
        told: digest of what rank 0 knows of this rank; "" when that is not certain.
    """

    def __init__(self) -> None:
        self.told = ""
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
                _keep(self._whole, digests, None)
            return lack

    def _text(self, rank: int, digest: str, text: str) -> str:
        known = self._texts.setdefault(rank, {})
        return _keep(known, digest, text or known.get(digest, ""))


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


def _keep(known: dict[_Key, _Value], key: _Key, value: _Value) -> _Value:
    """Put it last, and let go of what was used longest ago."""
    known.pop(key, None)
    known[key] = value
    while len(known) > _KEPT:
        del known[next(iter(known))]
    return value


def _row(part: Slice | None) -> Json:
    if part is None:
        return None
    block = part.block
    return part.begin, part.nbytes, None if block is None else (block.offsets, block.sizes)


def _lack(texts: Iterable[str]) -> str | None:
    leaves: dict[str, tuple[int, list[int], list[Json]]] = {}
    for text in texts:
        for name, unit, shape, row in json.loads(zlib.decompress(base64.b64decode(text))):
            rows = leaves.setdefault(name, (unit, shape, []))[2]
            if row is not None:
                rows.append(row)
    # Many are cut alike: layers of a model, states of its optimizer.
    effort, whole = Effort(), set[str]()
    for name, leaf in leaves.items():
        gap = _gap(*leaf, effort, whole)
        if gap is not None:
            return (
                f"the ranks' parts of {name!r} do not make it up: nothing of {gap} is in any. All ranks that "
                "hold a part of a DTensor must save together, and all FlatParts together hold every element"
            )
    return None


def _gap(
    unit: int, shape: list[int], rows: list[Json], effort: Effort, whole: set[str]
) -> str | None:
    if not rows:
        return "it"
    if _is_made_of_runs(unit, shape, rows) or (key := str((unit, shape, rows))) in whole:
        return None
    gap = uncovered(shape, unit, [_slice(*row) for row in rows], effort=effort)
    if gap is None:
        whole.add(key)
    return gap


def _is_made_of_runs(unit: int, shape: list[int], rows: list[Json]) -> bool:
    """Whether those parts that are runs of the leaf's bytes make it up: little work beside `uncovered`."""
    inner, line = shape[1:], unit * prod(shape[1:])
    runs = []
    for begin, nbytes, box in rows:
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
