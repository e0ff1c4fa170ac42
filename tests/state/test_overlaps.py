"""Live memory that is shared otherwise than what was saved: restored right, or refused untouched."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ckpt_core.errors import StateMismatch
from ckpt_core.state import RngState, bind
from tests.quick import drawn
from tests.state.state_helpers import fill, restore, same, saved

_SIZE = 25


@st.composite
def _views(draw: st.DrawFn) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Shapes, and strides and offsets that fit them into a buffer of `_SIZE`."""
    made = []
    for _ in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
        made.append((shape, draw(_strides(len(shape))), draw(st.integers(0, 8))))
    return made


def _strides(count: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(*[st.integers(0, 4)] * count)


def _build(views: Any, kind: str, base: torch.Tensor) -> list[Any]:
    made = []
    for shape, stride, offset in views:
        if kind == "tensors":
            made.append(base.as_strided(shape, stride, offset))
        elif kind == "arrays":
            whole = base.numpy()
            start = whole[offset:]
            steps = [step * 4 for step in stride]
            made.append(np.lib.stride_tricks.as_strided(start, shape, steps, writeable=True))
        elif kind == "backwards":
            start = base.numpy()[: _SIZE - offset]
            steps = [-step * 4 for step in stride]
            start = start[::-1]
            made.append(np.lib.stride_tricks.as_strided(start, shape, steps, writeable=True))
        else:
            made.append(torch.zeros(shape, dtype=torch.int32).add_(offset))
    return made


def held(item: Any) -> Any:
    return item.clone().numpy() if isinstance(item, torch.Tensor) else item.copy()


@settings(deadline=None, max_examples=drawn(300))
@given(st.data())
def test_any_sharing_is_restored_right_or_refused_untouched(data: st.DataObject) -> None:
    views = data.draw(_views())
    kinds = st.sampled_from(["tensors", "apart"])
    if data.draw(st.booleans()):
        kinds = st.sampled_from(["arrays", "backwards"])
    saved_kind, live_kind = data.draw(kinds), data.draw(kinds)
    other = [(shape, data.draw(_strides(len(shape))), offset) for shape, _, offset in views]
    live_views = other if data.draw(st.booleans()) else views
    filler = torch.arange(_SIZE, dtype=torch.int32)
    state = _build(views, saved_kind, filler + 100 if data.draw(st.booleans()) else filler * 0)
    base = -filler
    live = _build(live_views, live_kind, base)
    before = [held(item) for item in live]
    refused = False
    try:
        restore({"it": state}, {"it": live})
    except StateMismatch:
        refused = True
    assert not (refused and (saved_kind, views) == (live_kind, live_views))
    wanted = before if refused else [held(item) for item in state]
    assert all(np.array_equal(a, held(b)) for a, b in zip(wanted, live, strict=True))


def test_two_names_of_one_element_may_have_other_strides() -> None:
    def build(stride: int, value: int) -> list[torch.Tensor]:
        memory = torch.full((4,), value)
        return [memory.as_strided((1,), (0,)), memory.as_strided((1,), (stride,))]

    live = build(1, 0)
    restore(build(0, 7), live)
    assert [item.item() for item in live] == [7, 7]


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_untied_values_in_one_memory_are_refused_by_both_names(kind: str) -> None:
    state: Any = {"a": torch.zeros(4), "b": torch.ones(4)}
    memory = torch.full((6,), 7.0)
    live: Any = {"a": memory[:4], "b": memory[2:]}
    if kind == "array":
        state, live = ({k: v.numpy() for k, v in side.items()} for side in (state, live))
    with pytest.raises(StateMismatch) as caught:
        restore(state, live)
    assert caught.value.problems == ["a: shares memory with b here, and has another value there"]
    assert memory.tolist() == [7.0] * 6


def test_two_views_of_one_array_come_back_into_two_such_views() -> None:
    def build(value: float) -> dict[str, Any]:
        memory = np.arange(6.0) + value
        return {
            "a": memory[:4],
            "b": memory[2:],
            "back": memory[::-1],
            "t": torch.from_numpy(memory),
        }

    state, live = build(0), build(9)
    restore(state, live)
    assert all(np.array_equal(state[name], live[name]) for name in state)


def test_fields_of_one_structured_array_come_back_in_place() -> None:
    def build(value: int) -> Any:
        return np.array([(value, 2.5 * value), (3, 4.5)], dtype=[("x", "i4"), ("y", "f8")])

    state, live = build(5), build(0)
    restore({"x": state["x"], "y": state["y"]}, {"x": live["x"], "y": live["y"]})
    assert live.tolist() == state.tolist()


def test_distinct_rows_do_not_go_into_one_row() -> None:
    state, live = {"w": torch.arange(6.0).view(2, 3)}, {"w": torch.full((1, 3), 7.0).expand(2, 3)}
    with pytest.raises(StateMismatch, match="w: shares memory with its own elements"):
        restore(state, live)
    assert live["w"].tolist() == [[7.0] * 3] * 2


def test_a_module_that_loads_itself_does_not_lose_a_tied_weight() -> None:
    class Loads(nn.Module):
        def __init__(self, tie: bool) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
            if tie:
                self.b.weight = self.a.weight

        def get_extra_state(self) -> Any:
            return 1

        def set_extra_state(self, state: Any) -> None: ...

    live = Loads(True)
    before = live.a.weight.clone()
    with pytest.raises(StateMismatch, match=r"a\.weight: shares memory with b\.weight"):
        restore(Loads(False), live)
    assert torch.equal(before, live.a.weight)


class Draws:
    """Draws random numbers of every kind when it loads."""

    def state_dict(self) -> dict[str, Any]:
        return {"x": torch.ones(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        random.random(), np.random.rand(), torch.rand(2)


@pytest.mark.parametrize("order", [["rng", "draws"], ["draws", "rng"]])
def test_random_numbers_go_on_whatever_draws_while_it_loads(order: list[str]) -> None:
    def build() -> Any:
        parts = {"rng": RngState(), "draws": Draws()}
        return {"deep": [{name: parts[name] for name in order}], "last": Draws()}

    state = build()
    skeleton, specs, bytes_of = saved(state)
    expected = (random.random(), float(np.random.rand()), torch.rand(3).tolist())
    binding = bind(skeleton, specs, build(), trusted=False)
    for name, target in binding.destinations.items():
        fill(target, bytes_of[name])
    binding.finish()
    assert (random.random(), float(np.random.rand()), torch.rand(3).tolist()) == expected


# -- modules whose shapes their own load_state_dict takes -----------------------------------------


class Grows(nn.Module):
    """A buffer of as many rows as have been seen."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(rows, 2))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.seen = torch.zeros_like(state[prefix + "seen"], device=self.seen.device)
        super()._load_from_state_dict(state, prefix, *rest)


def test_a_buffer_that_grew_is_loaded_by_its_module() -> None:
    state, live = Grows(30_000), Grows(0)
    state.seen.fill_(3)
    calls = live.seen
    restore({"m": state}, {"m": live})
    assert same(dict(state.state_dict()), dict(live.state_dict())) and calls.numel() == 0


def test_a_module_that_grows_still_refuses_another_layer() -> None:
    state, live = Grows(3), Grows(0)
    state.linear = nn.Linear(3, 2)
    before = live.linear.weight.clone()
    with pytest.raises(StateMismatch, match=r"m\.linear\.weight: shape"):
        restore({"m": state}, {"m": live})
    assert torch.equal(before, live.linear.weight) and live.seen.shape == (0, 2)


def test_another_dtype_is_a_mismatch_though_a_load_would_cast() -> None:
    live = Grows(3).double()
    with pytest.raises(StateMismatch, match="dtype float32"):
        restore({"m": Grows(3)}, {"m": live})


def test_batch_norm_of_another_width_is_a_mismatch() -> None:
    live = nn.BatchNorm1d(3)
    with pytest.raises(StateMismatch, match="shape"):
        restore({"m": nn.BatchNorm1d(4)}, {"m": live})


class LowRank(torch.optim.Optimizer):
    """Keeps moments of a projection of the gradient, as GaLore does."""

    def __init__(self, params: Any, rank: int = 1) -> None:
        super().__init__(params, {"rank": rank})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                small = p.grad[: group["rank"]]
                rows = self.state[p]
                rows["exp_avg"] = rows.get("exp_avg", torch.zeros_like(small)) + small


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_moments_of_low_rank_come_back_into_any_optimizer(rank: int) -> None:
    def build(rank: int) -> LowRank:
        made = LowRank([nn.Parameter(torch.ones(4, 3))], rank=rank)
        made.param_groups[0]["params"][0].grad = torch.randn(4, 3)
        if rank:
            made.step()
        return made

    state, live = build(2), build(rank)
    restore({"o": state}, {"o": live})
    assert same(state.state_dict()["state"], live.state_dict()["state"])


class Point(NamedTuple):
    x: float
    y: torch.Tensor


class Keeps(LowRank):
    """Keeps an array and a named tuple for each parameter, which torch's own load cannot rebuild."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for rows in self.state.values():
            rows["seen"] = np.arange(3.0)
            rows["deep"] = [{"point": Point(2.5, torch.full((2,), 7.0))}, (np.ones(2),)]
        self.state["all"] = {"array": np.ones(2)}


def test_an_array_in_the_state_of_a_parameter_comes_back() -> None:
    def build(steps: int) -> Keeps:
        made = Keeps([nn.Parameter(torch.ones(4, 3))])
        made.param_groups[0]["params"][0].grad = torch.ones(4, 3)
        for _ in range(steps):
            made.step()
        return made

    for steps in (0, 1):
        live = build(steps)
        restore({"o": build(2)}, {"o": live}, trusted=True)
        (rows,) = [rows for key, rows in live.state.items() if key != "all"]
        assert rows["seen"].tolist() == [0, 1, 2] and live.state["all"]["array"].tolist() == [1, 1]
        point, (array,) = rows["deep"][0]["point"], rows["deep"][1]
        assert type(point) is Point and point.x == 2.5 and point.y.tolist() == [7, 7]
        assert array.tolist() == [1, 1]
