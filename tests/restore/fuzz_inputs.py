"""Inputs of the fuzzer: honest checkpoints, and ways to change them that know what they are made of."""

from __future__ import annotations

import argparse
import copy
import json
import pickle
import pickletools
import random
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from ckpt_core.state import RngState, flatten
from ckpt_core.state.atoms import from_base64, to_base64
from tests.restore.ranks import Job, write_ranks

INTS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    8,
    255,
    624,
    625,
    4096,
    2**31 - 1,
    2**31,
    2**32,
    2**40,
    2**53,
    2**60,
    2**61,
)
INTS += (2**62, 2**63 - 1, 2**63, 2**64, -(2**31), -(2**63), 10**40, 2**61 - 1)
TEXTS = (
    "x w a.b ../x /etc/passwd \x00 \ud800 é 0 7ff0000000000000 = AA== float32 int64 uint8 bool complex64"
    " bfloat16 qint8 int4 S0 V0 O |O8 os:system ckpt_core.state.rng:RngState step-000000000001 __pad__0 p cn"
).split(" ")
TEXTS += ["", "x" * 5000]
TAGS = (
    "tensor array composite list tuple set frozenset deque Size slice dict OrderedDict defaultdict Counter"
    " dataclass namedtuple object enum opaque int float str complex bytes bytearray range ellipsis dtype"
    " device layout memory_format path date datetime time timedelta timezone uuid ndarray npscalar npdtype"
    " versions"
).split()
FIELDS = "! v items leaf view flags parts meta kind type state fields attrs name value maxlen factory".split()


# -- what is changed ---------------------------------------------------------------------------


def sample() -> dict[str, Any]:
    """A little of everything that a state may hold."""
    weight = torch.arange(12.0)
    generators: dict[str, Any] = {
        "old": np.random.RandomState(1),
        "plain": random.Random(1),
        "torch": torch.Generator(),
    }
    for name in ("PCG64", "MT19937", "Philox", "SFC64"):
        generators[name] = np.random.Generator(getattr(np.random, name)(1))
    return {
        "w": weight.reshape(3, 4).t(),
        "views": [weight[2:], weight.view(torch.int32)[1::2], torch.ones(1).expand(5)],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "conj": torch.ones(2, dtype=torch.complex64).conj(),
        "coo": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.ones(4), 0.5, 1, torch.qint8),
        "array": np.arange(4.0),
        "objects": np.array([1, "x", None], dtype=object),
        "texts": np.array(["a", "bc"]),
        "keys": {1: 2, (1, "x"): 3, None: 4},
        "sets": [{1, 2}, frozenset({(1, (2, 3))})],
        "plain": [1.5, -0.0, 2**70, "x", b"y", range(3), slice(1, 2), torch.float32, 1j],
        "generators": generators,
        "rng": RngState(),
    }


@cache
def honest() -> tuple[Any, dict[str, Any], dict[str, torch.Tensor]]:
    """A skeleton as JSON, its specs, and the bytes of its leaves."""
    flat = flatten(sample(), eager_leaf_bytes=4096)
    specs = {leaf.spec.name: leaf.spec for leaf in flat.leaves}
    tree = json.loads(json.dumps(flat.skeleton.to_json()))
    return tree, specs, {leaf.spec.name: leaf.tensor.clone() for leaf in flat.leaves}


@cache
def subtrees() -> list[tuple[str, Any, dict[str, Any]]]:
    """Parts of the sample small enough to be changed a thousand times a second."""
    tree, specs, _ = honest()
    rest = {key: value for key, value in tree.items() if key != "tree"}
    found = []
    for key, node in tree["tree"]["v"].items():
        names = {name for name in specs if f'"{name}"' in json.dumps(node)}
        found.append((key, {"tree": node, **rest}, {name: specs[name] for name in names}))
    return found


@cache
def steps() -> dict[str, Path]:
    """A step of one rank and one of three, on storage."""
    root = Path(tempfile.mkdtemp(prefix="fuzz-"))
    state = {"x": torch.ones(4), "y": torch.ones(3, dtype=torch.int64)}
    job = Job(world=3, replicated={"w": torch.arange(9000.0)}, boxed={"b": torch.ones(4, 6)}, dim=1)
    return {
        "one": write_ranks(root / "one", 1, Job(world=2, boxed=state)),
        "three": write_ranks(root / "three", 1, job),
    }


@cache
def files_of(step: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in step.iterdir() if path.is_file()}


# -- how it is changed -------------------------------------------------------------------------


