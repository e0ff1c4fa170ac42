"""Every release reads every golden step, whichever release wrote it."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_core

HERE = Path(__file__).parent
GOLDEN = sorted(path for path in HERE.glob("golden-v*/step-*") if path.is_dir())
STATES = {"golden-v1": "golden_state"}
"""Name of the function of make_golden.py that builds what a version's step holds."""


def expected_state(step_dir: Path) -> Any:
    return runpy.run_path(str(HERE / "make_golden.py"))[STATES[step_dir.parent.name]]()


def version_and_step(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


@pytest.fixture(params=GOLDEN, ids=version_and_step)
def step_dir(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def same(found: Any, expected: Any, place: str = "state") -> None:
    """Both have the same types and bits all the way down."""
    assert type(found) is type(expected), place
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), place
        assert bits(found) == bits(expected), place
    elif isinstance(expected, dict):
        assert list(found) == list(expected), place
        for key, value in expected.items():
            same(found[key], value, f"{place}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), place
        for index, value in enumerate(expected):
            same(found[index], value, f"{place}[{index}]")
    else:
        assert found == expected, place
        if isinstance(expected, float):
            assert math.copysign(1, found) == math.copysign(1, expected), place


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def test_there_is_a_golden_step_of_every_version_up_to_this_one() -> None:
    from ckpt_core.layout import FORMAT_VERSION

    wanted = {f"golden-v{version}" for version in range(1, FORMAT_VERSION + 1)}
    assert {path.parent.name for path in GOLDEN} == wanted == STATES.keys()


def test_a_golden_step_loads_as_the_state_that_was_saved(step_dir: Path) -> None:
    same(ckpt_core.load(step_dir), expected_state(step_dir))


def test_tied_weights_of_a_golden_step_are_one_tensor(step_dir: Path) -> None:
    model = ckpt_core.load(step_dir)["model"]
    assert model["embedding"].data_ptr() == model["head"].data_ptr()


def test_a_golden_step_is_whole(step_dir: Path) -> None:
    report = ckpt_core.verify(step_dir)
    assert report.ok
    assert report.checked_bytes > 0
    assert report.unchecked_bytes == 0
