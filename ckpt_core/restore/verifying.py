"""Read every byte of a step, or of all steps, and say what is wrong. Torch-free."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt_core.errors import ConfigError, CorruptCheckpoint, RestoreError
from ckpt_core.layout import (
    LENGTH_BYTES,
    PAD_PREFIX,
    FileEntry,
    HeaderEntry,
    RankManifest,
    SliceEntry,
    header_length,
    in_header,
    itemsize,
    nbytes,
    parse_header,
)
from ckpt_core.restore.deadline import READ_TIMEOUT_S, within
from ckpt_core.restore.failures import NoMeans, Retired, check_means
from ckpt_core.restore.leaves import StepLeaves
from ckpt_core.restore.manifests import StepManifest, file_problem, read_json, read_start
from ckpt_core.restore.reading import Outcome, ParallelReader, Progress
from ckpt_core.restore.units import BadChunk, Discard, ReadJob
from ckpt_core.restore.watch import undisturbed
from ckpt_core.store import committed_steps, resolve, step_path
from ckpt_core.system.files import Files
from ckpt_core.types import parse_step_dir

SharedFile = tuple[int, int, int, FileEntry]
"""A file of this machine, when it was written, and what it should be."""

KnownFiles = dict[SharedFile, tuple[BadChunk, ...]]
"""Files that several steps have and that were read in one of them, and what is wrong with each."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What `verify` found in one step.

    Attributes:
        step: its number; None for a directory of files, and when the directory's name and manifest say none.
        path: its directory.
        bad_chunks: pieces of shard files whose bytes differ, in file order.
        problems: everything else that is wrong, one sentence each.
        unread: those of `problems` that are of this process: it has no permission to read something.
        checked_bytes: bytes of shard files that were compared with a checksum.
        unchecked_bytes: bytes that were read and have no checksum (`checksum=False` at the save).
        ranks: those whose files are here; () when the manifests cannot be read.
        world_size: how many ranks saved the step together.
        elsewhere: leaves of which this root, that of one node, holds a part or nothing.
    """

    step: int | None
    path: Path
    bad_chunks: tuple[BadChunk, ...] = ()
    problems: tuple[str, ...] = ()
    checked_bytes: int = 0
    unchecked_bytes: int = 0
    ranks: tuple[int, ...] = ()
    world_size: int = 1
    elsewhere: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with what is here."""
        return not self.bad_chunks and not self.problems

    @property
    def is_unread(self) -> bool:
        """Whether nothing is known to be wrong, since this process has no permission to read it all."""
        return not self.bad_chunks and bool(self.problems) and self.problems == self.unread

    @property
    def is_partial(self) -> bool:
        """Whether this is what one node wrote: other roots hold the files of the other ranks."""
        return 0 < len(self.ranks) < self.world_size


@dataclass(frozen=True, slots=True)
class Report:
    """What `verify` found: `steps` ascending, one for a step directory, all of them for a root."""

    path: Path
    steps: tuple[StepReport, ...]

    @property
    def ok(self) -> bool:
        """Whether every step is sound."""
        return all(step.ok for step in self.steps)

    @property
    def bad_chunks(self) -> tuple[BadChunk, ...]:
        """Those of all steps."""
        return tuple(bad for step in self.steps for bad in step.bad_chunks)

    @property
    def problems(self) -> tuple[str, ...]:
        """Those of all steps."""
        return tuple(problem for step in self.steps for problem in step.problems)

    @property
    def checked_bytes(self) -> int:
        """Bytes that were compared with a checksum."""
        return sum(step.checked_bytes for step in self.steps)

    @property
    def unchecked_bytes(self) -> int:
        """Bytes that were read and have no checksum."""
        return sum(step.unchecked_bytes for step in self.steps)


def verify(
    path: str | Path,
    *,
    readers: int = 8,
    share: tuple[int, int] = (0, 1),
    keep_cached: bool = False,
    progress: Progress | None = None,
    files: Files | None = None,
    known: KnownFiles | None = None,
) -> Report:
    """`ckpt_core.verify` of a directory: the arguments, what it returns and its errors are those.

    Args:
        files: how its files are read; also those of a stand-in (`ckpt_core.levels`).
        known: what earlier calls have found; these files are not read again.
    """
    path = Path(path) if isinstance(path, str) else path
    share = _checked_share(share)
    reader = ParallelReader(
        files=files or Files(),
        readers=readers,
        timeout_s=READ_TIMEOUT_S,
        progress=progress,
        buffered=keep_cached,
    )
    how = _How(reader, share, {} if known is None else known)
    found = resolve(path)
    if found == path:
        return Report(path, (_verify_step(path, how),))
    reports = []
    for step in committed_steps(path):
        with suppress(Retired):
            reports.append(_verify_step(step_path(path, step), how))
    return Report(path, tuple(reports))


