"""The suite `device`: one quick run on host memory for all tests of its output; its bits on late devices."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from ckpt_core.bench import DeviceSettings
from ckpt_core.bench.device import figures, suite
from ckpt_core.bench.device.accelerator import Accelerator
from ckpt_core.bench.device.bits import wrong_steps
from ckpt_core.bench.device.settings import ALL_LEAVES, MEASURED, NAMES
from ckpt_core.bench.results import Entrant, Report
from ckpt_core.bench.team import Team
from ckpt_core.cli.bench import Request, _keep
from ckpt_core.system.machine import describe
from tests.bench.quick import ckpt_core_bench, quick_fixtures
from tests.devices.late_devices import PACES, LateDevices

pytestmark = pytest.mark.timeout(300)
_WITHOUT = pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one")
output, report = quick_fixtures("--suite", "device", "--device", "cpu")


def test_every_way_saves_the_bits_that_training_had(report: dict[str, Any]) -> None:
    reasons = {name: entry["reason"] for name, entry in report["contenders"].items()}
    ran = {name for name, reason in reasons.items() if reason is None}
    assert ran >= {*MEASURED, "ckpt_core_auto", "torch_save", "dcp_async_overlapped"}, reasons
    for name in ran & {*NAMES}:
        assert report["contenders"][name]["restored"] is True


def test_copies_are_measured_beside_raw_ones_in_each_turn(report: dict[str, Any]) -> None:
    results, rounds = report["results"], report["settings"]["rounds"]
    for leaves in ALL_LEAVES:
        staged = results[figures.STAGED.of(leaves).key]["contenders"]
        assert list(staged) == [figures.RAW, figures.PIECES, MEASURED[0]]
        shares = results[figures.SHARE.of(leaves).key]["contenders"][MEASURED[0]]["values"]
        assert [len(staged[figures.RAW]["values"]), len(shares)] == [rounds, rounds]
        passed = results[figures.PASSED.of(leaves).key]["contenders"]
        assert set(passed) == {figures.WITHIN, *MEASURED}


def test_training_is_compared_with_itself_without_saves(report: dict[str, Any]) -> None:
    for figure in (figures.INTERVAL, figures.LONGEST, figures.TRAIN_CALL):
        rows = report["results"][figure.key]["contenders"]
        for name in (*MEASURED, "torch_save", "dcp_async_overlapped"):
            assert len(rows[name]["values"]) == report["settings"]["rounds"]


def test_reads_first_saves_and_restores_are_measured(report: dict[str, Any]) -> None:
    results = report["results"]
    assert set(results[figures.READ["p99"].key]["contenders"]) == {
        figures.NONE,
        figures.RAW,
        *MEASURED,
    }
    for figure in (figures.FIRST, figures.PREPARE, figures.PREPARED):
        assert list(results[figure.key]["contenders"]) == list(MEASURED)
    assert {figures.FROM_HOST, figures.PLAIN, "torch_save"} < set(
        results[figures.RESTORE.key]["contenders"]
    )


def test_without_a_device_it_says_that_figures_mean_nothing(
    output: Path, report: dict[str, Any]
) -> None:
    text = (output / "stdout").read_text()
    assert "host memory only: figures mean nothing for a device" in text
    assert (output / "out.png").read_bytes().startswith(b"\x89PNG")
    assert not list((output / "root").iterdir())
    assert str(output) not in json.dumps(report)


def test_a_run_that_is_cut_off_has_told_its_rows_and_written_its_figures(tmp_path: Path) -> None:
    request = Request(suite="device", json_file=tmp_path / "out.json")
    found = Report("device", {}, describe(tmp_path))
    found.entrants["ckpt_core"] = Entrant()
    found.add(figures.FIRST, "ckpt_core", 0.5)
    told = io.StringIO()
    _keep(request, Console(file=told), found, "a row")
    assert told.getvalue() == "a row\n"
    assert json.loads((tmp_path / "out.json").read_text())["results"]["first_save"]


@pytest.mark.parametrize("name", ["nowhere", "cuda:99"])
def test_a_device_that_cannot_be_used_is_told_before_anything_is_written(
    tmp_path: Path, name: str
) -> None:
    asked = ["--suite", "device", "--device", name, "--root", str(tmp_path)]
    result = ckpt_core_bench([*asked, "--quick", "--json", str(tmp_path / "out.json")])
    assert result.exit_code == 2 and f"--device {name} cannot be used here" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("more", "told"),
    [
        pytest.param(["--quick"], "no device is here: name one by --device", marks=_WITHOUT),
        (["--interval", "3"], "it saves every 10th step"),
        (["--leaves", "3"], "it has three sizes of them"),
    ],
)
def test_what_cannot_run_here_is_refused(more: list[str], told: str) -> None:
    assert told in ckpt_core_bench(["--suite", "device", *more]).output
    assert "--device goes with --suite device" in ckpt_core_bench(["--device", "cpu"]).output


def test_leaves_and_model_shrink_with_the_state(tmp_path: Path) -> None:
    whole = DeviceSettings(root=tmp_path)
    assert [leaves.within(whole.part) for leaves in ALL_LEAVES] == [
        (300, 32 * 2**20),
        (10_000, 2**20),
        (100_000, 64 * 2**10),
    ]
    assert whole.model.width == 2048
    assert abs(whole.model.state_bytes - whole.state_bytes) < whole.state_bytes / 10
    small = DeviceSettings(root=tmp_path, state_bytes=30 * 2**20)
    for leaves in ALL_LEAVES:
        count, leaf_bytes = leaves.within(small.part)
        assert count * leaf_bytes <= leaves.count * leaves.leaf_bytes * small.part * 1.5
    assert small.model.state_bytes <= small.state_bytes


class Torn(Team):
    """Answers that steps have other bits than training had."""

    lines = ()

    @property
    def pids(self) -> list[int]:
        return []

    def ask(self, operation: str, /, **arguments: Any) -> list[dict[str, Any]]:
        assert operation in ("hello", "check"), "nothing is measured"
        return [{"device": "a device", "reason": None, "wrong": ["step 1"]}]

    def kill(self) -> None:
        """There is no process."""

    close = kill


def test_a_way_that_commits_other_bits_is_not_measured_and_the_run_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(name: str, folder: Path, timeout_s: float) -> Team:
        return Torn(folder, timeout_s)

    monkeypatch.setattr(suite, "Launcher", lambda **kind: launch)
    rows: list[str] = []
    settings = DeviceSettings(root=tmp_path, contenders=MEASURED).quick()
    found = suite.SUITE.run(settings, lambda text: None, lambda report, row: rows.append(row))
    assert not found.sound and not found.values
    for name in MEASURED:
        assert found.entrants[name].failed and found.entrants[name].restored is False
        assert f"bits of 6 steps, {name}: ['step 1']" in rows


# -- bits on late devices ----------------------------------------------------------------------


class Late(Accelerator):
    """The last of two late devices."""

    def __init__(self, devices: LateDevices) -> None:
        super().__init__("cpu")
        self.devices = self.late = devices

    def put(self, tensor: Tensor) -> Tensor:
        return self.late.place(tensor, 1)

    def run(self, do: Callable[[], Any]) -> None:
        self.late.run(1, do)

    def drain(self) -> None:
        self.late.drain()


class Hasty(LateDevices):
    """Does not let copies wait for training."""

    def record(self, device: torch.device, stream: Any = None) -> Any:
        event = super().record(device)
        event.count = 0
        return event


def bits_on(devices: LateDevices, root: Path, mode: str) -> Sequence[str]:
    return wrong_steps(root, Late(devices), mode=mode, leaf_bytes=64 * 1024, steps=4)


@pytest.mark.parametrize("mode", ["host", "device", "auto"])
@pytest.mark.parametrize("pace", ["all late", "copies run ahead"])
def test_bits_hold_on_late_devices(tmp_path: Path, mode: str, pace: str) -> None:
    devices = LateDevices(PACES[pace])
    assert bits_on(devices, tmp_path, mode) == []
    assert not devices.failures


def test_a_missing_wait_is_seen(tmp_path: Path) -> None:
    assert bits_on(Hasty(PACES["copies run ahead"]), tmp_path, "host")
