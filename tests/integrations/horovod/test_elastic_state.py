"""What an elastic state is made of: taken from a step, from the first rank, or from its construction."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from horovod.common.exceptions import HorovodInternalError

import ckpt_horovod
from ckpt_core import CoordinationTimeout, RestoreError, load
from ckpt_horovod.elastic import TorchState
from ckpt_horovod.elastic_parts import _noted
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


# -- attributes ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
def test_lists_and_dicts_stay_the_objects_that_the_program_holds(tmp_path: Path) -> None:
    model, optimizer, _ = _wrapped()
    losses: list[float] = []
    around: list[Any] = [losses]
    around.append(around)
    given = {"losses": losses, "log": {"losses": losses}}
    with TorchState(model, optimizer, root=tmp_path, **given) as state:
        state.sync()
        assert state.losses is losses and state.log["losses"] is losses
        losses.append(1.0)
        state.commit()
    assert load(tmp_path)["attributes"]["log"] == {"losses": [1.0]}
    assert _noted(around) is around


class _Meter:
    """A user's own object."""

    def __init__(self) -> None:
        self.n = 0

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n = state["n"]


def _metered(root: Path, tensors: Any) -> tuple[TorchState, _Meter, _Meter, Any]:
    """A state with objects in a dict and in a list, and with one that takes the place of None."""
    one, other = _Meter(), _Meter()
    model, optimizer, _ = tensors
    held = {"meters": {"acc": one, "best": 0.0}, "rows": [1, (other,)], "scheduler": None}
    state = TorchState(model, optimizer, root=root, **held)
    state.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return state, one, other, state.scheduler


@pytest.mark.usefixtures("alone")
def test_objects_in_containers_and_those_that_came_later_are_filled_and_stay(
    tmp_path: Path,
) -> None:
    def step() -> None:
        _step(*tensors[1:])
        one.n, other.n = one.n + 1, other.n + 2
        state.meters["best"] += 0.5
        scheduler.step()

    def found() -> Any:
        assert state.meters["acc"] is one
        assert state.rows[1][0] is other
        assert state.scheduler is scheduler
        return one.n, other.n, state.meters["best"], scheduler.last_epoch

    tensors = _wrapped()
    state, one, other, scheduler = _metered(tmp_path, tensors)
    with state:
        state.sync()
        step()
        state.commit()
        step()
        state.restore()
        state.on_reset()
        state.sync()
        assert found() == (1, 2, 0.5, 1)
        step()
        state.on_reset()
        state.sync()
        assert found() == (2, 4, 1.0, 2)
    tensors = _wrapped()
    state, one, other, scheduler = _metered(tmp_path, tensors)
    with state:
        state.sync()
        assert found() == (1, 2, 0.5, 1)


@pytest.mark.usefixtures("alone")
def test_objects_in_containers_are_what_they_were_at_construction_if_nothing_is_durable(
    tmp_path: Path,
) -> None:
    state, one, other, _ = _metered(tmp_path, _wrapped())
    with state:
        state.sync()
        for _ in range(2):
            one.n, other.n, state.meters, state.rows = 3, 4, {}, []
            state.restore()
            state.on_reset()
            state.sync()
            assert (one.n, other.n, state.meters, state.rows) == (
                0,
                0,
                {"acc": one, "best": 0.0},
                [1, (other,)],
            )


# -- losses while ranks meet -----------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
def test_a_reload_that_always_times_out_ends_the_job_and_each_time_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def late(**how: Any) -> None:
        raise CoordinationTimeout("rank 1 is late")

    model, optimizer, _ = _wrapped()
    with TorchState(model, optimizer, root=tmp_path) as state:
        with monkeypatch.context() as changed:
            changed.setattr(optimizer, "restore", late)
            for number in range(1, 4):
                with pytest.raises(HorovodInternalError):
                    state.sync()
                assert caplog.text.count("begin anew") == number
                state.restore()
                state.on_reset()
            with pytest.raises(CoordinationTimeout):
                state.sync()
        state.restore()
        state.on_reset()
        state.sync()
        assert state._losses == 0


# -- the copy of construction ----------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
def test_steps_of_every_n_steps_are_durable_too_for_the_copy_of_construction(
    tmp_path: Path,
) -> None:
    model, optimizer, params = _wrapped(every_n_steps=1)
    state = TorchState(model, optimizer, root=tmp_path / "root")
    with state:
        state.sync()
        _step(optimizer, params)
        optimizer.end_iteration()
        deadline = time.monotonic() + 60
        while state._parts.have_initial:
            assert time.monotonic() < deadline
            time.sleep(0.002)
            state.check_host_updates()
        state.restore()
        state.on_reset()
        shutil.rmtree(tmp_path / "root")
        with pytest.raises(RestoreError, match="holds no step any more"):
            state.sync()
