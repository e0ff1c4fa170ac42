"""From what a person typed to a step that is open for reading."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ckpt_core.cli.places import seen
from ckpt_core.cli.text import ranks_text
from ckpt_core.errors import ConfigError, RestoreError
from ckpt_core.layout import RankManifest
from ckpt_core.restore import LeafReader, Retired, StepManifest, Watch, read_manifests
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
def opened(place: str, step: int | None = None) -> Iterator[LeafReader]:
    """Manifests and leaves of a step whose files are read in the body.

    A reader holds no lock, so a writer may retire the step meanwhile.

    Raises:
        ConfigError: `place` is a URL with an unknown scheme, or without the extra that it needs.
        NotCommitted: there is no such step, or it was retired or replaced while the body read it.
        CorruptCheckpoint, UnknownFormat, RestoreError: as `read_manifests`.
    """
    with seen(place) as there:
        directory = there.ready(find_step(there.path, step))
        with _watched(directory):
            manifests = read_manifests(directory, files=there.files)
            with LeafReader(manifests, files=there.files) as reader:
                yield reader
        there.check()


@contextmanager
def _watched(directory: Path) -> Iterator[None]:
    with Watch(directory) as watch:
        try:
            yield
        except (RestoreError, FileNotFoundError) as exc:
            if watch.stood_still():
                raise
            raise Retired(directory) from exc
        if not watch.still_there():
            raise Retired(directory)


def rank_of(step: StepManifest, number: int | None) -> RankManifest:
    """What one rank wrote; None means the first one that is there.

    Raises:
        ConfigError: this rank's files are not there; the text says whose are.
    """
    if number is None:
        return step.ranks[0]
    for rank in step.ranks:
        if rank.rank == number:
            return rank
    there = held_text([rank.rank for rank in step.ranks], step.manifest.world_size)
    raise ConfigError(f"--rank {number}: {step.path} has no such rank; it holds {there}")


def held_text(ranks: Sequence[int], world_size: int) -> str:
    """Which ranks' files are there, in words: `ranks 0-3`, or `ranks 0-1 of 4` in a node's root."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    of = f" of {world_size}" if len(ranks) < world_size else ""
    return f"{noun} {ranks_text(ranks)}{of}"


def elsewhere_text(ranks: Sequence[int], world_size: int) -> str:
    """The ranks whose files are not there: `ranks 2-3`."""
    here = set(ranks)
    others = [rank for rank in range(world_size) if rank not in here]
    return held_text(others, len(others))


def file_bytes(step: StepManifest) -> int:
    """Size of all shard files."""
    return sum(entry.nbytes for _, _, entry in step.files())
