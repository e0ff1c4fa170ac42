"""Every promise about bytes, on devices that do everything late: a missing wait is a torn step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.devices import jobs
from tests.devices.late_devices import PACES, LateDevices
from tests.quick import few

MODES = ["host", "device", "auto"]


@pytest.fixture(params=few(list(PACES), 2, of="paces"))
def devices(request: pytest.FixtureRequest) -> LateDevices:
    return LateDevices(PACES[request.param])


@pytest.mark.parametrize("mode", [*MODES, "direct"])
def test_every_committed_step_is_the_state_at_its_step(
    root: Path, devices: LateDevices, mode: str
) -> None:
    jobs.train(root, devices, mode=mode)


def test_a_state_on_another_device_than_the_first_is_whole(
    root: Path, devices: LateDevices
) -> None:
    jobs.train(root, devices, homes=(1,))


def test_training_in_a_stream_of_its_own_is_waited_for(root: Path, devices: LateDevices) -> None:
    devices.own_stream(0)
    devices.own_stream(1)
    jobs.train(root, devices)


def test_steps_that_are_written_once_they_are_staged_are_whole(
    root: Path, devices: LateDevices
) -> None:
    jobs.train(root, devices, pipelined=False, staging_bytes="16MiB")


@pytest.mark.parametrize("mode", [*MODES, "direct"])
def test_a_failed_save_leaves_nothing_behind_in_the_memory_of_the_next(
    root: Path, devices: LateDevices, mode: str
) -> None:
    jobs.train_with_failures(root, devices, mode=mode)


def test_tensors_that_are_staged_one_by_one_are_those_of_their_step(
    root: Path, devices: LateDevices
) -> None:
    jobs.train_layer_by_layer(root, devices)


def test_named_files_hold_the_bytes_of_their_step(root: Path, devices: LateDevices) -> None:
    jobs.save_named_files(root, devices)


def test_a_restore_is_not_undone_by_what_training_had_queued(
    root: Path, devices: LateDevices
) -> None:
    jobs.restore_in_place(root, devices)
