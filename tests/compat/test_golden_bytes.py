"""A reader written from docs/format.md alone gets the same bytes out of the golden steps.

It imports nothing of ours: if it stops working, the page or the format has changed.
"""

from __future__ import annotations

import json
import math
import runpy
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

HERE = Path(__file__).parent
SIZES = {
    **{"float64": 8, "int64": 8, "uint64": 8, "complex64": 8, "complex128": 16},
    **{"float32": 4, "int32": 4, "uint32": 4, "complex32": 4},
    **{"float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2},
}


Leaves = dict[str, tuple[str, list[int], bytes]]
"""Leaf name -> dtype, shape, bytes."""


def read_json(path: Path, version: int) -> Any:
    data = path.read_bytes()
    assert data[-28:-19] == b',"xxh3":"'
    assert data[-3:] == b'"}\n'
    assert data[-19:-3].decode() == xxhash.xxh3_64_hexdigest(data[:-28])
    value = json.loads(data)
    assert (value["format"], value["version"]) == ("ckpt-core", version)
    return value


def read_shard(path: Path, nbytes: int, chunks: list[list[Any]]) -> bytes:
    data = path.read_bytes()
    assert len(data) == nbytes
    position = 0
    for size, digest in chunks:
        assert digest == xxhash.xxh3_64_hexdigest(data[position : position + size])
        position += size
    assert position == nbytes
    return data


def read_step(step_dir: Path, version: int) -> list[Leaves]:
    """The leaves of each rank: its own and those that ranks store together."""
    manifest = read_json(step_dir / "manifest.json", version)
    ranks: list[Leaves] = []
    slices: dict[str, list[tuple[list[Any], bytes]]] = {}
    state_bytes = 0
    for number, name, nbytes, digest in manifest["ranks"]:
        raw = (step_dir / name).read_bytes()
        assert (len(raw), xxhash.xxh3_64_hexdigest(raw)) == (nbytes, digest)
        rank = read_json(step_dir / name, version)
        assert rank["rank"] == number == len(ranks)
        files = [read_shard(step_dir / f["name"], f["nbytes"], f["chunks"]) for f in rank["files"]]
        ranks.append({})
        for leaf, dtype, shape, file, offset, size in rank["leaves"]:
            assert size == SIZES.get(dtype, 1) * math.prod(shape)
            ranks[-1][leaf] = (dtype, shape, files[file][offset : offset + size])
            state_bytes += size
        for row in rank.get("slices", []):
            leaf, _, _, file, offset, size, _, _ = row
            slices.setdefault(leaf, []).append((row, files[file][offset : offset + size]))
            state_bytes += size
    assert manifest["world_size"] == len(ranks)
    assert manifest["state_bytes"] == state_bytes
    shared = {name: joined(rows) for name, rows in slices.items()}
    assert not any(rank.keys() & shared.keys() for rank in ranks)
    return [{**shared, **rank} for rank in ranks]


def joined(rows: list[tuple[list[Any], bytes]]) -> tuple[str, list[int], bytes]:
    """A leaf from its slices, which must cover it."""
    (_, dtype, shape, *_), _ = rows[0]
    unit = SIZES.get(dtype, 1)
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    found: dict[int, bytes] = {}
    for (_, same_dtype, same_shape, _, _, size, begin, block), data in rows:
        assert (same_dtype, same_shape, len(data)) == (dtype, shape, size)
        box = numbers
        for dim, (offset, length) in enumerate(zip(*block, strict=True) if block else ()):
            box = box.narrow(dim, offset, length)
        first, last = begin // unit, (begin + size) // unit
        for index, number in enumerate(box.reshape(-1)[first:last].tolist()):
            assert number not in found
            found[number] = data[index * unit : (index + 1) * unit]
    assert len(found) == math.prod(shape)
    return dtype, shape, b"".join([found[number] for number in range(len(found))])


CASES = [
    (version, rank, path)
    for version in (1, 2)
    for path in sorted(HERE.glob(f"golden-v{version}/step-*"))
    for rank in range(len(list(path.glob("rank-*.json"))))
]
every_rank = pytest.mark.parametrize(
    ("version", "rank", "step_dir"), CASES, ids=[f"v{case[0]}-rank-{case[1]}" for case in CASES]
)


def tensors(version: int, rank: int) -> dict[str, torch.Tensor]:
    """Tensors of a golden state that lie in one piece, by their dotted path."""
    program = runpy.run_path(str(HERE / "make_golden.py"))
    state = program["golden_state"]() if version == 1 else program["golden_state_2"](rank)
    found: dict[str, torch.Tensor] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, torch.Tensor):
            if value.is_contiguous():
                found[path] = value
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{path}.{key}" if path else str(key))

    walk(state, "")
    del found["model.head"]  # the same tensor as model.embedding, so it is no leaf of its own
    return found


