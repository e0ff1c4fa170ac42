"""`diff`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core.cli import comparing, numbers
from ckpt_core.cli.numbers import Distance
from tests.cli.conftest import Heard

Cli = Callable[..., Any]
Save = Callable[..., Path]


def _diff(cli: Cli, a: Path, b: Path) -> Any:
    answer = cli("diff", a, b, "--json")
    found = json.loads(answer.out)
    assert answer.code == (0 if found["same"] else 1)
    return found


def test_a_step_is_the_same_as_itself(cli: Cli, ckpts: Path) -> None:
    answer = cli("diff", ckpts, ckpts / "step-000000000030")
    assert answer.code == 0
    assert answer.out.startswith("the same: ")


def test_two_steps_of_training_differ_in_what_training_changed(cli: Cli, ckpts: Path) -> None:
    found = _diff(cli, ckpts / "step-000000000010", ckpts)
    paths = {row["path"] for row in found["tensors"]}
    assert "model.embed.weight" in paths
    assert "model.head.weight" not in paths  # the same memory: compared once
    assert "model.norm.running_mean" in found["equal"]
    assert found["only_a"] == found["only_b"] == []
    assert cli("diff", ckpts / "step-000000000010", ckpts).code == 1


def test_places_of_one_path_are_compared_whatever_their_order(cli: Cli, save: Save) -> None:
    outer = {"a.b": {"c": torch.ones(1)}}
    inner = {"a": {"b.c": torch.zeros(1), "b": {"c": torch.full((1,), 2.0)}}}
    a, b = save({**outer, **inner}, "a"), save({**inner, **outer}, "b")
    assert _diff(cli, a, b)["same"]


def test_how_far_two_tensors_are_apart(cli: Cli, save: Save) -> None:
    a = torch.zeros(1000, 3)
    b = a.clone()
    b[5, 1], b[900, 2] = 2.0, -0.5
    c = torch.ones(4)
    found = _diff(cli, save({"x": a, "c": c}), save({"x": b, "c": c}, "b"))
    (row,) = found["tensors"]
    assert row["path"] == "x"
    assert row["reason"] == "values"
    assert (row["elements"], row["differing"]) == (3000, 2)
    assert (row["max_abs"], row["max_rel"], row["not_finite"]) == (2.0, 1.0, 0)
    assert found["equal"] == ["c"]


def test_nan_and_infinity_are_counted_and_not_measured(cli: Cli, save: Save) -> None:
    a = torch.tensor([1.0, 2.0, math.nan, math.inf])
    b = torch.tensor([1.5, math.nan, math.nan, -math.inf])
    (row,) = _diff(cli, save({"x": a}), save({"x": b}, "b"))["tensors"]
    assert (row["differing"], row["not_finite"], row["max_abs"]) == (3, 2, 0.5)
    out = cli("diff", save({"x": a}, "c"), save({"x": b}, "d")).out
    assert "+2 inf/nan" in out


def test_other_dtypes_shapes_and_names(cli: Cli, save: Save) -> None:
    a = save({"d": torch.ones(2), "s": torch.ones(2, 3), "a": torch.ones(1), "z": 1})
    b = save({"d": torch.ones(2).half(), "s": torch.ones(3, 2), "b": torch.ones(1)}, "b")
    found = _diff(cli, a, b)
    assert [(row["path"], row["reason"]) for row in found["tensors"]] == [
        ("d", "dtype"),
        ("s", "shape"),
    ]
    assert (found["only_a"], found["only_b"]) == (["a", "z"], ["b"])
    out = cli("diff", a, b).out
    assert "only in A: a\n" in out
    assert "d: float32 [2] -> float16 [2]\n" in out


def test_plain_values_show_old_and_new(cli: Cli, save: Save) -> None:
    a = save({"epoch": 1, "lr": 1e-3, "flag": True, "t": (1, 2), "same": [1, "x"]})
    b = save({"epoch": 2, "lr": 1e-4, "flag": 1, "t": [1, 2], "same": [1, "x"]}, "b")
    found = _diff(cli, a, b)
    assert {row["path"]: (row["a"], row["b"]) for row in found["values"]} == {
        "epoch": ("1", "2"),
        "lr": ("0.001", "0.0001"),
        "flag": ("True", "1"),
        "t": ("(1, 2)", "[1, 2]"),
    }
    assert "epoch: 1 -> 2\n" in cli("diff", a, b).out


def test_sharing_of_memory_is_compared(cli: Cli, save: Save) -> None:
    x = torch.ones(5)
    a, b = save({"x": x, "y": x}), save({"x": x, "y": x.clone()}, "b")
    found = _diff(cli, a, b)
    assert found["tensors"] == []
    (row,) = found["values"]
    assert (row["path"], row["a"], row["b"]) == ("y", "tensor, same memory as x", "tensor")


def test_views_of_one_memory_are_compared_by_what_they_show(cli: Cli, save: Save) -> None:
    x = torch.arange(10.0)
    a = save({"x": x, "v": x[2:6]})
    assert _diff(cli, a, save({"x": x, "v": x[2:6]}, "b"))["same"]
    (row,) = _diff(cli, a, save({"x": x, "v": x[3:7]}, "c"))["tensors"]
    assert (row["path"], row["reason"]) == ("v", "view")


def test_a_view_differs_where_what_it_shows_does(cli: Cli, save: Save) -> None:
    def state(first: float, last: float) -> dict[str, torch.Tensor]:
        x = torch.arange(20.0)
        x[0], x[7] = first, last
        square = x[:16].view(4, 4)
        return {"x": x, "v": x[5:8], "t": square.t(), "none": x[3:3]}

    a, first, last = save(state(0, 7)), save(state(1, 7), "b"), save(state(0, 8), "c")
    found = _diff(cli, a, first)
    counts = {row["path"]: (row["differing"], row["elements"]) for row in found["tensors"]}
    assert counts == {"x": (1, 20), "t": (1, 16)}
    assert {"v", "none"} == set(found["equal"])
    counts = {
        row["path"]: (row["differing"], row["elements"]) for row in _diff(cli, a, last)["tensors"]
    }
    assert counts == {"x": (1, 20), "t": (1, 16), "v": (1, 3)}


def test_views_of_one_buffer_are_read_by_what_they_show(cli: Cli, save: Save, heard: Heard) -> None:
    count, size = 200, 500

    def state(last: float) -> dict[str, torch.Tensor]:
        flat = torch.arange(float(count * size))
        flat[-1] = last
        return {"flat": flat} | {f"p{at}": flat[at * size : (at + 1) * size] for at in range(count)}

    steps = save(state(0), chunk_bytes=4096), save(state(1), "b", chunk_bytes=4096)
    heard.nbytes = 0
    found = _diff(cli, *steps)
    assert [row["path"] for row in found["tensors"]] == ["flat", f"p{count - 1}"]
    # Of each step its sums, the leaf, and each view.
    assert heard.nbytes <= 2 * (3 * count * size * 4 + count * 4096)


def test_parts_of_sparse_tensors_are_compared(cli: Cli, save: Save) -> None:
    x = torch.eye(4).to_sparse()
    found = _diff(cli, save({"x": x}), save({"x": x * 2}, "b"))
    assert [row["path"] for row in found["tensors"]] == ["x.values"]


def test_a_corrupt_leaf_is_no_difference_but_an_error(
    cli: Cli, ckpts: Path, damage: Callable[[Path, int], None]
) -> None:
    damage(ckpts / "step-000000000010" / "shard-00000-0.safetensors", 9000)
    answer = cli("diff", ckpts / "step-000000000010", ckpts)
    assert answer.code == 2
    assert "expected xxh3" in answer.err


def test_pieces_and_chunks_of_any_size_give_the_same(
    cli: Cli, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = (torch.arange(50_000) % 1000).to(torch.int16)
    b = a.clone()
    b[::7] += 1
    steps = save({"x": a}, chunk_bytes=4096), save({"x": b}, "b", chunk_bytes=8192)
    for piece in (1000, 32_000, 1 << 18):
        monkeypatch.setattr(comparing, "_PIECE_ELEMENTS", piece)
        (row,) = _diff(cli, *steps)["tensors"]
        assert (row["differing"], row["max_abs"]) == (len(b[::7]), 1.0)


def _distance(name: str, a: bytes, b: bytes, *, itemsize: int) -> Distance:
    """The same with numpy as without."""
    found, plain = Distance(name), Distance(name)
    found.feed(bytearray(a), bytearray(b), itemsize=itemsize)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "numpy", None)
        assert numbers._library(name) is torch
        plain.feed(bytearray(a), bytearray(b), itemsize=itemsize)
    # The size of a complex number may round otherwise.
    assert found.max_rel == (plain.max_rel and pytest.approx(plain.max_rel, rel=1e-15))
    assert found == replace(plain, max_rel=found.max_rel)
    return found


@pytest.mark.parametrize("name", ["int64", "uint64", "int8", "uint8", "bool", "uint16", "uint32"])
@given(st.data())
def test_distances_of_whole_numbers_are_exact(name: str, data: st.DataObject) -> None:
    dtype = getattr(torch, name)
    low, high = (0, 1) if name == "bool" else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    numbers = st.lists(st.integers(low, high), min_size=1, max_size=5)
    a = data.draw(numbers)
    b = [data.draw(st.one_of(st.just(x), st.integers(low, high))) for x in a]
    size = dtype.itemsize
    raw = [b"".join((x % 256**size).to_bytes(size, "little") for x in xs) for xs in (a, b)]
    distance = _distance(name, *raw, itemsize=size)
    gaps = [abs(x - y) for x, y in zip(a, b, strict=True) if x != y]
    assert distance.differing == len(gaps)
    if gaps:
        assert distance.max_abs == pytest.approx(max(gaps), rel=1e-12)
        assert distance.max_rel is not None
        assert 0 < distance.max_rel <= 2


@pytest.mark.parametrize(
    "name",
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz complex32 complex64"
    " complex128 bcomplex32".split(),
)
def test_distances_of_every_dtype_with_numbers(name: str) -> None:
    halves = {"complex32": torch.float16, "bcomplex32": torch.bfloat16}
    kind = halves[name] if name in halves else getattr(torch, name)
    values = torch.tensor([1.0, 2.0, 1.0, 2.0]).to(kind)
    other = torch.tensor([1.0, 2.0, 3.0, 2.0]).to(kind)
    if name in halves:
        values, other = values.view(2, 2), other.view(2, 2)
    raw = [bytes(t.flatten().view(torch.uint8).tolist()) for t in (values, other)]
    # torch has bcomplex32 since 2.14.
    itemsize = 2 * kind.itemsize if name in halves else kind.itemsize
    distance = _distance(name, *raw, itemsize=itemsize)
    assert distance.differing == 1
    assert distance.max_abs == 2.0
    larger = 13**0.5 if name in halves else 3.0
    assert distance.max_rel == pytest.approx(2 / larger)


@pytest.mark.parametrize("name", "float64 float32 float16 bfloat16 float8_e5m2 complex64".split())
def test_what_is_not_finite_is_counted_whatever_the_dtype(name: str) -> None:
    dtype = getattr(torch, name)
    a = torch.tensor([math.nan, math.inf, math.inf, 1.0, 4.0, math.nan]).to(dtype)
    b = torch.tensor([math.nan, math.inf, -math.inf, math.nan, 2.0, 1.0]).to(dtype)
    raw = [bytes(t.view(torch.uint8).tolist()) for t in (a, b)]
    found = _distance(name, *raw, itemsize=dtype.itemsize)
    assert (found.differing, found.not_finite) == (4, 3)
    assert (found.max_abs, found.max_rel) == (2.0, 0.5)


def test_what_differs_in_no_number_is_apart_by_nothing() -> None:
    found = _distance("float32", bytes(4), b"\0\0\0\x80", itemsize=4)
    assert (found.differing, found.max_abs, found.max_rel) == (1, 0.0, 0.0)


def test_dtypes_without_numbers_are_counted_only() -> None:
    distance = _distance("float4_e2m1fn_x2", b"\x01\x02", b"\x01\x03", itemsize=1)
    assert (distance.differing, distance.max_abs) == (1, None)
