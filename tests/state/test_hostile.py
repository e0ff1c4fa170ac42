"""Skeletons from strangers: an error that names the file, never a crash or code that runs."""

from __future__ import annotations

import copy
import json
import os
import pickle
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_core.errors import CorruptCheckpoint, RestoreError, UntrustedData
from ckpt_core.state import Skeleton, flatten
from ckpt_core.state.atoms import to_base64
from ckpt_core.types import LeafSpec
from tests.quick import drawn
from tests.state.state_helpers import LIMIT, same, through

T = {"!": "tensor", "leaf": "a"}
SPEC = {"a": LeafSpec("a", "float32", (4,))}


def load(tree: Any, **rest: Any) -> Any:
    skeleton = Skeleton.from_json({"tree": tree, **rest}, path="evil.json")
    return skeleton.unflatten(skeleton.allocate(SPEC), trusted=False)


def opaque(data: bytes) -> dict[str, Any]:
    return {"!": "opaque", "type": "x.Y", "v": to_base64(data)}


def nested(depth: int) -> Any:
    tree: Any = None
    for _ in range(depth):
        tree = [tree]
    return tree


@pytest.mark.parametrize(
    "tree",
    [
        {"!": "nope"},
        {"x": 1},
        {"!": 3},
        {"!": "dict", "v": [1]},
        {"!": "dict", "items": [[[1], 2]]},
        {"!": "dict", "items": [[1, 2], [1, 3]]},
        {"!": "dict", "items": [[1, 2, 3]]},
        {"!": "set", "v": [[1]]},
        {"!": "deque", "v": [1], "maxlen": 10**30},
        {"!": "deque", "v": [1], "maxlen": -1},
        {"!": "Size", "v": ["a"]},
        {"!": "Size", "v": [10**40]},
        {"!": "range", "v": [0, 1, 0]},
        {"!": "float", "v": "zz"},
        {"!": "bytes", "v": "***"},
        {"!": "dtype", "v": "load"},
        {"!": "layout", "v": "load"},
        {"!": "device", "v": "no where"},
        {"!": "device", "v": "cuda:x"},
        {"!": "timedelta", "v": [10**30, 0, 0]},
        {"!": "uuid", "v": "x"},
        {"!": "path", "v": ["Popen", "aa"]},
        {"!": "ndarray", "v": ["<f8", [10**9, 10**9], ""]},
        {"!": "ndarray", "v": ["|O", [1], "AAAAAAAAAAA="]},
        {"!": "ndarray", "v": ["<f8", [-1], ""]},
        {"!": "ndarray", "v": ["V999999999", [1], "AA=="]},
        {"!": "npscalar", "v": ["<f8", "AA=="]},
        {"!": "npdtype", "v": [[["a"], "O"]]},
        {"!": "defaultdict", "v": {}, "factory": "exec"},
        {"!": "enum", "type": "os", "name": "x"},
        {"!": "dataclass", "type": "a:b", "fields": [["x", 1], ["x", 2]]},
        {"!": "object", "type": "a:b"},
        {"!": "array", "leaf": 3},
        {"!": "tensor", "leaf": "unknown"},
        {"!": "tensor"},
        T | {"flags": "zzz"},
        T | {"view": ["float32", 0, [5], [1]]},
        T | {"view": ["float32", 8, [4], [1]]},
        T | {"view": ["float32", -4, [1], [1]]},
        T | {"view": ["float32", 0, [2**61], [2**61]]},
        T | {"view": ["float32", 0, [2**61, 2**61], [0, 0]]},
        T | {"view": ["float32", 0, [2], [-1]]},
        T | {"view": ["float32", 0, [2], [1, 1]]},
        T | {"view": ["load", 0, [1], [1]]},
        T | {"view": ["float32", 0, [1] * 100, [1] * 100]},
        {"!": "composite", "kind": "coo", "parts": {"values": T}, "meta": {}},
        {
            "!": "composite",
            "kind": "coo",
            "parts": {"values": T, "indices": T},
            "meta": {"shape": [3], "coalesced": True},
        },
        {
            "!": "composite",
            "kind": "quantized",
            "parts": {"values": T},
            "meta": {"dtype": "qint8", "shape": [2**40], "scale": "3ff0000000000000"},
        },
        nested(2000),
        opaque(b""),
        opaque(b"\x80\x04\x8e" + (2**40).to_bytes(8, "little") + b"x."),
        opaque(b"\x80\x04Nr\xff\xff\xff\x7f."),
        opaque(pickle.dumps(range(3), 4)[:-3]),
    ],
    ids=lambda tree: json.dumps(tree)[:60] if not isinstance(tree, list) else "deep",
)
def test_hostile_trees_are_corrupt(tree: Any) -> None:
    with pytest.raises(CorruptCheckpoint) as caught:
        load(tree)
    assert str(caught.value.path) == "evil.json"


@pytest.mark.parametrize(
    "tree",
    [
        {"!": "dtype", "v": "float3_e1m1"},
        {"!": "layout", "v": "sparse_other"},
        {"!": "device", "v": "npu:0"},
        T | {"view": ["float3_e1m1", 0, [1], [1]]},
        {
            "!": "composite",
            "kind": "bits",
            "parts": {"values": T},
            "meta": {"dtype": "uint9"},
        },
    ],
)
def test_names_of_another_torch_are_not_called_damage(tree: Any) -> None:
    with pytest.raises(RestoreError, match="Nothing is damaged") as caught:
        load(tree)
    assert not isinstance(caught.value, CorruptCheckpoint)
    assert str(caught.value.path) == "evil.json"


