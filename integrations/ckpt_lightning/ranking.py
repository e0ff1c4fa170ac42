"""Which steps are best by a monitored metric: those are pinned, so that retention leaves them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt_core import ConfigError


@dataclass(frozen=True)
class Change:
    """What a scored save does to the ranking once it is committed.

    Attributes:
        pin: steps that stay from then on.
        unpin: step -> score of those that give way.
        unpin_away: likewise of those that are not in the root.
    """

    pin: tuple[int, ...] = ()
    unpin: Mapping[int, float] = field(default_factory=dict)
    unpin_away: Mapping[int, float] = field(default_factory=dict)


@dataclass
class Ranking:
    """The best steps, each with its score. Used by the training thread alone.

    Attributes:
        monitor: name of the metric; None ranks nothing.
        mode: "min" or "max".
        top_k: how many are kept; -1 keeps all.
        kept: step -> score of those that are kept, saves under way included.
        away: likewise those that are not in the root, which may be a new one, and may be at a further level.
            They rank no more, and are unpinned there once `top_k` better ones are kept.
    """

    monitor: str | None = None
    mode: str = "min"
    top_k: int = 1
    kept: dict[int, float] = field(default_factory=dict)
    away: dict[int, float] = field(default_factory=dict)
    current: float | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise ConfigError(f"mode={self.mode!r} is unknown: use 'min' or 'max'")
        if self.monitor is not None and not isinstance(self.monitor, str):
            raise ConfigError(f"monitor={self.monitor!r} must be the name of a logged metric")
        given: object = self.top_k
        if isinstance(given, bool) or not isinstance(given, int) or given < -1:
            raise ConfigError(f"save_top_k={given!r} must be an int of at least -1")
        if self.monitor is None and given != 1:
            newest = "None" if given == -1 else str(max(given, 1))
            raise ConfigError(
                f"save_top_k={given!r} without monitor: there is nothing to rank by. Pass monitor=, the name "
                f"of a logged metric; or keep the newest steps with options=Options(keep_last={newest})"
            )

    @property
    def best(self) -> int | None:
        """The best step that is kept."""
        return min(self.kept, key=lambda step: self._order(self.kept[step]), default=None)

    @property
    def worst(self) -> int | None:
        """The worst step that is kept: the next to go."""
        return max(self.kept, key=lambda step: self._order(self.kept[step]), default=None)

    def score(self, metrics: Mapping[str, Any]) -> float | None:
        """The monitored value among these metrics; None when it is not there."""
        value = metrics.get(self.monitor) if self.monitor is not None else None
        if value is None:
            return None
        self.current = float(value)
        return self.current

    def would_keep(self, score: float) -> bool:
        """Whether a step of this score would be among the best."""
        if self.top_k in (-1, 0) or len(self.kept) < self.top_k:
            return self.top_k != 0
        worst = self.worst
        assert worst is not None
        return self._order(score) < self._order(self.kept[worst])

    def enter(self, step: int, score: float) -> Change:
        """A save of `step` starts with this score; returns what to do when it is committed."""
        before = dict(self.kept)
        self.kept[step] = score
        self._drop_worst()
        gone = {other: value for other, value in before.items() if other not in self.kept}
        self.away.pop(step, None)
        gone_away = {
            other: value for other, value in self.away.items() if not self.would_keep(value)
        }
        for other in gone_away:
            del self.away[other]
        return Change((step,) if step in self.kept else (), gone, gone_away)

    def undo(self, step: int, change: Change) -> None:
        """The save of `step` failed: whoever gave way to it is back."""
        self.kept.pop(step, None)
        self.kept.update(change.unpin)
        self.away.update(change.unpin_away)
        self._drop_worst()

    def restore(self, kept: Mapping[int, float], *, existing: Collection[int]) -> tuple[int, ...]:
        """Take over a ranking of an earlier process; returns the steps that must be unpinned."""
        self.kept = {step: score for step, score in kept.items() if step in existing}
        self.away = {step: score for step, score in kept.items() if step not in existing}
        return self._drop_worst()

    def _drop_worst(self) -> tuple[int, ...]:
        gone = []
        while self.top_k != -1 and len(self.kept) > self.top_k:
            worst = self.worst
            assert worst is not None
            gone.append(worst)
            del self.kept[worst]
        return tuple(gone)

    def _order(self, score: float) -> float:
        if math.isnan(score):
            return math.inf
        return score if self.mode == "min" else -score
