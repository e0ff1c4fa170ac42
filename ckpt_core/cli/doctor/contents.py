"""What a root holds: steps, or the tags of DeepSpeed; and who has it open."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckpt_core.cli.doctor.finding import Finding, note, ok, warning
from ckpt_core.cli.listing import Listing, size_cell, sum_text, survey
from ckpt_core.cli.text import age_text
from ckpt_core.layout import MANIFEST_NAME
from ckpt_core.restore import committed_directories
from ckpt_core.units import count_text

LATEST = "latest"
_LATEST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Contents:
    """What was found.

    Attributes:
        listing: as `ls` shows it.
        tags: directories of files that are whole, newest first.
        pointed: what `latest` names; None without such a file.
        newest_bytes: size of the newest step or tag; None if there is none, or it is not known.
    """

    listing: Listing
    tags: tuple[str, ...]
    pointed: str | None
    newest_bytes: int | None

    @property
    def root(self) -> Path:
        """Its directory."""
        return Path(self.listing.root)

    @property
    def recycled_bytes(self) -> int:
        """Blocks that the next save takes over."""
        return self.listing.slots["file_bytes"]


def contents_of(root: Path) -> Contents:
    """Look at a root, without a lock.

    Raises:
        CkptError: it is no root, or cannot be listed.
    """
    listing, tags = survey(root), committed_directories(root)
    sizes = [step.file_bytes for step in listing.steps[-1:]]
    sizes += [_tree_bytes(root / tag) for tag in tags[:1]]
    known = [size for size in sizes if size is not None]
    newest_bytes = max(known) if known and known == sizes else None
    return Contents(listing, tags, _pointed(root), newest_bytes)


def check_contents(contents: Contents) -> list[Finding]:
    """Who is there, what the next start would begin with, and what lies about."""
    return [*_writer(contents.listing), *_newest(contents), *_aside(contents.listing)]


def _writer(listing: Listing) -> Iterator[Finding]:
    if listing.writer is None:
        return
    writer = listing.writer
    text = (
        f"pid {writer['pid']} on {writer.get('host', 'another host')} has the root open for writing"
    )
    if "since" in writer:
        text += f", since {writer['since']}"
    yield note("in use", text, "until it ends, another job is refused")


def _newest(contents: Contents) -> Iterator[Finding]:
    steps = contents.listing.steps
    if steps:
        newest = steps[-1]
        size = size_cell(newest.file_bytes)
        text = f"step {newest.step} of {count_text(len(steps), 'committed step')}, {size}"
        if newest.problem is not None:
            advice = "restore passes it over; see `ckpt-core verify`"
            yield warning("newest", f"{text}: {newest.problem}", advice)
        else:
            yield ok("newest", f"{text}{_age(newest.created_unix_s)}")
    if contents.tags or contents.pointed is not None:
        yield _tag(contents)
    if not steps and not contents.tags and contents.pointed is None:
        yield ok("newest", "no committed step: training starts from the beginning")


def _tag(contents: Contents) -> Finding:
    tag, tags = contents.pointed, contents.tags
    if tag is None:
        text = f"{count_text(len(tags), 'tag')}, and no file 'latest'"
        return note("newest", text, f"load_checkpoint() takes {tags[0]}, with a warning")
    folder = contents.root / tag
    if tag in tags:
        return ok(
            "newest", f"tag {tag}, named by 'latest', of {count_text(len(tags), 'whole tag')}"
        )
    if not folder.is_dir():
        text = f"'latest' names {tag}, which is not there"
        return warning("newest", text, "write the name of a whole tag into it")
    if not (folder / MANIFEST_NAME).exists():
        text = f"tag {tag}, named by 'latest', was saved by DeepSpeed's own engine"
        advice = "it loads, unverified; see that the job names and imports ckpt_deepspeed"
        return warning("newest", text, advice)
    text = f"tag {tag}, named by 'latest', lacks files or has some of another size"
    instead = f"load_checkpoint() takes {tags[0]}" if tags else "no other tag is whole"
    return warning("newest", text, f"{instead}; see `ckpt-core verify {folder}`")


def _aside(listing: Listing) -> Iterator[Finding]:
    if listing.in_flight and listing.writer is None:
        size = sum_text(row.file_bytes for row in listing.in_flight)
        text = f"{count_text(len(listing.in_flight), 'save')} without a commit ({size})"
        yield note("left over", text, "the next start clears it")
    if listing.pinned_only is None:
        text = f"this user may not read {listing.root}/.pins: which steps are pinned is not known"
        yield warning("pins", text, "let this user read it: its jobs could retire nothing here")
    if listing.corrupt:
        size = sum_text(row.file_bytes for row in listing.corrupt)
        text = f"{count_text(len(listing.corrupt), 'corrupt step')} moved aside by restore ({size})"
        yield warning("left over", text, "look why, then delete .corrupt")


def _age(created_unix_s: float | None) -> str:
    return "" if created_unix_s is None else f", {age_text(time.time() - created_unix_s)}"


def _pointed(root: Path) -> str | None:
    try:
        # A named pipe would block there.
        if not (root / LATEST).is_file():
            return None
        with (root / LATEST).open("rb") as file:
            name = file.read(_LATEST_BYTES).decode(errors="replace").strip()
    except OSError:
        return None
    return name if name and "/" not in name and "\0" not in name else None


def _tree_bytes(folder: Path) -> int:
    size = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # a job may be at work
                size += os.lstat(os.path.join(path, name)).st_size
    return size
