"""A save that fails costs a warning, not the run."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from ckpt_core import Checkpointer, CkptError, ConfigError, PersistError, committed_steps
from ckpt_lightning import CheckpointWarning, strategy
from tests.integrations.lightning import models
from tests.integrations.lightning.running import differences, ending, fit, saver
from tests.interrupts.scenarios import strike
from tests.interrupts.trap import Trap


class LosesItsDisk(Callback):
    """Takes the root away after a step, and gives it back after another."""

    def __init__(self, root: Path, *, at: int, back_at: int) -> None:
        self.root, self.at, self.back_at = root, at, back_at

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        aside = self.root.with_name("aside")
        if trainer.global_step == self.at:
            trainer.checkpoint_callback._recorder.session.wait()
            self.root.rename(aside)
            self.root.write_text("no directory")
        if trainer.global_step == self.back_at:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trainer.checkpoint_callback._recorder.session.wait()
            self.root.unlink()
            aside.rename(self.root)


def test_training_goes_on_and_later_saves_work_when_the_disk_is_back(root: Path) -> None:
    undisturbed = ending(*fit(models.Net, models.train_loader))
    disk = LosesItsDisk(root, at=5, back_at=9)
    with pytest.warns(CheckpointWarning, match=r"save of step [5678] failed, and training goes on"):
        result = ending(*fit(models.Net, models.train_loader, disk, saver(root, every_n_steps=1)))
    assert not differences(undisturbed, result)
    assert set(committed_steps(root)) >= {1, 2, 3, 4, 10, 11, 12, 13, 14, 15}


def test_training_ends_when_that_is_what_on_error_says(root: Path) -> None:
    disk = LosesItsDisk(root, at=5, back_at=99)
    with pytest.raises(CkptError):
        fit(models.Net, models.train_loader, disk, saver(root, every_n_steps=1, on_error="raise"))


def test_a_state_that_cannot_be_saved_is_told_and_training_goes_on(root: Path) -> None:
    class Unsavable(models.Net):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = lambda: None

    with pytest.warns(CheckpointWarning, match=r"'mine' is a builtins.function.*cannot be stored"):
        trainer, _ = fit(Unsavable, models.train_loader, saver(root))
    assert trainer.global_step == 15
    with pytest.raises(ConfigError, match="cannot be stored"):
        fit(Unsavable, models.train_loader, saver(root, on_error="raise"))


def test_a_root_that_cannot_be_written_is_an_error_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PersistError):
        fit(models.Net, models.train_loader, saver(tmp_path / "file" / "root"))


def test_a_failure_of_the_last_save_is_told_at_the_end(root: Path) -> None:
    disk = LosesItsDisk(root, at=14, back_at=99)
    with pytest.warns(CheckpointWarning, match="save of step 15 failed"):
        fit(models.Net, models.train_loader, disk, saver(root, every_n_epochs=3))
    root.unlink()
    shutil.rmtree(root.with_name("aside"))


def test_ctrl_c_while_a_step_is_restored_leaves_no_warning_off(root: Path) -> None:
    with Checkpointer(root) as ck:
        ck.save(1, {"w": torch.ones(3)}).committed.result(60)
        counting = Trap(-1)
        strike(counting, lambda: strategy._restored(ck, None, trusted=False))
        ends = 40  # where warnings are turned off, and on again
        for n in (*range(ends), *range(counting.lines - ends, counting.lines)):
            strike(Trap(n), lambda: strategy._restored(ck, None, trusted=False))


def test_ctrl_c_twice_while_a_step_is_restored_leaves_no_warning_off(root: Path) -> None:
    lines = (str(Path(strategy.__file__).parent), warnings.__file__)

    def strikes(first: int, then: int | None) -> Trap:
        trap = Trap(first, then=then, package=lines)
        strike(trap, lambda: strategy._restored(ck, None, trusted=False))
        return trap

    with Checkpointer(root) as ck:
        ck.save(1, {"w": torch.ones(3)}).committed.result(60)
        for first in range(strikes(-1, None).lines):
            for then in range(strikes(first, -1).lines):
                strikes(first, then)
