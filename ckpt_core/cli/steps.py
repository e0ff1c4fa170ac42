"""From what a person typed to a step that is open for reading."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt_core.errors import ConfigError, CorruptCheckpoint, NotCommitted
from ckpt_core.files import Files
from ckpt_core.restore import StepManifest, read_manifests
from ckpt_core.store import resolve, step_path
from ckpt_core.types import parse_step_dir


def find_step(path: Path, step: int | None) -> Path:
    """The directory of the step that is meant.

    Raises:
        NotCommitted: there is none; the text says what is there.
        ConfigError: `--step` together with one step's directory.
    """
    if step is None:
        return resolve(path)
    if parse_step_dir(path.name) is not None:
        raise ConfigError(f"{path} is one step already: leave --step out, or name the root")
    return resolve(step_path(path, step))


@contextmanager
def opened(path: Path, step: int | None = None) -> Iterator[StepManifest]:
    """Manifests of a step whose files are read in the body.

    A reader holds no lock, so a writer may retire the step meanwhile and overwrite its files.

    Raises:
        NotCommitted: there is no such step, or it was retired while the body read it.
        CorruptCheckpoint, UnknownFormat, RestoreError: as `read_manifests`.
    """
    directory = find_step(path, step)
    before = _identity(directory)
    try:
        yield read_manifests(directory, files=Files())
    except (CorruptCheckpoint, FileNotFoundError) as exc:
        if _identity(directory) == before:
            raise
        raise _retired(directory) from exc
    if _identity(directory) != before:
        raise _retired(directory)


def file_bytes(step: StepManifest) -> int:
    """Size of all shard files."""
    return sum(entry.nbytes for _, _, entry in step.files())


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _retired(path: Path) -> NotCommitted:
    text = f"{path} was retired or replaced while it was read: pin it first (`ckpt-core pin`)"
    return NotCommitted(text, step=parse_step_dir(path.name), path=path)
