"""Optimizers that change weights elsewhere than in `step`, where saves wait by themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from ckpt_core import Checkpointer, committed_steps, load, step_path
from ckpt_transformers import AsyncCheckpoint, doors
from tests.crash.layers import hooked
from tests.crash.promises import QuickFiles
from tests.integrations.transformers.jobs import SMALL, DiesAt, run, trainer_of

BETA, STEPS = 0.9, 7
EVALUATED = {"max_steps": STEPS, "eval_strategy": "steps", "eval_steps": 2}
TINY = replace(SMALL, chunk_bytes="4KiB", staging_bytes="48KiB", in_flight=1)
"""Less than the state: what cannot be written holds up what is to be copied."""


class ScheduleFree(torch.optim.Optimizer):
    """As that of the package schedulefree: weights are averages while it is told to evaluate."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.01, "train_mode": False, "k": 0})
        self.changes: Callable[[], None] = lambda: None

    def train(self) -> None:
        self._turn(to_train=True, weight=1 - BETA)

    def eval(self) -> None:
        self._turn(to_train=False, weight=1 - 1 / BETA)

    @torch.no_grad()
    def _turn(self, *, to_train: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["train_mode"] != to_train:
                self.changes()
                group["train_mode"] = to_train
                for param in group["params"]:
                    if "z" in self.state[param]:
                        param.lerp_(self.state[param]["z"], weight)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["train_mode"]
            group["k"] += 1
            for param in group["params"]:
                z = self.state[param].setdefault("z", param.clone())
                param.lerp_(z, 1 / group["k"])
                param.sub_(param.grad, alpha=group["lr"] * BETA)
                z.sub_(param.grad, alpha=group["lr"])


class InBackward(torch.optim.SGD):
    """As LOMO: a gradient is used up as soon as it is there."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.01)
        self.changes: Callable[[], None] = lambda: None
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(self._use_up)

    @torch.no_grad()
    def _use_up(self, param: torch.Tensor) -> None:
        self.changes()
        param.sub_(param.grad, alpha=0.01)  # type: ignore[arg-type]
        param.grad = None


class Gate(TrainerCallback):
    """Lets nothing be written of a save until somebody waits for it to be staged, or weights change."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.checkpointer: Any = None
        self.early = 0

    def __call__(self, name: str, args: tuple[Any, ...], act: Callable[[], Any]) -> Any:
        assert self._open.wait(60)
        return act()

    def checkpointer_of(self, *args: Any, **options: Any) -> Checkpointer:
        files = hooked(QuickFiles, self, names=("pwrite", "write_mapped"))
        gate = self._open

        class Told(Checkpointer):
            def wait_staged(self, *args: Any, **options: Any) -> None:
                gate.set()
                super().wait_staged(*args, **options)

        self.checkpointer = Told(*args, files=files, **options)
        return self.checkpointer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_save and state.global_step < STEPS:
            self.checkpointer.wait()
            self._open.clear()

    def changes(self) -> None:
        """Weights are about to change."""
        self.early += not self.checkpointer.is_staged()
        self._open.set()


@pytest.mark.parametrize("kind", [ScheduleFree, InBackward])
def test_weights_change_once_a_save_has_copied_them(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    monkeypatch.setattr(doors, "Checkpointer", gate.checkpointer_of)
    saver = AsyncCheckpoint(tmp_path / "ckpts", options=TINY)
    trainer: Any = trainer_of(tmp_path, gate, saver=saver, optimizer=kind, **EVALUATED)
    trainer.accelerator.has_lomo_optimizer = kind is InBackward
    trainer.optimizer.changes = gate.changes
    trainer.train()
    assert gate.early == 0
    assert committed_steps(tmp_path / "ckpts") == (2, 4, 6, 7)


def test_a_run_with_swapped_weights_ends_like_one_that_is_not_cut_short(tmp_path: Path) -> None:
    more = EVALUATED | {"optimizer": ScheduleFree}
    expected = run(tmp_path / "whole", **more)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", DiesAt(5), **more)
    assert run(tmp_path / "cut", **more) == expected


class Averaged(TrainerCallback):
    """Puts other weights in for a save, and its own back behind it."""

    def __init__(self, saver: AsyncCheckpoint) -> None:
        self._saver = saver
        self._own: list[torch.Tensor] = []
        self.changes: Callable[[], None] = lambda: None

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_save:
            self._saver.wait_staged()
            self._own = [param.clone() for param in kwargs["model"].parameters()]
            for param in kwargs["model"].parameters():
                param.fill_(state.global_step)

    @torch.no_grad()
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._saver.wait_staged()
        self.changes()
        for param, own in zip(kwargs["model"].parameters(), self._own, strict=True):
            param.copy_(own)


def test_a_callback_may_change_weights_behind_wait_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    monkeypatch.setattr(doors, "Checkpointer", gate.checkpointer_of)
    saver = AsyncCheckpoint(tmp_path / "ckpts", options=TINY)
    saver.wait_staged()  # before any run
    averaged = Averaged(saver)
    averaged.changes = gate.changes
    trainer_of(tmp_path, gate, averaged, saver=saver, max_steps=STEPS, save_steps=3).train()
    assert gate.early == 0
    assert committed_steps(tmp_path / "ckpts") == (3, 6, 7)
    model = load(step_path(tmp_path / "ckpts", 3), only=["model"])["model"]
    assert model["transformer.wte.weight"].unique().tolist() == [3.0]
