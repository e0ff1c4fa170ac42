"""Tensors without elements are in no memory: nothing may tell them apart by where they lie."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckpt_core
from ckpt_core import Checkpointer, Options


@pytest.mark.parametrize("shape", [(0,), (0, 3)])
@pytest.mark.parametrize("nested", [False, True])
def test_a_layerwise_save_of_several_empty_tensors_of_one_shape_is_sealed(
    tmp_path: Path, shape: tuple[int, ...], nested: bool
) -> None:
    base = torch.arange(4.0)
    tensors = {"a": torch.empty(shape), "b": torch.empty(shape), "w": base, "c": base[:0]}
    state = {"model": tensors, "step": 1} if nested else tensors
    with Checkpointer(tmp_path, Options(timeout=60)) as ck:
        save = ck.begin(1, tensors)
        for name in tensors:
            save.stage([name])
        save.seal(state).committed.result(60)
    found = ckpt_core.load(tmp_path)
    found = found["model"] if nested else found
    assert all(torch.equal(found[name], value) for name, value in tensors.items())
