"""`ls`: the steps of a root, and what else takes space there. Neither locks nor writes."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ckpt_core.cli.listing_levels import Further, further_levels, told
from ckpt_core.cli.listing_losses import Losses, losses_of
from ckpt_core.cli.places import seen
from ckpt_core.cli.ranking import Score, scores
from ckpt_core.cli.same_files import added_bytes, bytes_below, files_below, readable_entries
from ckpt_core.cli.text import age_text, ranks_text, say, say_json, say_rich, table
from ckpt_core.errors import CkptError, ConfigError, NotCommitted
from ckpt_core.layout import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, is_directory_name
from ckpt_core.restore import Watch
from ckpt_core.store import (
    CORRUPT,
    INFLIGHT,
    SLOTS,
    committed_steps,
    is_real_dir,
    listing,
    pins_told,
    roots_in,
    step_path,
    writer_of,
)
from ckpt_core.system.files import Files
from ckpt_core.types import parse_step_dir
from ckpt_core.units import count_text, size_text

if TYPE_CHECKING:
    from ckpt_core.cli.requests import ListRequest

_Row = TypeVar("_Row")
_MOST_TRIES = 5
PINS_NOT_KNOWN = "which steps are pinned is not known: this user may not read .pins"
_ELSEWHERE = "at levels alone"
_WRONG = ("corrupt", "unreadable")
_COMMITTED = ("committed", "unreadable")


@dataclass(frozen=True)
class StepRow:
    """A committed step; what its manifest says is None when that cannot be read, see `problem`.

    A size is None where this user may not look at all files, here and below; `pinned` where it may not read
    the pins.
    `ranks` saved it together; the files of `ranks_here` are in this root. `score` is what it is kept for.
    `added_bytes` are those of files that no older step has as well.
    """

    step: int
    path: str
    file_bytes: int | None
    newest: bool
    pinned: bool | None
    attempt: str | None = None
    created_unix_s: float | None = None
    state_bytes: int | None = None
    ranks: int | None = None
    ranks_here: tuple[int, ...] | None = None
    problem: str | None = None
    score: Score | None = None
    added_bytes: int | None = 0


@dataclass(frozen=True)
class DirectoryRow:
    """A directory of files that was committed; it is no step.

    `added_bytes` are those of files that no step and no directory that was made before it has as well.
    """

    name: str
    step: int
    path: str
    file_bytes: int | None
    created_unix_s: float
    added_bytes: int | None = 0


@dataclass(frozen=True)
class OtherRow:
    """A directory that is no committed step: begun and not committed, or moved aside as corrupt."""

    name: str
    step: int | None
    path: str
    file_bytes: int | None
    modified_unix_s: float


@dataclass(frozen=True)
class Listing:
    """Everything that `ls` shows."""

    root: str
    writer: dict[str, Any] | None
    steps: tuple[StepRow, ...]
    directories: tuple[DirectoryRow, ...]
    in_flight: tuple[OtherRow, ...]
    corrupt: tuple[OtherRow, ...]
    slots: dict[str, int]
    pinned_only: tuple[int, ...] | None
    file_bytes: int
    further: Further | None
    roots_below: dict[str, int] = field(default_factory=dict)


def list_steps(request: ListRequest) -> bool:
    """Print the listing of a root; always a success.

    Raises:
        NotCommitted: there is no such directory.
        ConfigError: it is one step, not a root.
        RestoreError: it cannot be listed, or the store cannot be reached.
    """
    found = survey_of(request.root)
    losses = losses_of(Path(found.root), ask=request.ask) if found.further is not None else None
    if losses is not None and found.further is not None:
        found = replace(found, further=losses.corrected(found.further))
    if request.json:
        say_json({**asdict(found), **({} if losses is None else losses.to_json(found.steps))})
    else:
        _print(found, losses)
    return True


def survey_of(place: str) -> Listing:
    """What is in a root that a person named, a directory or a URL; as `survey`."""
    with seen(place) as there:
        there.directories()
        there.outline()
        there.pins()
        return survey(there.path)


def survey(root: Path) -> Listing:
    """What is in a root, as of now, but for what can be lost; raises as `list_steps`."""
    if (
        parse_step_dir(os.path.basename(os.path.realpath(root))) is not None
        and (root / MANIFEST_NAME).exists()
    ):
        raise ConfigError(f"{root} is one step, not a root: `ckpt-core show {root}` shows it")
    if not root.exists():
        raise NotCommitted(f"{root}: there is no such directory", path=root)
    steps = committed_steps(root)
    pinned = pins_told(root)
    found = [_step_row(root, step, newest=step == steps[-1], pins=pinned) for step in steps]
    # What is kept for its metric is pinned, so a root without pins costs nothing here.
    kept = scores(step_path(root, steps[-1])) if steps and pinned != frozenset() else {}
    there = [row for row in found if row is not None]
    named = _directories(root)
    folders = [*(step_path(root, row.step) for row in there), *(root / row.name for row in named)]
    added = iter(added_bytes(folders))
    rows = [replace(row, score=kept.get(row.step), added_bytes=next(added)) for row in there]
    directories = [replace(row, added_bytes=next(added)) for row in named]
    in_flight, corrupt = tuple(_others(root / INFLIGHT)), tuple(_others(root / CORRUPT))
    slots = [file.st_size for file in files_below(root / SLOTS) or ()]
    sizes = [*[row.added_bytes for row in rows], *[row.added_bytes for row in directories]]
    sizes += [other.file_bytes for other in (*in_flight, *corrupt)]
    total = sum(slots) + sum(size or 0 for size in sizes)
    return Listing(
        root=str(root),
        writer=writer_of(root),
        steps=tuple(rows),
        directories=tuple(directories),
        in_flight=in_flight,
        corrupt=corrupt,
        slots={"files": len(slots), "file_bytes": sum(slots)},
        pinned_only=None if pinned is None else tuple(sorted(pinned - set(committed_steps(root)))),
        file_bytes=total,
        further=further_levels(root),
        roots_below={} if steps else {str(path): new for path, new in roots_in(root).items()},
    )


def _step_row(
    root: Path, step: int, *, newest: bool, pins: frozenset[int] | None
) -> StepRow | None:
    """What is said of a step; None if a writer has retired it meanwhile."""
    path = step_path(root, step)

    def look() -> StepRow:
        pinned = None if pins is None else step in pins
        row = StepRow(step, str(path), bytes_below(path), newest=newest, pinned=pinned)
        return _with_manifest(row, path)

    return _steadily(path, look)


def _directories(root: Path) -> list[DirectoryRow]:
    """The directories of files, oldest first; what has no manifest that says so is somebody else's."""
    with listing(root):
        paths = [root / name for name in filter(is_directory_name, os.listdir(root))]
    likely = [path for path in paths if is_real_dir(path) and os.path.exists(path / MANIFEST_NAME)]
    found = [_steadily(path, partial(_directory_row, path)) for path in likely]
    rows = [row for row in found if row is not None]
    return sorted(rows, key=lambda row: (row.created_unix_s, row.step, row.name))


