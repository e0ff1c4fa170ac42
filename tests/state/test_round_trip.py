"""State trees survive: flatten, bytes, JSON text, allocate, unflatten."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import math
import pathlib
import random
import struct
import uuid
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_core.state import flatten
from ckpt_core.state.leaf import dtypes
from ckpt_core.state.special import QUANTIZED
from tests.quick import drawn
from tests.state.state_helpers import LIMIT, restore, same, through


class Colour(enum.Enum):
    RED = 1
    BLUE = "b"


class Bits(enum.Flag):
    A = 1
    B = 2


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    name: str
    weight: Any

    def __post_init__(self) -> None:
        assert self.name != "loaded twice"


class Buffers(torch.nn.Linear):
    def __init__(self, buffers: dict[str, torch.Tensor]) -> None:
        super().__init__(2, 2)
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)


PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**9000), 2**9000),
    st.floats(allow_nan=True),
    st.text(st.characters(exclude_categories=[])),
    st.binary(),
    st.complex_numbers(allow_nan=True),
    st.builds(bytearray, st.binary()),
    st.dates(),
    st.datetimes(),
    st.datetimes(timezones=st.just(dt.UTC)),
    st.timedeltas(),
    st.uuids(),
    st.decimals(allow_nan=False),
    st.fractions(),
    st.sampled_from([Colour.RED, Colour.BLUE, Bits.A | Bits.B, Bits(0), ..., torch.float8_e5m2]),
)
KEYS = st.one_of(
    st.text(st.characters(exclude_categories=[])),
    st.integers(),
    st.booleans(),
    st.none(),
    st.binary(),
    st.floats(allow_nan=False),
    st.tuples(st.integers(), st.text()),
    st.sampled_from(list(Colour)),
)
NAMED = sorted(dtypes())


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    name = draw(st.sampled_from([n for n in NAMED if dtypes()[n] not in QUANTIZED]))
    dtype = dtypes()[name]
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    count = math.prod(shape)
    raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if name == "bool":
        raw = bytes(byte & 1 for byte in raw)
    buffer = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0).byte()
    made = buffer.view(dtype).reshape(shape)
    return made.permute(draw(st.permutations(range(len(shape)))))


TREES = st.recursive(
    PLAIN | tensors(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(st.text(), inner, max_size=4).map(collections.OrderedDict),
        st.lists(inner, max_size=3).map(lambda items: collections.deque(items, 5)),
        st.dictionaries(KEYS, inner, max_size=2).map(lambda d: collections.defaultdict(list, d)),
        st.builds(Pair, inner, inner),
        st.builds(Frozen, st.just("x"), inner),
        st.frozensets(st.integers() | st.text(), max_size=3),
        st.sets(st.integers(), max_size=3),
    ),
    max_leaves=12,
)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@settings(deadline=None, max_examples=drawn(300))
@given(TREES)
def test_any_tree_comes_back_with_types_and_bits(tree: Any) -> None:
    back = through(tree)
    assert same(tree, back), (tree, back)


@pytest.mark.parametrize(
    "value",
    [
        1 << 20_000,
        float("inf"),
        -0.0,
        struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0],
        collections.Counter("aab"),
        slice(1, None, 3),
        range(5, 1, -2),
        torch.Size([2, 3]),
        torch.device("cpu"),
        torch.channels_last,
        torch.strided,
        pathlib.Path("a/b"),
        pathlib.PureWindowsPath("c:/x"),
        uuid.UUID(int=5),
        dt.time(1, 2, 3, fold=1),
        dt.timezone(dt.timedelta(hours=3)),
        dt.timezone(dt.timedelta(hours=3), "named"),
        decimal.Decimal("1.50"),
        fractions.Fraction(2, 3),
        np.float32(1.5),
        np.datetime64("2020-01-01"),
        np.dtype("float16"),
        np.str_("hello"),
        np.str_(""),
        np.bytes_(b""),
        random.Random(3).getstate(),
        type("N", (), {}).__name__,
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_values_come_back(value: Any) -> None:
    assert same(value, through(value))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3).T,
        np.arange(6, dtype=np.uint16)[::-1],
        np.arange(6)[::2],
        np.array(3, dtype=np.int8),
        np.empty((0, 3), np.float16),
        np.array(["a", "bcd"]),
        np.array(["2020-01-01"], "M8[D]"),
        np.array([(1, 2.5, "x")], dtype=[("a", "i4"), ("b", "f8", (2,)), ("c", "U3")]),
        np.arange(3, dtype=">f4"),
        np.array([1, None, "x"], dtype=object),
        np.array([True, False]),
        np.arange(4, dtype=np.complex128),
        np.arange(4, dtype=np.longlong),
        np.arange(4, dtype=np.ulonglong),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_numpy_arrays_come_back(array: Any) -> None:
    back = through({"a": array})["a"]
    assert type(back) is np.ndarray and back.dtype == array.dtype and back.shape == array.shape
    assert repr(back.tolist()) == repr(array.tolist())


def test_a_read_only_array_stays_read_only() -> None:
    array = np.arange(4)
    array.flags.writeable = False
    back = through(array)
    assert not back.flags.writeable and back.tolist() == [0, 1, 2, 3]


def test_strides_and_parameters_come_back() -> None:
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    tree = {
        "image": image,
        "p": torch.nn.Parameter(torch.randn(3)),
        "frozen": torch.nn.Parameter(torch.randn(3), requires_grad=False),
        "grad": torch.randn(2, requires_grad=True),
        "computed": torch.randn(2, requires_grad=True) * 2,
    }
    back = through(tree)
    assert back["image"].stride() == image.stride()
    assert type(back["p"]) is torch.nn.Parameter and back["p"].requires_grad
    assert type(back["frozen"]) is torch.nn.Parameter and not back["frozen"].requires_grad
    assert back["grad"].requires_grad and back["grad"].is_leaf
    assert not back["computed"].requires_grad


def test_tied_tensors_are_one_leaf_and_stay_tied() -> None:
    weight = torch.randn(4, 4)
    flat = flatten({"a": weight, "b": weight.view(4, 4)}, eager_leaf_bytes=LIMIT)
    assert [leaf.spec.name for leaf in flat.leaves] == ["a"]
    back = through({"a": weight, "b": weight.view(4, 4)})
    back["a"].fill_(7)
    assert (back["b"] == 7).all()


def test_overlapping_views_share_one_span() -> None:
    base = torch.arange(100.0)
    tree = {
        "low": base[10:30],
        "high": base[20:50].view(5, 6),
        "bytes": base[12:13].view(torch.int8),
    }
    flat = flatten(tree, eager_leaf_bytes=LIMIT)
    assert [leaf.nbytes for leaf in flat.leaves] == [160]
    back = through(tree)
    assert same(tree, back)
    back["low"].fill_(-1)
    assert (back["high"].flatten()[:10] == -1).all()
    assert back["bytes"].untyped_storage()._cdata == back["low"].untyped_storage()._cdata


def test_an_odd_byte_span_is_rebuilt_aligned() -> None:
    base = torch.arange(64, dtype=torch.uint8)
    tree = {"raw": base[1:20], "ints": base[4:16].view(torch.int32)}
    back = through(tree)
    assert same(tree, back)
    back["raw"].zero_()
    assert not back["ints"].any()


def test_an_expanded_tensor_is_stored_once() -> None:
    row = torch.randn(1, 50)
    wide = torch.randn(1000, 1000)[:, :1].expand(1000, 50)
    tree = {"row": row.expand(1000, 50), "wide": wide}
    flat = flatten(tree, eager_leaf_bytes=LIMIT)
    assert sum(leaf.nbytes for leaf in flat.leaves) == 200 + 4000
    back = through(tree)
    assert same(tree, back) and 0 in back["row"].stride() and 0 in back["wide"].stride()


def test_disjoint_views_share_a_storage_again() -> None:
    flat_buffer = torch.randn(64)
    tree = [flat_buffer[:16].view(4, 4), flat_buffer[16:40], flat_buffer[40:].view(2, 12)]
    flat = flatten(tree, eager_leaf_bytes=LIMIT)
    assert [leaf.spec.shape for leaf in flat.leaves] == [(4, 4), (24,), (2, 12)]
    back = through(tree)
    assert same(tree, back)
    assert len({part.untyped_storage()._cdata for part in back}) == 1
    assert back[1].data_ptr() - back[0].data_ptr() == 64


def test_far_apart_views_come_back_separately() -> None:
    base = torch.randn(100_000)
    back = through([base[:4], base[-4:]])
    assert back[0].untyped_storage()._cdata != back[1].untyped_storage()._cdata
    assert back[0].untyped_storage().nbytes() < 4096


def test_columns_of_a_big_matrix_do_not_drag_the_matrix_along() -> None:
    base = torch.randn(1000, 1000)
    tree = [base[:, 0], base[:, 5:7]]
    flat = flatten(tree, eager_leaf_bytes=LIMIT)
    assert sum(leaf.nbytes for leaf in flat.leaves) == 12_000
    assert same(tree, through(tree))


@settings(deadline=None, max_examples=drawn(200))
@given(st.data())
def test_views_of_one_storage_keep_values_and_sharing(data: st.DataObject) -> None:
    base = torch.arange(64, dtype=torch.int32)
    views = []
    for _ in range(data.draw(st.integers(1, 5))):
        shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
        stride = data.draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
        view = base.as_strided(shape, stride, data.draw(st.integers(0, 9)))
        if data.draw(st.booleans()):
            view = view.view(torch.float32)
        views.append(view)
    back = through(views)
    assert same(views, back)
    places = [elements(view) for view in views]
    for number, view in enumerate(back):
        before = [other.clone() for other in back]
        if view.numel():
            view.view(torch.int32).as_strided((1,), (1,)).fill_(-5 - number)
        for other, was, mine in zip(back, before, places, strict=True):
            shared = bool(places[number]) and places[number][0] in mine
            changed = not torch.equal(other.view(torch.int32), was.view(torch.int32))
            assert shared == changed


def elements(view: torch.Tensor) -> list[int]:
    offsets = [view.storage_offset()]
    for size, step in zip(view.shape, view.stride(), strict=True):
        offsets = [offset + step * index for offset in offsets for index in range(size)]
    return offsets


def test_conjugate_and_negative_views_come_back() -> None:
    value = torch.randn(3, dtype=torch.complex64)
    tree = {"v": value, "c": value.conj(), "i": value.conj().imag}
    assert same(tree, through(tree))


@pytest.mark.filterwarnings("ignore")
def test_sparse_and_quantized_tensors_come_back() -> None:
    dense = torch.tensor([[0.0, 1.0, 0.0, 2.0], [3.0, 0.0, 0.0, 0.0]])
    tree = {
        "coo": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((1, 2)),
        "q": torch.quantize_per_tensor(dense, 0.5, 3, torch.qint8),
        "qt": torch.quantize_per_tensor(dense, 0.5, 3, torch.quint8).t(),
        "qc": torch.quantize_per_channel(
            dense, torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint32
        ),
    }
    back = through(tree)
    for name, tensor in tree.items():
        assert back[name].layout == tensor.layout and back[name].dtype == tensor.dtype
        if tensor.is_quantized:
            assert torch.equal(back[name].int_repr(), tensor.int_repr())
            assert torch.equal(back[name].dequantize(), tensor.dequantize())
        else:
            assert torch.equal(back[name].to_dense(), tensor.to_dense())


@pytest.mark.filterwarnings("ignore")
def test_a_live_quantized_tensor_takes_the_values_that_its_own_scale_would_make_others() -> None:
    def made(scale: float, zero: int) -> dict[str, torch.Tensor]:
        dense, zeros = torch.tensor([[0.0, 1.0], [3.0, 2.0]]), torch.tensor([zero, 1])
        scales = torch.tensor([scale, 0.5])
        return {
            "q": torch.quantize_per_tensor(dense, scale, zero, torch.quint8),
            "qt": torch.quantize_per_tensor(dense, scale, zero, torch.qint8).t(),
            "qc": torch.quantize_per_channel(dense, scales, zeros, 0, torch.qint32),
            "other": torch.quantize_per_channel(dense, scales, zeros, zero % 2, torch.qint8),
        }

    state, live, module = made(0.5, 3), made(0.25, 0), Buffers(made(0.25, 0))
    restore(state, live)
    restore(Buffers(state), module)
    for name, tensor in state.items():
        assert torch.equal(live[name].dequantize(), tensor.dequantize()), name
        assert torch.equal(getattr(module, name).dequantize(), tensor.dequantize()), name


@pytest.mark.filterwarnings("ignore")
def test_a_live_tensor_of_several_elements_to_a_byte_takes_values_and_scales() -> None:
    def made(scale: float) -> dict[str, torch.Tensor]:
        dense, zeros = torch.arange(16.0).view(2, 8) % 3 * scale, torch.zeros(2)
        scales = torch.full((2,), scale)
        four = torch.quantize_per_channel(dense, scales, zeros, 0, torch.quint4x2)
        two = torch._empty_affine_quantized((2, 8), scale=scale, zero_point=0, dtype=torch.quint2x4)
        two.untyped_storage().fill_(int(scale))
        return {"four": four, "two": two}

    state, live = made(3.0), made(1.0)
    places = {name: tensor.data_ptr() for name, tensor in live.items()}
    restore(state, live)
    assert torch.equal(live["four"].dequantize(), state["four"].dequantize())
    assert live["two"].q_scale() == 3 and bytes(live["two"].untyped_storage()) == b"\3" * 4
    assert places == {name: tensor.data_ptr() for name, tensor in live.items()}
    assert not set(places.values()) & {tensor.data_ptr() for tensor in state.values()}


def test_a_module_takes_sparse_buffers_of_other_parts_and_is_filled_in_place() -> None:
    for diagonal in ([1.0, 0.0, 0.0], [1.0, 2.0, 3.0]):
        state = Buffers({"coo": torch.tensor(diagonal).diag().to_sparse()})
        live = Buffers({"coo": torch.tensor([0.0, 4.0, 5.0]).diag().to_sparse()})
        coo, place = live.get_buffer("coo"), live.weight.data_ptr()
        restore(state, live)
        assert torch.equal(coo.to_dense(), torch.tensor(diagonal).diag())
        assert live.get_buffer("coo") is coo and live.weight.data_ptr() == place
        assert torch.equal(live.weight, state.weight)


def test_the_tree_is_frozen_at_flatten() -> None:
    log = [1, 2]
    state = {"log": log, "raw": bytearray(b"ab"), "name": {"a": 1}}
    flat = flatten(state, eager_leaf_bytes=LIMIT)
    log.append(3)
    state["raw"][0] = 0
    state["name"]["b"] = 2
    assert flat.skeleton.unflatten({}, trusted=False) == {
        "log": [1, 2],
        "raw": bytearray(b"ab"),
        "name": {"a": 1},
    }


def test_a_leaf_survives_data_being_swapped() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    leaf = flatten(parameter, eager_leaf_bytes=LIMIT).leaves[0]
    parameter.data = torch.zeros(3)
    assert leaf.tensor.tolist() == [1, 1, 1]
