"""Files are shared, and every step is whole, where copies of devices come late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Checkpointer, Options, load, verify
from ckpt_core.store import step_path
from tests.devices.jobs import SMALL
from tests.devices.late_devices import PACES, LateDevices
from tests.quick import few

STEPS = 8
FIRST_SHARED = 4
"""Three saves to see that leaves stay, one that gives them a file of their own, then this one."""


@pytest.mark.parametrize("mode", ["host", "device"])
@pytest.mark.parametrize("changes_at", [None, 5])
def test_leaves_of_late_devices_are_shared_as_those_of_the_host(
    mode: str, changes_at: int | None, tmp_path: Path
) -> None:
    devices = LateDevices()
    torch.manual_seed(3)
    base = [devices.place(torch.randn(9000), index) for index in (0, 1)]
    strided = devices.place(torch.randn(60, 90).t(), 0)
    adapter = devices.place(torch.zeros(3000), 0)
    here, expected = torch.randn(5000), {}
    state: dict[str, Any] = {"base": [*base, strided, here], "adapter": adapter}
    settings = {**SMALL, "mode": mode, "keep_last": None, "share_unchanged": True}
    options = Options(**settings, frozen=["base"] if changes_at is None else ["base.0", "base.1"])
    with Checkpointer(tmp_path, options, devices=devices) as ck:
        for step in range(STEPS):
            ck.wait_staged()
            devices.run(0, lambda: adapter.add_(1))
            if step == changes_at:
                devices.run(0, lambda: strided.add_(1))
                here.add_(1)
            taken: dict[str, torch.Tensor] = {}
            devices.run(0, lambda taken=taken: taken.update(a=adapter.clone(), s=strided.clone()))
            expected[step] = taken, here.clone()
            ck.save(step, state).committed.result(60)
    devices.drain()
    for step, (taken, host) in expected.items():
        got = load(step_path(tmp_path, step))
        assert torch.equal(got["adapter"], taken["a"]) and torch.equal(got["base"][2], taken["s"])
        assert torch.equal(got["base"][3], host)
        assert all(map(torch.equal, got["base"], base))
    names = [path.stat().st_nlink for path in tmp_path.glob("step-*/shard-00000-1*")]
    assert max(names) == STEPS


class Undeclared:
    """A state of which little changes, on two devices and perhaps the host; whatever changes it is queued."""

    def __init__(self, root: Path, devices: LateDevices, *, mode: str, host: bool = False) -> None:
        torch.manual_seed(3)
        self.root, self.devices = root, devices
        self.homes = (0, 1, 1, 0)
        made = [*(torch.randn(9216) for _ in range(3)), torch.randn(60, 90).t()]
        self.base = [devices.place(leaf, home) for leaf, home in zip(made, self.homes, strict=True)]
        self.adapter = devices.place(torch.zeros(3000), 0)
        self.here = [torch.randn(5000)] if host else []
        # Leaves of whole pieces: a piece that changes is that of one leaf.
        options = {**SMALL, "chunk_bytes": "4KiB", "mode": mode, "keep_last": None}
        self.options = Options(**options, share_unchanged=True)
        self.expected: dict[int, dict[str, torch.Tensor]] = {}

    def run(self, at: int, do: Callable[[], Any]) -> None:
        """Work of training on the device of a leaf."""
        self.devices.run(self.homes[at], do)

    def save(self, ck: Checkpointer, step: int, *, changed: Sequence[int] = ()) -> None:
        """Training goes on as soon as it may; then the step is committed."""
        taken = self.expected[step] = {}
        self.devices.run(0, lambda: taken.update(adapter=self.adapter.clone()))
        for at in range(len(self.base)):
            self.run(at, lambda at=at: taken.update({f"{at}": self.base[at].clone()}))
        state = {"base": [*self.base, *self.here], "adapter": self.adapter}
        handle = ck.save(step, state)
        ck.wait_staged()
        self.devices.run(0, lambda: self.adapter.add_(1))
        for at in changed:
            self.run(at, lambda at=at: self.base[at].mul_(1.5))
        handle.committed.result(60)

    def check(self) -> None:
        self.devices.drain()
        assert not self.devices.failures
        for step, taken in self.expected.items():
            got = load(step_path(self.root, step))
            assert torch.equal(got["adapter"], taken["adapter"]), step
            for at in range(len(self.base)):
                assert torch.equal(got["base"][at], taken[f"{at}"]), (step, at)
            assert all(map(torch.equal, got["base"][len(self.base) :], self.here))
            assert verify(step_path(self.root, step)).ok

    def written(self, step: int) -> int:
        """Bytes of the files that no other step has."""
        found = [path.stat() for path in step_path(self.root, step).glob("shard-*")]
        return sum(one.st_size for one in found if one.st_nlink == 1)


@pytest.mark.parametrize("pace", few(list(PACES), 2, of="paces"))
@pytest.mark.parametrize(("mode", "host"), [("host", False), ("host", True), ("device", False)])
def test_leaves_of_late_devices_that_nobody_declares_are_found_by_themselves(
    mode: str, host: bool, pace: str, tmp_path: Path
) -> None:
    job = Undeclared(tmp_path, LateDevices(PACES[pace]), mode=mode, host=host)
    with Checkpointer(tmp_path, job.options, devices=job.devices) as ck:
        for step in range(FIRST_SHARED + 2):
            job.save(ck, step)
    job.check()
    assert job.written(FIRST_SHARED - 2) > 100_000, "shared too early"
    assert job.written(FIRST_SHARED) < 30_000


def change_after_all(root: Path, devices: LateDevices, *, mode: str, changed: int = 2) -> None:
    """A leaf that lies in a file that is shared changes, and goes on to: every step must be whole."""
    job = Undeclared(root, devices, mode=mode)
    with Checkpointer(root, job.options, devices=devices) as ck:
        for step in range(FIRST_SHARED + 5):
            job.save(ck, step, changed=[changed] if step >= FIRST_SHARED else [])
    job.check()
    # The file of all of them is written once more, and then one of the others.
    assert job.written(FIRST_SHARED) < 30_000
    assert job.written(FIRST_SHARED + 1) > 100_000
    assert job.written(FIRST_SHARED + 4) < 70_000


@pytest.mark.parametrize("mode", ["host", "device"])
@pytest.mark.parametrize("changed", [0, 2, 3])
def test_a_leaf_of_a_device_that_changes_after_all_is_written_and_moves_back(
    mode: str, changed: int, tmp_path: Path
) -> None:
    change_after_all(tmp_path, LateDevices(), mode=mode, changed=changed)


def test_a_device_whose_leaves_all_change_pays_no_file(tmp_path: Path) -> None:
    job = Undeclared(tmp_path, LateDevices(), mode="device")
    with Checkpointer(tmp_path, job.options, devices=job.devices) as ck:
        for step in range(6):
            job.save(ck, step, changed=range(len(job.base)))
    job.check()
    assert all(len(list(path.glob("shard-*"))) == 1 for path in tmp_path.glob("step-*"))


def test_declared_leaves_are_read_behind_what_training_has_queued_on_their_device(
    tmp_path: Path,
) -> None:
    """Also where no other leaf lies there."""
    devices = LateDevices(PACES["copies run ahead"])
    base = devices.place(torch.zeros(9000), 1)
    adapter = devices.place(torch.zeros(3000), 0)
    options = Options(**SMALL, share_unchanged=True, frozen=["base"])
    with Checkpointer(tmp_path, options, devices=devices) as ck:
        devices.run(1, lambda: base.fill_(7))  # its weights are loaded
        ck.save(1, {"base": base, "adapter": adapter}).committed.result(60)
    assert load(tmp_path)["base"].eq(7).all()
