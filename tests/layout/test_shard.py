from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core.errors import ConfigError
from ckpt_core.layout import Extent, LayoutBuilder, ShardLayout, header_length, itemsize, nbytes
from ckpt_core.layout.dtypes import STORAGE
from ckpt_core.types import LeafSpec

Image = Callable[[ShardLayout, Mapping[str, bytes]], bytes]
Noise = Callable[[str, int], bytes]

KINDS = st.tuples(
    st.sampled_from(sorted(STORAGE)),
    st.lists(st.sampled_from([0, 1, 2, 3, 5, 16, 31, 64, 257]), max_size=3)
    .map(tuple)
    .filter(lambda shape: math.prod(shape) < 2**20),
)
NAMES = st.one_of(st.text(max_size=12), st.from_regex(r"__pad__[0-9]", fullmatch=True))


@st.composite
def spec_lists(draw: st.DrawFn) -> list[LeafSpec]:
    names = draw(st.lists(NAMES.filter(lambda n: n != "__metadata__"), unique=True, max_size=12))
    return [LeafSpec(name, *draw(KINDS)) for name in names]


def check_rules(layout: ShardLayout, specs: Sequence[LeafSpec], *, eager: int) -> None:
    """The file's sizes, and order, alignment and separation of its leaves."""
    by_name = {spec.name: spec for spec in specs}
    assert len(layout.header) % 4096 == layout.file_bytes % 4096 == 0
    assert [extent.nbytes for extent in layout.extents] == [
        nbytes(by_name[extent.name]) for extent in layout.extents
    ]
    assert {extent.name for extent in layout.extents} == by_name.keys()
    end = len(layout.header)
    for index, extent in enumerate(layout.extents):
        unit = itemsize(by_name[extent.name].dtype)
        if index < eager:
            assert extent.offset == end
        else:
            unit = 128 if extent.nbytes >= 4096 else unit
            assert end <= extent.offset < end + unit
        assert extent.nbytes == 0 or extent.offset % unit == 0
        end = extent.offset + extent.nbytes
        if index + 1 == eager:
            assert layout.front_bytes == end
    if eager == 0:
        assert layout.front_bytes == len(layout.header)
    assert end <= layout.file_bytes


def ends(layout: ShardLayout) -> int:
    last = layout.extents[-1] if layout.extents else Extent("", len(layout.header), 0)
    return last.offset + last.nbytes


def check_readable(
    layout: ShardLayout, specs: Sequence[LeafSpec], image: Image, noise: Noise
) -> None:
    """The safetensors package finds every leaf's bytes, and nothing but padding besides."""
    payload = {extent.name: noise(extent.name, extent.nbytes) for extent in layout.extents}
    found = dict(safetensors.deserialize(image(layout, payload)))
    for spec in specs:
        kept, entry = STORAGE[spec.dtype], found.pop(spec.name)
        assert bytes(entry["data"]) == payload[spec.name]
        assert entry["dtype"] == kept.code
        trailing = [] if kept.trailing is None else [kept.trailing]
        assert list(entry["shape"]) == [*spec.shape, *trailing]
    for name, entry in found.items():
        assert name.startswith("__pad__")
        assert not any(entry["data"])


@given(spec_lists(), st.data())
def test_every_plan_keeps_the_rules_and_is_readable(
    image: Image, noise: Noise, specs: list[LeafSpec], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(specs)))
    layout = ShardLayout.plan(specs[:cut], specs[cut:])
    check_rules(layout, specs, eager=cut)
    assert layout.file_bytes - ends(layout) < 4096
    check_readable(layout, specs, image, noise)


@given(spec_lists(), st.randoms(use_true_random=False))
def test_every_order_of_appending_keeps_the_rules_and_is_readable(
    image: Image, noise: Noise, specs: list[LeafSpec], rng: random.Random
) -> None:
    builder = LayoutBuilder(specs)
    reserved, promised = builder.header_bytes, builder.file_bytes
    order = rng.sample(specs, len(specs))
    extents = [builder.append(spec.name) for spec in order]
    layout = builder.finish()
    assert list(layout.extents) == extents
    assert len(layout.header) == layout.front_bytes == reserved
    assert layout.file_bytes == promised
    assert layout.file_bytes - ends(layout) < 4096 + 128 * len(specs)
    check_rules(layout, specs, eager=0)
    check_readable(layout, specs, image, noise)


def test_eager_leaves_come_first_with_the_widest_dtype_in_front() -> None:
    eager = [
        LeafSpec("byte", "uint8", (3,)),
        LeafSpec("f", "float32", (1,)),
        LeafSpec("z", "complex128", (1,)),
        LeafSpec("g", "float32", ()),
    ]
    lazy = [LeafSpec("w", "float32", (1024,)), LeafSpec("v", "int16", (3,))]
    layout = ShardLayout.plan(eager, lazy)
    base = len(layout.header)
    assert layout.front_bytes == base + 27
    assert layout.extents == (
        Extent("z", base, 16),
        Extent("f", base + 16, 4),
        Extent("g", base + 20, 4),
        Extent("byte", base + 24, 3),
        Extent("w", base + 128, 4096),
        Extent("v", base + 4224, 6),
    )
    assert layout.file_bytes == base + 8192


