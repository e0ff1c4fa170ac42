"""Staging memory is made ready before the first save where the model is on a device, and not elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt_transformers import accelerating
from ckpt_transformers import run as of_trainer
from tests.integrations.transformers.accelerate_program import loop
from tests.integrations.transformers.jobs import run, run_stock


@pytest.mark.parametrize(("where", "first"), [("device", 4), ("device", 1), ("host", 4)])
def test_a_trainers_state_is_prepared_once_when_its_optimizer_has_made_a_step(
    tmp_path: Path,
    prepared: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    first: int,
) -> None:
    monkeypatch.setattr(of_trainer, "_on_device", lambda trainer: where == "device")
    found = run(tmp_path / "ours", save_steps=first)
    # Behind a first save there is nothing to prepare.
    assert len(prepared) == (where == "device" and first > 1)
    assert all(state["optimizer"].state for state in prepared)
    assert found == run_stock(tmp_path / "stock", save_steps=first)


@pytest.mark.parametrize("where", ["device", "host"])
def test_an_accelerators_state_is_prepared_once_behind_the_first_step(
    tmp_path: Path, prepared: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    expected = loop(tmp_path / "plain")
    assert prepared == []
    monkeypatch.setattr(accelerating, "_on_device", lambda accelerator: where == "device")
    assert loop(tmp_path / "ours") == expected
    assert len(prepared) == (where == "device")
    assert all(state["optimizers"][0].state for state in prepared)
