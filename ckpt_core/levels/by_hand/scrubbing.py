"""Every byte of some places against its sums; what is damaged is repaired from where it is whole.

    scrub([root, url, ...])      each of them is a source for the others
    places_of(root)              a root, its levels, and its copy at another node

A directory is a root: its step is replaced as a whole, brought and published as a restore does it, with the
root locked. In a store or at a peer the one file is put again under the name that only its attempt writes.
Parity is made again of the steps of its group. So a kill leaves what a kill of a restore or of an agent
leaves, and several scrubs at once do the same twice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from ckpt_core.errors import CkptError, CorruptCheckpoint, NotCommitted, RootBusy
from ckpt_core.layout import MANIFEST_NAME, ChunkSum, FileEntry, Manifest, RankEntry, RankManifest
from ckpt_core.levels.agent.pace import Pace
from ckpt_core.levels.bring.fetching import PATIENCE_S, Wanted, fetch
from ckpt_core.levels.by_hand.scrub_places import (
    KEPT,
    KeptParity,
    ScrubPlace,
    SharedPace,
    kept_for,
    places_at,
)
from ckpt_core.levels.far.door import Away, Copy
from ckpt_core.levels.mailbox import read_plan
from ckpt_core.levels.tokens import TOKEN_VARIABLE
from ckpt_core.store import Attempt, StepStore, store_by_hand
from ckpt_core.system.files import Files
from ckpt_core.types import Destination

Progress = Callable[[str, int, int], None]

_BUSY_S = 5.0
"""An agent that publishes in a directory has it locked for a moment; a trainer for its life."""
_PAUSE_S = 0.2
_ROUNDS = 3
"""A rank manifest that is put again names files that have not been looked at."""


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """One step (directory of files) of one place.

    Attributes:
        url: the place.
        copy: which save it is.
        checked_bytes: that were read and compared.
        damage: what was wrong, a sentence each; (): nothing.
        source: from where it was repaired; "": it was not.
        left: why not, if it was damaged; or why it could not be read.
        is_refused: this user has no permission to read it: whether it is sound is not known.
    """

    url: str
    copy: Copy
    checked_bytes: int = 0
    damage: tuple[str, ...] = ()
    source: str = ""
    left: str = ""
    is_refused: bool = False

    @property
    def ok(self) -> bool:
        """Whether it is whole now."""
        return not self.left and (not self.damage or bool(self.source))


def places_of(root: Path) -> list[str]:
    """A root, where its plan takes its steps, and what its node keeps of others.

    The peers' token is in the environment from now on.
    """
    plan = read_plan(root)
    if plan is not None and plan.serve is not None:
        os.environ.setdefault(TOKEN_VARIABLE, plan.serve.token_file)
    if plan is None:
        return [str(root)]
    kept = [f"{KEPT}://{root}"] if plan.serve is not None and kept_for(plan) else []
    return [str(root), *[level.url for level in plan.levels], *kept]


def scrub(
    places: Sequence[str],
    *,
    progress: Progress,
    dry_run: bool = False,
    bytes_per_s: int | None = None,
    files: Files | None = None,
) -> Iterator[Scrubbed]:
    """Read all of them, one after the other, and repair what is damaged; each step as it is done.

    Args:
        places: directories and URLs of roots, of the same run; the nearest first.
        dry_run: only read.
        bytes_per_s: most bytes that are read or sent; None: no bound.

    Raises:
        Away: once all others are read: a place cannot be listed; nothing of it was changed.
        ConfigError: a URL that is none.
    """
    files = files or Files()
    with ExitStack() as stack:
        pace = SharedPace(Pace(bytes_per_s))
        found = [place for url in places for place in places_at(url, stack, pace=pace, files=files)]
        for place in found:
            others = [one for one in found if one is not place and one.part == place.part]
            for copy in place.copies(others):
                try:
                    yield _Scrubbing(place, copy, others, progress).run(dry_run=dry_run)
                except NotCommitted:
                    continue  # retired or replaced meanwhile: that is no damage
        unlisted = [str(place.unlisted) for place in found if place.unlisted is not None]
        if unlisted:
            raise Away("; ".join(unlisted))


@dataclass
class _Looked:
    """What is wrong with a copy.

    Attributes:
        texts: a sentence each.
        ranks: names of rank manifests that are to be put again.
        files: shard files that are.
    """

    texts: list[str] = field(default_factory=list)
    ranks: list[str] = field(default_factory=list)
    files: list[FileEntry] = field(default_factory=list)
    nbytes: int = 0


class _Scrubbing:
    """One copy."""

    def __init__(
        self, place: ScrubPlace, copy: Copy, others: Sequence[ScrubPlace], progress: Progress
    ) -> None:
        self._place, self._copy = place, copy
        self._others = others
        self._progress = progress

    def run(self, *, dry_run: bool) -> Scrubbed:
        place, copy = self._place, self._copy
        try:
            looked = self._look()
        except NotCommitted:
            raise
        except CkptError as exc:
            left, is_refused = f"it could not be read: {exc}", _is_refused(exc)
            return Scrubbed(place.url, copy, left=left, is_refused=is_refused)
        found = Scrubbed(place.url, copy, looked.nbytes, tuple(looked.texts))
        if not looked.texts:
            return found
        source, left = ("", "only looked at") if dry_run else self._repair(looked)
        return Scrubbed(place.url, copy, looked.nbytes, found.damage, source, left)

    # -- reading -----------------------------------------------------------------------------------

    def _look(self) -> _Looked:
        looked, far, copy = _Looked(), self._place.far, self._copy
        manifest = self._manifest()
        if manifest is None:
            looked.texts.append(f"the manifest of {_named(copy)} cannot be read")
            return looked
        there = far.files(copy)
        total = sum(there.values())
        for row in manifest.ranks:
            data = self._rank(looked, row, there)
            if data is None:
                looked.ranks.append(row.file)
                continue
            looked.nbytes += len(data)
            for entry in RankManifest.decode(data, path=Path(row.file)).files:
                self._file(looked, entry, there, total)
        return looked

    def _manifest(self) -> Manifest | None:
        raw = self._place.far.manifest(self._copy.target)
        if raw is not None:
            manifest = Manifest.decode(raw, path=Path(self._place.url) / self._copy.target)
            if manifest.attempt == self._copy.attempt:
                return manifest
        elif (unread := self._place.unread(self._copy.target)) is not None:
            _be_ours(unread / MANIFEST_NAME)
            return None
        raise NotCommitted(f"{_named(self._copy)} was retired or replaced meanwhile")

    def _rank(self, looked: _Looked, row: RankEntry, there: dict[str, int]) -> bytes | None:
        """The bytes of a rank manifest, if they are what was saved."""
        if not _has_length(looked, row.file, row.nbytes, there):
            return None
        read = partial(self._place.far.read, self._copy, row.file, row.nbytes)
        data: bytes | None = self._guarded(looked, row.file, read)
        if data is not None and xxhash.xxh3_64_hexdigest(data) != row.xxh3:
            looked.texts.append(f"{row.file} is not what was saved")
            return None
        return data

    def _file(self, looked: _Looked, entry: FileEntry, there: dict[str, int], total: int) -> None:
        if not _has_length(looked, entry.name, entry.nbytes, there):
            looked.files.append(entry)
            return
        bad = self._guarded(looked, entry.name, lambda: self._bad_chunks(looked, entry, total))
        if bad:
            numbers = ", ".join(map(str, bad[:8])) + (", ..." if len(bad) > 8 else "")
            looked.texts.append(f"{entry.name}: chunks {numbers} are not what was saved")
        if bad is None or bad:
            looked.files.append(entry)

    def _guarded(self, looked: _Looked, name: str, read: Callable[[], Any]) -> Any:
        """What is read; None where a directory here does not give it: its disk is damaged."""
        try:
            return read()
        except Away as exc:
            self._manifest()  # retired meanwhile, if it raises
            if self._place.path is None or _is_refused(exc):
                raise
            looked.texts.append(f"{name} cannot be read: {exc}")
            return None

    def _bad_chunks(self, looked: _Looked, entry: FileEntry, total: int) -> list[int]:
        bad: list[int] = []
        offset = 0
        for number, chunk in enumerate(entry.chunks):
            # Twice: what is wrong may have happened on the way.
            if not any(self._is_right(entry, offset, chunk) for _ in range(2)):
                bad.append(number)
            offset += chunk.nbytes
            looked.nbytes += chunk.nbytes
            self._progress(f"{_named(self._copy)} of {self._place.url}", looked.nbytes, total)
        if bad:
            self._manifest()
        return bad

    def _is_right(self, entry: FileEntry, offset: int, chunk: ChunkSum) -> bool:
        found = xxhash.xxh3_64()
        for block in self._place.far.read_blocks(self._copy, entry.name, offset, chunk.nbytes):
            found.update(block)
        return chunk.xxh3 in (None, found.hexdigest())

    # -- repairing ---------------------------------------------------------------------------------

    def _repair(self, looked: _Looked) -> tuple[str, str]:
        """From where it was repaired, or why it was not."""
        if isinstance(self._place, KeptParity):
            return self._make_again(self._place)
        sources = [one for one in self._others if one.there.get(self._copy.target) == self._copy]
        away = next((one.away for one in self._others if one.away), "")
        left = [] if sources else [away or "no other place that was named holds this save"]
        for source in sources:
            try:
                if self._place.path is not None:
                    self._bring(source)
                else:
                    self._put_again(source, looked)
                self._place.there[self._copy.target] = self._copy
                return source.url, ""
            except RootBusy as exc:
                return "", f"{exc}. A restore there replaces the step by itself"
            except CkptError as exc:
                if isinstance(exc, NotCommitted):
                    self._manifest()  # retired here, or there?
                left.append(f"from {source.url}: {exc}")
        return "", "; ".join(left)

    def _make_again(self, place: KeptParity) -> tuple[str, str]:
        try:
            nodes = place.make_again(self._copy, self._tell)
        except CkptError as exc:
            if isinstance(exc, NotCommitted):
                self._manifest()
            return "", f"from the steps of the group: {exc}"
        return f"the steps of its {nodes} nodes", ""

    def _bring(self, source: ScrubPlace) -> None:
        """The whole step anew, under the lock of the root: nobody else changes it, or takes it away."""
        assert self._place.path is not None
        store = _opened(self._place.path, files=self._place.files)
        try:
            mine = self._manifest()
            given = self._manifest_of(source) if mine is None else mine
            ranks = tuple([row.rank for row in given.ranks])
            attempt = self._begin(store)
            try:
                wanted = Wanted(self._copy, attempt.path, ranks, given.world_size, PATIENCE_S)
                fetch(source.far, wanted, self._tell, files=self._place.files)
                store.publish(attempt)
            except BaseException:
                store.abandon(attempt)
                raise
        finally:
            store.close()

    def _begin(self, store: StepStore) -> Attempt:
        copy = self._copy
        if copy.directory is None:
            return store.begin(copy.step, brought=True)
        # Its pointer stays where it is.
        return store.begin(copy.step, copy.attempt, Destination(copy.directory))

    def _manifest_of(self, source: ScrubPlace) -> Manifest:
        raw = source.far.manifest(self._copy.target)
        if raw is None:
            raise NotCommitted(f"{_named(self._copy)} was retired at {source.url} meanwhile")
        return Manifest.decode(raw, path=Path(source.url) / self._copy.target)

    def _tell(self, done: int, total: int) -> None:
        self._progress(f"{_named(self._copy)} to {self._place.url}", done, total)

    def _put_again(self, source: ScrubPlace, looked: _Looked) -> None:
        """The files that are wrong, each by one atomic act; then all is looked at again."""
        for _ in range(_ROUNDS):
            for name in looked.ranks:
                size = source.far.files(self._copy).get(name, 0)
                data = source.far.read(self._copy, name, size)
                self._put(name, iter([memoryview(data)]), size)
            for entry in looked.files:
                self._put(entry.name, _verified(source, self._copy, entry), entry.nbytes)
            looked = self._look()
            if not looked.texts:
                return
        raise Away(f"{self._place.url} reads back otherwise: {'; '.join(looked.texts)}")

    def _put(self, name: str, blocks: Iterator[memoryview], nbytes: int) -> None:
        self._manifest()  # it is still there
        self._place.far.put(self._copy, name, blocks, nbytes)


def _is_refused(error: CkptError) -> bool:
    return isinstance(error.__cause__, PermissionError)


def _named(copy: Copy) -> str:
    return copy.directory or f"step {copy.step}"


def _has_length(looked: _Looked, name: str, nbytes: int, there: dict[str, int]) -> bool:
    if there.get(name) == nbytes:
        return True
    got = "is missing" if name not in there else f"has {there[name]} bytes"
    looked.texts.append(f"{name} {got}, and was saved with {nbytes}")
    return False


def _verified(source: ScrubPlace, copy: Copy, entry: FileEntry) -> Iterator[memoryview]:
    """A file of a source; the last block of each chunk comes once its sum was found right."""
    offset = 0
    for chunk in entry.chunks:
        found, done = xxhash.xxh3_64(), 0
        for block in source.far.read_blocks(copy, entry.name, offset, chunk.nbytes):
            found.update(block)
            done += len(block)
            if done == chunk.nbytes and chunk.xxh3 not in (None, found.hexdigest()):
                path = Path(source.url) / copy.target / entry.name
                text = f"{path}: expected xxh3 {chunk.xxh3}, got {found.hexdigest()}"
                raise CorruptCheckpoint(text, path=path, step=copy.step)
            yield block
        offset += chunk.nbytes


def _be_ours(path: Path) -> None:
    """Raises UnknownFormat where a newer release may read what this one cannot."""
    with suppress(OSError, CorruptCheckpoint):
        Manifest.decode(path.read_bytes(), path=path)


def _opened(root: Path, *, files: Files) -> StepStore:
    """The store of a root, locked, and repaired after a kill; somebody may have the lock for a moment."""
    deadline = time.monotonic() + _BUSY_S
    while True:
        store = store_by_hand(root, files=files)
        try:
            store.open()
            return store
        except RootBusy:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_PAUSE_S)
