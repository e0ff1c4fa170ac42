"""Read what a step consists of. Torch-free; nothing is allocated by a size that the disk does not confirm."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ckpt_core.errors import CorruptCheckpoint, NotCommitted, RestoreError
from ckpt_core.layout import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    FileEntry,
    Manifest,
    RankEntry,
    RankManifest,
    itemsize,
    parents_of,
    rank_manifest_name,
)
from ckpt_core.restore.failures import ReadRefused, check_means
from ckpt_core.store import home_of
from ckpt_core.system.files import Files
from ckpt_core.types import parse_step_dir
from ckpt_core.units import count_text


@dataclass(frozen=True)
class StepManifest:
    """A step as its manifests describe it.

    Attributes:
        path: the directory of its files.
        manifest: the step, and what belongs to it.
        ranks: what each rank wrote, in rank order.
    """

    path: Path
    manifest: Manifest
    ranks: tuple[RankManifest, ...]

    def files(self) -> Iterator[tuple[RankManifest, int, FileEntry]]:
        """Every shard file with the rank that wrote it and its index there."""
        for rank in self.ranks:
            for index, entry in enumerate(rank.files):
                yield rank, index, entry


def read_manifests(step_dir: Path, *, files: Files) -> StepManifest:
    """Manifests of a step, with the real size of every file compared to them. Takes no lock.

    Called by restore, load and verify, and by tools that list a step.

    Raises:
        CorruptCheckpoint: something is missing, no regular file, of another size, or malformed.
        UnknownFormat: written by a newer format.
        NotCommitted: there is no such directory (any more).
        RestoreError: the system refused to read; the OSError is its cause. Or it is no step but a directory
            of files.
    """
    step = read_json(step_dir, files=files)
    check_is_step(step)
    for problem in file_problems(step):
        raise problem
    return step


def check_is_step(step: StepManifest) -> None:
    """Be sure that there are leaves to restore.

    Raises:
        RestoreError: it is a directory of files.
    """
    if step.manifest.directory is None:
        return
    names = [entry.name for _, _, entry in step.files()]
    shown = f", such as {names[0]!r}" if names else ""
    raise RestoreError(
        f"{step.path} is no step but a directory of {count_text(len(names), 'file')} in torch's own format: "
        f"load each by its name with torch.load{shown}",
        step=step.manifest.step,
        path=step.path,
    )


def read_json(step_dir: Path, *, files: Files) -> StepManifest:
    """`read_manifests` without a look at the shard files."""
    manifest = read_manifest(step_dir, files=files)
    with _reading(step_dir):
        home = home_of(step_dir, manifest)
        if home != step_dir:
            _check_folder(home)
        ranks = tuple([_read_rank(home, entry, files=files) for entry in manifest.ranks])
    for rank in ranks:
        if rank.version != manifest.version:
            path = home / rank_manifest_name(rank.rank)
            here, there = f"version {rank.version}", f"version {manifest.version}"
            raise _corrupt(path, expected=f"{there} as in {MANIFEST_NAME}", got=here)
    return StepManifest(home, manifest, ranks)


def read_manifest(step_dir: Path, *, files: Files) -> Manifest:
    """`manifest.json` alone. Raises as `read_manifests`."""
    with _reading(step_dir):
        path = step_dir / MANIFEST_NAME
        manifest = Manifest.decode(_read_file(path, files=files), path=path)
        _check_step(step_dir, manifest)
    return manifest


def file_problems(step: StepManifest) -> Iterator[CorruptCheckpoint]:
    """What is wrong with the names, kinds and sizes of the shard files, without reading them."""
    for _, _, entry in step.files():
        problem = file_problem(step.path, entry)
        if problem is not None:
            yield problem


def file_problem(step_dir: Path, entry: FileEntry) -> CorruptCheckpoint | None:
    """Why a file of a step cannot be what its entry says; None when it can.

    Raises:
        RestoreError, NotCommitted: as `read_manifests`.
    """
    path = step_dir / entry.name
    try:
        with _reading(step_dir):
            for folder in sorted(parents_of([entry.name])):
                _check_folder(step_dir / folder)
            size = _regular_size(path)
            if size != entry.nbytes:
                raise _corrupt(path, expected=f"{entry.nbytes} bytes", got=f"{size} bytes")
    except CorruptCheckpoint as exc:
        return exc
    return None


def read_start(path: Path, nbytes: int, *, files: Files) -> bytes:
    """The first `nbytes` of a file, fewer if it ends before; the caller has checked its size."""
    fd = files.open_read(path)
    try:
        return files.first(fd, nbytes)
    finally:
        files.close(fd)


def _check_step(step_dir: Path, manifest: Manifest) -> None:
    named = parse_step_dir(step_dir.name)
    path = step_dir / MANIFEST_NAME
    if named is not None and manifest.directory is not None:
        raise _corrupt(path, expected=f"step {named}", got="a directory of files")
    if named is not None and named != manifest.step:
        raise _corrupt(path, expected=f"step {named}", got=f"step {manifest.step}")


def _read_rank(step_dir: Path, entry: RankEntry, *, files: Files) -> RankManifest:
    path = step_dir / entry.file
    data = _read_file(path, files=files)
    if len(data) != entry.nbytes:
        raise _corrupt(path, expected=f"{entry.nbytes} bytes", got=f"{len(data)} bytes")
    actual = xxhash.xxh3_64_hexdigest(data)
    if actual != entry.xxh3:
        raise _corrupt(path, expected=f"xxh3 {entry.xxh3}", got=f"xxh3 {actual}")
    manifest = RankManifest.decode(data, path=path)
    if manifest.rank != entry.rank:
        raise _corrupt(path, expected=f"rank {entry.rank}", got=f"rank {manifest.rank}")
    _check_alignment(path, manifest)
    return manifest


def _check_alignment(path: Path, manifest: RankManifest) -> None:
    # Elements are moved as whole numbers: one that straddles two reads could not be.
    entries = [(leaf.spec, leaf.offset, leaf.nbytes) for leaf in manifest.leaves]
    entries += [(entry.spec, entry.offset, entry.slice.nbytes) for entry in manifest.slices]
    for spec, offset, nbytes in entries:
        unit = itemsize(spec.dtype)
        if nbytes and offset % unit:
            what = f"leaf {spec.name[:60]!r} at a multiple of {unit}"
            raise _corrupt(path, expected=what, got=f"offset {offset}")


def _read_file(path: Path, *, files: Files) -> bytes:
    size = _regular_size(path)
    if size > MAX_MANIFEST_BYTES:
        raise _corrupt(path, expected=f"at most {MAX_MANIFEST_BYTES} bytes", got=f"{size} bytes")
    data = read_start(path, size, files=files)
    if len(data) != size:
        raise _corrupt(path, expected=f"{size} bytes", got=f"{len(data)} bytes")
    return data


def _check_folder(path: Path) -> None:
    # A link would lead out of the step.
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        raise _corrupt(path, expected="a directory", got="something else")


def _regular_size(path: Path) -> int:
    # Before opening: a named pipe would block there, and a device might do anything.
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "no regular file"
        raise _corrupt(path, expected="a regular file", got=kind)
    return found.st_size


@contextmanager
def _reading(step_dir: Path) -> Iterator[None]:
    """Where an OSError becomes an error of ours."""
    try:
        yield
    except OSError as exc:
        path = _below(step_dir, exc.filename)
        if exc.errno in (errno.ENOENT, errno.ENOTDIR) and not step_dir.is_dir():
            text = f"{step_dir} is not there: it was never committed, or has been retired"
            raise NotCommitted(text, step=parse_step_dir(step_dir.name), path=step_dir) from exc
        if exc.errno == errno.ENOENT:
            raise _corrupt(path, expected="a file", got="nothing of that name") from exc
        if exc.errno == errno.ELOOP:
            raise _corrupt(path, expected="a regular file", got="a symbolic link") from exc
        check_means(path, exc)
        raise ReadRefused(path, exc) from exc


def _below(step_dir: Path, name: object) -> Path:
    """The file that the system names, as a path of the step's own kind, which may print otherwise."""
    home = f"{os.fspath(step_dir)}/"
    if isinstance(name, str) and name.startswith(home):
        return step_dir / name[len(home) :]
    return Path(name) if isinstance(name, str) else step_dir


def _corrupt(path: Path, *, expected: str, got: str) -> CorruptCheckpoint:
    text = f"{path}: expected {expected}, got {got}"
    return CorruptCheckpoint(text, path=path, expected=expected, got=got)
