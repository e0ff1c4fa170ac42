"""Staging memory is made ready before the first save where parameters are on a device, and not elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch

import ckpt_horovod
from ckpt_core import Checkpointer, load
from ckpt_horovod.tree import StateTree


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """Horovod in this process, on one rank."""
    hvd.init()
    yield
    hvd.shutdown()


def train(root: Path, layerwise: str) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(30, 20)
    with Checkpointer(root, coordination=ckpt_horovod.coordination()) as ck:
        optimizer = ckpt_horovod.DistributedOptimizer(
            torch.optim.AdamW(model.parameters()),
            named_parameters=model.named_parameters(),
            checkpointer=ck,
            every_n_steps=3,
            layerwise=layerwise,
        )
        for _ in range(6):
            with optimizer.iteration():
                optimizer.zero_grad()
                model(torch.ones(5, 30)).square().mean().backward()
                optimizer.step()
        ck.wait()
        assert ck.steps() == (3, 6)
    return load(root)["model"]["weight"]


@pytest.mark.parametrize(
    ("where", "layerwise", "count"),
    [("device", "lazy", 1), ("device", "in_step", 0), ("host", "lazy", 0)],
)
def test_the_state_is_prepared_once_when_the_optimizer_has_made_a_step(
    tmp_path: Path,
    prepared: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    layerwise: str,
    count: int,
) -> None:
    expected = train(tmp_path / "plain", layerwise)
    assert prepared == []
    monkeypatch.setattr(StateTree, "is_on_device", lambda tree: where == "device")
    assert torch.equal(train(tmp_path / "ours", layerwise), expected)
    assert len(prepared) == count
    assert all(state["optimizer"].state for state in prepared)
