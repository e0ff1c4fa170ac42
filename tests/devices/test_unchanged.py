"""Files are shared, and every step is whole, where copies of devices come late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Checkpointer, Options, load
from ckpt_core.store import step_path
from tests.devices.jobs import SMALL
from tests.devices.late_devices import LateDevices

STEPS = 8


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
    # Those of devices are found to be still by nobody; whether they are is looked at at each save.
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
