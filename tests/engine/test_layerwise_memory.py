"""A tensor whose memory is another one since `begin` is staged as it is when it is staged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt_core import Checkpointer, ConfigError, load
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
