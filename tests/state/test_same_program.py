"""What `save` accepts, `restore` by the same program gives back; everything else `save` refuses."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ckpt_core.errors import ConfigError, StateMismatch
from ckpt_core.state import flatten
from ckpt_core.state.plain import is_plain_live
from tests.quick import drawn
from tests.state.state_helpers import LIMIT, restore, same
from tests.state.test_round_trip import PLAIN, TREES, Pair


class Settings(dict):  # type: ignore[type-arg]
    """A dict with attributes, as many libraries have one."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Rows(list):  # type: ignore[type-arg]
    pass


def _five() -> int:
    return 5


@dataclasses.dataclass
class Plan:
    rate: float
    weight: Any = None

    @functools.cached_property
    def double(self) -> float:
        return self.rate * 2


@dataclasses.dataclass
class Output(collections.OrderedDict):  # type: ignore[type-arg]
    """A dataclass that is a dict as well."""

    loss: Any = None

    def __post_init__(self) -> None:
        self["loss"] = self.loss

    def __reduce__(self) -> Any:
        return Output, (self.loss,)


class Labelled(Pair):
    """A namedtuple with room for more."""


class Wrapper:
    """Delegates everything."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)


def _placeholder(draw: Any, value: Any) -> Any:
    """A live state for a saved one: any placeholder for what is plain, else alike with other values."""
    if isinstance(value, torch.Tensor):
        return torch.empty_like(value)
    if is_plain_live(value) and _no_tensors(value):
        return draw(PLAIN | st.lists(PLAIN, max_size=3) | st.dictionaries(st.text(), PLAIN))
    if isinstance(value, dict):
        made = copy.copy(value)
        made.update({key: _placeholder(draw, item) for key, item in value.items()})
        return made
    if isinstance(value, Pair):
        return Pair(*(_placeholder(draw, item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_placeholder(draw, item) for item in value)
    if dataclasses.is_dataclass(value):
        made = copy.copy(value)
        object.__setattr__(made, "weight", _placeholder(draw, value.weight))  # type: ignore[attr-defined]
        return made
    return None  # A deque of tensors: they come back in the tree.


def _no_tensors(value: Any) -> bool:
    return not isinstance(value, collections.deque) or all(map(is_plain_live, value))


ARRAYS = {
    "negative strides": lambda v: np.arange(v, v + 6)[::-1],
    "both ways": lambda v: np.arange(v, v + 6.0).reshape(2, 3)[::-1, ::-2],
    "a field": lambda v: np.array([(v, 2.5), (3, v)], dtype=[("a", "i4"), ("b", "f8")])["b"],
    "part of a complex": lambda v: np.full(3, v, dtype=np.complex128).real,
}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@settings(deadline=None, max_examples=drawn(200))
@given(st.data())
def test_any_tree_comes_back_over_any_placeholders(data: st.DataObject) -> None:
    tree = data.draw(st.dictionaries(st.text(), TREES | st.sampled_from(list(ARRAYS.values()))))
    live = {key: value if callable(value) else None for key, value in tree.items()}
    saved = {key: value(5) if callable(value) else value for key, value in tree.items()}
    for key, value in live.items():
        live[key] = _placeholder(data.draw, tree[key]) if value is None else value(1)
    back = restore(saved, live)
    assert same(saved, back)
    arrays = {key: value for key, value in live.items() if isinstance(value, np.ndarray)}
    assert all(same(saved[key].tolist(), value.tolist()) for key, value in arrays.items())


def _kind(value: Any) -> str:
    """What a value is called in the name of a test: its text may hold an address."""
    return type(value).__name__


GROWN: list[tuple[Any, Any]] = [
    ({"a": 1, "b": [1, {2: 3}]}, {}),
    ({}, {"a": 1}),
    (collections.Counter("aab"), collections.Counter()),
    (collections.defaultdict(int, a=1), collections.defaultdict(int)),
    (collections.OrderedDict(a=1), collections.OrderedDict(b=2, c=3)),
    ([1, 2, 3], []),
    ([], [1, 2]),
    ((1, 2), None),
    ({"a": [1]}, [1]),
    (Plan(1.0), None),
    (Plan(1.0, [1, 2]), Plan(2.0, {"x": 1})),
    (collections.defaultdict(_five, a=1), collections.defaultdict(_five)),
    (Settings(a=1, b={"c": 2}), Settings()),
    (Rows([1, 2]), Rows()),
]


@pytest.mark.parametrize(("saved", "live"), GROWN, ids=_kind)
def test_plain_containers_that_grew_or_shrank_come_back(saved: Any, live: Any) -> None:
    back = restore(
        {"it": saved, "w": torch.ones(2)}, {"it": live, "w": torch.zeros(2)}, trusted=True
    )
    assert type(back["it"]) is type(saved) and back["it"] == saved


def test_a_defaultdict_keeps_the_factory_of_its_user() -> None:
    saved = collections.defaultdict(_five, a=1)
    assert restore(saved, collections.defaultdict(_five), trusted=True)["other"] == 5


def test_a_used_cached_property_is_no_state() -> None:
    saved, live = Plan(2.0, torch.ones(2)), Plan(3.0, torch.zeros(2))
    assert saved.double == 4 and live.double == 6
    back = restore({"p": saved}, {"p": live})["p"]
    assert back.double == 4 and live.weight.tolist() == [1, 1]


def _plan(value: float) -> Plan:
    made = Plan(value, torch.full((2,), value))
    made.note = f"note {value}"  # type: ignore[attr-defined]
    return made


def _labelled(value: float) -> Labelled:
    made = Labelled(torch.full((2,), value), int(value))
    made.label = value
    return made


HELD = {
    "a dict subclass": lambda v: Settings(w=torch.full((2,), v), deep={"a": np.full(3, v)}, n=v),
    "a list subclass": lambda v: Rows([torch.full((2,), v), v]),
    "a dataclass with another attribute": _plan,
    "a namedtuple with an attribute": _labelled,
    "a dataclass that is a dict": lambda v: Output(torch.full((2,), v)),
    "a factory of the user's": lambda v: collections.defaultdict(_five, w=torch.full((2,), v)),
}


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor | np.ndarray):
        return [value.tolist()]
    if isinstance(value, dict):
        return [x for item in value.values() for x in _tensors(item)]
    if dataclasses.is_dataclass(value):
        return _tensors(vars(value))
    return [x for item in value for x in _tensors(item)] if isinstance(value, list | tuple) else []


def _odd(value: float) -> dict[str, Any]:
    """Tensors that a copy into an alias would not fill, and an optimizer whose moments torch would cast."""
    parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([parameter])
    rows = {"exp_avg": torch.full((2,), value / 3), "mode": str(value)}
    optimizer.state[parameter] = {"step": torch.tensor(value), **rows}
    return {
        "coo": torch.tensor([value, 0.0, value - 1]).to_sparse(),
        "q": torch.quantize_per_tensor(torch.ones(2) * value, value / 8, 1, torch.quint8),
        "spread": torch.tensor([value]).expand(3),
        "asked for": nn.Parameter(torch.tensor([value])),
        "optimizer": optimizer,
    }


@pytest.mark.filterwarnings("ignore")
def test_a_container_with_a_type_of_its_own_is_filled_as_a_dict_is() -> None:
    for container in (dict, Settings):
        saved, live = container(_odd(2.0)), container(_odd(1.0))
        restore({"it": saved}, {"it": live}, trusted=True)
        for name in ("coo", "q", "spread", "asked for"):
            held, was = (
                one[name].dequantize() if name == "q" else one[name].detach().to_dense()
                for one in (live, saved)
            )
            assert torch.equal(held, was), name
        rows, was = (list(one["optimizer"].state.values()) for one in (live, saved))
        assert same(rows, was)


@pytest.mark.parametrize("make", HELD.values(), ids=HELD)
def test_containers_with_types_of_their_own_are_filled_in_place(make: Any) -> None:
    saved, live = make(2.0), make(1.0)
    back = restore({"it": saved}, {"it": live}, trusted=True)["it"]
    assert type(back) is type(saved)
    assert _tensors(back) == _tensors(live) == _tensors(saved) != []
    assert getattr(back, "__dict__", {}).keys() == getattr(saved, "__dict__", {}).keys()


def test_a_container_with_a_type_of_its_own_that_differs_is_refused_untouched() -> None:
    live = {"it": Settings(w=torch.zeros(2)), "x": torch.zeros(1)}
    for other, path in (
        (Settings(w=torch.ones(3)), r"it\.w: Tensor of torch\.float32 \[3\]"),
        (Settings(w=torch.ones(2), v=torch.ones(1)), r"it\.v: unexpected"),
        (Settings(), r"it\.w: missing"),
        (Settings(w=3), r"it\.w: int in the checkpoint"),
    ):
        with pytest.raises(StateMismatch, match=path):
            restore({"it": other, "x": torch.ones(1)}, live, trusted=True)
    assert not live["it"].w.any() and not live["x"].any()


def test_a_wrapper_that_delegates_comes_back_as_what_it_wraps() -> None:
    saved, live = Wrapper(nn.Linear(2, 2)), Wrapper(nn.Linear(2, 2))
    restore({"it": saved}, {"it": live})
    assert torch.equal(saved.inner.weight, live.inner.weight)


def test_an_object_in_a_pickled_container_is_loaded() -> None:
    saved, live = Settings(m=nn.Linear(2, 2)), Settings(m=nn.Linear(2, 2))
    restore({"it": saved}, {"it": live}, trusted=True)
    assert torch.equal(saved.m.weight, live.m.weight)


@pytest.mark.parametrize("make", ARRAYS.values(), ids=ARRAYS)
def test_arrays_of_any_strides_are_filled_in_place(make: Any) -> None:
    saved, live = make(5), make(1)
    back = restore({"it": saved}, {"it": live})["it"]
    assert live.tolist() == saved.tolist() == back.tolist()


@pytest.mark.parametrize(
    ("live", "text"),
    [
        (np.zeros(0), r"shape \[5\] in the checkpoint, \[0\] here"),
        (np.zeros(7), r"shape \[5\]"),
        (np.zeros(5, "f4"), "dtype float64 in the checkpoint, float32 here"),
        (np.zeros(5, np.dtype("f8").newbyteorder()), "dtype float64 in the checkpoint, [<>]f"),
        (np.zeros(5, "U5"), "dtype float64 in the checkpoint, .U5"),
    ],
)
def test_an_array_that_cannot_take_what_was_saved_is_a_mismatch(live: Any, text: str) -> None:
    with pytest.raises(StateMismatch, match=text):
        restore({"it": np.arange(5.0)}, {"it": live})
    assert restore({"it": np.zeros((0, 3))}, {"it": np.zeros((0, 3))})["it"].shape == (0, 3)


class Mute:
    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}


def _local() -> Any:
    @dataclasses.dataclass
    class Local:
        a: int

    return Local(1)


def _hidden(kind: str) -> Any:
    if kind == "namedtuple":

        class Hidden(NamedTuple):
            a: int

        return Hidden(1)

    class Colour(enum.Enum):
        RED = 1

    return Colour.RED


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Mute(), "'deep.it' is a .*Mute, which has state_dict.. and no load_state_dict"),
        (Wrapper(Mute()), "Wrapper.*no load_state_dict"),
        (_local(), "'deep.it' is a .*Local, and no type is found.*at the top of a module"),
        (_hidden("namedtuple"), "Hidden"),
        (_hidden("enum"), "Colour"),
        (Settings(f=lambda: 1), "'deep.it'"),
        (collections.defaultdict(lambda: 1), "'deep.it'"),
    ],
    ids=_kind,
)
def test_what_could_not_be_restored_is_refused_by_name(value: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        flatten({"deep": {"it": value}}, eager_leaf_bytes=LIMIT)
