"""What saves cost, told to whoever Trainer reports to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PrinterCallback, TrainerCallback

from tests.integrations.transformers.jobs import run, run_stock, trainer_of

NAMES = "stall_ms staged_ms persist_s bytes bytes_per_s interval_steps in_flight failures".split()


class Reporter(TrainerCallback):
    """Keeps what it is given, as reporters of Trainer are."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.ended = False

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        assert not self.ended and kwargs["model"] is not None and kwargs["optimizer"] is not None
        self.rows.append(dict(logs))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ended = True

    def costs(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if "ckpt/stall_ms" in row]


def test_every_save_is_reported_the_last_one_too_and_the_history_is_trainers_own(
    tmp_path: Path,
) -> None:
    reporter = Reporter()
    ended = run(tmp_path / "ours", reporter, save_steps=4)
    assert ended == run_stock(tmp_path / "stock", save_steps=4)
    rows = reporter.costs()
    assert [row["ckpt/interval_steps"] for row in rows] == [4.0, 4.0, 4.0, 4.0, 2.0]
    for row in rows:
        assert set(row) == {f"ckpt/{name}" for name in NAMES}
        assert all(type(value) is float for value in row.values())
        assert row["ckpt/stall_ms"] > 0 and row["ckpt/bytes_per_s"] > 0 == row["ckpt/failures"]
    logged = [row["loss"] for row in reporter.rows if "loss" in row]
    assert logged == [row["loss"] for row in ended["log"]], "none of Trainer's own was lost"


def test_the_terminal_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = trainer_of(tmp_path)
    assert any(isinstance(one, PrinterCallback) for one in trainer.callback_handler.callbacks)
    trainer.train()
    printed = capsys.readouterr().out
    assert "loss" in printed and "ckpt/" not in printed