def test_there_is_a_step_of_each_version() -> None:
    assert [(version, rank) for version, rank, _ in CASES] == [(1, 0), (2, 0), (2, 1)]


def test_the_directory_of_files_is_found_whole_by_the_page_alone() -> None:
    root = HERE / "golden-v3"
    folder = root / (root / "latest").read_text()
    manifest = read_json(folder / "manifest.json", 3)
    assert (manifest["directory"], manifest["world_size"]) == (folder.name, 1)
    names, total = set(), 0
    for number, name, nbytes, digest in manifest["ranks"]:
        raw = (folder / name).read_bytes()
        assert (len(raw), xxhash.xxh3_64_hexdigest(raw)) == (nbytes, digest)
        rank = read_json(folder / name, 3)
        assert (rank["rank"], rank["skeleton"]) == (number, None)
        assert "leaves" not in rank and "slices" not in rank
        for file in rank["files"]:
            read_shard(folder / file["name"], file["nbytes"], file["chunks"])
            assert file["name"] not in names
            names.add(file["name"])
            total += file["nbytes"]
    assert total == manifest["state_bytes"]
    assert any(len(file["chunks"]) > 1 and file["nbytes"] % 4096 for file in rank["files"])
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == names | {"manifest.json", "rank-00000.json"}


@every_rank
def test_the_leaves_are_found_by_the_page_alone(version: int, rank: int, step_dir: Path) -> None:
    leaves = read_step(step_dir, version)[rank]
    wanted = tensors(version, rank)
    assert "model.head" not in leaves
    assert len(wanted) > 20
    for name, tensor in wanted.items():
        raw = bytes(tensor.reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""
        assert leaves[name] == (str(tensor.dtype)[6:], list(tensor.shape), raw), name


@every_rank
def test_the_shard_is_laid_out_as_the_page_says(version: int, rank: int, step_dir: Path) -> None:
    data = (step_dir / f"shard-{rank:05d}-0.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    start = 8 + length
    assert start % 4096 == len(data) % 4096 == 0
    header = json.loads(data[8:start])
    assert header.pop("__metadata__") == {"format": "pt", "ckpt_core": "1"}
    position = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        assert begin == position
        position = end
        if name.startswith("__pad__"):
            assert entry == {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
            assert not any(data[start + begin : start + end])
    assert start + position == len(data)
    manifest = read_json(step_dir / f"rank-{rank:05d}.json", version)
    for name, dtype, shape, _, offset, size, *part in manifest["leaves"] + manifest.get(
        "slices", []
    ):
        unit = SIZES.get(dtype, 1)
        entry = header[name]
        assert entry["data_offsets"] == [offset - start, offset - start + size]
        assert size == 0 or offset % unit == 0
        if part and size != unit * math.prod(shape):
            assert entry["shape"][0] == size // unit
            assert math.prod(entry["shape"][1:]) in (1, 2, unit)  # the dimension of some dtypes
        else:
            assert entry["shape"][: len(shape)] == shape