def _directory_row(path: Path) -> DirectoryRow | None:
    with suppress(CkptError, OSError):
        manifest = _manifest(path / MANIFEST_NAME)
        if manifest.directory is not None:
            size, made_unix_s = bytes_below(path), manifest.created_unix_s
            return DirectoryRow(path.name, manifest.step, str(path), size, made_unix_s)
    return None


def _steadily(path: Path, look: Callable[[], _Row]) -> _Row | None:
    """What is seen of a directory that is one and the same meanwhile; None if it has gone."""
    for _ in range(_MOST_TRIES):
        with Watch(path) as watch:
            row = look()
            if watch.stood_still():
                return row
        # Retired, or replaced: then there is another one to look at.
    return row if path.is_dir() else None


def _with_manifest(row: StepRow, path: Path) -> StepRow:
    try:
        manifest = _manifest(path / MANIFEST_NAME)
    except CkptError as exc:
        return replace(row, problem=str(exc))
    except OSError as exc:
        return replace(row, problem=f"{path / MANIFEST_NAME}: {exc.strerror}")
    return replace(
        row,
        attempt=manifest.attempt,
        created_unix_s=manifest.created_unix_s,
        state_bytes=manifest.state_bytes,
        ranks=manifest.world_size,
        ranks_here=tuple(entry.rank for entry in manifest.ranks),
    )


def _manifest(path: Path) -> Manifest:
    # Before opening: a named pipe would block there.
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError(errno.EINVAL, "no regular file")
    fd = Files().open_read(path)
    with open(fd, "rb") as file:
        # One byte more than is allowed, so that it is refused: a read takes as much memory as it may get.
        most = min(os.fstat(fd).st_size, MAX_MANIFEST_BYTES) + 1
        return Manifest.decode(file.read(most), path=path)


def _others(folder: Path) -> Iterator[OtherRow]:
    for entry in readable_entries(folder):
        files = files_below(Path(entry.path))
        with suppress(FileNotFoundError):
            mine = entry.stat(follow_symlinks=False)
            modified = max(about.st_mtime for about in (mine, *(files or ())))
            name = entry.name.removeprefix("step-")
            yield OtherRow(
                name=entry.name,
                step=parse_step_dir(f"step-{name.partition('-')[0]}"),
                path=entry.path,
                file_bytes=None if files is None else sum(file.st_size for file in files),
                modified_unix_s=modified,
            )


# -- for people --------------------------------------------------------------------------------


