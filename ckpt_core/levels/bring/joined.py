"""Steps of which every node has a part, as a level that has them whole: for another number of nodes.

with open_source(url) as far:        url: "peers://<root>", where the plan of that root names the places
    far.steps()                      of which the places together have what all ranks wrote
    far.read_blocks(...)             from the place that has the file

Idea: the manifests of parts are those of the step with fewer rows. With all rows together it is the step, as
one root that all ranks share would have it, and whoever brings it compares every byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt_core.errors import CorruptCheckpoint, UnknownFormat
from ckpt_core.layout import Manifest, RankManifest
from ckpt_core.levels.bring.subsets import part_of
from ckpt_core.levels.far.door import Away, Copy, Readable
from ckpt_core.levels.parity.parts import Part, read_part
from ckpt_core.types import parse_step_dir

_AT_ONCE = 16


@dataclass(frozen=True)
class _Whole:
    """A save, put together.

    Attributes:
        raw: the bytes of its `manifest.json`.
        owners: where each file is, the first place that has it.
        sizes: of these files.
    """

    raw: bytes
    owners: Mapping[str, Readable]
    sizes: Mapping[str, int]


class JoinedFar(Readable):
    """What places hold of steps, each its part.

    Args:
        url: what it is called.
        places: roots with the files of some ranks each, those to be read first in front.
    """

    def __init__(self, url: str, places: Sequence[Readable]) -> None:
        self.url, self._places = url, list(places)
        self._saves: dict[int, str] | None = None
        self._whole: dict[Copy, _Whole] = {}

    def steps(self) -> dict[int, str]:
        """As `Far.steps`.

        Raises:
            Away: a place does not answer, and with what it has there may be a newer one.
        """
        there: dict[Copy, set[int]] = {}
        count: dict[Copy, int] = {}
        away: list[Away] = []
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="ckpt-joined") as threads:
            for found in threads.map(_manifests, self._places):
                if isinstance(found, Away):
                    away.append(found)
                    continue
                for one in found:
                    copy = Copy(one.step, one.attempt)
                    there.setdefault(copy, set()).update(row.rank for row in one.ranks)
                    count[copy] = one.world_size
        whole = [copy for copy, ranks in there.items() if len(ranks) == count[copy]]
        newest = max([copy.step for copy in there], default=-1)
        if away and newest > max([copy.step for copy in whole], default=-2):
            raise away[0]
        # The same at all nodes, whoever answers first.
        return {copy.step: copy.attempt for copy in sorted(whole, key=_order)}

    def directories(self) -> dict[str, Copy]:
        """None: nodes that keep one another's steps have directories of files in their roots alone."""
        return {}

    def manifest(self, target: str) -> bytes | None:
        """As `Far.manifest`."""
        step = parse_step_dir(target)
        if self._saves is None:
            self._saves = self.steps()
        if step is None or step not in self._saves:
            return None
        return self._put_together(Copy(step, self._saves[step])).raw

    def files(self, copy: Copy) -> dict[str, int]:
        """As `Far.files`."""
        return dict(self._put_together(copy).sizes)

    def read_into(self, copy: Copy, name: str, buffer: memoryview, offset: int) -> None:
        """As `Far.read_into`."""
        self._owner(copy, name).read_into(copy, name, buffer, offset)

    def read_blocks(self, copy: Copy, name: str, offset: int, nbytes: int) -> Iterator[memoryview]:
        """As `Far.read_blocks`."""
        return self._owner(copy, name).read_blocks(copy, name, offset, nbytes)

    def close(self) -> None:
        """See `Readable`."""
        for place in self._places:
            place.close()

    # -- inside ----------------------------------------------------------------------------------

    def _owner(self, copy: Copy, name: str) -> Readable:
        place = self._put_together(copy).owners.get(name)
        if place is None:
            raise Away(f"{self.url}: no node has {name} of step {copy.step}", step=copy.step)
        return place

    def _put_together(self, copy: Copy) -> _Whole:
        if copy not in self._whole:
            self._whole[copy] = self._read(copy)
        return self._whole[copy]

    def _read(self, copy: Copy) -> _Whole:
        manifest: Manifest | None = None
        ranks: dict[int, RankManifest] = {}
        owners: dict[str, Readable] = {}
        sizes: dict[str, int] = {}
        for place, part in self._parts(copy):
            path = Path(place.url) / copy.target
            found = Manifest.decode(part.raw, path=path)
            fresh = [row for row in found.ranks if row.rank not in ranks]
            rows = {row.rank: row for row in (*(manifest.ranks if manifest else ()), *fresh)}
            manifest = replace(found, ranks=tuple([rows[rank] for rank in sorted(rows)]))
            for row in fresh:
                one = RankManifest.decode(part.ranks[row.file], path=path / row.file)
                ranks[row.rank] = one
                sizes |= {entry.name: entry.nbytes for entry in one.files} | {row.file: row.nbytes}
                owners |= dict.fromkeys([row.file, *(entry.name for entry in one.files)], place)
        if manifest is None or len(ranks) < manifest.world_size:
            raise Away(f"{self.url}: not all of step {copy.step} is there any more", step=copy.step)
        whole = part_of(manifest, [ranks[rank] for rank in sorted(ranks)])
        return _Whole(whole.encode(), owners, sizes)

    def _parts(self, copy: Copy) -> Iterator[tuple[Readable, Part]]:
        """What each place has of a save; where it is damaged or away another may have the same."""
        for place in self._places:
            try:
                part = read_part(place, copy)
            except (Away, CorruptCheckpoint, UnknownFormat):
                continue
            if part is not None:
                yield place, part


def _manifests(place: Readable) -> list[Manifest] | Away:
    """Those of the steps of a place; that it is away is a kind of answer."""
    found = []
    try:
        for step, attempt in place.steps().items():
            copy = Copy(step, attempt)
            raw = place.manifest(copy.target)
            if raw is not None:
                found.append(Manifest.decode(raw, path=Path(place.url) / copy.target))
    except Away as exc:
        return exc
    return found


def _order(copy: Copy) -> tuple[int, str]:
    return copy.step, copy.attempt
