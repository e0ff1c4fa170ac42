"""Every parameter of the optimizer is in the checkpoint, and its groups stay the objects that they are."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from torch import nn

import ckpt_horovod
from ckpt_core import Checkpointer, ConfigError, RestoreError
from ckpt_horovod.elastic import TorchState


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """Horovod in this process, on one rank."""
    hvd.init()
    yield
    hvd.shutdown()


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    return nn.Linear(6, 6), nn.Linear(6, 6)


def wrapped(one: nn.Module, other: nn.Module, checkpointer: Checkpointer | None) -> Any:
    named = [*one.named_parameters("one"), *other.named_parameters("other")]
    return ckpt_horovod.DistributedOptimizer(
        torch.optim.Adam([param for _, param in named]),
        named_parameters=named,
        checkpointer=checkpointer,
    )


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


COPIES = {
    "copy": copy.deepcopy,
    "copy of a copy": lambda model: copy.deepcopy(copy.deepcopy(model)),
    "average": torch.optim.swa_utils.AveragedModel,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "pickle of a pickle": lambda model: pickle.loads(
        pickle.dumps(pickle.loads(pickle.dumps(model)))
    ),
}


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_of_an_attached_model_is_free_of_the_optimizer(tmp_path: Path, kind: str) -> None:
    one, _ = pair()
    with Checkpointer(tmp_path) as ck:
        optimizer = ckpt_horovod.DistributedOptimizer(
            torch.optim.Adam(one.parameters()),
            named_parameters=one.named_parameters(),
            checkpointer=ck,
        )
        optimizer.attach(model=one)
        one(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        assert b"orovod" not in pickle.dumps(one), "it is opened without Horovod, too"
        copied = COPIES[kind](one).train()
        assert torch.equal(copied(torch.ones(2, 6)), nn.Linear.forward(one, torch.ones(2, 6)))
        assert optimizer.iterations == 0, "the forward of the copy ended the iteration"
        one(torch.ones(2, 6))
        assert optimizer.iterations == 1


def scheduled(model: nn.Module, prefix: str, checkpointer: Checkpointer | None) -> tuple[Any, Any]:
    """A wrapped optimizer, and a scheduler that was made before."""
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    wrapped = ckpt_horovod.DistributedOptimizer(
        plain, named_parameters=model.named_parameters(prefix), checkpointer=checkpointer
    )
    return wrapped, scheduler


def rates(*optimizers: Any) -> list[float]:
    return [optimizer.param_groups[0]["lr"] for optimizer in optimizers]


@pytest.mark.filterwarnings("ignore:Detected call of")  # torch looks at the plain one
def test_schedulers_made_before_wrapping_go_on_for_attached_optimizers(tmp_path: Path) -> None:
    one, other = pair()
    with Checkpointer(tmp_path) as ck:
        optimizer, first = scheduled(one, "one", ck)
        second, its = scheduled(other, "other", None)
        optimizer.attach(model=one, other=other, more=[second], schedulers=[first, its])
        for number in range(3):
            iterate(optimizer, one, other, save=number == 0)
            first.step()
            its.step()
            if number == 1:
                ck.wait()
                optimizer.restore()
                assert rates(optimizer, second) == [1.0, 1.0]
        assert rates(optimizer, second) == [0.5, 0.5]


@pytest.mark.filterwarnings("ignore:Detected call of")  # torch looks at the plain one
def test_schedulers_made_before_wrapping_go_on_after_all_was_lost(tmp_path: Path) -> None:
    one, _ = pair()
    optimizer, scheduler = scheduled(one, "one", None)
    with TorchState(one, optimizer, root=tmp_path, scheduler=scheduler) as state:
        for _ in range(2):
            state.sync()
            scheduler.step()
            assert rates(optimizer) == scheduler.get_last_lr() == [0.5]
            state.restore()
            state.on_reset()


class Refusing:
    """Comes after the optimizer, and cannot be restored."""

    def state_dict(self) -> dict[str, Any]:
        return {"value": 1}

    def load_state_dict(self, found: dict[str, Any]) -> None:
        raise KeyError("value")


@pytest.mark.filterwarnings("ignore:Detected call of")  # torch looks at the plain one
def test_schedulers_made_before_wrapping_go_on_after_a_restore_that_failed(tmp_path: Path) -> None:
    one, other = pair()
    with Checkpointer(tmp_path) as ck:
        optimizer, scheduler = scheduled(one, "one", ck)
        optimizer.attach(model=one, other=other, scheduler=scheduler, refusing=Refusing())
        iterate(optimizer, one, other, save=True)
        scheduler.step()
        ck.wait()
        groups = list(map(id, optimizer.param_groups))
        with pytest.raises(RestoreError):
            optimizer.restore()
        assert list(map(id, optimizer.param_groups)) == groups
        scheduler.step()
        assert rates(optimizer) == scheduler.get_last_lr()


class Part(NamedTuple):
    """What an attribute held when it was saved, what is there at a restore, and what that makes of it."""

    saved: Any
    here: Any
    filled: Any


PLAIN = {
    "a list": Part([3], [0], [3]),
    "a list that was longer": Part([1, 2, (3, "x")], [], [1, 2, (3, "x")]),
    "a list that was shorter": Part([1.5], [7, 8], [1.5]),
    "a dict": Part({"seen": 12, "best": None}, {"seen": 0}, {"seen": 12, "best": None}),
    "other keys": Part({2: "two"}, {1: "one"}, {2: "two"}),
    "another kind": Part({"best": 3, "all": [1]}, {"best": [], "all": 0}, {"best": 3, "all": [1]}),
    "NumPy's": Part({"better": np.True_}, {"better": np.False_}, {"better": np.True_}),
    "a number": Part(3, 0, 0),
    "a tuple": Part((3,), (0,), (0,)),
    "a subclass": Part(Counter(a=3), Counter(), Counter()),
}


@pytest.mark.parametrize("given", [True, False], ids=["given", "attached"])
@pytest.mark.parametrize("kind", PLAIN)
def test_lists_and_dicts_of_plain_values_are_filled_in_place(
    tmp_path: Path, kind: str, given: bool
) -> None:
    saved, here, filled = copy.deepcopy(PLAIN[kind])
    one, other = pair()
    with Checkpointer(tmp_path) as ck:
        optimizer = wrapped(one, other, ck)
        iterate(optimizer, one, other, save=True, part=saved)
        ck.wait()
        if not given:
            optimizer.attach(part=here)
        found = optimizer.restore(**({"part": here} if given else {}))
    assert here == filled
    assert found.state["part"] == saved


def test_what_lies_in_lists_and_dicts_keeps_its_identity(tmp_path: Path) -> None:
    one, other = pair()
    losses, average, weight = [1.0, 2.0], nn.Linear(2, 2), torch.ones(2)
    scheduler = CountingUp()
    part = {"losses": losses, "epoch": 2, "more": [average, weight, (scheduler, 1), 5]}
    with Checkpointer(tmp_path) as ck:
        optimizer = wrapped(one, other, ck)
        optimizer.attach(part=part)
        iterate(optimizer, one, other, save=True)
        ck.wait()
        losses.append(3.0)
        part["epoch"], part["more"][3] = 9, 9
        weight.zero_()
        scheduler.count = 9
        optimizer.restore()
    assert part["losses"] is losses
    assert losses == [1.0, 2.0]
    assert (part["epoch"], part["more"][3], scheduler.count) == (2, 5, 0)
    assert part["more"][0] is average
    assert part["more"][1] is weight
    assert part["more"][2] == (scheduler, 1)
    assert torch.equal(weight, torch.ones(2))


def test_a_restore_that_fails_leaves_lists_and_dicts_as_they_were(tmp_path: Path) -> None:
    one, other = pair()
    counters = [1]
    with Checkpointer(tmp_path) as ck:
        optimizer = wrapped(one, other, ck)
        optimizer.attach(counters=counters, refusing=Refusing())
        iterate(optimizer, one, other, save=True)
        ck.wait()
        counters[0] = 2
        with pytest.raises(RestoreError):
            optimizer.restore()
    assert counters == [2]


class CountingUp:
    """An object that loads."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, found: dict[str, Any]) -> None:
        self.count = found["count"]


def test_once_the_checkpointer_is_closed_it_is_what_a_refusal_and_a_warning_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = pair()
    with Checkpointer(tmp_path) as ck:
        optimizer = wrapped(one, other, ck)
        iterate(optimizer, one, other)
    with pytest.raises(ConfigError, match="optimizer's Checkpointer is closed"):
        optimizer.restore()
    iterate(optimizer, one, other)
    assert not caplog.records
    iterate(optimizer, one, other, save=True)
    with optimizer.iteration(save=True):
        pass
    assert optimizer.iterations == 4
    [record] = caplog.records
    assert "iteration 3 is not saved: the Checkpointer is closed" in record.getMessage()


def test_without_a_checkpointer_a_restore_is_refused_and_nothing_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, other = pair()
    optimizer = wrapped(one, other, None)
    with pytest.raises(ConfigError, match="was given checkpointer=None"):
        optimizer.restore()
    iterate(optimizer, one, other, save=True)
    assert not caplog.records
