"""Which optimizers may be stepped in parts: found out before training, and checked in every step."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_core import ConfigError
from ckpt_horovod.separable import is_separable
from ckpt_horovod.substeps import SubSteps
from tests.integrations.horovod import own_optimizers as own

TORCHS = "SGD Adam AdamW NAdam RAdam Adamax Adadelta Adagrad RMSprop Rprop ASGD Adafactor".split()


def params() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in ((4, 3), (4,), (2, 2))]


@pytest.mark.parametrize("name", TORCHS)
def test_torchs_optimizers_may(name: str) -> None:
    assert is_separable(getattr(torch.optim, name)(params()))


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"amsgrad": True}])
def test_their_forms_may(options: dict[str, bool]) -> None:
    assert is_separable(torch.optim.Adam(params(), **options))


def test_sparse_adam_and_muon_may() -> None:
    assert is_separable(torch.optim.SparseAdam(params()))
    if hasattr(torch.optim, "Muon"):
        assert is_separable(torch.optim.Muon([nn.Parameter(torch.randn(3, 3))]))


def test_lbfgs_may_not() -> None:
    assert not is_separable(torch.optim.LBFGS(params()))


@pytest.mark.parametrize("cls", [own.PlainOwn, own.ToyLamb])
def test_an_own_optimizer_of_each_parameter_by_itself_may(cls: Any) -> None:
    assert is_separable(cls(params()))


@pytest.mark.parametrize(
    "cls",
    [own.GlobalNorm, own.GroupCounter, own.SelfCounter, own.RandomDraws, own.ClippingSGD],
)
def test_an_own_optimizer_that_keeps_something_for_all_may_not(cls: Any) -> None:
    assert not is_separable(cls(params()))


class Renamed(torch.optim.AdamW):
    """A subclass that leaves `step` as it is."""


class Same(torch.optim.SGD):
    """A subclass whose `step` does what it did."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_a_subclass_is_judged_by_what_its_step_does() -> None:
    assert is_separable(Renamed(params()))
    assert is_separable(Same(params()))


class Blender(own.PlainOwn):
    """Keeps a tensor for all in itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.mean = torch.zeros(())


class Broken(own.PlainOwn):
    """Cannot be stepped at all on parameters that are not its own."""

    def step(self, closure: Any = None) -> None:
        raise RuntimeError("not these")


@pytest.mark.parametrize("cls", [Blender, Broken])
def test_what_cannot_be_probed_may_not(cls: Any) -> None:
    assert not is_separable(cls(params()))


def test_nothing_is_changed_by_asking() -> None:
    mine = params()
    optimizer = own.PlainOwn(mine)
    for param in mine:
        param.grad = torch.ones_like(param)
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    before = [param.detach().clone() for param in mine]
    state = torch.get_rng_state(), random.getstate(), dict(optimizer.state)
    assert is_separable(optimizer)
    assert all(torch.equal(old, new) for old, new in zip(before, mine, strict=True))
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1] == random.getstate()
    assert dict(optimizer.state) == state[2]
    assert scheduler.get_last_lr() == [0.05]


def stepped(optimizer: Any, update: Callable[[Any], None]) -> None:
    torch.manual_seed(1)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.randn(param.shape)
    update(optimizer)


def in_parts(optimizer: Any) -> None:
    parts = SubSteps(optimizer, type(optimizer))
    for param in reversed(optimizer.param_groups[0]["params"]):
        parts.update([param])
    parts.finish()


@pytest.mark.parametrize(
    ("cls", "name"), [(own.GroupCounter, "'steps' of its groups"), (own.SelfCounter, "'calls' of")]
)
def test_a_step_in_parts_that_changes_more_than_its_part_is_an_error(cls: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*pass separable=False"):
        stepped(cls(params()), in_parts)


@pytest.mark.parametrize("name", TORCHS)
def test_a_step_in_parts_leaves_state_in_the_order_of_a_whole_one(name: str) -> None:
    whole, parts = (getattr(torch.optim, name)(params()) for _ in range(2))
    for _ in range(2):
        stepped(whole, lambda optimizer: optimizer.step())
        stepped(parts, in_parts)
    one, other = whole.state_dict(), parts.state_dict()
    assert list(one["state"]) == list(other["state"])
    for number, entry in one["state"].items():
        for key, value in entry.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other["state"][number][key]))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_the_first_step_of_a_fused_optimizer_may_be_made_in_parts(name: str) -> None:
    whole, parts = (getattr(torch.optim, name)(params(), fused=True) for _ in range(2))
    for _ in range(2):
        stepped(whole, lambda optimizer: optimizer.step())
        stepped(parts, in_parts)
    for one, other in zip(*(run.param_groups[0]["params"] for run in (whole, parts)), strict=True):
        assert torch.equal(one, other)
    assert vars(whole).keys() == vars(parts).keys()


def test_state_that_comes_later_keeps_its_place_behind_the_older() -> None:
    mine = params()
    optimizer = torch.optim.SGD(mine, momentum=0.9)
    for chosen in (mine[2:], mine[:2]):
        parts = SubSteps(optimizer, torch.optim.SGD)
        for param in reversed(chosen):
            param.grad = torch.ones_like(param)
            parts.update([param])
        parts.finish()
    assert list(optimizer.state) == [mine[2], mine[0], mine[1]]
