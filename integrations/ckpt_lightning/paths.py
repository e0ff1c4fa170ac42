"""What Lightning and its loggers ask a checkpoint callback, under the names that ModelCheckpoint gave it."""

from __future__ import annotations

from pathlib import Path

import torch

from ckpt_core import step_path
from ckpt_lightning.ranking import Ranking


class Paths:
    """Part of `AsyncCheckpoint`: which steps are there, and which are best."""

    root: Path
    _ranking: Ranking
    _last_step: int | None
    _told_best: str = ""

    @property
    def monitor(self) -> str | None:
        """Name of the monitored metric."""
        return self._ranking.monitor

    @property
    def mode(self) -> str:
        """ "min" or "max"."""
        return self._ranking.mode

    @property
    def save_top_k(self) -> int:
        """How many of the best are kept."""
        return self._ranking.top_k

    @property
    def dirpath(self) -> str:
        """The root."""
        return str(self.root)

    @property
    def best_model_path(self) -> str:
        """Directory of the best step, for `ckpt_path="best"`: without a monitor the newest; "" for none."""
        best = self._last_step if self._ranking.monitor is None else self._ranking.best
        return self._told_best if best is None else str(step_path(self.root, best))

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        """Where processes are spawned (ddp_spawn), Lightning tells the first one what they have found."""
        self._told_best = path

    @property
    def best_model_score(self) -> torch.Tensor | None:
        """The monitored value of the best step."""
        best = self._ranking.best
        return None if best is None else torch.tensor(self._ranking.kept[best])

    @property
    def current_score(self) -> torch.Tensor | None:
        """The newest monitored value."""
        current = self._ranking.current
        return None if current is None else torch.tensor(current)

    @property
    def last_model_path(self) -> str:
        """Directory of the newest committed step; "" for none."""
        return "" if self._last_step is None else str(step_path(self.root, self._last_step))

    @property
    def best_k_models(self) -> dict[str, torch.Tensor]:
        """Directory and score of each step that is kept for its score."""
        kept = self._ranking.kept
        return {str(step_path(self.root, step)): torch.tensor(kept[step]) for step in sorted(kept)}

    @property
    def kth_best_model_path(self) -> str:
        """Directory of the step that gives way to the next better one; "" for none."""
        worst = self._ranking.worst
        return "" if worst is None else str(step_path(self.root, worst))
