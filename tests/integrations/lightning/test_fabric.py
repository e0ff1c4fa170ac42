"""Fabric saves and loads through the engine, and goes on bit for bit."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy
from lightning.fabric.wrappers import _FabricModule
from torch import nn
from torch.utils.data import TensorDataset

import ckpt_core
from ckpt_core import ConfigError, StateMismatch, committed_steps, step_path
from ckpt_core.bench.meeting import free_port
from ckpt_core.data import ResumableLoader
from ckpt_lightning import FabricCheckpoint
from tests.forks import Forks
from tests.integrations.lightning.fabric_program import STEPS, Stop, made, net, saver, train
from tests.integrations.lightning.running import differences

HERE = Path(__file__).parents[3]
PROGRAM = "tests.integrations.lightning.fabric_program"


def _launch(forks: Forks, folder: Path, mode: str) -> list[int]:
    port = free_port()
    ranks = [
        forks.popen([sys.executable, "-m", PROGRAM, rank, 2, port, folder, mode], cwd=HERE)
        for rank in range(2)
    ]
    try:
        return [process.wait(timeout=250) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()


@pytest.mark.timeout(600)
def test_two_ranks_that_are_killed_go_on_bit_for_bit(forks: Forks, tmp_path: Path) -> None:
    assert _launch(forks, tmp_path, "dies") == [-signal.SIGKILL] * 2
    begun = committed_steps(tmp_path / "root")
    assert begun and begun[-1] < STEPS
    assert _launch(forks, tmp_path, "goes-on") == [0, 0]
    for rank in range(2):
        first, second = (
            torch.load(tmp_path / f"{name}{rank}.pt", weights_only=False)
            for name in ("undisturbed", "resumed")
        )
        assert not differences(first, second), rank
    assert committed_steps(tmp_path / "root")[-1] == STEPS


@pytest.mark.parametrize("step", [1, 4, 7])
def test_one_process_goes_on_bit_for_bit_from_any_step(root: Path, step: int) -> None:
    undisturbed = train(made(), None)

    def stop(reached: int) -> None:
        if reached == step:
            raise Stop

    with saver(root, every_n_steps=1) as saving, pytest.raises(Stop):
        train(made(saving), saving, stop=stop)
    assert committed_steps(root)[-1] == step
    with saver(root) as saving:
        assert not differences(undisturbed, train(made(saving), saving, seed=99))


@pytest.mark.parametrize("step", range(1, 9))
def test_a_loader_that_fabric_has_set_up_goes_on_with_the_batches_that_are_due(
    root: Path, step: int
) -> None:
    undisturbed = _batches(root / "whole")
    first = _batches(root / "cut", stop=step)
    assert first + _batches(root / "cut") == undisturbed


def _batches(root: Path, *, stop: int | None = None) -> list[tuple[int, list[int]]]:
    """Those of three epochs, from the newest step of a root on."""
    seen: list[tuple[int, list[int]]] = []
    with saver(root, every_n_steps=1) as saving:
        fabric, module = made(saving), nn.Linear(1, 1)
        model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=1e-5))
        rows = TensorDataset(torch.arange(12.0).reshape(-1, 1))
        inner = ResumableLoader(rows, batch_size=4, shuffle=True, seed=1)
        loader: Any = fabric.setup_dataloaders(inner)  # type: ignore[arg-type]
        state = {"model": model, "optimizer": optimizer, "data": [loader], "step": 0}
        saving.attach(fabric)
        saving.restore(state)
        for epoch in range(inner.epoch, 3):
            for (x,) in loader:
                seen.append((epoch, x.flatten().int().tolist()))
                fabric.backward(model(x).square().mean())
                optimizer.step()
                state["step"] += 1
                fabric.call("on_train_batch_end", state=state)
                if state["step"] == stop:
                    return seen
        fabric.call("on_train_end", state=state)
    return seen


def _begun(root: Path, **more: Any) -> tuple[Fabric, FabricCheckpoint, dict[str, Any]]:
    fabric, saving = made(), saver(root)
    model, optimizer = fabric.setup(module := net(), torch.optim.SGD(module.parameters(), lr=0.1))
    saving.attach(fabric)
    return fabric, saving, {"model": model, "optimizer": optimizer, "step": 3, **more}


def test_save_and_load_of_fabric_itself_go_through_the_engine(root: Path, tmp_path: Path) -> None:
    fabric, saving, state = _begun(root, epoch=2)
    with saving:
        fabric.save(root, state)
        saving.wait()
        assert committed_steps(root) == (3,)
        weight = state["model"].module[0].weight
        expected = weight.detach().clone()
        for path in (root, step_path(root, 3)):
            with torch.no_grad():
                weight.zero_()
            given = {"model": state["model"], "step": 0}
            rest = fabric.load(path, given)
            assert torch.equal(weight, expected)
            assert given["step"] == 3
            assert (set(rest), rest["epoch"]) == ({"optimizer", "epoch"}, 2)
        assert set(fabric.load(root)) == {"model", "optimizer", "step", "epoch"}
        fabric.save(tmp_path / "theirs.ckpt", state)
        assert fabric.load(tmp_path / "theirs.ckpt")["epoch"] == 2
        with pytest.raises(ConfigError, match="filter"):
            fabric.save(root, state, filter={"model": lambda *_: True})


def test_a_look_at_a_step_leaves_the_generators_of_the_run_alone(root: Path) -> None:
    fabric, saving, state = _begun(root)
    with saving:
        fabric.save(root, state)
        saving.wait()
        torch.rand(1)
        before = torch.get_rng_state()
        assert fabric.load(step_path(root, 3))["step"] == 3
        assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("kind", [list, tuple])
def test_models_within_containers_are_restored_and_saved_again_as_they_are_by_then(
    root: Path, kind: Any
) -> None:
    fabric, saving, state = _begun(root)
    model, optimizer = state.pop("model"), state.pop("optimizer")
    state |= {"models": {"g": model, "seen": 1}, "rest": kind([optimizer, 2])}
    with saving:
        fabric.save(root, state)
        saving.wait()
        state["models"]["seen"] = 5
        assert saving.restore(state) == 3
        assert state["models"] == {"g": model, "seen": 1} and state["rest"] == kind([optimizer, 2])
        with torch.no_grad():
            model.module[0].weight.fill_(0.5)
        fabric.save(root, {**state, "step": 4})
        saving.wait()
    assert (ckpt_core.load(root)["models"]["g"]["0.weight"] == 0.5).all()


class _AsDdp(nn.Module):
    """A strategy's wrapper, as DistributedDataParallel is one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize("way", ["plain", "nested", "compiled"])
