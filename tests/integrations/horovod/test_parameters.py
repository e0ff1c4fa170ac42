"""Every parameter of the optimizer is in the checkpoint, wherever it comes from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import nn

import ckpt_horovod
from ckpt_core import Checkpointer


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """Horovod in this process, on one rank."""
    hvd.init()
    yield
    hvd.shutdown()


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    return nn.Linear(6, 6), nn.Linear(6, 6)


def iterate(optimizer: Any, one: nn.Module, other: nn.Module, **how: Any) -> None:
    optimizer.zero_grad()
    (one(torch.ones(2, 6)) + other(torch.ones(2, 6))).square().sum().backward()
    optimizer.step()
    optimizer.end_iteration(**how)


def come_back(optimizer: Any, one: nn.Module, other: nn.Module) -> bool:
    """Whether a restore gives both modules what they had when the last iteration was saved."""
    optimizer.checkpointer.wait()
    params = [*one.parameters(), *other.parameters()]
    before = [param.detach().clone() for param in params]
    with torch.no_grad():
        for param in params:
            param.zero_()
    optimizer.restore()
    return all(map(torch.equal, before, params))


ATTACHED = {
    "dict": lambda one, other: {"one": one},
    "list": lambda one, other: [one],
    "none": lambda one, other: None,
    "both": lambda one, other: {"one": one, "others": [other]},
    "a tensor": lambda one, other: {"one": one, "weight": other.weight},
}


@pytest.mark.parametrize("layerwise", ["in_step", "lazy"])
@pytest.mark.parametrize("kind", ATTACHED)
def test_what_the_attached_model_lacks_is_saved_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, layerwise: str
) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")  # one rank reduces as well
    one, other = pair()
    named = [*one.named_parameters("one"), *other.named_parameters("other")]
    with Checkpointer(tmp_path) as ck:
        optimizer = ckpt_horovod.DistributedOptimizer(
            torch.optim.Adam([param for _, param in named]),
            named_parameters=named,
            checkpointer=ck,
            every_n_steps=1,
            layerwise=layerwise,
        )
        optimizer.attach(model=ATTACHED[kind](one, other))
        for _ in range(2):
            iterate(optimizer, one, other)
        assert come_back(optimizer, one, other)


@pytest.mark.parametrize("attach", [True, False])
def test_parameters_of_a_group_that_was_added_later_are_saved(tmp_path: Path, attach: bool) -> None:
    one, other = pair()
    with Checkpointer(tmp_path) as ck:
        optimizer = ckpt_horovod.DistributedOptimizer(
            torch.optim.Adam(one.parameters()),
            named_parameters=one.named_parameters(),
            checkpointer=ck,
        )
        if attach:
            optimizer.attach(model=one)
        iterate(optimizer, one, other, save=True)
        optimizer.add_param_group({"params": list(other.parameters())})
        iterate(optimizer, one, other, save=True)
        assert come_back(optimizer, one, other)
