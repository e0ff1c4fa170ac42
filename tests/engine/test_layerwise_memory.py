"""Memory of open saves: tensors that lie elsewhere since `begin`, and staging memory that must grow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckpt_core import Checkpointer, ConfigError, Options, load
from ckpt_core.save.layerwise import LayerwiseSave
from ckpt_core.save.named_files import FilesSave
from ckpt_core.store import step_path


def test_a_tensor_that_was_given_other_memory_is_saved_as_it_is_when_staged(tmp_path: Path) -> None:
    net = torch.nn.Linear(300, 200)
    tensors = dict(net.named_parameters())
    with Checkpointer(tmp_path) as ck:
        save = ck.begin(1, tensors)
        net.weight.data = torch.full((200, 300), 7.0)
        save.stage(tensors)
        save.seal({"weight": net.weight, "bias": net.bias}).committed.result(60)
        save = ck.begin(2, tensors)
        net.weight.data = torch.full((200, 300), 8.0)
        save.stage(tensors)
        save.seal().committed.result(60)
    for step, value in ((1, 7.0), (2, 8.0)):
        found = load(step_path(tmp_path, step))
        assert torch.equal(found["weight"], torch.full((200, 300), value))
        assert torch.equal(found["bias"], net.bias)


@pytest.mark.parametrize("other", [torch.ones(3, 2), torch.ones(3, 4).T[:2], torch.ones(2, 3, 1)])
def test_a_tensor_of_another_form_since_begin_is_refused_and_the_save_stays_open(
    tmp_path: Path, other: torch.Tensor
) -> None:
    tensor = torch.zeros(2, 3)
    before = tensor.data
    with Checkpointer(tmp_path) as ck:
        save = ck.begin(1, {"w": tensor})
        tensor.data = other
        with pytest.raises(ConfigError, match=r"stage: 'w' has .* and had"):
            save.stage(["w"])
        tensor.data = before
        save.stage(["w"])
        save.seal().committed.result(60)
    assert torch.equal(load(step_path(tmp_path, 1))["w"], torch.zeros(2, 3))


def open_layers(ck: Checkpointer, small: dict[str, torch.Tensor]) -> LayerwiseSave | FilesSave:
    save = ck.begin(1, small)
    save.stage(small)
    return save


def open_files(ck: Checkpointer, small: dict[str, torch.Tensor]) -> LayerwiseSave | FilesSave:
    save = ck.begin_files(1, "files")
    save.add("small", small)
    return save


@pytest.mark.parametrize("begin", [open_layers, open_files])
def test_a_save_that_needs_more_memory_than_an_open_one_leaves_is_refused_at_once(
    tmp_path: Path,
    begin: Callable[[Checkpointer, dict[str, torch.Tensor]], LayerwiseSave | FilesSave],
) -> None:
    small, large = {"w": torch.ones(3000)}, {"w": torch.ones(4 << 20)}
    with Checkpointer(tmp_path, Options(chunk_bytes=4096, timeout=60)) as ck:
        save = begin(ck, small)
        with pytest.raises(ConfigError, match="a save that was begun is open"):
            ck.save(2, large)
        save.seal().committed.result(60)
        ck.save(3, large).committed.result(60)
        # With memory for the larger one from the start both go on together.
        save = begin(ck, small)
        ck.save(4, large).committed.result(60)
        save.seal().committed.result(60)


def test_memory_that_was_prepared_for_the_larger_state_serves_beside_an_open_save(
    tmp_path: Path,
) -> None:
    small, large = {"w": torch.ones(3000)}, {"w": torch.ones(4 << 20)}
    with Checkpointer(tmp_path, Options(chunk_bytes=4096, timeout=60)) as ck:
        ck.prepare(large)
        save = open_layers(ck, small)
        ck.save(2, large).committed.result(60)
        save.seal().committed.result(60)
