"""A step waits for every copy of what it changes, whatever is in flight and whatever its groups are now."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import nn

import ckpt_horovod
from ckpt_core import Checkpointer, Options, load


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Horovod in this process, on one rank, which reduces as well."""
    hvd.init()
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    yield
    hvd.shutdown()


class Run:
    """Training of a few layers.

    Args:
        options: of ckpt_horovod.DistributedOptimizer; None for Horovod's own.
    """

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(40, 40) for _ in range(4)])
        make: Any = hvd if options is None else ckpt_horovod
        self.optimizer = make.DistributedOptimizer(
            torch.optim.AdamW(self.model.parameters()),
            named_parameters=self.model.named_parameters(),
            **(options or {}),
        )
        self._drawn = torch.Generator().manual_seed(1)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(3, 40, generator=self._drawn)).square().sum().backward()
        self.optimizer.step()

    def freeze_first(self) -> None:
        """Take the first layer out of its group."""
        frozen = list(self.model[0].requires_grad_(False).parameters())
        self.optimizer.param_groups[0]["params"][:2] = []
        for param in frozen:
            self.optimizer.state.pop(param, None)

    def params(self) -> dict[str, torch.Tensor]:
        return {name: param.detach().clone() for name, param in self.model.named_parameters()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def held(ck: Checkpointer) -> threading.Event:
    """Nothing is copied until a while after the event."""
    gate = threading.Event()
    ck._engine.pipeline.stager.submit(lambda: gate.wait(60))
    return gate


def step_behind(run: Run, gate: threading.Event) -> None:
    """A step that begins while nothing is copied yet."""
    timer = threading.Timer(0.2, gate.set)
    timer.start()
    run.step()
    timer.join()


@pytest.mark.parametrize("every", [None, 1])
def test_a_step_waits_for_a_save_by_hand_of_any_number(tmp_path: Path, every: int | None) -> None:
    with Checkpointer(tmp_path, Options(eager_leaf_bytes=0)) as ck:
        run = Run({"checkpointer": ck, "every_n_steps": every, "layerwise": "in_step"})
        run.step()
        run.optimizer.end_iteration(save=False)
        expected = run.params()
        gate = held(ck)
        handle = ck.save(1000, run.optimizer.checkpoint_tree())
        step_behind(run, gate)
        assert handle.staged.done()
        handle.committed.result(60)
        assert same(load(tmp_path)["model"], expected)


def test_a_parameter_that_is_taken_out_of_its_group_is_left_as_horovod_leaves_it(
    tmp_path: Path,
) -> None:
    with Checkpointer(tmp_path, Options(eager_leaf_bytes=0)) as ck:
        ours, stock = Run({"checkpointer": ck, "layerwise": "in_step"}), Run()
        for run in (ours, stock):
            run.step()
        gate = held(ck)
        handle = ours.optimizer.end_iteration(save=True)
        for run in (ours, stock):
            run.freeze_first()
        # The moments of the first one left have the name now that those of the frozen one had in this save.
        step_behind(ours, gate)
        assert handle.staged.done()
        stock.step()  # it waits for all copies, as every optimizer does
        for _ in range(2):
            expected, gate = ours.params(), held(ck)
            handle = ours.optimizer.end_iteration(save=True)
            step_behind(ours, gate)
            stock.step()
            handle.committed.result(60)
            assert same(load(tmp_path)["model"], expected)
        assert same(ours.params(), stock.params())