def test_no_padding_entry_appears_where_nothing_is_to_be_filled() -> None:
    layout = ShardLayout.plan([], [LeafSpec("w", "float32", (2048,))])
    assert b"__pad__" not in layout.header


def test_regular_sizes_cost_a_layer_wise_file_no_padding() -> None:
    specs = [LeafSpec(f"w{index}", "float32", (32 * index, 64)) for index in range(1, 21)]
    builder = LayoutBuilder(specs)
    for spec in specs:
        builder.append(spec.name)
    layout = builder.finish()
    assert layout.file_bytes - len(layout.header) == sum(nbytes(spec) for spec in specs)
    assert b"__pad__" not in layout.header


def test_a_file_without_leaves_is_a_header_alone(image: Image) -> None:
    layout = ShardLayout.plan([], [])
    assert (layout.front_bytes, layout.file_bytes, layout.extents) == (4096, 4096, ())
    assert safetensors.deserialize(image(layout, {})) == []
    assert LayoutBuilder([]).finish() == layout


def test_the_header_tells_the_format_and_carries_metadata() -> None:
    layout = ShardLayout.plan([], [], metadata={"note": 'a "quoted" né'})
    table = json.loads(layout.header[8:])
    assert table["__metadata__"] == {"format": "pt", "ckpt_core": "1", "note": 'a "quoted" né'}


@pytest.mark.parametrize(
    "metadata", [{"format": "np"}, {"ckpt_core": "2"}, {"a": 1}, {"a": "\ud800"}]
)
def test_metadata_that_the_header_cannot_hold_is_refused(metadata: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        ShardLayout.plan([], [], metadata=metadata)
    with pytest.raises(ConfigError):
        LayoutBuilder([], metadata=metadata)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "b", "a"], "'a' occurs more than once"),
        (["__metadata__"], "safetensors' own"),
        (["\ud800"], "lone surrogate"),
    ],
)
def test_names_that_a_header_cannot_hold_are_refused(names: list[str], message: str) -> None:
    specs = [LeafSpec(name, "float32", (1,)) for name in names]
    with pytest.raises(ConfigError, match=message):
        ShardLayout.plan(specs[:1], specs[1:])
    with pytest.raises(ConfigError, match=message):
        LayoutBuilder(specs)


def test_a_header_above_the_limit_of_safetensors_is_refused() -> None:
    specs = [LeafSpec(f"{i:03d}" + "x" * 1_000_000, "float32", (1,)) for i in range(100)]
    with pytest.raises(ConfigError, match="safetensors allows 100000000"):
        ShardLayout.plan([], specs)
    with pytest.raises(ConfigError, match="safetensors allows 100000000"):
        LayoutBuilder(specs)


def test_a_leaf_is_appended_once_and_only_if_it_was_announced() -> None:
    builder = LayoutBuilder([LeafSpec("a", "float32", (1,)), LeafSpec("b", "float32", (1,))])
    builder.append("a")
    for name in ("a", "c"):
        with pytest.raises(ConfigError, match="appended before or is not part"):
            builder.append(name)
    with pytest.raises(ConfigError, match="never appended: 1 leaf, 'b'"):
        builder.finish()


@pytest.mark.parametrize("leaf_bytes", [64 * 1024 + 2, 1024 * 1024, 8 * 1024 * 1024 - 2])
@pytest.mark.parametrize("total_bytes", [8 * 2**20, 100 * 2**20])
def test_header_and_padding_add_at_most_one_percent(leaf_bytes: int, total_bytes: int) -> None:
    count = -(-total_bytes // leaf_bytes)
    names = [f"transformer.h.{i}.attention.query.weight" for i in range(count)]
    specs = [LeafSpec(name, "bfloat16", (leaf_bytes // 2,)) for name in names]
    builder = LayoutBuilder(specs)
    for spec in reversed(specs):
        builder.append(spec.name)
    for layout in (ShardLayout.plan([], specs), builder.finish()):
        payload = sum(extent.nbytes for extent in layout.extents)
        assert (layout.file_bytes - payload) / payload <= 0.01


def test_ten_thousand_leaves_are_planned_fast() -> None:
    # Measured at 15 ms. Processor time, and a wide bound: only a quadratic step is to be caught.
    eager = [LeafSpec(f"layers.{i}.norm.weight", "float32", (i % 50,)) for i in range(5000)]
    lazy = [LeafSpec(f"layers.{i}.mlp.weight", "bfloat16", (i % 70, 999)) for i in range(5000)]
    best_s = min(_seconds(lambda: ShardLayout.plan(eager, lazy)) for _ in range(5))
    assert best_s < 0.1


def _seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def test_the_worst_names_and_sizes_fit_the_reserved_header() -> None:
    # A leaf named like padding costs each padding entry a longer number.
    specs = [LeafSpec(f"__pad__{i}", "uint8", (4097,)) for i in range(200)]
    specs += [LeafSpec(f'"\x00\U0001f600{i}', "float64", (1,)) for i in range(200)]
    builder = LayoutBuilder(specs)
    for spec in random.Random(0).sample(specs, len(specs)):
        builder.append(spec.name)
    layout = builder.finish()
    assert header_length(layout.header, file_bytes=layout.file_bytes, path=Path("x")) == len(
        layout.header
    )
    check_rules(layout, specs, eager=0)
