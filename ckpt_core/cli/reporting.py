"""`report`: one HTML page of a run, from the event files that it wrote, or of what a root alone knows."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median

from ckpt_core.anywhere import local, url_of
from ckpt_core.cli.exported import check_outside
from ckpt_core.cli.listing import (
    PINS_NOT_KNOWN,
    Listing,
    StepRow,
    size_cell,
    state_texts,
    survey_of,
    total_text,
)
from ckpt_core.cli.listing_levels import told
from ckpt_core.cli.requests import ReportRequest
from ckpt_core.cli.text import note
from ckpt_core.errors import ConfigError
from ckpt_core.report import gather, page, plain_page
from ckpt_core.system.replacing import replaced
from ckpt_core.units import count_text, size_text, time_text

_LACKS = (
    "a root says when each step was committed, not how long it took or what training waited: for that, "
    "run with Options(events_file='events.jsonl') or CKPT_CORE_EVENTS_FILE, and name that file"
)


def write_report(request: ReportRequest) -> bool:
    """Write the page; an old one of that name is replaced once it is whole.

    Raises:
        ConfigError: a path is not there, holds no events or no step, or a root is not named alone; or the
            page would be in a step.
        RestoreError: the root is in an object store, which cannot be reached.
        OSError: a file cannot be read or written.
    """
    check_outside(Path(os.path.realpath(request.out)))  # links are followed
    roots = [place for place in request.paths if url_of(place) or local(place).is_dir()]
    if roots and len(request.paths) > 1:
        raise ConfigError(f"{roots[0]} is a root: name it alone, or event files")
    text = _of_root(survey_of(roots[0])) if roots else _of_events(request)
    with replaced(request.out) as out:
        out.write_text(text, encoding="utf-8")
    note(f"{request.out} is written: open it in a browser")
    if roots:
        note(f"note: {_LACKS}")
    return True


def _of_events(request: ReportRequest) -> str:
    paths = [local(place) for place in request.paths]
    for path in paths:
        if path.exists() and request.out.exists() and path.samefile(request.out):
            raise ConfigError(f"--out {request.out} is the event file itself; name another")
    return page(gather(paths), title=_title(", ".join(path.name for path in paths)))


def _title(names: str) -> str:
    return f"Checkpoints of {names}"


def _of_root(found: Listing) -> str:
    """Steps, sizes, times and levels."""
    if not found.steps:
        raise ConfigError(
            f"{found.root} holds no committed step; an event file is a file: {_LACKS}"
        )
    headings: tuple[str, ...] = (
        "step",
        "committed",
        "after the one before",
        "files",
        "state",
        "ranks",
        "what",
    )
    rows = [_row(before, row) for before, row in pairwise((None, *found.steps)) if row is not None]
    more: list[tuple[str, list[str]]] = []
    if any(row.added_bytes != row.file_bytes for row in found.steps):
        more.append(("adds", [size_cell(row.added_bytes) for row in found.steps]))
    if found.further is not None:
        more.append(("levels", [found.further.cell(row.step, row.attempt) for row in found.steps]))
    for heading, column in more:
        headings = (*headings[:-1], heading, headings[-1])
        rows = [(*cells[:-1], one, cells[-1]) for cells, one in zip(rows, column, strict=True)]
    notes = [] if found.further is None else told(found.further)
    notes += [PINS_NOT_KNOWN] if found.pinned_only is None else []
    about = f"{found.root}, as of {_moment(time.time())}; {_LACKS}"
    return plain_page(
        _title(Path(found.root).name or found.root),
        about,
        list(_tiles(found)),
        (headings, rows),
        notes,
    )


def _tiles(found: Listing) -> Iterator[tuple[str, str]]:
    yield str(len(found.steps)), count_text(len(found.steps), "committed step").partition(" ")[2]
    yield str(found.steps[-1].step), "newest"
    yield total_text(found), "in all"
    apart = [later.step - step.step for step, later in pairwise(found.steps)]
    if apart:
        yield f"{median(apart):g}", "steps apart, of those that are there"
    kept = [row for row in found.steps if row.score is not None and row.score.best]
    if kept and kept[0].score is not None:
        yield f"{kept[0].score.value:.6g}", f"best {kept[0].score.metric}, step {kept[0].step}"
    if found.directories:
        number, _, noun = count_text(len(found.directories), "directory of files").partition(" ")
        yield number, noun
    if found.in_flight:
        yield str(len(found.in_flight)), "in flight" if found.writer else "left over"
    if found.corrupt:
        yield str(len(found.corrupt)), "corrupt, moved aside"


def _row(before: StepRow | None, row: StepRow) -> tuple[str, ...]:
    at_s = row.created_unix_s
    earlier_s = None if before is None else before.created_unix_s
    after = "" if at_s is None or earlier_s is None else time_text(max(at_s - earlier_s, 0))
    return (
        str(row.step),
        "" if at_s is None else _moment(at_s),
        after,
        size_cell(row.file_bytes),
        "" if row.state_bytes is None else size_text(row.state_bytes),
        "" if row.ranks is None else str(row.ranks),
        row.problem or ", ".join(state_texts(row)),
    )


def _moment(unix_s: float) -> str:
    # Hostile manifests may say any number.
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(max(unix_s, 0), 253402300799)))
