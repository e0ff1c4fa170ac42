"""A save that fails costs that step alone."""

from __future__ import annotations

import errno
import functools
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from ckpt_core import Checkpointer, committed_steps, step_path
from ckpt_core.store.pins import pinned_steps
from ckpt_transformers import AsyncCheckpoint, CheckpointWarning, doors
from tests.crash.layers import hooked
from tests.crash.promises import QuickFiles
from tests.integrations.transformers.jobs import SMALL, DiesAt, trainer_of

BEST: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "metric_for_best_model": "score",
    "load_best_model_at_end": True,
    "save_total_limit": 1,
}


class Disk(TrainerCallback):
    """Fails the first write of the save of step 4, once step `heard_at` is being saved.

    All other saves are settled before training goes on.
    """

    def __init__(self, heard_at: int) -> None:
        self._heard_at = heard_at
        self._armed, self._struck = threading.Event(), threading.Event()
        self._go_on = threading.Event()
        self.trainer: Any = None

    def __call__(self, name: str, args: tuple[Any, ...], act: Callable[[], Any]) -> Any:
        if self._armed.is_set():
            first = not self._struck.is_set()
            self._struck.set()
            assert self._go_on.wait(60)
            if first:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return act()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            self._armed.set()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            assert self._struck.wait(60)
        if state.global_step == self._heard_at:
            self._go_on.set()
        if self._go_on.is_set() or not self._armed.is_set():
            self.trainer.checkpointer().wait()


def _train(
    folder: Path,
    scores: dict[int, float],
    heard_at: int,
    monkeypatch: pytest.MonkeyPatch,
    *callbacks: TrainerCallback,
    **more: Any,
) -> list[str]:
    """A run whose steps have these scores: what it has said."""
    disk = Disk(heard_at)
    files = hooked(QuickFiles, disk, names=("pwrite", "write_mapped"))
    monkeypatch.setattr(doors, "Checkpointer", functools.partial(Checkpointer, files=files))
    saver = AsyncCheckpoint(folder / "ckpts", options=SMALL)
    more = {"max_steps": max(scores)} | BEST | more
    trainer: Any = trainer_of(folder, disk, *callbacks, saver=saver, **more)
    trainer.compute_metrics = lambda _: {"score": scores[trainer.state.global_step]}
    trainer.checkpointer = lambda: saver._doors.run.checkpointer  # type: ignore[union-attr]
    disk.trainer = trainer
    with pytest.warns(CheckpointWarning) as told, suppress(KeyboardInterrupt):
        trainer.train()
    assert any("the save of step 4 failed" in str(one.message) for one in told)
    return [str(one.message) for one in told]


@pytest.mark.parametrize("heard_at", [4, 6])
def test_the_best_step_stays_when_the_save_of_a_better_one_fails(
    heard_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = {2: 0.5, 4: 0.9, 6: 0.1, 8: 0.2}
    told = _train(tmp_path, scores, heard_at, monkeypatch)
    assert committed_steps(tmp_path / "ckpts") == (2, 8)
    assert any("step, 4, was not saved" in text and "Step 2 is kept" in text for text in told)


@pytest.mark.parametrize("heard_at", [4, 6])
def test_it_gives_way_to_the_next_one_that_is_better_and_is_saved(
    heard_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = {2: 0.5, 4: 0.8, 6: 0.9, 8: 0.2, 10: 0.2}
    _train(tmp_path, scores, heard_at, monkeypatch)
    assert committed_steps(tmp_path / "ckpts") == (6, 10)
    assert pinned_steps(tmp_path / "ckpts") == {6}


@pytest.mark.parametrize("loaded", [True, False])
def test_trainer_ends_beside_a_directory_of_its_own_when_the_best_step_was_not_saved(
    loaded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out" / "checkpoint-1").mkdir(parents=True)
    scores = {2: 0.5, 4: 0.9, 6: 0.1, 8: 0.2}
    _train(tmp_path, scores, 4, monkeypatch, load_best_model_at_end=loaded)
    assert committed_steps(tmp_path / "ckpts") == (2, 8)


@pytest.mark.parametrize("heard_at", [4, 6])
def test_that_the_best_step_was_not_saved_is_told_behind_a_restart_too(
    heard_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = {2: 0.5, 4: 0.9, 6: 0.1, 8: 0.2}
    _train(tmp_path, scores, heard_at, monkeypatch, DiesAt(7))
    assert committed_steps(tmp_path / "ckpts") == (2, 6)
    trainer: Any = trainer_of(tmp_path, max_steps=8, **BEST)
    trainer.compute_metrics = lambda _: {"score": scores[trainer.state.global_step]}
    with pytest.warns(CheckpointWarning, match=r"step, 4, was not saved.*Step 2 is kept"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.best_model_checkpoint == str(step_path(tmp_path / "ckpts", 2))
