"""A root that is named by its URL: can steps be kept there, and which are there."""

from __future__ import annotations

from collections.abc import Iterator

from ckpt_core.cli.doctor.contents import LATEST, Contents, check_contents
from ckpt_core.cli.doctor.finding import Finding, Level, note, problem
from ckpt_core.cli.doctor.levels import check_level
from ckpt_core.cli.listing import survey
from ckpt_core.errors import CkptError
from ckpt_core.levels import look_at
from ckpt_core.types import parse_step_dir

_CHECK = "root"


def check_far_root(url: str) -> list[Finding]:
    """What a level is checked for, and what the place holds. Leaves nothing there."""
    root, _, name = url.rpartition("/")
    if parse_step_dir(name) is not None:
        return [problem(_CHECK, f"{url} is one step, not a root", f"name the root, {root}")]
    found = list(check_level(url))
    if any(one.level is Level.PROBLEM for one in found):
        return found
    text = f"{url} is a further level of a run, whose first root is a directory"
    advice = f"Checkpointer(DIRECTORY, levels=[Level({url!r})])"
    return [note(_CHECK, text, advice), *found, *_held(url)]


def _held(url: str) -> Iterator[Finding]:
    try:
        with look_at(url) as look:
            look.outline()
            tags = sorted(look.far.directories().values(), key=lambda tag: tag.step, reverse=True)
            names = tuple([tag.target for tag in tags])
            pointed = look.far.pointers().get(LATEST) if names else None
            yield from check_contents(Contents(survey(look.path), names, pointed, None))
    except CkptError as exc:
        yield problem(_CHECK, f"what {url} holds cannot be told: {exc}", "a restore would say so")
