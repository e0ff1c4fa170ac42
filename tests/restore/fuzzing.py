"""Made and changed inputs for everything that reads bytes of strangers, in a process that may die of them.

    python -m tests.restore.fuzzing SEED COUNT [KIND]

Inputs are a function of the seed and their number. Each gives a value, which is then used, or one of our
errors; anything else ends the process with a report. The number of the input at work is in the file that
FUZZ_AT names, so that a crash or a hang is known by it too.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import json
import os
import pickle
import pickletools
import random
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from ckpt_core.cli.tree import read_tree, walk
from ckpt_core.cli.values import value_text
from ckpt_core.errors import CkptError, ConfigError
from ckpt_core.files import Files
from ckpt_core.layout import Manifest, RankManifest, parse_header
from ckpt_core.restore import StepLeaves, StepManifest, committed_directories, load, verify
from ckpt_core.state import RngState, Skeleton, flatten
from ckpt_core.state.atoms import from_base64, to_base64
from tests.restore.ranks import Job, write_ranks

MEMORY_BYTES = 6 << 30
SLOW_S = 30
SMALL = 1 << 16
MESSAGE = 4000

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
    "",
    "x",
    "w",
    "a.b",
    "../x",
    "/etc/passwd",
    "\x00",
    "\ud800",
    "é",
    "0",
    "7ff0000000000000",
    "=",
    "AA==",
)
TEXTS += (
    "float32",
    "int64",
    "uint8",
    "bool",
    "complex64",
    "bfloat16",
    "qint8",
    "int4",
    "S0",
    "V0",
    "O",
    "|O8",
)
TEXTS += (
    "os:system",
    "ckpt_core.state.rng:RngState",
    "step-000000000001",
    "__pad__0",
    "p",
    "pg",
    "cn",
    "x" * 5000,
)
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
    generators: dict[str, Any] = {"old": np.random.RandomState(1), "plain": random.Random(1)}
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
        where[key] = [old] * dice.choice((0, 2, 300))
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


# -- who reads it: each gives a value, or raises one of our errors -----------------------------


def read_skeleton(dice: random.Random) -> Any:
    _, tree, specs = dice.choice(subtrees())
    tree = change(tree, dice)
    for item in walk(read_tree(tree)):
        value_text(item.value)
    skeleton = Skeleton.from_json(tree, path="p")
    if any(_size(spec) > SMALL for spec in specs.values()):
        return None
    tensors = skeleton.allocate(specs)
    bytes_of = honest()[2]
    for name, tensor in tensors.items():
        tensor.copy_(bytes_of[name])
    return skeleton.unflatten(tensors, trusted=False)


def _size(spec: Any) -> int:
    return int(np.prod(spec.shape, dtype=object))


def read_pickle(dice: random.Random) -> Any:
    node = {"!": "opaque", "type": "x.Y", "v": to_base64(splice(dice))}
    tree = {"!": dice.choice(("set", "tuple")), "v": [node]}
    return Skeleton.from_json({"tree": tree}, path="p").unflatten({}, trusted=False)


def read_manifests(dice: random.Random) -> Any:
    step = dice.choice(list(steps().values()))
    held = files_of(step)
    objs = {name: json.loads(data) for name, data in held.items() if name.endswith("json")}
    for obj in objs.values():
        del obj["xxh3"]
    name = dice.choice(sorted(objs))
    objs[name] = change(objs[name], dice)
    path = step / "manifest.json"
    manifest = Manifest.decode(sign(objs["manifest.json"]), path=path)
    ranks = [
        RankManifest.decode(sign(obj), path=path)
        for name, obj in objs.items()
        if name[:5] == "rank-"
    ]
    leaves = StepLeaves(StepManifest(step, manifest, tuple(ranks)))
    owner = leaves.owner(0)
    skeleton = Skeleton.from_json(owner.skeleton, path=path)
    named = leaves.of(owner, skeleton.leaf_names(), whole=True)
    return [leaf.nbytes for leaf in named.values()]


def read_header(dice: random.Random) -> Any:
    held = files_of(dice.choice(list(steps().values())))
    data = held[dice.choice(sorted(name for name in held if name.startswith("shard")))]
    length = int.from_bytes(data[:8], "little")
    if dice.random() < 0.5:
        made = bend(data[: 8 + length], dice)
    else:
        text = json.dumps(change(json.loads(data[8 : 8 + length]), dice)).encode()
        text += b" " * (-(8 + len(text)) % 4096)
        made = len(text).to_bytes(8, "little") + text
    return parse_header(made, file_bytes=len(made) + len(data) - 8 - length, path=Path("p"))


def read_envelope(dice: random.Random) -> Any:
    held = files_of(dice.choice(list(steps().values())))
    name = dice.choice(sorted(name for name in held if name.endswith("json")))
    data = bend(held[name], dice)
    if dice.random() < 0.8:
        body = data[:-28]
        data = b'%s,"xxh3":"%s"}\n' % (body, xxhash.xxh3_64_hexdigest(body).encode())
    decoder = Manifest if name == "manifest.json" else RankManifest
    return decoder.decode(data, path=Path("p"))


def read_directory(dice: random.Random) -> Any:
    """A step on storage with changed manifests, shards, kinds of files; through the public calls."""
    source = dice.choice(list(steps().values()))
    root = Path(tempfile.mkdtemp(prefix="fuzz-step-"))
    try:
        step = root / source.name
        shutil.copytree(source, step)
        _spoil(step, dice)
        verify(root, readers=1)
        committed_directories(root)
        return load(dice.choice((root, step)), readers=1, files=Files())
    finally:
        shutil.rmtree(root)


def _spoil(step: Path, dice: random.Random) -> None:
    name = dice.choice(sorted(os.listdir(step)))
    way = dice.randrange(8)
    if way == 0:
        (step / name).unlink()
        dice.choice((os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)))(step / name)
    elif way == 1:
        os.truncate(step / name, dice.choice((0, 1, 27, 28, 4096, 2**40)))
    elif way == 2:
        (step / name).write_bytes(bend((step / name).read_bytes(), dice))
    else:
        _resign(step, dice)


def _resign(step: Path, dice: random.Random) -> None:
    manifest = json.loads((step / "manifest.json").read_bytes())
    manifest.pop("xxh3")
    for row in manifest["ranks"]:
        obj = json.loads((step / row[1]).read_bytes())
        obj.pop("xxh3")
        if dice.random() < 0.5:
            obj = change(obj, dice)
        data = sign(obj)
        (step / row[1]).write_bytes(data)
        row[2:] = [len(data), xxhash.xxh3_64_hexdigest(data)]
    if dice.random() < 0.3:
        manifest = change(manifest, dice)
    (step / "manifest.json").write_bytes(sign(manifest))


KINDS: dict[str, tuple[int, Callable[[random.Random], Any]]] = {
    "skeleton": (40, read_skeleton),
    "pickle": (25, read_pickle),
    "manifests": (15, read_manifests),
    "header": (10, read_header),
    "envelope": (8, read_envelope),
    "directory": (2, read_directory),
}
"""Kind -> its share in a hundred, and how such an input is made and read."""


# -- what is done with a value -----------------------------------------------------------------


def use(value: Any) -> None:
    """Do what a program does with what it has loaded: native code must survive it."""
    stack, seen = [value], 0
    while stack and seen < 2000:
        item = stack.pop()
        seen += 1
        if isinstance(item, torch.Tensor):
            _use_tensor(item)
        elif isinstance(item, np.ndarray):
            if item.nbytes < SMALL and item.size < SMALL:
                item.copy().tolist()
                stack.extend(item.ravel()[:4] if item.dtype.hasobject else [])
        elif isinstance(item, np.random.Generator | np.random.RandomState):
            item.bytes(8)
            (item.standard_normal if isinstance(item, np.random.Generator) else item.randn)(700)
        elif isinstance(item, np.random.BitGenerator):
            item.random_raw(700)
        elif isinstance(item, random.Random):
            [item.random() for _ in range(700)]
        elif isinstance(item, dict):
            _use_states(item)
            stack.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            stack.extend(list(item)[:100])


def _use_tensor(tensor: torch.Tensor) -> None:
    if not 0 < tensor.numel() < SMALL:
        return
    if tensor.layout is not torch.strided:
        tensor.to_dense().sum()
    elif tensor.is_quantized:
        tensor.dequantize().sum()
    elif tensor.dtype not in (torch.bits8, torch.bits16):
        tensor.detach().clone()


def _use_states(states: dict[Any, Any]) -> None:
    if {"python", "torch"} <= states.keys():
        RngState().load_state_dict(states)
        random.random()
        np.random.randn(700)
        torch.rand(700)


# -- the process -------------------------------------------------------------------------------


def try_one(seed: int, number: int, only: str | None) -> str:
    """Make, read and use one input; the kind and what came of it."""
    dice = random.Random(f"{seed}/{number}")
    kind = only or dice.choices(list(KINDS), [share for share, _ in KINDS.values()])[0]
    try:
        value = KINDS[kind][1](dice)
    except CkptError as exc:
        if isinstance(exc, ConfigError):
            raise
        if len(str(exc)) > MESSAGE:
            raise RuntimeError(f"a message of {len(str(exc))} characters") from exc
        return type(exc).__name__
    try:
        use(value)
    except (ValueError, RuntimeError, TypeError, NotImplementedError, OverflowError, IndexError):
        return "a value that is of no use"
    return "a value"


def main() -> None:
    seed, count = int(sys.argv[1]), int(sys.argv[2])
    only = (sys.argv[3] if len(sys.argv) > 3 else "") or None
    first = int(sys.argv[4]) if len(sys.argv) > 4 else 0
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    honest(), subtrees(), steps(), pickles()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    at = os.open(os.environ.get("FUZZ_AT", os.devnull), os.O_WRONLY | os.O_CREAT)
    outcomes: dict[str, int] = {}
    began = time.monotonic()
    try:
        for number in range(first, first + count):
            os.pwrite(at, f"{number:12d}".encode(), 0)
            faulthandler.dump_traceback_later(SLOW_S, exit=True)
            outcome = try_one(seed, number, only)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
    finally:
        faulthandler.cancel_dump_traceback_later()
        for step in steps().values():
            shutil.rmtree(step.parent.parent, ignore_errors=True)
    print(json.dumps({"count": count, "seconds": round(time.monotonic() - began, 1), **outcomes}))


if __name__ == "__main__":
    main()
