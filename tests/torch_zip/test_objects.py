"""What is pickled: when, how, and what is said of it when it cannot be."""

from __future__ import annotations

import argparse
import io
import threading
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_core import ConfigError
from ckpt_core.torch_zip import plan_zip
from tests.torch_zip.zip_files import assert_alike, filled, loaded, planned, saved


def test_objects_are_pickled_with_the_values_of_the_moment_of_planning() -> None:
    tree: dict[str, Any] = {"epoch": 1, "args": argparse.Namespace(lr=0.1), "w": torch.zeros(2)}
    plan = plan_zip(tree)
    tree["epoch"], tree["args"].lr = 2, 0.2
    tree["w"].fill_(1)
    back = loaded(filled(plan))
    assert (back["epoch"], back["args"].lr, back["w"].tolist()) == (1, 0.1, [1.0, 1.0])


def test_a_module_and_its_optimizer_load_and_go_on() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "module": model}
    back = loaded(planned(states))
    assert_alike(back["model"], loaded(saved(model.state_dict())))
    optimizer.load_state_dict(back["optimizer"])
    assert back["module"][0].weight.data_ptr() == back["model"]["0.weight"].data_ptr()


def test_containers_with_cycles_and_shared_parts_keep_them() -> None:
    shared = [torch.ones(1)]
    tree: dict[str, Any] = {"a": shared, "b": shared}
    tree["self"] = tree
    back = loaded(planned(tree))
    assert back["self"] is back and back["a"] is back["b"]


class _Holder:
    def __init__(self, part: Any) -> None:
        self.part = part


@pytest.mark.parametrize(
    ("tree", "place"),
    [
        ({"a": 1, "client": {"list": [0, lambda: 0]}}, "client.list.1: this function"),
        ({"a": (torch.ones(1), {"lock": threading.Lock()})}, "a.1.lock: this lock"),
        ({"o": _Holder({"x": threading.Lock()})}, "o.part.x: this lock"),
        ({3: {"gen": (x for x in ())}}, "3.gen: this generator"),
        (threading.Lock(), "the state: this lock"),
    ],
)
def test_the_place_of_what_cannot_be_pickled_is_named(tree: Any, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_zip(tree)
    assert str(caught.value).startswith(place)
    assert caught.value.__cause__ is not None


def test_a_broken_part_of_a_cyclic_tree_is_named_too() -> None:
    tree: dict[str, Any] = {}
    tree["self"] = tree
    tree["bad"] = threading.Lock()
    with pytest.raises(ConfigError, match=r"this "):
        plan_zip(tree)


class _Careless:
    """Cannot be pickled, and says so in its own way."""

    def __reduce__(self) -> Any:
        raise KeyError("no such thing")


def test_errors_of_objects_become_errors_of_the_caller() -> None:
    with pytest.raises(ConfigError, match=r"^job: this _Careless cannot be saved: .*no such thing"):
        plan_zip({"job": _Careless()})


def test_torch_saves_as_ever_after_a_plan_that_failed() -> None:
    with pytest.raises(ConfigError):
        plan_zip({"bad": threading.Lock()})
    file = io.BytesIO()
    torch.save(torch.arange(3), file)
    assert loaded(file.getvalue()).tolist() == [0, 1, 2]
