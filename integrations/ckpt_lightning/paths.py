"""What Lightning and its loggers ask a checkpoint callback, under the names that ModelCheckpoint gave it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ckpt_core import step_path
from ckpt_lightning import finding
from ckpt_lightning.by_deepspeed import tag_path
from ckpt_lightning.ranking import Ranking

_OF_A_FIT = ("_recorder", "_counter", "_front", "_resumed")
"""Attributes that belong to the fit that runs: a copy of the callback takes no part in it."""


class Paths:
    """Part of `AsyncCheckpoint`: which steps are there, and which are best."""

    root: Path
    knows_root: bool
    _ranking: Ranking
    _last_step: int | None
    _told_best: str = ""
    _as_tags: bool = False

    @staticmethod
    def latest(root: str | os.PathLike[str]) -> str | None:
        """The newest committed step directory of a root, for `ckpt_path=`; None when there is none."""
        return finding.latest(root)

    @staticmethod
    def best(root: str | os.PathLike[str]) -> str | None:
        """The best committed step directory of a root, by whatever metric its run monitors.

        Without one, the newest; None when there is none (yet). Reads a note in the newest step; needs no fit.
        """
        return finding.best(root)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and for other processes, of which none saves to the root that is open here."""
        return {**self.__dict__, **dict.fromkeys(_OF_A_FIT)}

    def _path_of(self, step: int) -> Path:
        return (tag_path if self._as_tags else step_path)(self.root, step)

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
        """Directory of the best step, for `ckpt_path="best"`: without a monitor the newest; "" for none.

        Before the first fit of a process, what the root says of the runs before.
        """
        best = self._last_step if self._ranking.monitor is None else self._ranking.best
        if best is not None:
            return str(self._path_of(best))
        if self.knows_root or self._told_best:
            return self._told_best
        return finding.best(self.root, monitor=self._ranking.monitor) or ""

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
        if self._last_step is not None:
            return str(self._path_of(self._last_step))
        return "" if self.knows_root else finding.latest(self.root) or ""

    @property
    def best_k_models(self) -> dict[str, torch.Tensor]:
        """Directory and score of each step that is kept for its score."""
        kept = self._ranking.kept
        return {str(self._path_of(step)): torch.tensor(kept[step]) for step in sorted(kept)}

    @property
    def kth_best_model_path(self) -> str:
        """Directory of the step that gives way to the next better one; "" for none."""
        worst = self._ranking.worst
        return "" if worst is None else str(self._path_of(worst))
