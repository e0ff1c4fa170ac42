"""Which steps a run keeps for a metric: what the newest step's own state says. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckpt_core.cli.tree import Item, read_tree, walk
from ckpt_core.errors import CkptError
from ckpt_core.layout import RankManifest

_RANK = "rank-00000.json"
_MOST_BYTES = 64 * 2**20
"""Of a manifest that is read for this alone: of some hundred thousand leaves, in a second or two."""

_ORDERS = {"min": 1.0, "max": -1.0}


@dataclass(frozen=True, slots=True)
class Score:
    """What a step is kept for; `best` of all, None where the state does not say which way is better."""

    metric: str
    value: float
    best: bool | None


def scores(step: Path) -> dict[int, Score]:
    """Step -> its score, of those that the run kept when it saved this one; never raises.

    A ranking is any dict of the state with `monitor`, the name of a metric, and `kept`, step -> value;
    `mode` says "min" or "max". `ckpt_lightning.AsyncCheckpoint` keeps one.
    """
    found: dict[int, Score] = {}
    with suppress(OSError, CkptError, RecursionError):
        path = step / _RANK
        if path.is_file() and path.stat().st_size <= _MOST_BYTES:
            manifest = RankManifest.decode(path.read_bytes(), path=path)
            for item in walk(read_tree(manifest.skeleton)):
                found |= _of(item)
    return found


def _of(item: Item) -> dict[int, Score]:
    parts = {child.key: child for child in item.children}
    monitor, kept = parts.get("monitor"), parts.get("kept")
    if monitor is None or kept is None or not isinstance(monitor.value, str):
        return {}
    values = dict(_numbers(kept))
    mode = parts["mode"].value if "mode" in parts else None
    order = _ORDERS.get(mode) if isinstance(mode, str) else None
    best = min(values, key=lambda step: (order or 0) * values[step], default=None)
    return {
        step: Score(monitor.value, value, None if order is None else step == best)
        for step, value in values.items()
    }


def _numbers(kept: Item) -> Iterator[tuple[int, float]]:
    for child in kept.children:
        value = child.value
        if child.key.isdecimal() and isinstance(value, int | float) and math.isfinite(value):
            yield int(child.key), float(value)