def test_what_a_strategy_has_wrapped_is_saved_under_the_modules_own_names(
    root: Path, way: str
) -> None:
    module = net()
    model: Any = _FabricModule(_AsDdp(module), made().strategy, original_module=module)
    if way == "compiled":
        model = torch.compile(model, backend="eager")
    state = {"model": {"g": model} if way == "nested" else model, "step": 1}
    with saver(root).attach(made()) as saving:
        saving.save(state)
    saved = ckpt_core.load(root)["model"]
    assert set(saved["g"] if way == "nested" else saved) == set(module.state_dict())


def test_a_state_of_another_model_is_refused_and_nothing_is_changed(root: Path) -> None:
    fabric, saving, state = _begun(root)
    with saving:
        fabric.save(root, state)
        saving.wait()
        other = torch.nn.Linear(2, 2)
        before = other.weight.detach().clone()
        with pytest.raises(StateMismatch):
            saving.restore({"model": other, "step": 0})
        assert torch.equal(before, other.weight)


def test_what_is_wrong_is_named_with_what_to_do(root: Path) -> None:
    saving = FabricCheckpoint(root)
    with pytest.raises(ConfigError, match=r"not open: call attach\(fabric\)"):
        saving.save({"step": 1})
    with pytest.raises(ConfigError, match="FSDPStrategy keeps parts"):
        saving.attach(_With(FSDPStrategy()))
    saving.attach(made())
    with saving:
        with pytest.raises(ConfigError, match="is open already"):
            saving.attach(made())
        with pytest.raises(ConfigError, match=r"state\['step'\]=None must be the number of steps"):
            saving.save({"model": net()})
        assert saving.restore({"model": net(), "step": 0}) is None


class _With:
    """All that is asked of a Fabric whose strategy cannot be set up here."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
