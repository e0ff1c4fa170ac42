"""Steps of which every node has a part, as a level that has them whole: for another number of nodes.

with open_source(url) as far:        url: "peers://<root>", where the plan of that root names the places
    far.steps()                      of which the places together have what all ranks wrote
    far.read_blocks(...)             from a place that has the file, and does answer
    far.places(...)                  all of them, for whoever finds that the bytes are wrong

Idea: the manifests of parts are those of the step with fewer rows. With all rows together it is the step, as
one root that all ranks share would have it, and whoever brings it compares every byte.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
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
        owners: where each file is, the first place in front.
        sizes: of these files.
    """

    raw: bytes
    owners: Mapping[str, Sequence[Readable]]
    sizes: Mapping[str, int]


class JoinedFar(Readable):
    """What places hold of steps, each its part.

    Args:
        url: what it is called.
        places: roots with the files of some ranks each, those to be read first in front.
        rest: what is asked only where a file is damaged, or away, at all of them.
    """

    def __init__(
        self, url: str, places: Sequence[Readable], *, rest: Sequence[Readable] = ()
    ) -> None:
        self.url, self._places, self._rest = url, list(places), list(rest)
        self._away: set[Readable] = set()
        self._saves: dict[int, str] | None = None
        self._whole: dict[Copy, _Whole] = {}
        self._spare: dict[Copy, list[tuple[Readable, Part]]] = {}

    def steps(self) -> dict[int, str]:
        """As `Far.steps`.

        Raises:
            Away: a place does not answer, and with what it has there may be a newer one.
        """
        there: dict[Copy, set[int]] = {}
        count: dict[Copy, int] = {}
        made: dict[Copy, tuple[int, float]] = {}
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
                    when = min((row.rank for row in one.ranks), default=0), one.created_unix_s
                    made[copy] = min(when, made.get(copy, when))
        whole = [copy for copy, ranks in there.items() if len(ranks) == count[copy]]
        newest = max([copy.step for copy in there], default=-1)
        if away and newest > max([copy.step for copy in whole], default=-2):
            raise away[0]
        # Of two saves the one made last counts, by the clock of the first rank: the same at all nodes.
        whole.sort(key=lambda copy: (copy.step, made[copy][1], copy.attempt))
        return {copy.step: copy.attempt for copy in whole}

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
        done = 0
        for block in self.read_blocks(copy, name, offset, len(buffer)):
            buffer[done : done + len(block)] = block
            done += len(block)

    def read_blocks(self, copy: Copy, name: str, offset: int, nbytes: int) -> Iterator[memoryview]:
        """As `Far.read_blocks`: where a place does not give it, the next one goes on."""
        done = 0
        failed: Exception | None = None
        for place in self._in_turn(copy, name):
            try:
                for block in place.read_blocks(copy, name, offset + done, nbytes - done):
                    done += len(block)
                    yield block
                return
            except (Away, CorruptCheckpoint) as exc:
                self._away.add(place)
                failed = failed or exc
        raise failed or Away(f"{self.url}: no node has {name} of step {copy.step}", step=copy.step)

    def places(self, copy: Copy, name: str) -> Iterator[Readable]:
        """As `Readable.places`."""
        return self._in_turn(copy, name)

    def close(self) -> None:
        """See `Readable`."""
        for place in (*self._places, *self._rest):
            place.close()

    # -- inside ----------------------------------------------------------------------------------

    def _in_turn(self, copy: Copy, name: str) -> Iterator[Readable]:
        """The places that have a file, those last that have failed to give one; then the rest."""
        owners = self._put_together(copy).owners.get(name, ())
        yield from sorted(owners, key=lambda place: place in self._away)
        if copy not in self._spare:
            self._spare[copy] = list(self._parts(copy, self._rest))
        for place, part in self._spare[copy]:
            if place not in owners and part.has(name):
                yield place

    def _put_together(self, copy: Copy) -> _Whole:
        if copy not in self._whole:
            self._whole[copy] = self._read(copy)
        return self._whole[copy]

    def _read(self, copy: Copy) -> _Whole:
        manifest: Manifest | None = None
        ranks: dict[int, RankManifest] = {}
        owners: dict[str, list[Readable]] = {}
        sizes: dict[str, int] = {}
        for place, part in self._enough(copy, ranks):
            path = Path(place.url) / copy.target
            found = Manifest.decode(part.raw, path=path)
            rows = {row.rank: row for row in (*found.ranks, *(manifest.ranks if manifest else ()))}
            manifest = replace(found, ranks=tuple([rows[rank] for rank in sorted(rows)]))
            for row in found.ranks:
                one = RankManifest.decode(part.ranks[row.file], path=path / row.file)
                if ranks.setdefault(row.rank, one) != one:
                    continue
                here = {row.file: row.nbytes} | {entry.name: entry.nbytes for entry in one.files}
                sizes |= here
                for name in here:
                    owners.setdefault(name, []).append(place)
        if manifest is None or len(ranks) < manifest.world_size:
            raise Away(f"{self.url}: not all of step {copy.step} is there any more", step=copy.step)
        whole = part_of(manifest, [ranks[rank] for rank in sorted(ranks)])
        return _Whole(whole.encode(), owners, sizes)

    def _enough(self, copy: Copy, ranks: Collection[int]) -> Iterator[tuple[Readable, Part]]:
        """What the places have, and what the rest has if ranks are missing then."""
        world_size = -1
        for place, part in self._parts(copy, self._places):
            world_size = Manifest.decode(part.raw, path=Path(place.url)).world_size
            yield place, part
        if len(ranks) != world_size:
            yield from self._parts(copy, self._rest)

    def _parts(self, copy: Copy, places: Sequence[Readable]) -> Iterator[tuple[Readable, Part]]:
        """What each place has of a save; where it is damaged or away another may have the same."""
        for place in places:
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
