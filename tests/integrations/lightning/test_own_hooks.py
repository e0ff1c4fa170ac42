"""A module's own hook behind a validation comes after the callback's: the step is saved behind both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ckpt_core import committed_steps
from ckpt_lightning import CheckpointWarning
from tests.integrations.lightning import models
from tests.integrations.lightning.running import differences, ending, fit, saver

MID = {"val_check_interval": 2}
RARE: dict[str, Any] = {"every_n_epochs": 50, "save_last": False}


class Stop(Exception):
    """Ends a run, as a crash would."""


class Scored(models.SwapsForPlateau):
    """Ends in its own hook behind the validation of a step, as `how` says."""

    def __init__(self, at: int = 0, how: str = "") -> None:
        super().__init__()
        self.at, self.how = at, how

    def on_validation_model_train(self) -> None:
        super().on_validation_model_train()
        if not self.at or self.global_step != self.at:
            return
        if self.how == "fails":
            raise Stop
        self.trainer.should_stop = self.how == "stops"
        self.trainer._signal_connector.received_sigterm = self.how == "SIGTERM"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.how == "fails later" and self.global_step == self.at:
            raise Stop
        return super().training_step(batch, batch_idx)


def _run(*callbacks: Any, at: int = 0, how: str = "", **options: Any) -> dict[str, Any]:
    options = MID | options
    made = fit(
        lambda: Scored(at, how), models.train_loader, *callbacks, val=models.val_loader(), **options
    )
    return ending(*made)


@pytest.mark.parametrize("how", ["SIGTERM", "stops", "fails later"])
def test_the_score_of_a_validation_stays_with_a_step_that_waits_for_the_modules_own_hook(
    root: Path, tmp_path: Path, how: str
) -> None:
    scores = {"monitor": "val_loss", "save_top_k": -1, **RARE}
    whole = saver(tmp_path / "whole", **scores)
    undisturbed = _run(whole)
    best = {Path(path).name: score for path, score in whole.best_k_models.items()}
    steps = [int(name.removeprefix("step-")) for name in best]
    assert steps == [2, 4, 5, 7, 9, 10, 12, 14, 15]

    ended = saver(root, **scores)
    if how == "stops":
        _run(ended, at=2, how=how)
    else:
        with pytest.raises(SIGTERMException if how == "SIGTERM" else Stop):
            _run(ended, at=2, how=how)
    assert committed_steps(root) == (2,)
    assert [Path(path).name for path in ended.best_k_models] == ["step-000000000002"]
    resumed = saver(root, **scores)
    assert not differences(undisturbed, _run(resumed))
    assert {Path(path).name: score for path, score in resumed.best_k_models.items()} == best


def test_a_step_is_neither_saved_nor_ranked_when_the_own_hook_behind_its_validation_fails(
    root: Path,
) -> None:
    callback = saver(root, monitor="val_loss", save_on_exception=True, **RARE)
    with pytest.raises(Stop):
        _run(callback, at=2, how="fails")
    assert committed_steps(root) == () and not callback.best_k_models


def test_nothing_is_whole_within_a_validation_behind_a_batch_without_a_step(root: Path) -> None:
    callback = saver(root, monitor="val_loss", save_on_exception=True, **RARE)
    with pytest.raises(Stop):
        _run(callback, at=1, how="fails", accumulate_grad_batches=2, val_check_interval=3)
    assert committed_steps(root) == () and not callback.best_k_models


@pytest.mark.parametrize("how", ["fails later", "stops"])
def test_a_failure_or_the_end_right_behind_a_validation_finds_the_step_of_the_own_hook(
    root: Path, how: str
) -> None:
    undisturbed = _run()
    callback = saver(root, every_n_epochs=50, save_on_exception=True)
    if how == "stops":
        _run(callback, at=7, how=how)
    else:
        with pytest.raises(Stop):
            _run(callback, at=7, how=how)
    assert committed_steps(root) == (7,)
    assert not differences(undisturbed, _run(saver(root)))


class Swaps(Callback):
    """Validates with other weights, as averaging callbacks do."""

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        for param in pl_module.parameters():
            param.data.neg_()

    on_validation_epoch_end = on_validation_epoch_start


def _patience() -> EarlyStopping:
    return EarlyStopping("val_loss", patience=50)


def _averaging() -> Any:
    callbacks = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging")
    return callbacks.EMAWeightAveraging(decay=0.5)


def _cut_short(
    kind: type[models.Net], root: Path, at: int, made: Any, **options: Any
) -> tuple[list[str], tuple[int, ...]]:
    """SIGTERM in a validation, at this step; how the resumed run ends otherwise, and what was saved."""

    class Asked(kind):  # type: ignore[valid-type, misc]
        at = 0

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            if self.at and self.global_step == self.at and batch_idx == 1:
                self.trainer._signal_connector.received_sigterm = True

    class AskedThere(Asked):
        pass

    AskedThere.at = at
    options = {"val": models.val_loader(), **MID, **options}
    undisturbed = ending(*fit(Asked, models.train_loader, *made(), **options))
    with pytest.raises(SIGTERMException):
        fit(AskedThere, models.train_loader, saver(root, every_n_steps=3), *made(), **options)
    steps = committed_steps(root)
    resumed = fit(Asked, models.train_loader, saver(root, every_n_steps=3), *made(), **options)
    return differences(undisturbed, ending(*resumed)), steps


@pytest.mark.parametrize(
    ("kind", "at", "callback"),
    [
        (models.StepPlateau, 4, None),
        (models.StepPlateau, 2, None),
        (models.Plateau, 5, None),
        (models.SwapsInHook, 4, None),
        (models.ScheduleFree, 4, None),
        (models.Net, 4, _averaging),
        (models.Net, 4, Swaps),
        (models.Net, 4, _patience),
    ],
)
def test_sigterm_within_a_validation_saves_nothing_where_its_rest_would_be_missed(
    root: Path, kind: type[models.Net], at: int, callback: Any
) -> None:
    options = {"val_check_interval": 5} if at == 5 else {}
    with pytest.warns(CheckpointWarning, match="within a validation"):
        differ, steps = _cut_short(
            kind, root, at, lambda: [callback()] if callback else [], **options
        )
    assert steps == ((3,) if at > 3 else ())
    assert not differ


@pytest.mark.parametrize(("at", "interval"), [(4, 2), (5, 5), (9, 2)])
def test_sigterm_within_a_validation_saves_the_step_where_nothing_comes_of_its_rest(
    root: Path, at: int, interval: int
) -> None:
    differ, steps = _cut_short(models.Net, root, at, list, val_check_interval=interval)
    assert steps[-1] == at
    assert not differ
