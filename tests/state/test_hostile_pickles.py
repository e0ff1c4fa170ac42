"""Pickles of strangers: bounded work, no call that is not on the list, no state that native code believes."""

from __future__ import annotations

import argparse
import collections
import decimal
import fractions
import pickle
import random
import types
import uuid
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_core.errors import CorruptCheckpoint, RestoreError, UntrustedData
from ckpt_core.state import RngState, Skeleton
from ckpt_core.state.atoms import to_base64
from ckpt_core.state.keys import Keys, TooMuchWork, Work
from ckpt_core.types import LeafSpec
from tests.state.state_helpers import through

TIMEOUT_S = 60
pytestmark = pytest.mark.timeout(TIMEOUT_S)


def load(data: bytes, *, inside: str = "") -> Any:
    node: Any = {"!": "opaque", "type": "x.Y", "v": to_base64(data)}
    tree = {"!": inside, "v": [node]} if inside else node
    skeleton = Skeleton.from_json({"tree": tree}, path="evil.json")
    return skeleton.unflatten({}, trusted=False)


def nested_tuples(depth: int, end: bytes) -> bytes:
    """Tuples of the same tuple twice, so many levels deep: `end` hashes them."""
    code = b"\x80\x04)\x94"
    for level in range(depth):
        code += b"h" + bytes([level]) + b"h" + bytes([level]) + b"\x86\x94"
    return code + end


HASHED = {
    "frozenset": b"(h\x28\x91.",
    "set": b"\x8f(h\x28\x90.",
    "dict": b"}h\x28Ns.",
    "dict of items": b"}(h\x28Nu.",
    "the older dict": b"(h\x28Nd.",
    "a set that is called": b"cbuiltins\nset\n(h\x28l\x85R.",
    "a Counter": b"ccollections\nCounter\n}h\x28K\x01s\x85R.",
    "keys of an OrderedDict": b"ccollections\nOrderedDict\n)Rh\x28Ns.",
}


@pytest.mark.parametrize("kind", HASHED)
def test_tuples_that_share_their_parts_are_not_hashed(kind: str) -> None:
    with pytest.raises(UntrustedData, match="too much work"):
        load(nested_tuples(40, HASHED[kind]))


@pytest.mark.parametrize("kind", ["set", "frozenset"])
def test_an_unpickled_key_of_the_tree_is_not_hashed_either(kind: str) -> None:
    with pytest.raises(CorruptCheckpoint, match="too much work"):
        load(nested_tuples(40, b"h\x28."), inside=kind)


def test_deep_keys_do_not_end_the_process() -> None:
    with pytest.raises(UntrustedData, match="too deeply"):
        load(b"\x80\x04)" + b"\x85" * 200_000 + b"\x94(h\x00\x91.")


def test_keys_with_one_hash_are_refused() -> None:
    keys = {number * (2**61 - 1): None for number in range(1, 1000)}
    with pytest.raises(UntrustedData, match="one hash"):
        load(pickle.dumps(keys, 4))
    items = [[number, None] for number in keys]
    with pytest.raises(CorruptCheckpoint, match="one hash"):
        Skeleton.from_json({"tree": {"!": "dict", "items": items}}, path="x")


def test_copies_of_one_list_are_paid_for() -> None:
    code = b"\x80\x04]\x94(" + b"K\x01" * 300_000 + b"e0"
    code += b"ctorch\nSize\n\x94(" + b"h\x01h\x00\x85R0" * 100_000 + b"N."
    with pytest.raises(UntrustedData, match="too much work"):
        load(code)


