"""`pull`: one step of another place becomes a step of a root."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ckpt_core.cli.places import directory_of
from ckpt_core.cli.pushing import check_meant, name_of
from ckpt_core.cli.text import note, say, say_json
from ckpt_core.errors import ConfigError
from ckpt_core.levels import Pulled, pull
from ckpt_core.observe import progress_bar
from ckpt_core.options import Level
from ckpt_core.types import parse_step_dir
from ckpt_core.units import size_text

if TYPE_CHECKING:
    from ckpt_core.cli.requests import PullRequest


def pull_save(request: PullRequest) -> bool:
    """Bring it and say so; always a success. Raises as `pull`."""
    if not request.to:
        raise ConfigError("say which root is to hold it: --to ROOT")
    check_meant(request.step)
    root = directory_of(request.to, command="ckpt-core pull --to")
    url, name = _meant(request)
    with progress_bar(shown=not request.no_progress, tell=note) as show:
        label = f"{name or 'newest step'} of {url}"
        done = pull(url, name, root, replace=request.force, progress=partial(show, label))
    if request.json:
        sizes = {"nbytes": done.nbytes, "resumed_bytes": done.resumed_bytes}
        names = {"step": done.copy.step, "directory": done.copy.directory}
        save = {**names, "attempt": done.copy.attempt, "path": str(done.path)}
        say_json({"url": url, "root": str(root), **save, **sizes, "already": done.already})
    else:
        say(_told(done, url))
    return True


def _meant(request: PullRequest) -> tuple[str, str | None]:
    """The root elsewhere, and what is meant there; the URL may name a step."""
    url = Level(request.url).url
    place, _, name = url.rpartition("/")
    step = parse_step_dir(name)
    if step is None:
        return url, request.step
    if request.step is not None:
        raise ConfigError(f"{url} is one step already: leave STEP out, or name the root, {place}")
    return place, str(step)


def _told(done: Pulled, url: str) -> str:
    if done.already:
        return f"{name_of(done.copy)} is there already: {done.path}"
    text = f"{name_of(done.copy)} is {done.path}: {size_text(done.nbytes)} from {url}, verified"
    if done.resumed_bytes:
        text += f"; of these {size_text(done.resumed_bytes)} were here"
    return text
