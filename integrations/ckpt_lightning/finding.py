"""Which step of a root is the newest, and which the best: the root says so, in any process, without a fit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ckpt_core
from ckpt_core import CkptError, ConfigError, committed_steps, step_path
from ckpt_lightning.ranking import Ranking

STATE_KEY = "ckpt_lightning.AsyncCheckpoint"
"""Name of the callback's state among those of all callbacks."""


def latest(root: str | os.PathLike[str]) -> str | None:
    """The newest committed step directory of a root; None when there is none (yet)."""
    steps = committed_steps(place := Path(root).expanduser())
    return str(step_path(place, steps[-1])) if steps else None


def best(root: str | os.PathLike[str], *, monitor: str | None = None) -> str | None:
    """The best committed step directory of a root; None when there is none (yet).

    What is best is noted in each step as it is saved; the newest one that can be read is asked. A run without
    a monitor has no best but its newest step. Nothing is read but that note.

    Args:
        monitor: the metric that must have been monitored; None: whichever was.

    Raises:
        ConfigError: another metric was monitored.
        CkptError: there are steps, and none can be read.
    """
    place = Path(root).expanduser()
    steps, error = committed_steps(place), None
    for step in reversed(steps):
        try:
            noted = _noted(step_path(place, step))
        except CkptError as exc:
            error = error or exc
            continue
        found = _best_of(noted, steps, monitor, place)
        return None if found is None else str(step_path(place, found))
    if error is not None:
        raise error
    return None


def _best_of(
    noted: Mapping[str, Any], steps: tuple[int, ...], monitor: str | None, root: Path
) -> int | None:
    if monitor is not None and noted["monitor"] != monitor:
        raise ConfigError(
            f"monitor={monitor!r}: the run in {root} monitored {noted['monitor']!r}, so it has no best step "
            f"by that. Leave monitor= out, or correct it"
        )
    if noted["monitor"] is None:
        return steps[-1]
    ranking = Ranking(noted["monitor"], noted["mode"], top_k=-1)
    ranking.restore(noted["kept"], existing=steps)
    return ranking.best


def _noted(path: Path) -> Mapping[str, Any]:
    """The ranking that a step was saved with; one without any, if it was saved without the callback."""
    try:
        callbacks = ckpt_core.load(path, only=[f"callbacks.{STATE_KEY}"])["callbacks"]
    except ConfigError:  # a subclass may have another name
        callbacks = _all_callbacks(path)
    for state in callbacks.values():
        if isinstance(state, Mapping) and {"monitor", "mode", "kept"} <= set(state):
            return state
    return {"monitor": None}


def _all_callbacks(path: Path) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = ckpt_core.load(path, only=["callbacks"])["callbacks"]
    except ConfigError:  # not saved by Lightning, or without callbacks
        return {}
    return found
