"""Planning takes memory for the pickle and the zip directory, whatever the size of the state."""

from __future__ import annotations

import os
import resource
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core.torch_zip import ZipPlan, plan_zip

GIB = 1 << 30
STATE_BYTES = 10 * GIB
ALLOWED_BYTES = 64 << 20


@pytest.fixture
def vast(tmp_path: Path) -> torch.Tensor:
    """Ten gibibytes in a file without blocks: reading them would be seen in the memory of the process."""
    path = tmp_path / "vast"
    path.touch()
    os.truncate(path, STATE_BYTES)
    storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=STATE_BYTES)
    return torch.empty(0).set_(storage)


def _tree(vast: torch.Tensor) -> dict[str, Any]:
    """One tensor beyond four gibibytes, many small ones, a strided one, and a vast expanded one."""
    large, rest = vast[: 5 * GIB // 4], vast[5 * GIB // 4 :]
    small = list(rest[: GIB // 4].split(1 << 20))
    strided = rest[GIB // 4 :].view(1024, -1)[:, ::2]
    return {
        "large": large,
        "small": small,
        "strided": strided,
        "tied": large,
        "expanded": torch.ones(1).expand(STATE_BYTES // 4),
    }


def _high_water_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_a_state_larger_than_memory_is_planned_in_little_memory(vast: torch.Tensor) -> None:
    tree = _tree(vast)
    before = _high_water_bytes()
    tracemalloc.start()
    try:
        plan = plan_zip(tree)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert plan.layout.file_bytes > STATE_BYTES
    assert sum(len(data) for _, data in plan.layout.frames) < 1 << 20
    assert peak < 4 << 20
    assert _high_water_bytes() - before < ALLOWED_BYTES


def test_a_vast_file_has_its_records_where_torch_looks(vast: torch.Tensor, tmp_path: Path) -> None:
    plan = plan_zip(_tree(vast))
    path = tmp_path / "vast.pt"
    _write_frames(plan, path)
    reader = torch._C.PyTorchFileReader(str(path))
    for extent in plan.layout.extents:
        assert reader.get_record_offset(extent.name) == extent.offset
    back = torch.load(path, mmap=True, weights_only=True)
    assert back["large"].nbytes == 5 * GIB and back["tied"].shape == back["large"].shape
    assert len(back["small"]) == 256 and back["strided"].is_contiguous()


def _write_frames(plan: ZipPlan, path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(plan.layout.file_bytes)
        for offset, data in plan.layout.frames:
            os.pwrite(file.fileno(), data, offset)
