"""What an elastic state is made of: taken from a step, from the first rank, or from its construction."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch

import ckpt_horovod
from ckpt_horovod.elastic import TorchState
from tests.integrations.horovod.launch import Outcome


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Horovod in this process, on one rank, which reduces as several do."""
    hvd.init()
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    yield
    hvd.shutdown()


def _wrapped(
    *more: torch.nn.Parameter, **options: Any
) -> tuple[torch.nn.Module, Any, list[torch.nn.Parameter]]:
    model = torch.nn.Linear(2, 1)
    params = [*model.parameters(), *more]
    optimizer = ckpt_horovod.DistributedOptimizer(
        torch.optim.Adam(params, lr=0.1),
        named_parameters=[(str(number), param) for number, param in enumerate(params)],
        **{"checkpointer": None, **options},
    )
    return model, optimizer, params


def _step(optimizer: Any, params: list[torch.nn.Parameter]) -> None:
    optimizer.zero_grad()
    torch.stack([param.exp().sum() for param in params]).sum().backward()
    optimizer.step()


# -- parameters that no module holds ---------------------------------------------------------------


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("with_model", [True, False])
def test_parameters_without_a_module_are_what_they_were_at_construction_if_nothing_is_durable(
    tmp_path: Path, with_model: bool
) -> None:
    model, optimizer, params = _wrapped(torch.nn.Parameter(torch.rand(3)))
    began = [param.tolist() for param in params]
    with TorchState(model if with_model else None, optimizer, root=tmp_path) as state:
        state.sync()
        for _ in range(2):
            _step(optimizer, params)
            state.restore()
            state.on_reset()
            state.sync()
            assert [param.tolist() for param in params] == began
        assert optimizer.iterations == 0


@pytest.mark.parametrize("with_model", [True, False])
def test_a_new_worker_takes_parameters_without_a_module_from_the_first_rank(
    pair: Outcome, with_model: bool
) -> None:
    first, second = pair.of(f"took_live-{with_model}")
    assert first == second
    assert first["steps"] == [1, 2]
