"""What saves cost, told to the trainer's loggers, the progress bar and the log."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger

from tests.integrations.lightning import models
from tests.integrations.lightning.running import fit, saver

NAMES = "stall_ms staged_ms persist_s bytes bytes_per_s interval_steps in_flight failures".split()


class Keeps(Logger):
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[dict[str, Any], int | None]] = []

    @property
    def name(self) -> str:
        return "keeps"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **options: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.rows.append((metrics, step))


def test_every_save_is_logged_with_plain_numbers(root: Path) -> None:
    logger = Keeps()
    fit(models.Net, models.train_loader, saver(root, every_n_steps=4), logger=logger)
    rows = [metrics for metrics, _ in logger.rows if "ckpt/stall_ms" in metrics]
    assert len(rows) == 4
    assert [row["ckpt/interval_steps"] for row in rows] == [4.0, 4.0, 4.0, 3.0]
    for row in rows:
        assert set(row) == {f"ckpt/{name}" for name in NAMES}
        assert all(type(value) is float for value in row.values())
        assert row["ckpt/persist_s"] >= row["ckpt/staged_ms"] / 1000 > 0
        assert row["ckpt/stall_ms"] > 0 and row["ckpt/bytes_per_s"] > 0
        assert row["ckpt/in_flight"] >= 0 == row["ckpt/failures"]


def test_intervals_go_on_across_a_restart(root: Path) -> None:
    fit(models.Net, models.train_loader, saver(root, every_n_steps=4), max_epochs=1)
    logger = Keeps()
    fit(models.Net, models.train_loader, saver(root, every_n_steps=4), logger=logger)
    rows = [metrics for metrics, _ in logger.rows if "ckpt/stall_ms" in metrics]
    assert [row["ckpt/interval_steps"] for row in rows] == [3.0, 4.0, 3.0]


def test_the_csv_logger_has_them_in_its_file(root: Path, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    fit(models.Net, models.train_loader, saver(root, every_n_steps=4), logger=logger)
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sum(bool(row["ckpt/persist_s"]) for row in rows) == 4


def test_the_progress_bar_has_a_number_while_training_goes_on(root: Path) -> None:
    class Looks(Callback):
        seen: tuple[Any, ...] = ()

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            trainer.checkpoint_callback._recorder.session.checkpointer.wait()

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            self.seen += (bar.get_metrics(trainer, pl_module).get("ckpt"),)

    bar, looks = TQDMProgressBar(), Looks()
    trainer, _ = fit(
        models.Net,
        models.train_loader,
        saver(root, every_n_steps=3),
        bar,
        looks,
        max_epochs=2,
        enable_progress_bar=True,
    )
    # A save is heard of at the end of the batch after it.
    assert looks.seen == (*[None] * 4, *[3.0] * 3, *[6.0] * 3)
    assert "ckpt" not in trainer.progress_bar_metrics


def test_the_end_of_fit_sums_up(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        fit(models.Net, models.train_loader, saver(root, every_n_steps=4))
    assert f"checkpoints in {root}: 4 steps saved, the last is 15; training waited" in caplog.text


def test_no_tensor_is_made_on_a_device_for_them(root: Path) -> None:
    logger = Keeps()
    trainer, _ = fit(models.Net, models.train_loader, saver(root), logger=logger)
    assert not [name for name in trainer.callback_metrics if name.startswith("ckpt")]
    assert not any(
        isinstance(value, torch.Tensor) for metrics, _ in logger.rows for value in metrics.values()
    )
