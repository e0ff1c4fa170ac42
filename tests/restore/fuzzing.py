"""Made and changed inputs for everything that reads bytes of strangers, in a process that may die of them.

    python -m tests.restore.fuzzing SEED COUNT [KIND]

Inputs are a function of the seed and their number. Each gives a value, which is then used, or one of our
errors; anything else ends the process with a report. The number of the input at work is in the file that
FUZZ_AT names, so that a crash or a hang is known by it too.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from ckpt_core.cli.tree import read_tree, walk
from ckpt_core.cli.values import value_text
from ckpt_core.errors import CkptError, ConfigError
from ckpt_core.layout import Manifest, RankManifest, parse_header
from ckpt_core.restore import StepLeaves, StepManifest, committed_directories, load, verify
from ckpt_core.state import RngState, Skeleton
from ckpt_core.state.atoms import to_base64
from ckpt_core.system.files import Files
from tests.restore.fuzz_inputs import (
    bend,
    change,
    files_of,
    honest,
    pickles,
    sign,
    splice,
    steps,
    subtrees,
)

MEMORY_BYTES = 6 << 30
SLOW_S = 30
SMALL = 1 << 16
MESSAGE = 4000

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
        elif isinstance(item, torch.Generator):
            torch.rand(700, generator=item)
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