def _checked_share(share: tuple[int, int]) -> tuple[int, int]:
    with suppress(TypeError, ValueError):
        number, count = map(operator.index, share)
        if 0 <= number < count:
            return number, count
    raise ConfigError(f"share={share!r}: give (number, count) with number in 0 .. count-1")


@dataclass(frozen=True, slots=True)
class _How:
    """How files are read, and which of them."""

    reader: ParallelReader
    share: tuple[int, int]
    known: KnownFiles


class _Faulty(Exception):
    """A report that is believed only if the step stood still meanwhile. Never leaves this module."""

    def __init__(self, report: StepReport) -> None:
        self.report = report


def _verify_step(path: Path, how: _How) -> StepReport:
    fresh: KnownFiles = {}

    def read() -> StepReport:
        fresh.clear()
        report = _look_at(path, how, fresh)
        if not report.ok:
            raise _Faulty(report)
        return report

    try:
        report = undisturbed(path, read, timeout_s=how.reader.timeout_s)
    except _Faulty as found:
        report = found.report
    # Only now: what was read of a step that was replaced meanwhile says nothing of a file.
    how.known.update(fresh)
    return report


def _look_at(path: Path, how: _How, fresh: KnownFiles) -> StepReport:
    number, reader = parse_step_dir(path.name), how.reader
    try:
        step = within(reader.timeout_s, lambda: read_json(path, files=reader.files), path=path)
    except NoMeans:
        raise  # It says nothing of the step.
    except RestoreError as exc:  # all that can be wrong with a manifest
        return _without_bytes(number, path, exc)
    try:
        return _verify_files(step, how, fresh)
    except NoMeans:
        raise
    except RestoreError as exc:  # the storage hangs
        return _without_bytes(_number(step), path, exc)


class _Unread(str):
    """A problem that says nothing of the step: this process has no permission to read it."""


def _without_bytes(number: int | None, path: Path, error: RestoreError) -> StepReport:
    problems = (str(error),)
    is_unread = isinstance(error.__cause__, PermissionError)
    return StepReport(number, path, problems=problems, unread=problems if is_unread else ())


def _refused(path: Path, error: OSError) -> str:
    check_means(path, error)
    text = f"{path}: cannot be read: {error}"
    return _Unread(text) if isinstance(error, PermissionError) else text


def _number(step: StepManifest) -> int | None:
    return step.manifest.step if step.manifest.directory is None else None


def _verify_files(step: StepManifest, how: _How, fresh: KnownFiles) -> StepReport:
    reader, (number, count) = how.reader, how.share
    problems, found = within(reader.timeout_s, lambda: _inspect(step, reader.files), path=step.path)
    known = [(job, how.known[which]) for job, which in found if which in how.known]
    found = [(job, which) for job, which in found if which not in how.known]
    jobs = _part([job for job, _ in found], number, count)
    gaps, elsewhere = _coverage(step)
    problems += gaps
    outcome = reader.run(jobs, keep_going=True)
    if count == 1:
        fresh.update(_read_whole(found, outcome))
    bad = outcome.bad + [
        replace(one, path=job.path, file=job.entry.name) for job, wrong in known for one in wrong
    ]
    for path, error in outcome.failed:
        problems.append(_refused(path, error))
    unchecked = sum(_unchecked_bytes(job.entry, job.wanted) for job in jobs)
    return StepReport(
        _number(step),
        step.path,
        tuple(sorted(bad, key=lambda one: (one.file, one.index))),
        tuple(map(str, problems)),
        checked_bytes=max(outcome.done_bytes - unchecked, 0)
        + sum(job.entry.nbytes for job, _ in known),
        unchecked_bytes=min(outcome.done_bytes, unchecked),
        ranks=tuple(rank.rank for rank in step.ranks),
        world_size=step.manifest.world_size,
        elsewhere=tuple(elsewhere),
        unread=tuple([str(text) for text in problems if isinstance(text, _Unread)]),
    )


def _read_whole(found: Sequence[tuple[ReadJob, SharedFile | None]], outcome: Outcome) -> KnownFiles:
    failed = {path for path, _ in outcome.failed}
    wrong: dict[Path, list[BadChunk]] = {}
    for bad in outcome.bad:
        wrong.setdefault(bad.path, []).append(bad)
    return {
        which: tuple(wrong.get(job.path, ()))
        for job, which in found
        if which is not None and job.path not in failed
    }


