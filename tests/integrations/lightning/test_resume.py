"""The same script, run again: where it goes on, what it says, and when it refuses."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from ckpt_core import (
    ConfigError,
    CorruptCheckpoint,
    RootBusy,
    StateMismatch,
    committed_steps,
    step_path,
)
from ckpt_lightning import AsyncCheckpoint, CheckpointWarning
from tests.integrations.lightning import models
from tests.integrations.lightning.running import differences, ending, fit, saver, trainer_of


class Stop(Exception):
    pass


class StopsAt(models.Net):
    """Fails in the step after `at`."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.at:
            raise Stop
        return super().training_step(batch, batch_idx)


def _interrupted(root: Path, at: int, **options: Any) -> None:
    options = {"every_n_steps": 2, **options}
    with pytest.raises(Stop):
        fit(lambda: StopsAt(at), models.train_loader, saver(root, **options))


def _break(step_dir: Path) -> None:
    shard = next(step_dir.glob("*.safetensors"))
    with shard.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 64)


def test_a_run_that_failed_goes_on_by_itself_and_says_so_in_one_line(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    undisturbed = ending(*fit(models.Net, models.train_loader))
    _interrupted(root, 9)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        resumed = ending(
            *fit(models.Net, models.train_loader, saver(root, every_n_steps=2), seed=1)
        )
    assert not differences(undisturbed, resumed)
    said = [r.getMessage() for r in caplog.records if "resumed from" in r.getMessage()]
    assert said == [f"resumed from step 8 (epoch 1, mid-epoch) of {root}"]


def test_a_run_that_had_ended_trains_nothing_more(root: Path) -> None:
    first = ending(*fit(models.Net, models.train_loader, saver(root)))
    again = ending(*fit(models.Net, models.train_loader, saver(root), seed=1))
    assert not differences(first, again)


def test_a_run_that_had_ended_goes_on_when_it_is_given_more_epochs(root: Path) -> None:
    undisturbed = ending(*fit(models.Net, models.train_loader, max_epochs=4))
    fit(models.Net, models.train_loader, saver(root))
    longer = ending(*fit(models.Net, models.train_loader, saver(root), seed=1, max_epochs=4))
    assert not differences(undisturbed, longer)


@pytest.mark.parametrize("val", [False, True], ids=["no validation", "validation"])
def test_a_run_that_ended_by_steps_mid_epoch_goes_on_when_it_is_given_more(
    root: Path, val: bool
) -> None:
    loader = models.val_loader() if val else None
    undisturbed = ending(
        *fit(models.Net, models.train_loader, val=loader, max_epochs=-1, max_steps=13)
    )
    options = {"val": loader, "max_epochs": -1}
    fit(models.Net, models.train_loader, saver(root), max_steps=7, **options)
    longer = ending(
        *fit(models.Net, models.train_loader, saver(root), seed=1, max_steps=13, **options)
    )
    assert not differences(undisturbed, longer)


class StopsItself(models.OwnHook):
    """Ends training in its own hook after the seventh step."""

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.trainer.should_stop = self.global_step == 7


@pytest.mark.parametrize("saving", [{}, {"every_n_steps": 2}], ids=["at the end", "every 2"])
@pytest.mark.parametrize("make", [models.OwnHook, StopsItself], ids=["by steps", "by itself"])
def test_a_run_that_ended_mid_epoch_goes_on_though_the_module_has_an_own_hook_after_batches(
    root: Path, saving: Any, make: Any
) -> None:
    undisturbed = ending(*fit(models.OwnHook, models.train_loader, max_epochs=-1, max_steps=13))
    most = 7 if make is models.OwnHook else 13
    fit(make, models.train_loader, saver(root, **saving), max_epochs=-1, max_steps=most)
    assert committed_steps(root)[-1] == 7
    longer = saver(root, **saving)
    resumed = fit(models.OwnHook, models.train_loader, longer, seed=1, max_epochs=-1, max_steps=13)
    assert not differences(undisturbed, ending(*resumed))


@pytest.mark.parametrize("val", [False, True], ids=["no validation", "validation"])
def test_an_epoch_that_was_stopped_in_its_middle_is_saved_as_such_when_only_epochs_are(
    root: Path, val: bool
) -> None:
    options = {"val": models.val_loader() if val else None, "max_epochs": -1}
    undisturbed = ending(*fit(models.Net, models.train_loader, max_steps=13, **options))
    fit(models.Net, models.train_loader, saver(root, save_last=False), max_steps=7, **options)
    resumed = fit(models.Net, models.train_loader, saver(root), seed=1, max_steps=13, **options)
    assert committed_steps(root) == (5, 7, 10, 13)
    assert not differences(undisturbed, ending(*resumed))


def test_a_second_fit_of_one_process_goes_on_with_what_is_in_memory(root: Path) -> None:
    torch.manual_seed(7)
    module, callback = models.Net(), saver(root, resume="never")
    trainer = trainer_of(callback, max_epochs=1)
    trainer.fit(module, models.train_loader())
    with torch.no_grad():
        module.net[0].weight.fill_(0.5)
    trainer.fit_loop.max_epochs = 1
    trainer.fit(module, models.train_loader())
    assert (module.net[0].weight == 0.5).all()


def test_a_root_that_holds_steps_is_refused_when_resume_is_never(root: Path) -> None:
    _interrupted(root, 5)
    with pytest.raises(ConfigError, match=r"resume='never'.*2 steps .newest 4.*another root"):
        fit(models.Net, models.train_loader, saver(root, resume="never"))


def test_an_explicit_ckpt_path_wins(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    _interrupted(root, 9)
    undisturbed = ending(*fit(models.Net, models.train_loader))
    path = str(step_path(root, 4))
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        resumed = ending(*fit(models.Net, models.train_loader, saver(root), ckpt_path=path))
    assert f"resumed from step 4 (epoch 0, mid-epoch) of {path}" in caplog.text
    assert not differences(undisturbed, resumed)


def test_last_goes_on_from_the_newest_step(root: Path) -> None:
    _interrupted(root, 9)
    undisturbed = ending(*fit(models.Net, models.train_loader))
    resumed = ending(*fit(models.Net, models.train_loader, saver(root), ckpt_path="last"))
    assert not differences(undisturbed, resumed)


def test_a_corrupt_newest_step_is_passed_over_with_a_warning(root: Path) -> None:
    undisturbed = ending(*fit(models.Net, models.train_loader))
    _interrupted(root, 9)
    _break(step_path(root, 8))
    with pytest.warns(CheckpointWarning, match="step 8 is corrupt, going back"):
        resumed = ending(*fit(models.Net, models.train_loader, saver(root, every_n_steps=3)))
    assert not differences(undisturbed, resumed)


def test_a_root_without_any_whole_step_is_an_error_not_a_fresh_start(root: Path) -> None:
    _interrupted(root, 5)
    for step in committed_steps(root):
        _break(step_path(root, step))
    with pytest.warns(CheckpointWarning), pytest.raises(CorruptCheckpoint):
        fit(models.Net, models.train_loader, saver(root))


def test_a_root_of_another_model_is_refused_before_anything_is_changed(root: Path) -> None:
    class Wider(models.Net):
        def __init__(self) -> None:
            super().__init__()
            self.net[4] = torch.nn.Linear(8, 2)
            self.extra = torch.nn.Linear(2, 2)

    _interrupted(root, 5)
    before = committed_steps(root)
    with pytest.raises(
        StateMismatch, match=r"another model.*extra.weight is missing.*root of its own"
    ):
        fit(Wider, models.train_loader, saver(root))
    assert committed_steps(root) == before


def test_a_root_that_another_run_writes_to_is_refused(root: Path) -> None:
    class Second(models.Net):
        def on_train_start(self) -> None:
            with pytest.raises(RootBusy):
                fit(models.Net, models.train_loader, saver(root))
            self.tried = True

    _, module = fit(Second, models.train_loader, saver(root), max_epochs=1)
    assert module.tried


def test_the_newest_step_is_known_without_a_trainer(root: Path) -> None:
    assert AsyncCheckpoint.latest(root) is None
    _interrupted(root, 5)
    assert AsyncCheckpoint.latest(root) == str(step_path(root, 4))


def test_no_model_checkpoint_is_made_beside_and_one_of_the_users_own_works(
    root: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(saver(root))
    assert [type(c).__name__ for c in trainer.checkpoint_callbacks] == ["AsyncCheckpoint"]
    theirs = ModelCheckpoint(tmp_path / "theirs", every_n_epochs=1, save_top_k=-1)
    fit(models.Net, models.train_loader, theirs, saver(root))
    assert len(list((tmp_path / "theirs").glob("*.ckpt"))) == 3
    assert committed_steps(root) == (5, 10, 15)


def test_the_callback_changes_nothing_when_it_may_not_leave_anything_behind(root: Path) -> None:
    fit(models.Net, models.train_loader, saver(root), fast_dev_run=True)
    assert not root.exists()


def test_a_moved_root_is_as_good_as_the_old_one(root: Path, tmp_path: Path) -> None:
    undisturbed = ending(*fit(models.Net, models.train_loader))
    _interrupted(root, 9)
    moved = Path(shutil.move(root, tmp_path / "elsewhere"))
    resumed = ending(*fit(models.Net, models.train_loader, saver(moved)))
    assert not differences(undisturbed, resumed)


def test_save_on_exception_keeps_the_last_whole_step(root: Path) -> None:
    undisturbed = ending(*fit(models.Net, models.train_loader))
    _interrupted(root, 8, every_n_steps=None, every_n_epochs=50, save_on_exception=True)
    assert committed_steps(root) == (8,)
    resumed = ending(*fit(models.Net, models.train_loader, saver(root)))
    assert not differences(undisturbed, resumed)


def test_without_save_on_exception_a_failure_saves_nothing(root: Path) -> None:
    _interrupted(root, 8, every_n_steps=None, every_n_epochs=50)
    assert committed_steps(root) == ()
