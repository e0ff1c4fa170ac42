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


def read_json(path: Path) -> Any:
    data = path.read_bytes()
    assert data[-28:-19] == b',"xxh3":"'
    assert data[-3:] == b'"}\n'
    assert data[-19:-3].decode() == xxhash.xxh3_64_hexdigest(data[:-28])
    value = json.loads(data)
    assert (value["format"], value["version"]) == ("ckpt-core", 1)
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


def read_step(step_dir: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Leaf name -> dtype, shape, bytes."""
    leaves = {}
    for _, name, nbytes, digest in read_json(step_dir / "manifest.json")["ranks"]:
        raw = (step_dir / name).read_bytes()
        assert (len(raw), xxhash.xxh3_64_hexdigest(raw)) == (nbytes, digest)
        rank = read_json(step_dir / name)
        files = [read_shard(step_dir / f["name"], f["nbytes"], f["chunks"]) for f in rank["files"]]
        for leaf, dtype, shape, file, offset, size in rank["leaves"]:
            assert size == SIZES.get(dtype, 1) * math.prod(shape)
            leaves[leaf] = (dtype, shape, files[file][offset : offset + size])
    return leaves


@pytest.fixture(params=sorted(HERE.glob("golden-v1/step-*")), ids=lambda path: path.name)
def step_dir(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    """Tensors of the golden state that lie in one piece, by their dotted path."""
    state = runpy.run_path(str(HERE / "make_golden.py"))["golden_state"]()
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


def test_the_leaves_are_found_by_the_page_alone(
    step_dir: Path, tensors: dict[str, torch.Tensor]
) -> None:
    leaves = read_step(step_dir)
    assert "model.head" not in leaves
    assert len(tensors) > 20
    for name, tensor in tensors.items():
        raw = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
        assert leaves[name] == (str(tensor.dtype)[6:], list(tensor.shape), raw), name


def test_the_shard_is_laid_out_as_the_page_says(step_dir: Path) -> None:
    data = (step_dir / "shard-00000-0.safetensors").read_bytes()
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
    rank = read_json(step_dir / "rank-00000.json")
    for name, dtype, _, _, offset, size in rank["leaves"]:
        assert header[name]["data_offsets"] == [offset - start, offset - start + size]
        assert size == 0 or offset % SIZES.get(dtype, 1) == 0
