"""Further levels: can steps be kept there, how fast do they get there, and what does their agent say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ckpt_core.cli.doctor.finding import Finding, note, ok, problem, warning
from ckpt_core.cli.listing_levels import further_levels
from ckpt_core.errors import CkptError, ConfigError
from ckpt_core.levels import check_extra, open_far, upload_speed
from ckpt_core.options import PARITY, Level, scheme_of
from ckpt_core.units import size_text

_CHECK = "level"


def check_levels(root: Path | None, given: Sequence[str]) -> list[Finding]:
    """The levels of a root's plan, and those that are given. Leaves nothing there."""
    further, found = None, list[Finding]()
    try:
        further = None if root is None else further_levels(root)
    except OSError as exc:
        text = f"which levels {root} has cannot be told: {exc.strerror}"
        found.append(problem(_CHECK, text, "check its owner and its permissions"))
    urls = [] if further is None else [level.url for level in further.levels]
    for text in given:
        try:
            urls.append(Level(text).url)
        except ConfigError as exc:
            found.append(problem(_CHECK, str(exc), "correct it"))
    urls = [url for url in dict.fromkeys(urls) if scheme_of(url) != PARITY]
    for url in urls:
        found += check_level(url)
    for level in () if further is None else further.levels:
        if level.problem is not None:
            text = f"the agent cannot go on with {level.url}: {level.problem}"
            found.append(warning(_CHECK, text, "committed steps are safe in the root meanwhile"))
    if root is not None:
        found += _same_disk(root, urls)
    return found


def check_level(url: str) -> Iterator[Finding]:
    """One level, as a Checkpointer would have it; a problem comes alone."""
    is_store = scheme_of(url) is not None
    try:
        if is_store:
            check_extra(url)
        with open_far(url) as far:
            far.check()
        speed = upload_speed(url)
    except ConfigError as exc:
        yield problem(_CHECK, str(exc), "a Checkpointer with this level is refused")
        return
    except CkptError as exc:
        yield problem(_CHECK, f"it cannot be told now: {exc}", "steps would stay in the root")
        return
    can = "reachable, writable, its conditions hold" if is_store else "writable"
    yield ok(_CHECK, f"{url}: {can}; takes {size_text(int(speed))} for each second")
    if scheme_of(url) in ("s3", "gs"):
        # Azure forgets such parts by itself.
        text = f"{url}: a send that is killed leaves parts of files, which no list shows and which cost"
        text += (
            "; the next agent goes on with them, or aborts them, where it can ask for credentials"
        )
        advice = "a lifecycle rule that aborts incomplete multipart uploads does it always"
        yield note(_CHECK, text, advice)


def _same_disk(root: Path, urls: Sequence[str]) -> Iterator[Finding]:
    here = _device(root)
    for url in urls:
        if scheme_of(url) is None and here is not None and _device(Path(url)) == here:
            text = f"{url} is on the filesystem of {root}"
            yield warning(_CHECK, text, "what loses the one loses the other: name another disk")


def _device(path: Path) -> int | None:
    for place in (path, *path.parents):
        if place.exists():
            return place.stat().st_dev
    return None
