"""The late devices are late enough: whatever wait is taken out of the engine, a promise breaks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckpt_core import CorruptCheckpoint
from ckpt_core.restore.slots import Slots
from ckpt_core.save import plain
from ckpt_core.snapshot import image
from tests.devices import jobs, mistakes, test_memory, test_unchanged
from tests.devices.late_devices import PACES, LateDevices

Scenario = Callable[[Path, LateDevices], None]

HOST: Scenario = jobs.train
DEVICE: Scenario = partial(jobs.train, mode="device")
SECOND: Scenario = partial(jobs.train, homes=(1,))
STILL: Scenario = partial(test_unchanged.change_after_all, mode="host")
STILL_DEVICE: Scenario = partial(test_unchanged.change_after_all, mode="device")
FOUND = (AssertionError, CorruptCheckpoint, RuntimeError)

SEEDED = [
    (mistakes.EventBeforeClones, "all late", HOST),
    (mistakes.EventBeforeClones, "copies run ahead", DEVICE),
    (mistakes.EventBeforeClones, "copies run ahead", jobs.train_layer_by_layer),
    (mistakes.EventBeforeClones, "copies run ahead", jobs.save_named_files),
    (mistakes.NoWaitForTraining, "all late", HOST),
    (mistakes.NoWaitForTraining, "copies run ahead", DEVICE),
    (mistakes.NoWaitForTraining, "copies run ahead", jobs.train_layer_by_layer),
    (mistakes.NoWaitForTraining, "copies run ahead", jobs.save_named_files),
    (mistakes.NoSynchronize, "training runs ahead", HOST),
    (mistakes.NoSynchronize, "training runs ahead", DEVICE),
    (mistakes.NoSynchronize, "training runs ahead", jobs.train_layer_by_layer),
    (mistakes.NoSynchronize, "training runs ahead", jobs.save_named_files),
    (mistakes.NoHoldingBack, "training runs ahead", HOST),
    (mistakes.NoHoldingBack, "training runs ahead", DEVICE),
    (mistakes.NoHoldingBack, "training runs ahead", jobs.save_named_files),
    (mistakes.NoWaitForPieces, "all late", HOST),
    (mistakes.NoWaitForPieces, "all late", DEVICE),
    (mistakes.EventOfTheFirstDevice, "all late", HOST),
    (mistakes.EventOfTheFirstDevice, "copies run ahead", SECOND),
    (mistakes.EventOfOneDevice, "copies run ahead", HOST),
    (mistakes.NoWaitForTraining, "all late", STILL),
    (mistakes.NoWaitForTraining, "all late", STILL_DEVICE),
    (mistakes.NoHoldingBack, "training runs ahead", STILL),
    (mistakes.NoHoldingBack, "training runs ahead", STILL_DEVICE),
    (mistakes.NoWaitForPieces, "all late", STILL),
    (mistakes.NoWaitForPieces, "all late", STILL_DEVICE),
    (mistakes.EventOfOneDevice, "copies run ahead", STILL),
    (mistakes.NoWaitBeforeRestore, "all late", jobs.restore_in_place),
    (mistakes.NoWaitBeforeRestore, "all late", jobs.restore_into_what_loads),
]


@pytest.mark.parametrize(("kind", "pace", "scenario"), SEEDED)
def test_a_wait_that_is_missing_is_found(
    root: Path, kind: type[LateDevices], pace: str, scenario: Scenario
) -> None:
    with pytest.raises(FOUND):
        scenario(root, kind(PACES[pace]))


@pytest.mark.parametrize(
    ("method", "mistake"), [("free", mistakes.use_again_at_once), ("drain", mistakes.end_at_once)]
)
def test_a_wait_that_is_missing_in_a_restore_is_found(
    root: Path, monkeypatch: pytest.MonkeyPatch, method: str, mistake: Any
) -> None:
    monkeypatch.setattr(Slots, method, mistake)
    with pytest.raises(FOUND):
        jobs.restore_through_small_buffers(root, LateDevices())


@pytest.mark.parametrize("where", ["open", "held", "mapped"])
def test_memory_that_is_abandoned_too_early_is_found(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(image, "_give_back", mistakes.give_back_at_once)
    with pytest.raises(FOUND):
        test_memory.abandon_and_use_again(where)


@pytest.mark.parametrize("held_back", [False, True])
def test_memory_that_writers_give_back_too_early_is_found(
    monkeypatch: pytest.MonkeyPatch, held_back: bool
) -> None:
    monkeypatch.setattr(image, "_give_back", mistakes.give_back_at_once)
    with pytest.raises(FOUND):
        test_memory.cancel_and_use_again(held_back=held_back)


def test_clones_that_are_let_go_too_early_are_found(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "source_of", mistakes.let_go_of_clones)
    with pytest.raises(FOUND):
        jobs.train(root, LateDevices(PACES["training runs ahead"]))