def change(value: Any, dice: random.Random) -> Any:
    """The same JSON with one to three places changed."""
    holder = [copy.deepcopy(value)]
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        places = list(_places(holder))
        where, key = dice.choice(places)
        _change_at(where, key, dice)
    return holder[0]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    rows = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in rows:
        yield value, key
        if isinstance(item, dict | list):
            yield from _places(item)


def _change_at(where: Any, key: Any, dice: random.Random) -> None:
    old = where[key]
    way = dice.randrange(10)
    if way == 0 and isinstance(where, dict):
        del where[key]
    elif way == 1 and isinstance(where, list):
        where.insert(key, copy.deepcopy(old))
    elif way == 2 and isinstance(old, str) and len(old) > 40:
        where[key] = to_base64(bend(_bytes(old), dice))
    elif way == 3 and isinstance(old, dict):
        old[dice.choice(FIELDS)] = junk(dice, 2)
    elif way == 4 and isinstance(old, dict) and "!" in old:
        old["!"] = dice.choice(TAGS)
    elif type(old) is int and way < 8:
        where[key] = old + dice.choice((-1, 1, 8, 2**31, -(2**31), 2**62))
    elif way == 9:
        where[key] = [old] * dice.choice((0, 2, 12))
    else:
        where[key] = junk(dice, 3)


def _bytes(text: str) -> bytes:
    try:
        return from_base64(text)
    except ValueError:
        return text.encode("utf-8", "surrogatepass")


def junk(dice: random.Random, depth: int) -> Any:
    way = dice.randrange(9 if depth else 5)
    if way == 0:
        return dice.choice(INTS)
    if way == 1:
        return dice.choice(TEXTS)
    if way == 2:
        return dice.choice((None, True, False, 0.5, -0.0, 1e308, []))
    if way == 3:
        return to_base64(dice.randbytes(dice.randrange(12)))
    if way == 4:
        return [dice.choice(INTS) for _ in range(dice.randrange(5))]
    if way in (5, 6):
        return {
            "!": dice.choice(TAGS),
            dice.choice(FIELDS): junk(dice, depth - 1),
            "v": junk(dice, depth - 1),
        }
    if way == 7:
        return {dice.choice(TEXTS): junk(dice, depth - 1) for _ in range(dice.randrange(4))}
    return [junk(dice, depth - 1) for _ in range(dice.randrange(4))]


def bend(data: bytes, dice: random.Random) -> bytes:
    """The same bytes with a few changed, moved, doubled or gone."""
    made = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 4))):
        at, size = dice.randrange(len(made) + 1), dice.choice((1, 1, 2, 8, 64))
        way = dice.randrange(5)
        if way == 0:
            made[at : at + size] = dice.randbytes(size)
        elif way == 1:
            del made[at : at + size]
        elif way == 2:
            made[at:at] = made[dice.randrange(len(made) + 1) :][:size]
        elif way == 3:
            made[at : at + 1] = dice.choice(
                (b"\x00", b"\xff", b"\x7f", b"R", b"b", b"(", b"h\x00", b".")
            )
        else:
            made[at:at] = dice.choice(INTS).to_bytes(18, "little", signed=True)[
                : dice.choice((1, 2, 4, 8))
            ]
    return bytes(made)


@cache
def pickles() -> list[tuple[bytes, tuple[int, ...]]]:
    """Honest pickles, and where their opcodes begin."""
    values = [*sample()["generators"].values(), sample()["objects"], np.random.SeedSequence(3)]
    values += [argparse.Namespace(a=[1, {2: (3,)}]), {frozenset({(1, 2)}): {3, 4}}, np.float64(2.5)]
    values += [np.datetime64("2020-01-01"), random.Random(2)]
    made = [pickle.dumps(value, 4) for value in values]
    return [(data, tuple(place for _, _, place in pickletools.genops(data))) for data in made]


def splice(dice: random.Random) -> bytes:
    """A pickle with opcodes of another one, or bent."""
    data, cuts = dice.choice(pickles())
    if dice.random() < 0.4:
        return bend(data, dice)
    other, places = dice.choice(pickles())
    at, begin = dice.choice(cuts), dice.randrange(len(places))
    end = places[min(begin + dice.randrange(1, 6), len(places) - 1)]
    skip = dice.choice((0, 0, 1, 3))
    after = cuts[min(cuts.index(at) + skip, len(cuts) - 1)]
    return data[:at] + other[places[begin] : end] * dice.choice((1, 1, 2, 50)) + data[after:]


def sign(obj: Any) -> bytes:
    """A manifest with a checksum that is right."""
    body = json.dumps(obj, separators=(",", ":"))[:-1].encode()
    return b'%s,"xxh3":"%s"}\n' % (body, xxhash.xxh3_64_hexdigest(body).encode())