@pytest.mark.parametrize(
    "code",
    [
        # A Namespace whose attribute __setstate__, append, extend or add is the class bytes.
        b"cargparse\nNamespace\n)\x81}\x8c\x0c__setstate__cbuiltins\nbytes\nsb\x8a\x06"
        + b"\xff" * 5
        + b"\x00b.",
        b"cargparse\nNamespace\n)\x81}\x8c\x06appendcbuiltins\nbytes\nsb\x8a\x06"
        + b"\xff" * 5
        + b"\x00a.",
        b"cargparse\nNamespace\n)\x81}\x8c\x06extendcbuiltins\nbytes\nsb(\x8a\x06"
        + b"\xff" * 5
        + b"\x00e.",
        b"cargparse\nNamespace\n)\x81}\x8c\x03addcbuiltins\nbytes\nsb(\x8a\x06"
        + b"\xff" * 5
        + b"\x00\x90.",
        # random expands an older state of any length; a range spells itself out.
        b"crandom\nRandom\n)R(K\x02cbuiltins\nrange\nK\x00\x8a\x07"
        + b"\xff" * 6
        + b"\x00\x86RNtb.",
        b"ccollections\nOrderedDict\n(cbuiltins\nrange\nK\x00\x8a\x07"
        + b"\xff" * 6
        + b"\x00\x86Rl\x85R.",
        # The flags of objects on a dtype of raw bytes.
        b"cnumpy\ndtype\n\x8c\x02V8\x85R(K\x03\x8c\x01|NNNK\x08K\x01K?tb.",
        b"cnumpy\ndtype\n\x8c\x0b(9999999,)f\x85R.",
    ],
)
def test_what_an_object_holds_is_never_called(code: bytes) -> None:
    with pytest.raises(RestoreError):
        load(b"\x80\x04" + code)


def forged(value: Any, state: Any) -> bytes:
    """A pickle of a generator with another state."""

    class Forged:
        def __reduce__(self) -> Any:
            return *value.__reduce__()[:2], state

    return pickle.dumps(Forged(), 4)


def bits(kind: str, **parts: Any) -> dict[str, Any]:
    return getattr(np.random, kind)(1).state | parts


def twister(pos: Any) -> dict[str, Any]:
    return {"key": np.zeros(624, np.uint32), "pos": pos}


STATES: dict[str, bytes] = {
    **{
        f"a position of {pos}": forged(np.random.MT19937(1), bits("MT19937", state=twister(pos)))
        for pos in (-1, 625, 2**31 - 1, None, 1.5)
    },
    "few words": forged(
        np.random.MT19937(1), bits("MT19937", state={"key": np.zeros(3, np.uint32), "pos": 0})
    ),
    "Philox": forged(np.random.Philox(1), bits("Philox", buffer_pos=-(2**20))),
    "Philox, 5": forged(np.random.Philox(1), bits("Philox", buffer_pos=5)),
    "RandomState": forged(
        np.random.RandomState(1),
        np.random.RandomState(1).get_state(legacy=False) | {"state": twister(9999)},
    ),
    "RandomState, a tuple": forged(
        np.random.RandomState(1), ("MT19937", np.zeros(624, np.uint32), 10**6, 0, 0.0)
    ),
    "Generator": forged(np.random.default_rng(1), bits("MT19937", state=twister(10**6))),
    "random": forged(random.Random(1), (3, (*[0] * 624, 10**6), None)),
    "random of words": forged(random.Random(1), (3, (*[2**40] * 624, 0), None)),
}


@pytest.mark.parametrize("kind", STATES)
def test_a_forged_state_of_a_generator_is_refused(kind: str) -> None:
    with pytest.raises(RestoreError):
        load(STATES[kind])


def _numpy(**change: Any) -> Any:
    names = ("name", "key", "pos", "has_gauss", "gauss")
    made = dict(zip(names, np.random.RandomState(1).get_state(), strict=True)) | change
    return tuple(made[name] for name in names)


def _torch(left: int, following: int) -> torch.Tensor:
    state = torch.Generator().get_state().clone()
    state[8:12] = torch.tensor([left], dtype=torch.int32).view(torch.uint8)
    state[16:24] = torch.tensor([following], dtype=torch.int64).view(torch.uint8)
    return state


