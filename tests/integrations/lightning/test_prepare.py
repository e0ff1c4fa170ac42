"""Staging memory is made ready before the first save where the model is on a device, and not elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt_core import committed_steps
from ckpt_lightning import fabric, recorder
from tests.integrations.lightning import models
from tests.integrations.lightning.fabric_program import made, train
from tests.integrations.lightning.fabric_program import saver as fabric_saver
from tests.integrations.lightning.running import differences, ending, fit, saver


def test_a_state_on_a_device_is_prepared_once_when_its_optimizer_has_made_a_step(
    root: Path, prepared: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ending(*fit(models.Net, models.train_loader))
    monkeypatch.setattr(recorder, "on_device", lambda trainer: True)
    found = fit(models.Net, models.train_loader, saver(root, every_n_steps=4))
    (state,) = prepared
    assert state["global_step"] == 1 and state["optimizer_states"][0]["state"]
    assert committed_steps(root) == (4, 8, 12, 15)
    assert differences(expected, ending(*found)) == []


def test_nothing_is_prepared_behind_a_first_save(
    root: Path, prepared: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "on_device", lambda trainer: True)
    fit(models.Net, models.train_loader, saver(root, every_n_steps=1))
    assert prepared == []


def test_a_state_in_host_memory_is_not_prepared(root: Path, prepared: list[dict[str, Any]]) -> None:
    fit(models.Net, models.train_loader, saver(root, every_n_steps=4))
    assert prepared == []


@pytest.mark.parametrize("where", ["device", "host"])
def test_under_fabric_a_state_on_a_device_is_prepared_before_the_first_save(
    root: Path, prepared: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    expected = train(made(), None)
    monkeypatch.setattr(fabric, "_on_device", lambda fabric: where == "device")
    with fabric_saver(root, every_n_steps=3) as saving:
        assert not differences(expected, train(made(saving), saving))
    steps = [state["step"] for state in prepared]
    assert steps == ([1] if where == "device" else [])
    assert all(state["optimizer"].state for state in prepared)


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")
def test_a_run_on_a_device_goes_on_from_any_step_to_the_same_bits(
    root: Path, tmp_path: Path, prepared: list[dict[str, Any]]
) -> None:
    device = {"accelerator": "cuda", "devices": 1}
    found = fit(models.Net, models.train_loader, saver(root, every_n_steps=4), **device)
    assert len(prepared) == 1
    expected = ending(*found)
    path = str(root / "step-000000000008")
    beside = saver(tmp_path / "beside", every_n_epochs=99, save_last=False)
    again = fit(models.Net, models.train_loader, beside, seed=1, ckpt_path=path, **device)
    assert differences(expected, ending(*again)) == []