@pytest.mark.parametrize(
    "rest",
    [
        {"strides": {"a": [2]}},
        {"strides": {"a": [1, 1]}},
        {"strides": {"a": ["x"]}},
        {"strides": {"a": [10**30]}},
        {"strides": []},
        {"shifts": {"a": 99}},
        {"pools": [{"bytes": 2**50, "offsets": {"a": 0}}]},
        {"pools": [{"bytes": 8, "offsets": {"a": 0}}]},
        {"pools": [{"bytes": 64, "offsets": {"a": 2}}]},
        {"pools": [{"bytes": 16, "offsets": {"a": 0}}, {"bytes": 16, "offsets": {"a": 0}}]},
        {"pools": [3]},
    ],
)
def test_hostile_layouts_are_corrupt(rest: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpoint):
        load(T, **rest)


class Evil:
    def __init__(self, call: Any, arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


@pytest.mark.parametrize(
    ("call", "arguments", "named"),
    [
        (os.system, ("true",), "system"),
        (eval, ("1",), "builtins.eval"),
        (getattr, (int, "x"), "builtins.getattr"),
        (torch.load, ("x",), "torch.serialization.load"),
        (bytes, (10**12,), "builtins.bytes"),
    ],
)
def test_untrusted_calls_are_named_and_not_run(call: Any, arguments: Any, named: str) -> None:
    with pytest.raises(UntrustedData) as caught:
        load(opaque(pickle.dumps(Evil(call, arguments), 4)))
    assert named in caught.value.type_name and "trusted=True" in str(caught.value)


@pytest.mark.parametrize(("call", "arguments"), [(set, (range(10**12),)), (bytearray, (10**12,))])
def test_absurd_allocations_are_refused(call: Any, arguments: Any) -> None:
    with pytest.raises(RestoreError):
        load(opaque(pickle.dumps(Evil(call, arguments), 4)))


def test_a_class_cannot_be_changed_by_build() -> None:
    import argparse

    code = b"\x80\x04cargparse\nNamespace\n(N}\x8c\x03pwn\x8c\x01xs\x86b."
    code = b"\x80\x04cargparse\nNamespace\nN}\x8c\x03pwn\x8c\x01xs\x86b."
    with pytest.raises(UntrustedData):
        load(opaque(code))
    assert not hasattr(argparse.Namespace, "pwn")


class Mine:
    def __init__(self) -> None:
        self.x = 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mine) and other.x == self.x


def test_custom_objects_need_trust() -> None:
    module = sys.modules[__name__]
    assert module.Mine is Mine
    with pytest.raises(UntrustedData, match="Mine"):
        through({"m": Mine()})
    assert through({"m": Mine()}, trusted=True) == {"m": Mine()}


def test_a_type_that_is_not_loaded_is_not_imported() -> None:
    tree = {"!": "dataclass", "type": "antigravity:Thing", "fields": []}
    with pytest.raises(UntrustedData, match="antigravity"):
        load(tree)
    assert "antigravity" not in sys.modules


def test_a_skeleton_type_cannot_be_any_class() -> None:
    for kind in ("dataclass", "namedtuple"):
        with pytest.raises(UntrustedData):
            load({"!": kind, "type": "subprocess:Popen", "fields": []})


def test_harmless_objects_need_no_trust() -> None:
    import argparse
    import random
    import types

    import numpy as np

    rng, generator = random.Random(3), np.random.default_rng(4)
    back = through(
        {
            "args": argparse.Namespace(a=1),
            "ns": types.SimpleNamespace(b=[1]),
            "random": rng,
            "generator": generator,
            "objects": np.array([1, "x", None], dtype=object),
        }
    )
    assert back["args"] == argparse.Namespace(a=1) and back["ns"].b == [1]
    assert back["random"].random() == rng.random()
    assert back["generator"].random() == generator.random()
    assert back["objects"].tolist() == [1, "x", None]


SAMPLE = {
    "w": torch.arange(12.0).reshape(3, 4).t(),
    "v": torch.arange(8.0)[2:],
    "n": {1: (2, b"x"), "k": [1.5, None]},
    "s": torch.eye(2).to_sparse(),
}


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    rows = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in rows:
        found += paths(item, (*path, key))
    return found


JUNK = st.sampled_from(
    [None, -1, 2**70, 0.5, "x", "", [], {}, [[]], {"!": "tensor"}, {"!": "dict", "v": {}}, T, True]
)


@pytest.mark.filterwarnings("ignore")
@settings(deadline=None, max_examples=drawn(400))
@given(st.data())
def test_any_damaged_field_gives_a_tree_or_a_restore_error(data: st.DataObject) -> None:
    flat = flatten(SAMPLE, eager_leaf_bytes=LIMIT)
    tree = copy.deepcopy(flat.skeleton.to_json())
    place = data.draw(st.sampled_from(paths(tree)[1:]))
    holder = tree
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = data.draw(JUNK)
    specs = {leaf.spec.name: leaf.spec for leaf in flat.leaves}
    try:
        skeleton = Skeleton.from_json(tree, path="p")
        tensors = skeleton.allocate(specs)
        for leaf in flat.leaves:
            tensors[leaf.spec.name].copy_(leaf.tensor)
        skeleton.unflatten(tensors, trusted=False)
    except RestoreError:
        pass


def test_the_sample_itself_is_fine() -> None:
    back = through(SAMPLE)
    assert same(SAMPLE["w"], back["w"]) and back["n"] == SAMPLE["n"]