def _coverage(step: StepManifest) -> tuple[list[str], list[str]]:
    """Leaves that this step lacks bytes of, as problems; or, in the root of one node, their names."""
    try:
        leaves = StepLeaves(step)
    except CorruptCheckpoint as exc:
        return [str(exc)], []
    gaps = {name: leaves.gap(leaf) for name, leaf in leaves.shared.items()}
    lacking = {name: gap for name, gap in gaps.items() if gap is not None}
    if leaves.is_partial:
        return [], sorted(lacking)
    return [str(leaves.lacks(name, gap)) for name, gap in lacking.items()], []


def _inspect(
    step: StepManifest, files: Files
) -> tuple[list[str], list[tuple[ReadJob, SharedFile | None]]]:
    """What is wrong with files and headers, and which files can be read."""
    problems: list[str] = []
    jobs: list[tuple[ReadJob, SharedFile | None]] = []
    for rank, index, entry in step.files():
        path = step.path / entry.name
        problem = file_problem(step.path, entry)
        if problem is not None:
            problems.append(str(problem))
            continue
        if step.manifest.directory is None:
            problems += _header_problems(path, rank, index, files=files)
        jobs.append((ReadJob(path, entry, Discard()), _which(path, entry)))
    return problems, jobs


def _which(path: Path, entry: FileEntry) -> SharedFile | None:
    """What tells a file that other steps may have too; None: it is this step's alone, or has no checksums."""
    try:
        found = os.lstat(path)
    except OSError:  # that of a stand-in
        return None
    if found.st_nlink < 2 or _unchecked_bytes(entry):
        return None
    # By another name in another step, perhaps.
    return found.st_dev, found.st_ino, found.st_mtime_ns, replace(entry, name="")


def _part(jobs: list[ReadJob], number: int, count: int) -> list[ReadJob]:
    """The chunks of all files are dealt out in order, as many bytes to each."""
    if count == 1:
        return jobs
    total, at, found = sum(job.entry.nbytes for job in jobs), 0, []
    for job in jobs:
        wanted = set()
        for index, chunk in enumerate(job.entry.chunks):
            # By its middle: each chunk is in one part, and no part has more than half of one too many.
            part = (2 * at + chunk.nbytes) * count // max(2 * total, 1)
            if min(part, count - 1) == number:
                wanted.add(index)
            at += chunk.nbytes
        if wanted:
            found.append(replace(job, wanted=frozenset(wanted)))
    return found


def _unchecked_bytes(entry: FileEntry, wanted: frozenset[int] | None = None) -> int:
    return sum(
        chunk.nbytes
        for index, chunk in enumerate(entry.chunks)
        if chunk.xxh3 is None and (wanted is None or index in wanted)
    )


def _header_problems(path: Path, rank: RankManifest, index: int, *, files: Files) -> Iterator[str]:
    """Where the header of a shard file and the manifest disagree."""
    size = rank.files[index].nbytes
    try:
        length = header_length(
            read_start(path, LENGTH_BYTES, files=files), file_bytes=size, path=path
        )
        start = read_start(path, length, files=files)
        header = parse_header(start, file_bytes=size, path=path)
    except CorruptCheckpoint as exc:
        yield str(exc)
        return
    except OSError as exc:
        yield _refused(path, exc)
        return
    for name, expected in _expected(rank, index):
        yield from _entry_problems(path, name, expected, header.pop(name, None))
    for name, entry in header.items():
        if not name.startswith(PAD_PREFIX) or entry.dtype != "U8":
            yield f"{path}: the header has {name[:60]!r}, which the manifest does not know"


def _expected(rank: RankManifest, index: int) -> Iterator[tuple[str, HeaderEntry]]:
    """The header entries of one file, as the manifest has them."""
    for leaf in rank.leaves:
        if leaf.file == index:
            code, shape = in_header(leaf.spec.dtype, leaf.spec.shape)
            yield leaf.spec.name, HeaderEntry(code, shape, leaf.offset, leaf.nbytes)
    for entry in rank.slices:
        if entry.file == index:
            yield entry.spec.name, _slice_entry(entry)


def _slice_entry(entry: SliceEntry) -> HeaderEntry:
    spec, part = entry.spec, entry.slice
    # A slice that is not the whole leaf is a flat tensor.
    whole = part.nbytes == nbytes(spec)
    shape = spec.shape if whole else (part.nbytes // itemsize(spec.dtype),)
    return HeaderEntry(*in_header(spec.dtype, shape), entry.offset, part.nbytes)


def _entry_problems(
    path: Path, name: str, expected: HeaderEntry, entry: HeaderEntry | None
) -> Iterator[str]:
    if entry is None:
        yield f"{path}: the header lacks leaf {name[:60]!r}"
    # Of a leaf without elements some releases wrote the shape of a rank's part.
    elif entry != expected and (entry.nbytes or replace(entry, shape=expected.shape) != expected):
        yield f"{path}: the header says {entry} of leaf {name[:60]!r}, not {expected}"
