"""The safetensors package opens our files, and we read its files: both by the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ckpt_core.layout import HeaderEntry, ShardLayout, header_length, parse_header
from ckpt_core.layout.dtypes import STORAGE
from ckpt_core.types import LeafSpec

Image = Callable[[ShardLayout, Mapping[str, bytes]], bytes]

# The format knows dtypes that an older torch does not have.
HERE = {name: kept for name, kept in STORAGE.items() if hasattr(torch, name)}
NATIVE = sorted(name for name, kept in HERE.items() if kept.trailing is None)
VIEWED = sorted(name for name, kept in HERE.items() if kept.trailing is not None)


def dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def ramp(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor whose bytes count up; 0 and 1 for bool, whose other bytes have no meaning."""
    size = torch.Size(shape).numel() * dtype_of(dtype).itemsize
    raw = torch.arange(size, dtype=torch.int64).remainder(2 if dtype == "bool" else 251)
    return raw.to(torch.uint8).view(dtype_of(dtype)).reshape(shape)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def write(path: Path, tensors: Mapping[str, torch.Tensor], image: Image) -> None:
    specs = [
        LeafSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]
    layout = ShardLayout.plan(specs[::2], specs[1::2], metadata={"who": "test"})
    payload = {name: raw_bytes(tensor) for name, tensor in tensors.items()}
    path.write_bytes(image(layout, payload))


@pytest.mark.parametrize("dtype", NATIVE)
def test_each_dtype_of_safetensors_comes_back_as_itself(
    dtype: str, tmp_path: Path, image: Image
) -> None:
    shapes = [(), (0,), (3, 0, 2), (7,), (33, 70), (2, 3, 4)]
    tensors = {f"leaf{index}": ramp(dtype, shape) for index, shape in enumerate(shapes)}
    write(tmp_path / "a.safetensors", tensors, image)
    loaded = load_file(tmp_path / "a.safetensors")
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert raw_bytes(loaded[name]) == raw_bytes(tensor)


@pytest.mark.parametrize("dtype", VIEWED)
def test_any_other_dtype_comes_back_through_a_view(
    dtype: str, tmp_path: Path, image: Image
) -> None:
    shapes = [(), (0, 3), (5,), (9, 70)]
    tensors = {f"leaf{index}": ramp(dtype, shape) for index, shape in enumerate(shapes)}
    write(tmp_path / "a.safetensors", tensors, image)
    loaded = load_file(tmp_path / "a.safetensors")
    for name, tensor in tensors.items():
        view = loaded[name].view(dtype_of(dtype)).squeeze(-1)
        assert view.shape == tensor.shape
        assert raw_bytes(view) == raw_bytes(tensor)


def test_names_of_any_script_and_of_padding_open(tmp_path: Path, image: Image) -> None:
    names = [
        "",
        "a.b.0",
        "é",
        "重み",
        "\U0001f9e0",
        'q"uote\\',
        "\x00\n\x7f\u2028",
        "__pad__0",
        " ",
    ]
    tensors = {name: torch.full((5 + index,), index) for index, name in enumerate(names)}
    write(tmp_path / "a.safetensors", tensors, image)
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert set(names) <= set(file.keys())
        assert file.metadata() == {"format": "pt", "ckpt_core": "1", "who": "test"}
        for name, tensor in tensors.items():
            assert torch.equal(file.get_tensor(name), tensor)


def test_a_file_of_the_package_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {
        "w": torch.zeros(3, 5),
        "c": torch.zeros(2, dtype=torch.complex64),
        "e": torch.ones(0),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    data = path.read_bytes()
    end = header_length(data[:8], file_bytes=len(data), path=path)
    entries = parse_header(data[:end], file_bytes=len(data), path=path)
    assert entries.keys() == tensors.keys()
    assert entries["w"] == HeaderEntry("F32", (3, 5), entries["w"].offset, 60)
    assert (entries["c"].dtype, entries["c"].nbytes) == ("C64", 16)
    assert entries["e"].nbytes == 0
