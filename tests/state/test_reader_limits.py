"""Whatever `flatten` takes, a reader takes: else it is refused when it is saved, by name, or pickled."""

from __future__ import annotations

import datetime as dt
import enum
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ckpt_core.errors import ConfigError, UntrustedData
from ckpt_core.state import bind
from tests.state.state_helpers import same, saved, through


class Wide(enum.IntFlag):
    A = 1


class Open(enum.Enum):
    A = 1

    @classmethod
    def _missing_(cls, value: object) -> Open:
        made = object.__new__(cls)
        made._name_, made._value_ = "made", value
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Open) and self._value_ == other._value_

    __hash__ = enum.Enum.__hash__


def nested(depth: int) -> Any:
    fields: Any = "f4"
    for _ in range(depth):
        fields = [("a", fields)]
    return np.dtype(fields)


BUILTIN = [np.dtype(code).newbyteorder(order) for code in np.typecodes["All"] for order in "<>"]
EXACT = [
    deque([1], maxlen=sys.maxsize),
    torch.Size([2**62]),
    torch.Size([-(2**63), 2**63 - 1]),
    torch.Size([np.int64(3)]),
    np.zeros(5000, "U0"),
    np.zeros(4096, "V0"),
    np.zeros((0, 2**40), "U3"),
    range(2**8000),
    torch.ones(1).expand(2**61),
    torch.ones(1).expand(*[1] * 63, 2),
    torch.empty(0, 2**61),
    *(dtype for dtype in BUILTIN if not dtype.hasobject),
]
PICKLED = [
    np.zeros(2, [(f"f{number}", "i1") for number in range(5000)]),
    np.zeros(2, nested(10)),
    nested(10),
    np.zeros(5000, "V0"),
    np.zeros(2, "M8[2147483647s]"),
    np.datetime64(0, "2147483647s"),
    np.dtype("M8[2147483647s]"),
    Wide(1 << 9000),
    Open(5),
    range(2**70000),
    dt.timezone(dt.timedelta(hours=3), "named"),
    dt.datetime(2020, 1, 1, tzinfo=dt.timezone(dt.timedelta(microseconds=5))),
]


def apart() -> list[torch.Tensor]:
    base = torch.arange(8.0)
    return [base[:4], base[2:6].as_strided((4, 1), (1, 2**62))]


def with_attribute() -> OrderedDict[str, int]:
    made = OrderedDict(a=1)
    vars(made)[1] = 2  # type: ignore[index]
    return made


def sparse(*sizes: int) -> torch.Tensor:
    places = torch.zeros(len(sizes), 1, dtype=torch.int64)
    return torch.sparse_coo_tensor(places, torch.ones(1), sizes)


@pytest.mark.parametrize("value", EXACT, ids=lambda value: repr(value)[:40])
def test_what_is_taken_comes_back(value: Any) -> None:
    made = through({"x": value})["x"]
    assert isinstance(made, np.dtype) or type(made) is type(value)
    if isinstance(value, torch.Tensor):
        assert made.shape == value.shape and set(made.stride()) == set(value.stride())
    elif isinstance(value, deque):
        assert made == value and made.maxlen == value.maxlen
    else:
        assert np.array_equal(made, value) if isinstance(value, np.ndarray) else made == value


@pytest.mark.parametrize("value", PICKLED, ids=lambda value: type(value).__name__)
def test_what_no_skeleton_tells_is_pickled(value: Any) -> None:
    try:
        assert same(through({"x": value})["x"], value)
    except UntrustedData:
        made = through({"x": value}, trusted=True)["x"]
        assert type(made) is type(value) and (np.asarray(made == value)).all()
        assert getattr(made, "dtype", None) == getattr(value, "dtype", None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        apart,
        with_attribute,
        lambda: torch.ones(*[1] * 65),
        lambda: torch.ones(1).expand(*[1] * 64, 2),
        lambda: torch.ones(1).expand(2**31, 2**31),
        lambda: torch.ones(1).expand(2**62),
        lambda: torch.empty_strided((2, 1, 2), (1, 2**62, 2)),
        lambda: {2**70000: 1},
        lambda: torch.empty(3, 0, dtype=torch.qint8),
        lambda: sparse(2**62),
        lambda: sparse(*[1] * 65),
    ],
)
def test_what_no_reader_takes_is_refused_by_name_when_it_is_saved(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match=r"'here"):
        through({"here": make()})


def test_inside_a_function_of_torch_func_nothing_is_saved() -> None:
    def saving(value: torch.Tensor) -> torch.Tensor:
        with pytest.raises(ConfigError, match=r"inside torch\.func"):
            through({"x": value})
        return value.sum()

    torch.func.grad(saving)(torch.ones(3))
    torch.vmap(saving)(torch.ones(3, 2))


def test_under_a_fake_mode_nothing_is_saved_or_loaded() -> None:
    skeleton, specs, _ = saved({"x": torch.ones(3)})
    live = {"x": torch.ones(3)}
    with FakeTensorMode(allow_non_fake_inputs=True):
        for call in (
            lambda: saved(live),
            lambda: skeleton.allocate(specs),
            lambda: bind(skeleton, specs, live, trusted=False),
        ):
            with pytest.raises(ConfigError, match="FakeTensorMode"):
                call()


def test_a_sparse_tensor_may_have_more_places_than_memory() -> None:
    back = through(sparse(2**31, 2**31))
    assert back.shape == (2**31, 2**31) and back._values().tolist() == [1]