def _print(found: Listing, losses: Losses | None) -> None:
    now = time.time()
    rows = [_cells(row, now) for row in found.steps]
    further = found.further
    if further is not None:
        here = {row.step for row in found.steps}
        rows += [[str(step), "", "", "", _ELSEWHERE] for step in further.elsewhere(here)]
        rows.sort(key=lambda row: int(row[0]))
    begun = "in flight" if found.writer else "left over"
    for others, state in ((found.in_flight, begun), (found.corrupt, "corrupt, moved aside")):
        rows += [_other_cells(other, state, now) for other in others]
    headings = ["step", "age", "size", "ranks", "state"]
    if further is not None:
        headings.insert(4, "levels")
        attempts = {row.step: row.attempt for row in found.steps}
        for cells in rows:
            step = int(cells[0]) if cells[0].isdecimal() else None
            cells.insert(4, "" if step is None else further.cell(step, attempts.get(step)))
    if losses is not None:
        headings.insert(5, "can be lost")
        texts = {str(row.step): losses.text(row) for row in found.steps}
        for cells in rows:
            cells.insert(5, texts.get(cells[0], "") if cells[5].startswith(_COMMITTED) else "")
    if any(row.added_bytes != row.file_bytes for row in found.steps):
        headings.insert(3, "adds")
        adds = {str(row.step): size_cell(row.added_bytes) for row in found.steps}
        for cells in rows:
            cells.insert(3, adds.get(cells[0], "") if cells[-1].startswith(_COMMITTED) else "")
    if rows:
        say_rich(table(headings, rows, right=("step", "size", "adds", "ranks"), wrong=_WRONG))
    for row in found.steps:
        if row.problem is not None:
            say(f"step {row.step}: {row.problem}")
    for line in [] if further is None else told(further):
        say(line)
    for line in [] if losses is None else losses.told(found.steps):
        say(line)
    if found.roots_below:
        below = [[root, str(newest)] for root, newest in found.roots_below.items()]
        say_rich(table(["root below", "newest step"], below, right=("newest step",)))
    say(_summary(found))


def size_cell(nbytes: int | None) -> str:
    """A size in a table; `?` where it is not known."""
    return "?" if nbytes is None else size_text(nbytes)


def sum_text(sizes: Iterable[int | None]) -> str:
    """Sizes together: `at least` what is known of them."""
    given = list(sizes)
    text = size_text(sum(size or 0 for size in given))
    return f"at least {text}" if None in given else text


def total_text(found: Listing) -> str:
    """The size of all that is in a root."""
    sizes = [
        *[row.file_bytes for row in found.steps],
        *[row.file_bytes for row in found.directories],
    ]
    sizes += [row.file_bytes for row in (*found.in_flight, *found.corrupt)]
    return sum_text([found.file_bytes, *[size for size in sizes if size is None]])


def state_texts(row: StepRow) -> list[str]:
    """What is said of a step: committed, pinned, its score, newest."""
    states = ["committed" if row.problem is None else "unreadable"]
    states += ["pinned"] if row.pinned else []
    states += [] if row.score is None else _score_texts(row.score)
    return [*states, *(["newest"] if row.newest else [])]


def _cells(row: StepRow, now: float) -> list[str]:
    age = "" if row.created_unix_s is None else age_text(now - row.created_unix_s)
    ranks = _ranks_cell(row)
    return [str(row.step), age, size_cell(row.file_bytes), ranks, ", ".join(state_texts(row))]


def _score_texts(score: Score) -> list[str]:
    return [f"{score.metric} {score.value:.6g}", *(["best"] if score.best else [])]


def _ranks_cell(row: StepRow) -> str:
    if row.ranks is None or row.ranks_here is None:
        return ""
    if len(row.ranks_here) == row.ranks:
        return str(row.ranks)
    # The root of one node, or what is left of it: nothing here tells.
    return f"{ranks_text(row.ranks_here)} of {row.ranks}"


def _other_cells(other: OtherRow, state: str, now: float) -> list[str]:
    step = "?" if other.step is None else str(other.step)
    return [step, age_text(now - other.modified_unix_s), size_cell(other.file_bytes), "", state]


def _summary(found: Listing) -> str:
    if not found.steps:
        text = f"{found.root} holds no committed step"
        if found.roots_below:
            text += f"; {count_text(len(found.roots_below), 'root')} right below it"
    else:
        text = f"{count_text(len(found.steps), 'committed step')}, {total_text(found)} in all"
    if found.directories:
        size = sum_text(row.added_bytes for row in found.directories)
        text += f"; {count_text(len(found.directories), 'directory of files')} ({size})"
    if found.slots["files"]:
        slots = count_text(found.slots["files"], "recycled file")
        text += f"; {slots} ({size_text(found.slots['file_bytes'])}) for the next saves"
    if found.pinned_only:
        text += f"; pinned and not there: {', '.join(map(str, found.pinned_only))}"
    if found.pinned_only is None:
        text += f"; {PINS_NOT_KNOWN}"
    if found.writer is not None:
        host = found.writer.get("host", "another host")
        text += f"; open for writing by pid {found.writer['pid'] or 'unknown'} on {host}"
    return text
