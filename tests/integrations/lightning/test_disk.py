"""A real full disk, and a real read-only one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from ckpt_core import PersistError, committed_steps
from ckpt_lightning import CheckpointWarning
from tests.faults.mounts import mounted, remount
from tests.integrations.lightning import models
from tests.integrations.lightning.running import differences, ending, fit, saver


class Spoils(Callback):
    """Does something to the disk after a step, and undoes it after another."""

    def __init__(self, spoil: Callable[[], None], mend: Callable[[], None]) -> None:
        self._actions = {5: spoil, 9: mend}

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        action = self._actions.get(trainer.global_step)
        if action is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trainer.checkpoint_callback._recorder.session.wait()
            action()


def test_a_disk_that_is_full_for_a_while_costs_those_saves_and_nothing_else(tmp_path: Path) -> None:
    undisturbed = ending(*fit(models.Net, models.train_loader))
    with mounted("tmpfs", tmp_path) as disk:
        filler = disk / "filler"

        def fill() -> None:
            with open(filler, "wb", buffering=0) as file:
                try:
                    while file.write(bytes(4096)):
                        pass
                except OSError:
                    os.fsync(file.fileno())

        root = disk / "ckpts"
        with pytest.warns(CheckpointWarning, match=r"failed, and training goes on.*(free|space)"):
            result = ending(
                *fit(
                    models.Net,
                    models.train_loader,
                    Spoils(fill, filler.unlink),
                    saver(root, every_n_steps=1),
                )
            )
        assert not differences(undisturbed, result)
        assert set(committed_steps(root)) >= {1, 2, 3, 4, 10, 11, 12, 13, 14, 15}


def test_a_read_only_disk_is_told_before_training(tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path) as disk:
        root = disk / "ckpts"
        fit(models.Net, models.train_loader, saver(root), max_epochs=1)
        before = committed_steps(root)
        remount(disk, "ro")
        with pytest.raises(PersistError, match=r"[Rr]ead-only"):
            fit(models.Net, models.train_loader, saver(root))
        assert committed_steps(root) == before
        remount(disk, "rw")
