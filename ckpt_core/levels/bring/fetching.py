"""One copy from a level into a directory here: large ranges in parallel, every byte verified on its way.

    fetch(far, wanted, progress, files=files)    shard files durable, then rank manifests, manifest.json last

Idea: a range is some consecutive checksum chunks of one file, hashed and written block by block as it comes,
so that each byte is in the processor's cache for both. Memory is bounded whatever the state, and wrong bytes
never reach a name that counts: the directory becomes a step only when all sums were found right.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import xxhash

from ckpt_core.errors import CkptError, CorruptCheckpoint, NotCommitted, PersistError
from ckpt_core.layout import MANIFEST_NAME, FileEntry, Manifest, RankEntry, RankManifest
from ckpt_core.levels.bring.landing import Arriving, Landing, Run, Wrong, make_folders, runs_of
from ckpt_core.levels.bring.subsets import chosen_rows, lacks, part_of
from ckpt_core.levels.errands import Progress
from ckpt_core.levels.far.door import Away, Copy, Readable
from ckpt_core.system.files import Files, advice
from ckpt_core.system.threads import own_lock
from ckpt_core.units import size_text

logger = logging.getLogger("ckpt_core")

RANGE_BYTES = 16 * 1024 * 1024
"""Most bytes of one request; a checksum chunk that is longer takes several."""
STREAMS = 4
"""Requests under way at a time."""
PATIENCE_S = 60.0
"""How long a level may fail at everything before it is given up."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_TELL_S = 0.1

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is fetched, and where to.

    Attributes:
        copy: the save.
        directory: an empty directory, which is not a step yet.
        ranks: those of the root that it is for, if theirs may be enough; (): all are wanted;
            for a directory of files nobody asks.
        world_size: how many ranks will read it together.
        patience_s: see `PATIENCE_S`.
    """

    copy: Copy
    directory: Path
    ranks: tuple[int, ...]
    world_size: int
    patience_s: float = PATIENCE_S


def fetch(far: Readable, wanted: Wanted, progress: Progress, *, files: Files) -> int:
    """Bring a copy, or what the ranks of one root need of it; the bytes of its shard files.

    Args:
        progress: called a few times a second, by one thread at a time; what it raises ends the call.

    Raises:
        CorruptCheckpoint: what lies at the level is not what was saved; names the object.
        NotCommitted: that save is not there (any more), or only a part of it that is not enough.
        UnknownFormat: a newer release wrote it.
        Away: the level did not answer for as long as patience lasts.
        PersistError: the directory cannot be written to; the disk is full, for example.
    """
    return _Fetching(far, wanted, progress, files).run()


class _Fetching:
    def __init__(self, far: Readable, wanted: Wanted, progress: Progress, files: Files) -> None:
        self._far, self._wanted, self._files = far, wanted, files
        self._progress = progress
        self._lock = own_lock()
        self._heard = time.monotonic()
        self._told = 0.0
        self._error: BaseException | None = None
        self._done = self._total = 0
        self._raw = b""
        self._there: dict[str, int] = {}

    def run(self) -> int:
        manifest = self._manifest()
        self._there = self._patiently(lambda: self._far.files(self._wanted.copy))
        rows, ranks, raws = self._ranks(manifest)
        entries = [entry for rank in ranks for entry in rank.files]
        for entry in entries:
            self._check_length(entry)
        self._total = sum(entry.nbytes for entry in entries)
        self._check_space()
        with self._writing(self._wanted.directory):
            make_folders(self._wanted.directory, entries, files=self._files)
        self._shard_files(entries)
        # Order matters: a directory with a manifest is whole.
        for row in rows:
            self._write(row.file, raws[row.rank])
        own = self._raw if len(rows) == len(manifest.ranks) else part_of(manifest, ranks).encode()
        self._write(MANIFEST_NAME, own)
        return self._total

    # -- manifests -------------------------------------------------------------------------------

    def _manifest(self) -> Manifest:
        copy = self._wanted.copy
        raw = self._patiently(lambda: self._far.manifest(copy.target))
        if raw is None:
            raise self._gone()
        manifest = Manifest.decode(raw, path=self._place(MANIFEST_NAME))
        if (manifest.attempt, manifest.directory) != (copy.attempt, copy.directory):
            raise self._gone()
        self._raw = raw
        if lacks(manifest, self._wanted.ranks, self._wanted.world_size):
            ranks = ", ".join(str(row.rank) for row in manifest.ranks)
            text = f"{self._far.url} holds only what ranks {ranks} wrote of step {copy.step}"
            raise NotCommitted(text, step=copy.step)
        return manifest

    def _ranks(
        self, manifest: Manifest
    ) -> tuple[list[RankEntry], list[RankManifest], dict[int, bytes]]:
        """The rank manifests that are wanted: rows, what they say, and their bytes."""
        raws: dict[int, bytes] = {}
        found: dict[int, RankManifest] = {}

        def read(rows: Collection[RankEntry]) -> list[RankManifest]:
            for row in rows:
                if row.rank not in raws:
                    raws[row.rank] = self._small(row)
                    path = self._place(row.file)
                    found[row.rank] = RankManifest.decode(raws[row.rank], path=path)
                    is_named = found[row.rank].version > 2
                    if found[row.rank].rank != row.rank or is_named != (manifest.version > 2):
                        raise self._wrong(row.file, f"rank {row.rank}", "another one")
            return [found[row.rank] for row in rows]

        wanted = self._wanted
        rows = chosen_rows(manifest, wanted.ranks, wanted.world_size, read, place=self._place(""))
        return rows, read(rows), raws

    def _small(self, row: RankEntry) -> bytes:
        self._check_length(FileEntry(row.file, row.nbytes, ()))
        data = bytearray(row.nbytes)
        for last in (False, True):
            self._read(row.file, memoryview(data), 0)
            got = xxhash.xxh3_64_hexdigest(data)
            if got == row.xxh3:
                return bytes(data)
            if last:
                raise self._wrong(row.file, f"xxh3 {row.xxh3}", f"xxh3 {got}")
        raise AssertionError

    def _check_length(self, entry: FileEntry) -> None:
        """Tell a file that is missing or cut from a level that is away."""
        size = self._there.get(entry.name)
        if size == entry.nbytes or (size is None and self._has_end(entry.name, entry.nbytes)):
            return
        self._be_sure_it_is_there()
        got = "nothing of that name" if size is None else f"{size} bytes"
        raise self._wrong(entry.name, f"{entry.nbytes} bytes", got)

    def _has_end(self, name: str, nbytes: int) -> bool:
        """Whether a file is there that a list lacks: lists of object stores may lag behind."""
        try:
            self._far.read_into(self._wanted.copy, name, memoryview(bytearray(1)), nbytes - 1)
        except Away:
            return False
        return True

    def _check_space(self) -> None:
        directory = self._wanted.directory
        try:
            free = self._files.free_bytes(directory)
        except OSError as exc:
            raise self._cannot_write(directory, exc) from exc
        if free < self._total:
            raise PersistError(
                f"{directory.parent.parent} has {size_text(free)} free and bringing step "
                f"{self._wanted.copy.step} from {self._far.url} needs {size_text(self._total)}. Nothing was "
                "changed; free some space, keep fewer steps (keep_last), or use another root",
                step=self._wanted.copy.step,
                path=directory,
            )

    # -- shard files -----------------------------------------------------------------------------

    def _shard_files(self, entries: list[FileEntry]) -> None:
        landings = [Landing(self._wanted.directory, one, files=self._files) for one in entries]
        runs = iter([(one, run) for one in landings for run in runs_of(one.entry, RANGE_BYTES)])
        count = min(STREAMS, sum(len(one.entry.chunks) for one in landings))
        threads = [
            threading.Thread(target=self._work, args=(runs,), name=f"ckpt-bring-{n}", daemon=True)
            for n in range(count)
        ]
        self._tell()
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self._raise_if_failed()
            for one in landings:
                with self._writing(one.path):
                    one.settle()
        except RuntimeError as exc:  # no more threads are to be had
            self._fail(exc)
            raise self._cannot_write(self._wanted.directory, exc) from exc
        finally:
            for one in landings:
                one.close()

    def _work(self, runs: Iterator[tuple[Landing, Run]]) -> None:
        try:
            while self._error is None:
                with self._lock:
                    task = next(runs, None)
                if task is None:
                    return
                self._fetch_run(*task)
        except BaseException as exc:
            self._fail(exc)

    def _fetch_run(self, landing: Landing, run: Run) -> None:
        for wrong in self._stream(self._far, landing, run):
            self._fetch_again(landing, wrong)
        with self._writing(landing.path):
            landing.has_got(run)
        self._count(run.nbytes)

    def _fetch_again(self, landing: Landing, wrong: Wrong) -> None:
        """A chunk that is not what was saved: it may have happened on the way, or at one place of several."""
        again = Run(wrong.offset, wrong.chunk.nbytes, (wrong.chunk,))
        name = landing.entry.name
        failed: CkptError | None = None
        for place in self._far.places(self._wanted.copy, name):
            try:
                found = self._stream(place, landing, again)
            except Away as exc:
                failed = failed or exc
                continue
            if not found:
                return
            failed = self._bad_chunk(name, found[0])
        raise failed or self._bad_chunk(name, wrong)

    def _stream(self, far: Readable, landing: Landing, run: Run) -> list[Wrong]:
        """Write a run as it comes; its chunks that are not what was saved."""
        come = Arriving(run)

        def read_on() -> None:
            # Where it stopped, if it did: what has come was hashed, and lies in its place.
            first = run.offset + come.done
            nbytes = min(RANGE_BYTES, run.nbytes - come.done)
            for block in far.read_blocks(self._wanted.copy, landing.entry.name, first, nbytes):
                with self._writing(landing.path):
                    landing.write(block, run.offset + come.done)
                come.take(block)
                self._heard = time.monotonic()
                self._tell()
                self._raise_if_failed()

        while come.done < run.nbytes:
            self._patiently(read_on)
        return come.wrong

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
        self._tell()

    def _tell(self) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._told >= _TELL_S:
                self._told = now
                self._progress(self._done, self._total)

    def _write(self, name: str, data: bytes) -> None:
        path = self._wanted.directory / name
        with self._writing(path):
            self._files.write_new(path, data)

    # -- errors ----------------------------------------------------------------------------------

    def _read(self, name: str, buffer: memoryview, offset: int) -> None:
        copy = self._wanted.copy
        self._patiently(lambda: self._far.read_into(copy, name, buffer, offset))

    def _patiently(self, ask: Callable[[], _Result]) -> _Result:
        """What a level answers; asked again while it is away, unless it has long been silent."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                answer = ask()
            except Away as exc:
                self._be_sure_it_is_there()
                silent_s = time.monotonic() - self._heard
                if exc.hopeless or self._error is not None or silent_s > self._wanted.patience_s:
                    raise
                logger.debug("%s: %s; trying again", self._far.url, exc)
                time.sleep(pause_s * random.SystemRandom().uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                self._tell()
            else:
                self._heard = time.monotonic()
                return answer

    def _be_sure_it_is_there(self) -> None:
        """Tell a level that has retired or replaced the step meanwhile from one that is away."""
        if not self._raw:
            return
        try:
            now = self._far.manifest(self._wanted.copy.target)
        except Away:
            return
        if now != self._raw:
            raise self._gone()

    def _gone(self) -> NotCommitted:
        copy = self._wanted.copy
        return NotCommitted(
            f"step {copy.step} (saved as {copy.attempt}) is not at {self._far.url} any more: it was retired "
            "or replaced there",
            step=copy.step,
        )

    def _bad_chunk(self, name: str, wrong: Wrong) -> CorruptCheckpoint:
        end = wrong.offset + wrong.chunk.nbytes
        where = f"xxh3 {wrong.chunk.xxh3} in bytes {wrong.offset} to {end}"
        return self._wrong(name, where, f"xxh3 {wrong.got}")

    def _wrong(self, name: str, expected: str, got: str) -> CorruptCheckpoint:
        step = self._wanted.copy.step
        text = f"{name} of step {step} at {self._far.url}: expected {expected}, got {got}"
        path = self._place(name)
        return CorruptCheckpoint(text, path=path, expected=expected, got=got, step=step)

    def _place(self, name: str) -> Path:
        return Path(self._far.url) / self._wanted.copy.target / name

    def _writing(self, path: Path) -> _Writing:
        return _Writing(self, path)

    def _cannot_write(self, path: Path, exc: BaseException) -> PersistError:
        reason = getattr(exc, "strerror", None) or exc
        return PersistError(
            f"step {self._wanted.copy.step} cannot be brought from {self._far.url}: cannot write {path}: "
            f"{reason}. Committed steps are safe. {advice(exc)}",
            step=self._wanted.copy.step,
            path=path,
        )

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error


class _Writing:
    """Where an OSError of this side becomes an error of ours."""

    def __init__(self, fetching: _Fetching, path: Path) -> None:
        self._fetching, self._path = fetching, path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise self._fetching._cannot_write(self._path, error) from error
