"""What hooks and classes of a program make of an optimizer's state stays; what torch casts comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.state.state_helpers import restore, same

NAMES = ("w", "c")


class Keeper(torch.optim.Optimizer):
    """Keeps the gradients of bf16 parameters in float32, and other values."""

    def __init__(self, names: Iterable[str]) -> None:
        named = [(name, nn.Parameter(torch.ones(3, dtype=torch.bfloat16))) for name in names]
        super().__init__(named, {"lr": 0.1})
        self.named = dict(named)

    def step(self, closure: Any = None) -> None:
        for number, name in enumerate(NAMES):
            value = torch.full((3,), (number + 1) / 3)
            nested = {"low": [value.double()], "array": np.full(2, number)}
            self.state[self.named[name]] = {"m": value, "mode": name, "nested": nested}

    def rows(self) -> dict[str, Any]:
        return {name: self.state.get(self.named[name]) for name in NAMES}


def by_name(live: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """As in torch's tutorial: each row goes to the parameter of its name."""
    (group,), (here,) = state["param_groups"], live.param_groups
    numbers = dict(zip(group["param_names"], group["params"], strict=True))
    names = here["param_names"]
    rows = {at: state["state"][numbers[name]] for at, name in enumerate(names)}
    params = {"params": list(range(len(names))), "param_names": names}
    return {"state": rows, "param_groups": [{**group, **params}]}


@pytest.mark.parametrize("stepped", [False, True])
def test_a_hook_gives_rows_to_other_parameters(stepped: bool) -> None:
    made, live = Keeper(NAMES), Keeper(reversed(NAMES))
    made.step()
    wanted = made.rows()
    if stepped:
        live.step()
    live.register_load_state_dict_pre_hook(by_name)
    for _ in range(2):
        restore({"o": made}, {"o": live})
        assert same(live.rows(), wanted)
    assert len(live._optimizer_load_state_dict_pre_hooks) == 1


def test_what_a_hook_makes_of_a_row_that_torch_has_cast_stays() -> None:
    made, live = Keeper(NAMES), Keeper(NAMES)
    made.step()
    wanted = made.rows()

    def changed(optimizer: Any) -> None:
        row = optimizer.state[optimizer.named["w"]]
        row["m"].zero_()
        row["mode"] = "cold"

    live.register_load_state_dict_post_hook(changed)
    restore({"o": made}, {"o": live})
    wanted["w"].update(m=torch.zeros(3, dtype=torch.bfloat16), mode="cold")
    assert same(live.rows(), wanted)


class Halved(Keeper):
    """Its own load gives torch other rows than were saved."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rows = {key: {"m": row["m"] / 2} for key, row in state["state"].items()}
        super().load_state_dict({**state, "state": rows})


def test_what_a_class_gives_to_torch_is_what_comes_back() -> None:
    made, live = Halved(NAMES), Halved(NAMES)
    made.step()
    wanted = {name: {"m": row["m"] / 2} for name, row in made.rows().items()}
    restore({"o": made}, {"o": live})
    assert same(live.rows(), wanted)


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row.fill_(float("nan")),
        lambda row: row.copy_(torch.tensor([float("nan"), float("inf"), -0.0])),
        lambda row: row.to_sparse(),
        lambda row: row.to(torch.float8_e4m3fn),
        lambda row: row * 1e30,
        lambda row: torch.complex(row, row),
    ],
)
def test_values_of_any_kind_that_torch_casts_come_back(change: Callable[[Any], Any]) -> None:
    made, live = Keeper(NAMES), Keeper(NAMES)
    made.step()
    row = made.rows()["w"]
    row["m"] = change(row["m"])
    restore({"o": made}, {"o": live})
    back = live.rows()["w"]["m"]
    assert back.dtype is row["m"].dtype and back.layout is row["m"].layout
    assert same(*((one.to_dense() if one.is_sparse else one) for one in (back, row["m"])))


class Low:
    """Wraps an optimizer, and has its first moments its own way after each load."""

    def __init__(self, change: Callable[[Any], Any], hold: Callable[[Any], Any]) -> None:
        self.parameter, self.change = nn.Parameter(torch.ones(3)), change
        self.held = hold(torch.optim.Adam([self.parameter]))

    @property
    def inner(self) -> torch.optim.Optimizer:
        return self.held[0] if isinstance(self.held, list) else self.held

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        rows = self.inner.state[self.parameter]
        rows["exp_avg"] = self.change(rows["exp_avg"])


def nines(row: torch.Tensor) -> torch.Tensor:
    return torch.full((3,), 9, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "hold"),
    [
        (nines, lambda inner: inner),
        (torch.Tensor.bfloat16, lambda inner: inner),
        (nines, lambda inner: [inner]),  # where nobody looks for an optimizer
    ],
)
def test_what_a_wrapper_makes_of_a_row_stays(change: Any, hold: Any) -> None:
    made, live = Low(torch.Tensor.float, hold), Low(change, hold)
    made.parameter.grad = torch.ones(3)
    made.inner.step()
    saved = made.inner.state[made.parameter]["exp_avg"]
    restore({"o": made}, {"o": live})
    assert same(live.inner.state[live.parameter]["exp_avg"], change(saved))