FORGED: dict[str, dict[str, Any]] = {
    "numpy above": {"numpy": _numpy(pos=10**6)},
    "numpy below": {"numpy": _numpy(pos=-5)},
    "numpy words": {"numpy": _numpy(key=np.zeros(624, np.int64))},
    "numpy gauss": {"numpy": _numpy(has_gauss=7)},
    "numpy kind": {"numpy": _numpy(name="PCG64")},
    "numpy a dict": {"numpy": bits("Philox", buffer_pos=2**20)},
    "numpy nothing": {"numpy": {}},
    "python": {"python": (3, (*[0] * 624, 625), None)},
    "python of version 2": {"python": (2, tuple(range(625)), None)},
    "torch": {"torch": _torch(624, 624)},
    "torch, far": {"torch": _torch(1, 2**40)},
    "torch, strided": {"torch": torch.zeros(10112, dtype=torch.uint8)[::2]},
    "torch, floats": {"torch": torch.zeros(5056)},
    "cuda": {"cuda": [3]},
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_state_in_an_rng_state_changes_no_generator(kind: str) -> None:
    honest = RngState().state_dict()
    with pytest.raises(ValueError, match=r"state|generator|gauss|word|position"):
        RngState().load_state_dict(honest | FORGED[kind])
    now = RngState().state_dict()
    assert now["python"] == honest["python"] and torch.equal(now["torch"], honest["torch"])
    RngState().load_state_dict(honest)


def test_every_honest_state_of_a_generator_is_taken() -> None:
    torch.rand(1300)  # twisted, and in the middle
    for count in (0, 1, 623, 624, 625):
        torch.manual_seed(1)
        torch.rand(count)
        RngState().load_state_dict(RngState().state_dict())
    made: dict[str, Any] = {}
    for name in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"):
        made[name] = np.random.Generator(getattr(np.random, name)(1))
        made[name].random(3, dtype=np.float32)
        made[f"{name} of old"] = np.random.RandomState(getattr(np.random, name)(1))
        made[f"{name} of old"].randn()
        made[f"{name} bits"] = getattr(np.random, name)(1)
    made["seed"] = np.random.SeedSequence(1, spawn_key=(2,))
    back = through(made)
    for name, value in made.items():
        assert type(back[name]) is type(value)
        if isinstance(value, np.random.Generator):
            assert back[name].random() == value.random()
        if isinstance(value, np.random.RandomState):
            assert back[name].randn() == value.randn()


class _ByName:
    """Pickled as NumPy 1 pickles a generator: by the name of its kind, with one state for all of it."""

    def __init__(self, constructor: str, kind: str, state: Any) -> None:
        functions = vars(np.random._pickle)
        arguments = (kind, functions["__bit_generator_ctor"])
        self.reduced = (functions[constructor], arguments, state)

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_a_generator_that_numpy_1_pickled_is_read(kind: str) -> None:
    live = np.random.Generator(getattr(np.random, kind)(1))
    old = np.random.RandomState(getattr(np.random, kind)(1))
    live.random(3, dtype=np.float32)
    pickled = [
        _ByName("__generator_ctor", kind, live.bit_generator.state),
        _ByName("__randomstate_ctor", kind, old.get_state(legacy=False)),
    ]
    back, old_back = load(pickle.dumps(pickled, 4))
    assert back.random() == live.random() and old_back.randn() == old.randn()
    with pytest.raises(CorruptCheckpoint, match="bit generator"):
        load(pickle.dumps(_ByName("__generator_ctor", "os.system", None), 4))


def test_harmless_values_of_every_kind_are_read() -> None:
    many = collections.OrderedDict([((1, "a"), 2)])
    values = [
        fractions.Fraction(-1, 3), decimal.Decimal("1e500"), uuid.uuid4(), slice(1, None, (2,)),
        collections.Counter({(1, 2): 3}), collections.defaultdict(list, {1: [2]}), many,
        collections.deque([1], 3), {frozenset({(1, (2,))})}, bytearray(b"x"), complex(1, -0.0),
        argparse.Namespace(a=[1]), types.SimpleNamespace(b=(1,)), range(3), torch.Size([2, 3]),
        np.array(["a", None, 3.5], dtype=object), np.datetime64("2020-01-01", "3D"), np.float32(1.5),
        np.array([b"abc", 1], dtype=object), {-1: 1, -2: 2}, 2**100_000, random.Random(3).getstate(),
    ]  # fmt: skip
    for value in values:
        back = load(pickle.dumps([value, value], 4))
        assert (
            repr(back) == repr([value, value]) if not isinstance(value, int) else back[0] == value
        )
    assert load(pickle.dumps(random.Random(3), 4)).random() == random.Random(3).random()


def test_a_set_of_many_keys_is_read() -> None:
    keys = {(number, str(number)) for number in range(100_000)}
    assert load(pickle.dumps(keys, 4)) == keys
    assert load(pickle.dumps(dict.fromkeys(range(200_000)), 4)) == dict.fromkeys(range(200_000))


def test_work_is_counted_before_it_is_done() -> None:
    with pytest.raises(TooMuchWork):
        Keys(Work(10)).add([tuple(range(11))])
    Keys(Work(10**6)).add([2**10_000, "x", -1, -2, 1.5, None])


def test_items_without_bytes_take_no_memory() -> None:
    for dtype, shape in (("S0", [2**61]), ("V0", [2**61]), ("S0", [2**30]), ("U0", [2**20, 2**20])):
        with pytest.raises(CorruptCheckpoint):
            Skeleton.from_json({"tree": {"!": "ndarray", "v": [dtype, shape, ""]}}, path="x")


@pytest.mark.parametrize("name", ["_dynamo", "compile", "distributed", "load"])
def test_a_name_in_torch_is_not_looked_up(name: str) -> None:
    for tag in ("layout", "memory_format", "dtype"):
        with pytest.raises(CorruptCheckpoint):
            Skeleton.from_json({"tree": {"!": tag, "v": name}}, path="x")


def composite(kind: str, meta: dict[str, Any], **parts: Any) -> Any:
    nodes = {
        name: {"!": "tensor", "leaf": leaf} | ({"view": view} if view else {})
        for name, (leaf, view) in parts.items()
    }
    return {"!": "composite", "kind": kind, "parts": nodes, "meta": meta}


def rebuilt(tree: Any) -> Any:
    leaves = {
        "i": torch.tensor([[5, 1], [0, 0]]),
        "b": torch.arange(8, dtype=torch.int8),
        "f": torch.arange(4.0),
    }
    specs = {n: LeafSpec(n, str(t.dtype)[6:], tuple(t.shape)) for n, t in leaves.items()}
    skeleton = Skeleton.from_json({"tree": tree}, path="x")
    tensors = skeleton.allocate(specs)
    for name, tensor in leaves.items():
        tensors[name].copy_(tensor)
    return skeleton.unflatten(tensors, trusted=False)


HALF = "3fe0000000000000"
COMPOSITES = {
    "coalesced and not in order": composite(
        "coo",
        {"shape": [9, 9], "coalesced": True},
        values=("f", ["float32", 0, [2], [1]]),
        indices=("i", None),
    ),
    "a million million elements of one": composite(
        "coo",
        {"shape": [9], "coalesced": False},
        values=("f", ["float32", 0, [2**40], [0]]),
        indices=("i", ["int64", 0, [1, 2**40], [0, 0]]),
    ),
    "quantized of another shape": composite(
        "quantized",
        {"shape": [8, 1], "dtype": "qint8", "scale": HALF, "zero_point": 0},
        values=("b", ["int8", 0, [1, 8], [2**40, 1]]),
    ),
}


@pytest.mark.parametrize("kind", COMPOSITES)
def test_composites_of_unfit_parts_are_corrupt(kind: str) -> None:
    with pytest.raises(CorruptCheckpoint):
        rebuilt(COMPOSITES[kind])


def test_views_of_many_alignments_copy_a_leaf_a_few_times() -> None:
    leaf = torch.zeros(2**22, dtype=torch.uint8)
    views = [
        {"!": "tensor", "leaf": "a", "view": ["float64", offset % 8, [1], [1]]}
        for offset in range(20_000)
    ]
    skeleton = Skeleton.from_json({"tree": views}, path="x")
    tensors = skeleton.allocate({"a": LeafSpec("a", "uint8", (2**22,))})
    tensors["a"].copy_(leaf)
    assert len(skeleton.unflatten(tensors, trusted=False)) == 20_000


def test_more_memory_than_there_is_is_no_damage() -> None:
    spec = LeafSpec("a", "uint8", (2**59,))
    skeleton = Skeleton.from_json({"tree": {"!": "tensor", "leaf": "a"}}, path="x")
    with pytest.raises(RestoreError, match="memory") as caught:
        skeleton.allocate({"a": spec})
    assert not isinstance(caught.value, CorruptCheckpoint)
