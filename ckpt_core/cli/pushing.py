"""`push`: one save of a root to another place, now."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_core.cli.places import directory_of
from ckpt_core.cli.text import note, say, say_json
from ckpt_core.errors import ConfigError
from ckpt_core.levels import Copy, Pushed, Sent, push
from ckpt_core.observe import progress_bar
from ckpt_core.options import Level
from ckpt_core.store import resolve, step_path
from ckpt_core.units import size_text

if TYPE_CHECKING:
    from ckpt_core.cli.requests import PushRequest


def push_save(request: PushRequest) -> bool:
    """Send it and say what came of it; False when it is not whole there. Raises as `push`."""
    if not request.to:
        raise ConfigError("say where to: --to s3://bucket/run, or --to DIRECTORY")
    check_meant(request.step)
    root = directory_of(request.root, command="ckpt-core push")
    level = Level(request.to, bandwidth=request.bandwidth)
    path = _path(root, request.step)
    with progress_bar(shown=not request.no_progress, tell=note) as show:
        tell = partial(show, f"{path.name} to {level.url}")
        done = push(path, level, replace=request.force, progress=tell)
    if request.json:
        copy = {"step": done.copy.step, "directory": done.copy.directory}
        answer = {**copy, "attempt": done.copy.attempt, "nbytes": done.nbytes}
        whole = {"reached": done.sent is Sent.REACHED, "already": done.already}
        say_json({"root": str(root), "to": level.url, **answer, **whole})
    else:
        say(_told(done, level.url))
    return done.sent is Sent.REACHED


def name_of(copy: Copy) -> str:
    """A save, in words."""
    return f"step {copy.step}" if copy.directory is None else copy.directory


def check_meant(name: str | None) -> None:
    """Raises ConfigError where STEP is empty, as an unset variable of a shell is: not the newest is meant."""
    if name == "":
        raise ConfigError("STEP is empty: leave it out for the newest step")


def _path(root: Path, name: str | None) -> Path:
    if name is None:
        return resolve(root)
    return resolve(step_path(root, int(name)) if name.isdecimal() else root / name)


def _told(done: Pushed, url: str) -> str:
    name = name_of(done.copy)
    if done.already:
        return f"{name} is at {url} already, whole"
    if done.sent is Sent.REACHED:
        return f"{name} is at {url}: {size_text(done.nbytes)}, verified"
    if done.sent is Sent.WAITS:
        return f"{name}: what this node holds is at {url}; it is a step there once the other nodes' parts are"
    if done.sent is Sent.RETIRED:
        return f"{name} is not at {url}: it was removed there, or retired. Save it anew to have it there"
    return f"{name} is not at {url}: another save of it was faster"
